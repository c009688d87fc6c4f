"""States of random generators: the default ones of PyTorch, Python and NumPy, and those a call may find."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture.names import is_internal

_MAX_DEPTH, _MAX_SEEN = 5, 20_000
"""So deep, and among so many objects, generators are looked for."""


class Generators:
    """The generators that a call may draw from.

    Args:
        args: Of the call.
        kwargs: Of the call.
        original: What is called; generators in its attributes, in what it closes over, in its defaults and
            in globals that it reads count, too.
    """

    def __init__(self, args: Any, kwargs: Any, original: Any = None) -> None:
        self._own: dict[Hashable, Any] = {id(x): x for x in _found_in((args, kwargs, original))}

    def _of_torch(self) -> dict[Hashable, torch.Generator]:
        on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return {id(x): x for x in (torch.default_generator, *on_gpu)}

    def of_torch(self) -> dict[Hashable, Any]:
        """The states of PyTorch's default generators."""
        return self.states(self._of_torch())

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
        found |= {key: _state(x) for key, x in self._own.items() if is_wanted(key)}
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
            elif key in of_torch:
                of_torch[key].set_state(state)
            else:
                _set_state(self._own[key], state)


def _numpys() -> tuple[Any, ...]:
    """NumPy's classes with a state that is got by a call, and with one that is an attribute."""
    numpy = sys.modules.get("numpy")
    random_of_numpy = getattr(numpy, "random", None)
    if random_of_numpy is None:
        return (), ()
    return (random_of_numpy.RandomState,), (random_of_numpy.Generator, random_of_numpy.BitGenerator)


def _is_generator(x: Any) -> bool:
    if isinstance(x, random.Random):
        return not isinstance(x, random.SystemRandom)  # has no state
    by_call, by_attribute = _numpys()
    return isinstance(x, (torch.Generator, *by_call, *by_attribute))


def _state(x: Any) -> Any:
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, _numpys()[1]):
        return getattr(x, "bit_generator", x).state
    return x.get_state()


def _set_state(x: Any, state: Any) -> None:
    if isinstance(x, random.Random):
        x.setstate(state)
    elif isinstance(x, _numpys()[1]):
        getattr(x, "bit_generator", x).state = state
    else:
        x.set_state(state)


def _found_in(top: Any) -> list[Any]:
    """Generators in an object, in what it holds, and in what its code reads."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    todo = [(top, 0)]
    while todo and len(seen) < _MAX_SEEN:
        x, depth = todo.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x  # held, so that its id stays its own
        if _is_generator(x):
            found.append(x)
        elif isinstance(x, torch.nn.Module):  # one inside of another is no deeper
            todo += [(inside, depth) for inside in x.children()]
            todo += [(inside, depth + 1) for inside in _held_by(x)]
        elif depth < _MAX_DEPTH:
            todo += [(inside, depth + 1) for inside in _held_by(x)]
    return found


def _held_by(x: Any) -> list[Any]:
    """What an object holds: a container its items, a function what it reads, others their attributes."""
    if isinstance(x, (str, bytes, int, float, torch.Tensor, type, types.ModuleType)):
        return []
    if isinstance(x, dict):
        return list(islice(x.values(), _MAX_SEEN))
    if isinstance(x, (list, tuple, set, frozenset, deque)):
        return list(islice(x, _MAX_SEEN))
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        return [] if is_internal(x.__code__.co_filename) else _read_by(x)
    held = getattr(x, "__dict__", None)
    found = list(held.values()) if type(held) is dict else []
    call = getattr(type(x), "forward" if isinstance(x, torch.nn.Module) else "__call__", None)
    return [*found, call] if isinstance(call, types.FunctionType) else found


def _read_by(function: types.FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and the globals that it or a function in it reads."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            found.append(cell.cell_contents)
    codes = [function.__code__]
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        known = function.__globals__
        found += [known[name] for name in code.co_names if name in known]
    return found


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
