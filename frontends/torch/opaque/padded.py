"""Encoders that leave their padding out: they do so only where nobody captures them.

``nn.TransformerEncoder`` computes on nested tensors in evaluation without gradients, if a padding mask says
so, and padded rows are zeros then. While it is captured it goes another way, which computes them like
others (under ``torch.compile``, too). So the original makes such a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import inlining
from dynaflow_xla.frontends.torch.capture import lazy
from dynaflow_xla.frontends.torch.capture.names import ROOT_FILE
from dynaflow_xla.frontends.torch.opaque import calls

_MAX_KINDS = 64
_FORWARD = torch.nn.TransformerEncoder.forward


class LeavesOut(BaseException):
    """Ends a capture before anything ran; no ``Exception``, so that nobody keeps it."""


class PaddedCalls:
    """Which calls of a scheduled function reach such an encoder, as captures found.

    Args:
        original: The scheduled function or module.
        name: Of it, for messages.
        kind: What calls that are captured alike have in common, of arguments and keyword arguments.
    """

    def __init__(self, original: Any, name: str, kind: Callable[[Any, Any], Hashable]) -> None:
        self._name, self._kind = name, kind
        self._found: dict[Hashable, None] = {}
        self.possible = any(
            isinstance(module, torch.nn.TransformerEncoder)
            for held in lazy.held_modules(original)
            for module in held.modules()
        )

    def add(self, args: Any, kwargs: Any) -> None:
        """Remembers the kind of a call, so that it is not captured again."""
        if len(self._found) < _MAX_KINDS:
            self._found[self._kind(args, kwargs)] = None

    def why(self, args: Any, kwargs: Any) -> str:
        """Why the original makes a call like this; "" if it was not found that it has to."""
        if not self._found or self._kind(args, kwargs) not in self._found:
            return ""
        return (
            f"an nn.TransformerEncoder of {self._name!r} is called in evaluation without gradients with a "
            "padding mask: it leaves padded rows out and makes them zeros, which no capture does, so the "
            "original runs. For a schedule, give it enable_nested_tensor=False: padded rows are no zeros then"
        )

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Context of a call, whose capture ends at such an encoder."""
        if not self.possible or not torch.backends.mha.get_fastpath_enabled():
            return contextlib.nullcontext()
        return inlining.refused(_refuse, ROOT_FILE)


def _refuse(call: inlining.Followed) -> None:
    """Ends the capture if a call that Dynamo follows is one that leaves padding out."""
    if call.function is not _FORWARD:
        return
    tensors: list[Any] = []
    try:
        given = calls.bound(call.function, call.args, call.kwargs)
        read = {name: call.read(value, tensors, []) for name, value in given.items()}
    except (TypeError, inlining.CannotKeep):
        return
    encoder, src = read["self"], read["src"]
    if read["mask"] is not None or not isinstance(read["src_key_padding_mask"], inlining.TensorIn):
        return
    if not isinstance(src, inlining.TensorIn) or src.rank != 3 or not encoder.layers:
        return
    first = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training:
        return
    if not getattr(encoder, "mask_check", True):
        return  # it goes that way under a capture, too
    of_autograd = (inlining.example_of(tensors[src.number]), *first.parameters())
    if torch.is_grad_enabled() and any(t.requires_grad for t in of_autograd):
        return
    if not torch.is_autocast_enabled():
        raise LeavesOut
