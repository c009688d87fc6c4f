"""Calls of a function in a run of the original: what they take and make, and whether they do anything else.

A call that is to become an operator may change nothing but its results: a module's attribute that later
code reads would be read as it was when the graph was captured.
"""

from __future__ import annotations

import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat.inlining import CannotKeep, SizeIn, TensorIn
from dynaflow_xla.frontends.torch.capture.leaves import leaves_of
from dynaflow_xla.frontends.torch.opaque.shapes import Seen

_UNLOOKED = (torch.Tensor, torch.nn.Module, type, types.FunctionType, types.ModuleType)
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class OpaqueCall:
    """A call that was made.

    Attributes:
        modules: Those among its arguments.
        given: Its arguments by name, with ``TensorIn`` for tensors.
        training: Modes of the modules and of all inside of them.
        thread: See ``thread_state``.
        seen: Shapes.
        results: The result: numbers for its tensors, in tuples, lists and dicts.
        dtypes: Of the result's tensors.
    """

    modules: tuple[Any, ...]
    given: Mapping[str, Any]
    training: tuple[bool, ...]
    thread: tuple[Any, ...]
    seen: Seen
    results: Any
    dtypes: tuple[torch.dtype, ...]


def thread_state() -> tuple[Any, ...]:
    """What autocast and autograd do on this thread."""
    kinds = ("cpu", "cuda")
    return (
        *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
    )


def modes_of(modules: Sequence[torch.nn.Module]) -> tuple[bool, ...]:
    """Whether modules, and those inside of them, are in training."""
    return tuple(m.training for top in modules for m in top.modules())


def alike(a: Any, b: Any) -> bool:
    """Whether two arguments differ by the data and sizes of tensors, and by sizes, alone."""
    if isinstance(a, SizeIn) or isinstance(b, SizeIn):
        numbers = (SizeIn, int)
        return isinstance(a, numbers) and isinstance(b, numbers)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, torch.nn.Module):
        return a is b
    return a is b or bool(a == b)


def modules_in(given: Any) -> tuple[torch.nn.Module, ...]:
    """The modules among arguments."""
    if isinstance(given, list | tuple):
        found = [m for x in given for m in modules_in(x)]
    elif isinstance(given, dict):
        found = [m for x in given.values() for m in modules_in(x)]
    else:
        found = [given] if isinstance(given, torch.nn.Module) else []
    return tuple({id(m): m for m in found}.values())


def flat(result: Any, tensors: list[torch.Tensor]) -> Any:
    """A result with numbers for its tensors, which are added to the list.

    Raises:
        CannotKeep: it holds something else than tensors and None.
    """
    if isinstance(result, torch.Tensor):
        if type(result) not in (torch.Tensor, torch.nn.Parameter) or result.layout != torch.strided:
            raise CannotKeep(f"returns a {type(result).__name__} ({result.layout})")
        tensors.append(result)
        return len(tensors) - 1
    if result is None:
        return None
    if type(result) in (list, tuple):
        made = [flat(x, tensors) for x in result]
        return made if type(result) is list else tuple(made)
    if type(result) is dict:
        return {k: flat(v, tensors) for k, v in result.items()}
    raise CannotKeep(f"returns a {type(result).__name__}, which may depend on values")


def bound(function: types.FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments by the function's own names for them, defaults included."""
    found = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    found.apply_defaults()
    return dict(found.arguments)


def call_with(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Calls a function with arguments by name, see ``bound``."""
    signature = inspect.signature(function, follow_wrapped=False)
    made = inspect.BoundArguments(signature, dict(given))  # type: ignore[arg-type]
    return function(*made.args, **made.kwargs)


def _read(given: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(given, torch.Tensor):
        tensors.append(given)
        return TensorIn(len(tensors) - 1, given.dtype, given.dim())
    if isinstance(given, list):
        return [_read(x, tensors) for x in given]
    if isinstance(given, tuple):
        return tuple(_read(x, tensors) for x in given)
    if isinstance(given, dict):
        return {k: _read(v, tensors) for k, v in given.items()}
    return given


class _Before:
    """What a call could change, as it was."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        tensors: list[torch.Tensor] = []
        self.given = {k: _read(given[k], tensors) for k in sorted(given)}
        self.modules = modules_in(dict(given))
        inside = self.inside = within(self.modules)
        owned = [t for m in inside for t in (*m.parameters(False), *m.buffers(False))]
        self.tensors, self.owned = tensors, owned
        self.versions = [(t, _version(t)) for t in (*tensors, *owned)]
        self.attributes = [(m, {k: _shallow(v) for k, v in vars(m).items()}) for m in inside]
        self.containers = [(x, _shallow(x)) for x in _containers(dict(given))]
        self.training, self.thread = modes_of(self.modules), thread_state()
        self.random = _random_state()

    def lost(self, made: Sequence[torch.Tensor]) -> str:
        """Whose gradients an operator of these arguments would lose; "" if none."""
        known = [*self.tensors, *self.owned]
        for leaf in leaves_of(made, known):
            return (
                f"uses a tensor of shape {list(leaf.shape)} that wants gradients and is no argument and "
                "no parameter of a module among its arguments"
            )
        if any(t._backward_hooks for t in self.owned):
            return "has a parameter with a gradient hook"
        return ""

    def changed(self) -> str:
        """What a call changed; "" if it changed nothing."""
        if any(_version(t) != version for t, version in self.versions):
            return "writes into a tensor that it is given, or into a parameter or buffer"
        for module, before in self.attributes:
            after = vars(module)
            for name in (*before, *(n for n in after if n not in before)):
                if (
                    name not in before
                    or name not in after
                    or not _as_was(before[name], after[name])
                ):
                    return f"changes the attribute {name!r} of a {type(module).__name__}"
        if not all(_as_was(before, x) for x, before in self.containers):
            return "changes a list or dict that it is given"
        if not all(map(_equal, self.random, _random_state())):
            return "draws random numbers"
        return ""

    def unguarded(self) -> str:
        """What a later call may find changed without Dynamo's notice; "" if there is nothing such."""
        for module in self.inside:
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules") and _holds_tensors(value):
                    return f"may read the attribute {name!r} of a {type(module).__name__}, a tensor"
        if len(set(map(id, self.tensors))) != len(self.tensors):
            return "is given the same tensor twice"
        return ""


def within(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules, and all inside of them, each once."""
    return list({id(m): m for top in modules for m in top.modules()}.values())


def held_by(modules: Sequence[torch.nn.Module]) -> set[int]:
    """The ids of modules, of all inside of them, and of what these hold."""
    return {id(x) for m in within(modules) for x in (m, vars(m), *vars(m).values())}


def shares_memory(made: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> bool:
    """Whether a result shares memory with a tensor that was there, or with another result."""
    seen = {t.untyped_storage().data_ptr() for t in known if t.numel()}
    for t in made:
        if t.numel():
            place = t.untyped_storage().data_ptr()
            if place in seen:
                return True
            seen.add(place)
    return False


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return any(isinstance(x, torch.Tensor) for x in value)
    return isinstance(value, torch.Tensor)


def reads_outside(frame: Any) -> str:
    """What a function reads beside its arguments that may be another thing in a later call; "" if nothing.

    ``super()`` is a variable of the class around it.
    """
    code = frame.f_code
    if names := [n for n in code.co_freevars if n != "__class__"]:
        return f"closes over {names[0]!r}"
    for name in code.co_names:
        if isinstance(frame.f_globals.get(name), torch.Tensor):
            return f"may read the global tensor {name!r}"
    return ""


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _shallow(value: Any) -> tuple[Any, Any]:
    if isinstance(value, dict):
        return value, dict(value)
    if isinstance(value, list | set | deque):
        return value, list(value)
    if not isinstance(value, _UNLOOKED) and hasattr(value, "__dict__"):
        return value, dict(vars(value))
    return value, None


def _as_was(before: tuple[Any, Any], now: Any) -> bool:
    value, content = before
    if value is not now:
        return isinstance(value, _CONSTANTS) and type(value) is type(now) and value == now
    if isinstance(now, dict):
        return list(now) == list(content) and all(now[k] is content[k] for k in content)
    if content is not None and not isinstance(now, list | set | deque):
        held = vars(now)
        return list(held) == list(content) and all(held[k] is content[k] for k in content)
    if isinstance(now, list | set | deque):
        return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))
    return True


def _containers(given: Any) -> Iterator[Any]:
    if isinstance(given, list | tuple | dict):
        if not isinstance(given, tuple):
            yield given
        for x in given.values() if isinstance(given, dict) else given:
            yield from _containers(x)


def _random_state() -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states.append(sys.modules["numpy"].random.get_state()[1].tolist())
    return states


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


class CallRecorder:
    """Notes the calls of one function on this thread while it is open.

    The interpreter tells of them: a function that a decorator holds is found in no other way.

    Attributes:
        calls: The calls.
        refused: Why one of them cannot be an operator; "" if all can.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.calls: list[OpaqueCall] = []
        self.refused = ""
        self._open: dict[int, _Before] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, calls are noted."""
        before: Any = sys.getprofile()
        if before is not None and not callable(
            before
        ):  # a profiler's own, which Python cannot put back
            self.refused = "cannot be watched while a profiler runs"
            yield
            return

        def profile(frame: Any, event: Any, arg: Any) -> None:
            if frame.f_code is self.code and event in ("call", "return"):
                sys.setprofile(None)
                try:
                    self._note(frame, event, arg)
                except Exception as error:
                    self.refused = self.refused or f"cannot be watched ({error!r})"
                finally:
                    sys.setprofile(profile)
            if before is not None:
                with suppress(Exception):
                    before(frame, event, arg)

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = self.code
            count = code.co_argcount + code.co_kwonlyargcount
            count += bool(code.co_flags & inspect.CO_VARARGS) + bool(
                code.co_flags & inspect.CO_VARKEYWORDS
            )
            names = code.co_varnames[:count]
            self._open[id(frame)] = _Before({n: frame.f_locals[n] for n in names})
            return
        before = self._open.pop(id(frame), None)
        if before is None or self.refused:
            return
        made: list[torch.Tensor] = []
        try:
            results = flat(arg, made)
        except CannotKeep as error:
            self.refused = str(error)
            return
        self.refused = (
            before.changed() or before.lost(made) or before.unguarded() or reads_outside(frame)
        )
        if not made:
            self.refused = self.refused or "returns no tensor"
        elif len({t.device for t in (*made, *before.tensors)}) > 1:
            self.refused = self.refused or "takes or makes tensors of several devices"
        elif shares_memory(made, [*before.tensors, *before.owned]):
            self.refused = self.refused or "returns a tensor that shares memory with another"
        shapes = (tuple(tuple(t.shape) for t in ts) for ts in (before.tensors, made))
        self.calls.append(
            OpaqueCall(
                before.modules, before.given, before.training, before.thread, Seen(*shapes),
                results, tuple(t.dtype for t in made),
            )
        )  # fmt: skip
