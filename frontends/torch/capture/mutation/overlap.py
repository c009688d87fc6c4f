"""Arguments that share memory, where the function writes into some.

What a graph does then depends on which arguments share what. PyTorch's guards see most changes of that, not
all: a view in the place of a tensor of its own would get results other than the original's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch.capture.mutation.shared_memory import MemoryLayout, overlapping

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Other subclasses need have no memory of their own."""


class Pattern(NamedTuple):
    """Which tensors of a call overlap.

    Attributes:
        views: Numbers of two leaves that are views of one storage, with their places in it.
        foreign: Numbers of two that are not, say arrays of NumPy; PyTorch takes them for apart.
    """

    views: tuple[tuple[int, int, int, int], ...] = ()
    foreign: tuple[tuple[int, int], ...] = ()


_APART = Pattern()


def pattern(args: Any, kwargs: Any) -> Pattern:
    """Which tensors of a call overlap."""
    leaves = [
        (number, x)
        for number, x in enumerate(pytree.tree_leaves((args, kwargs)))
        if type(x) in _PLAIN and x.layout is torch.strided and not x.is_meta
    ]
    if len(leaves) < 2 or modes.in_transform():
        return _APART
    leaves = [(number, x) for number, x in leaves if x.numel() and x.data_ptr()]
    pairs = overlapping([_view(x) for _, x in leaves])
    if not pairs:
        return _APART
    views, foreign = [], []
    for first, second in pairs:
        (i, x), (j, y) = leaves[first], leaves[second]
        if x is y:  # one object in two places is seen by the guards
            continue
        if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
            views.append((i, j, int(x.storage_offset()), int(y.storage_offset())))
        else:
            foreign.append((i, j))
    return Pattern(tuple(views), tuple(foreign))


def _view(x: torch.Tensor) -> MemoryLayout:
    size = x.element_size()
    return MemoryLayout(x.data_ptr(), tuple(x.shape), tuple(n * size for n in x.stride()), size)


def check(found: Pattern, name: str) -> None:
    """Checks that a function which writes into its arguments can be captured for these.

    Raises:
        UnsupportedError: some share memory and PyTorch does not know.
    """
    if found.foreign:
        raise UnsupportedError(
            f"{name!r} writes into its arguments, and tensors among these share memory that PyTorch takes "
            "for apart (arrays of NumPy, say): the capture would miss in one what is written to the other. "
            "Pass views of one tensor, or tensors with memory of their own"
        )


class SharedOtherwise(Exception):
    """A graph is called with inputs that share memory in another way than those that it was captured for."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__("arguments share memory with what the function holds in another way")
        self.pattern = pattern


class SharedAsCaptured:
    """A graph that writes into its inputs, which share memory as when it was captured.

    It sees what ``pattern`` does not: an argument that is a view of a buffer, of a global.

    Args:
        run: The graph.
        arguments: Which inputs are arguments of the call.
    """

    def __init__(self, run: Callable[..., Any], arguments: Sequence[int]) -> None:
        self._run, self._arguments = run, arguments
        self._known: Pattern | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Runs it. Raises SharedOtherwise before it does anything."""
        found = self._found(inputs)
        if self._known is None:
            self._known = found
        elif found != self._known:
            raise SharedOtherwise(found)
        return self._run(*inputs)

    def _found(self, inputs: Sequence[Any]) -> Pattern:
        if modes.in_transform():
            return _APART
        twice = self._twice(inputs)
        given = [n for n in self._arguments if n in twice or _may_share(inputs[n])]
        if not given:
            return _APART
        storages = {inputs[n].untyped_storage().data_ptr() for n in given}
        others = set(range(len(inputs))).difference(self._arguments)
        near = [
            n
            for n in others
            if _has_memory(inputs[n]) and inputs[n].untyped_storage().data_ptr() in storages
        ]
        numbers = sorted((*given, *near))
        pairs = overlapping([_view(inputs[n]) for n in numbers]) if near else []
        views = []
        for i, j in ((numbers[a], numbers[b]) for a, b in pairs):
            x, y = inputs[i], inputs[j]
            if (i in others) != (j in others):
                views.append((i, j, int(x.storage_offset()), int(y.storage_offset())))
        return Pattern(tuple(views))

    def _twice(self, inputs: Sequence[Any]) -> set[int]:
        """Arguments that are another input, too: a buffer. PyTorch has no guard for some of these."""
        if len(set(map(id, inputs))) == len(inputs):
            return set()
        found = Counter(map(id, inputs))
        return {n for n in self._arguments if found[id(inputs[n])] > 1 and _has_memory(inputs[n])}


def _has_memory(x: Any) -> bool:
    return type(x) in _PLAIN and x.layout is torch.strided and not x.is_meta and x.numel() > 0


def _may_share(x: Any) -> bool:
    return _has_memory(x) and not modes.has_own_storage(x)
