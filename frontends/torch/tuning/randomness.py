"""States of random generators: PyTorch's default ones, Python's, NumPy's, and those among the arguments."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Generators:
    """The generators that a call may draw from.

    Args:
        args: Of the call.
        kwargs: Of the call.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        self._given = [x for x in leaves if isinstance(x, torch.Generator)]

    def _of_torch(self) -> dict[Hashable, torch.Generator]:
        on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return {id(x): x for x in (torch.default_generator, *on_gpu, *self._given)}

    def states(self, of: Iterable[Hashable] | None = None) -> dict[Hashable, Any]:
        """The states by generator.

        Args:
            of: Those wanted; all by default.
        """
        wanted = None if of is None else set(of)

        def is_wanted(key: Hashable) -> bool:
            return wanted is None or key in wanted

        found: dict[Hashable, Any] = {
            key: x.get_state() for key, x in self._of_torch().items() if is_wanted(key)
        }
        if is_wanted("Python"):
            found["Python"] = random.getstate()
        numpy = sys.modules.get("numpy")
        if numpy is not None and is_wanted("NumPy"):
            found["NumPy"] = numpy.random.get_state()
        return found

    def put_back(self, states: Mapping[Hashable, Any]) -> None:
        """Sets generators to what ``states`` gave."""
        of_torch = self._of_torch()
        for key, state in states.items():
            if key == "Python":
                random.setstate(state)
            elif key == "NumPy":
                sys.modules["numpy"].random.set_state(state)
            else:
                of_torch[key].set_state(state)


def changed(before: Mapping[Hashable, Any], after: Mapping[Hashable, Any]) -> set[Hashable]:
    """Generators that were drawn from, of those in both."""
    return {key for key, state in before.items() if key in after and not _same(state, after[key])}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):  # NumPy's has an array in it
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    tell = getattr(a, "tobytes", None)
    return bool(a == b if tell is None else tell() == b.tobytes())
