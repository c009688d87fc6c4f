"""Enlargements by the nearest element, as the one operator that the original runs.

AOTAutograd traces ``interpolate(mode="nearest")`` as some ten operators: indices that are computed anew in
every call, an indexing by them, and conversions around that. A compiler makes one loop of these; run one by
one they take several times as long, and where the ratio is no integer they take other elements than the
original (2.1, in PyTorch 2.11 and 2.13). So the call is a stand-in until the graph is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NAMES = tuple(
    f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)
)
_MODES = {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}

_library = torch.library.Library("dynaflow_xla", "FRAGMENT")


def _traced(x: torch.Tensor, size: Sequence[int] | None, scales: Sequence[float] | None) -> Any:
    """What the result is like."""
    if size is None:
        assert scales is not None  # as in every call that PyTorch accepts
        size = [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]
    made = x.new_empty((*x.shape[:2], *size))
    for ndim, order in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == ndim and x.is_contiguous(memory_format=order) and not x.is_contiguous():
            return made.to(memory_format=order)
    return made


for _name in _NAMES:
    _schema = f"{_name}(Tensor input, SymInt[]? output_size, float[]? scale_factors) -> Tensor"
    _library.define(_schema)
    _library.impl(_name, getattr(torch.ops.aten, _name).vec, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dynaflow_xla::{_name}", _traced, lib=_library)

_ORIGINAL = {
    getattr(torch.ops.dynaflow_xla, name).default: getattr(torch.ops.aten, name).vec
    for name in _NAMES
}


def keep_whole(gm: Any) -> None:
    """Rewrites calls of a Dynamo graph without gradients into the stand-ins; sizes that change stay open."""
    for node in gm.graph.nodes:
        if node.target is not torch.nn.functional.interpolate:
            continue
        given = _arguments(*node.args, **node.kwargs)
        if given is None:
            continue
        x, name, size, scales = given
        example = x.meta.get("example_value") if isinstance(x, torch.fx.Node) else None
        if example is None or not all(type(n) is int for n in example.shape):
            continue
        spatial = example.ndim - 2
        if not 1 <= spatial <= 3:
            continue
        node.target = getattr(torch.ops.dynaflow_xla, f"{name}{spatial}d").default
        node.args = x, _each(size, spatial, int), _each(scales, spatial, float)
        node.kwargs = {}


def _arguments(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: Any = None, recompute_scale_factor: Any = None, antialias: bool = False,
) -> Any:  # fmt: skip
    """Of a call of ``interpolate`` what the operator takes; None where it is another one."""
    if mode not in _MODES or align_corners is not None or recompute_scale_factor or antialias:
        return None
    given = scale_factor if size is None else size
    numbers = given if isinstance(given, list | tuple) else (given,)
    if (size is None) is (scale_factor is None) or any(
        type(n) not in (int, float) for n in numbers
    ):
        return None
    return input, _MODES[mode], size, scale_factor


def _each(value: Any, spatial: int, kind: type) -> Any:
    """One number for each dimension, where any are given."""
    if value is None:
        return None
    each = value if isinstance(value, list | tuple) else [value] * spatial
    return [kind(n) for n in each]


def as_written(gm: Any) -> None:
    """Puts PyTorch's operators in the place of the stand-ins, in the graph that AOTAutograd made."""
    kept = [node for node in gm.graph.nodes if node.target in _ORIGINAL]
    for node in kept:
        node.target = _ORIGINAL[node.target]
    if kept:
        gm.recompile()
