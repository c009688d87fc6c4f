"""Interpolation as the one operator that the original runs.

AOTAutograd traces ``interpolate`` as ten operators (nearest) to some forty (bicubic), by decompositions in
Python: indices that are computed anew in every call, indexing by them, and conversions around that; the
derivatives are sums into indexed places. A compiler makes few loops of these; run one by one they take
many times as long, and where the ratio is no integer "nearest" takes other elements than the original
(2.1, in PyTorch 2.11 and 2.13). So while a graph is made that runs operator by operator, the decompositions
step aside, and the graph has PyTorch's own operators, also for the backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import operators

_NEAREST = tuple(
    f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)
)
_SMOOTH = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa")


class _Making(threading.local):
    whole = False


_making = _Making()


@contextlib.contextmanager
def kept_whole(wanted: bool = True) -> Iterator[None]:
    """Context in which graphs that this thread traces have interpolations as one operator each.

    Args:
        wanted: False: the context changes nothing.
    """
    before, _making.whole = _making.whole, wanted or _making.whole
    try:
        yield
    finally:
        _making.whole = before


def _by_sizes(name: str, composite: bool, args: tuple[Any, ...]) -> Any:
    """A call with sizes or scales, one of which is None, as the call with sizes that it is in eager mode."""
    x, sizes, *how, scales = args
    if not _making.whole:
        return operators.GO_ON
    if sizes is None:
        spatial = zip(x.shape[2:], scales, strict=True)
        sizes = [torch.sym_int(n * scale) for n, scale in spatial]
    each = [None] * (x.ndim - 2) if scales is None else scales
    return getattr(torch.ops.aten, name).default(x, sizes, *how, *each)


def _whole(name: str, composite: bool, args: tuple[Any, ...]) -> Any:
    """A call with sizes, whose derivative is PyTorch's own."""
    if not _making.whole:
        return operators.GO_ON
    if composite:
        return NotImplemented  # it is made of nothing else
    target = getattr(torch.ops.aten, name).default
    with operators.without_decomposition(target):
        return target(*args)


def _like_input(gradient: torch.Tensor, sizes: Any, of: Any, *_: Any) -> torch.Tensor:
    """What the derivative of an interpolation of ``of`` to ``sizes`` is like."""
    made = gradient.new_empty(of)
    for ndim, order in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if made.ndim == ndim and gradient.is_contiguous(memory_format=order):
            return made if gradient.is_contiguous() else made.to(memory_format=order)
    return made


for _name in (*_NEAREST, *_SMOOTH, *_ANTIALIASED):
    _packet = getattr(torch.ops.aten, _name, None)
    if _packet is not None:  # each version of PyTorch has more of them
        operators.ask_first(_packet.vec, partial(_by_sizes, _name))
        operators.ask_first(_packet.default, partial(_whole, _name))
        # PyTorch's own cannot tell where a size is open.
        operators.tell_shapes(getattr(torch.ops.aten, f"{_name}_backward").default, _like_input)
