"""Calls that Dynamo follows into: somebody watches them, and may stand something in their place.

Dynamo has no way to keep a call as it is for some captures only (``torch.compiler.disable`` ends the graph,
``allow_in_graph`` holds for the process). Every call of a Python function passes one method of its
translator; what is put there asks the watcher of this thread, and without one goes on to Dynamo's own.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class CannotKeep(Exception):
    """An argument of a call is nothing that an operator can take."""


@dataclass(frozen=True)
class TensorIn:
    """A tensor among the arguments of a call: the ``number``-th."""

    number: int
    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class SizeIn:
    """An open size among the arguments of a call: the ``number``-th."""

    number: int


@dataclass
class Followed:
    """A call that Dynamo is about to follow.

    Attributes:
        function: What is called.
        args: As Dynamo has them; ``self`` of a method is the first.
        kwargs: As Dynamo has them.
        whole: Whether it lies directly in the graph, not in a branch, a loop or a checkpoint.
        translator: Dynamo's, at the call.
    """

    function: types.FunctionType
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    whole: bool
    translator: Any

    def changed(self) -> frozenset[int]:
        """The ids of objects that were there before and are changed already; -1 for a global variable.

        Dynamo in fact changes them only when the graph has run.
        """
        from torch._dynamo.variables import base

        effects = self.translator.output.side_effects
        existing = (base.AttributeMutationExisting, base.ValueMutationExisting)
        return frozenset(
            -1 if type(var).__name__ == "NewGlobalVariable" else number
            for number, var in effects.id_to_variable.items()
            if isinstance(var.mutation_type, existing) and effects.is_modified(var)
        )

    def read(self, given: Any, tensors: list[Any], sizes: list[Any]) -> Any:
        """An argument with ``TensorIn`` and ``SizeIn`` for what is added to the lists.

        Raises:
            CannotKeep: it is, or holds, something else than tensors, numbers, constants and modules.
        """
        from torch._dynamo import variables

        if not hasattr(given, "realize"):  # a default, or what holds the rest of the arguments
            return self._plain(given, tensors, sizes)
        given = given.realize()
        kind = type(given).__name__
        if isinstance(given, variables.TensorVariable):
            if kind != "TensorVariable":
                raise CannotKeep(f"takes a {kind.removesuffix('Variable')}")
            example = example_of(given)
            tensors.append(given)
            return TensorIn(len(tensors) - 1, example.dtype, example.dim())
        if isinstance(given, variables.SymNodeVariable):
            if not isinstance(example_of(given), torch.SymInt):
                raise CannotKeep("takes a number that depends on sizes")
            sizes.append(given)
            return SizeIn(len(sizes) - 1)
        if kind in ("ListVariable", "TupleVariable", "SizeVariable"):
            made = [self.read(x, tensors, sizes) for x in given.items]
            return made if kind == "ListVariable" else tuple(made)
        if kind == "ConstDictVariable":
            found = {}
            for key, value in given.items.items():
                found[key.vt.as_python_constant()] = self.read(value, tensors, sizes)
            return found
        module = getattr(given, "value", None)
        if isinstance(module, torch.nn.Module) and given.source is not None:
            return module
        try:
            return given.as_python_constant()
        except Exception:
            named = getattr(module, "__class__", None) or kind
            raise CannotKeep(f"takes a {getattr(named, '__name__', named)}") from None

    def _plain(self, given: Any, tensors: list[Any], sizes: list[Any]) -> Any:
        if isinstance(given, list | tuple):
            return type(given)(self.read(x, tensors, sizes) for x in given)
        if isinstance(given, dict):
            return {k: self.read(v, tensors, sizes) for k, v in given.items()}
        if isinstance(given, torch.Tensor | torch.nn.Module):
            raise CannotKeep(f"takes a {type(given).__name__} by default")
        return given


def example_of(variable: Any) -> Any:
    """The tensor without data, or the open size, that Dynamo has for an argument."""
    return variable.as_proxy().node.meta["example_value"]


def modules_in(given: Any) -> dict[int, Any]:
    """Modules among arguments as Dynamo has them, by the module's id."""
    if isinstance(given, list | tuple):
        return {k: v for x in given for k, v in modules_in(x).items()}
    if isinstance(given, dict):
        return modules_in(list(given.values()))
    if not hasattr(given, "realize"):
        return {}
    given = given.realize()
    if type(given).__name__ in ("ListVariable", "TupleVariable"):
        return modules_in(given.items)
    if type(given).__name__ == "ConstDictVariable":
        return modules_in(list(given.items.values()))
    module = getattr(given, "value", None)
    return {id(module): given} if isinstance(module, torch.nn.Module) else {}


def is_object(given: Sequence[Any], wanted: Any) -> bool:
    """Whether an object is among arguments as Dynamo has them."""
    return any(
        getattr(v, "realize", lambda v=v: v)().__dict__.get("value") is wanted for v in given
    )


class Watcher(Protocol):
    """Who is asked about the calls of a capture."""

    def entered(self, call: Followed) -> StandIn | None:
        """What stands in the place of a call; None: Dynamo follows it."""

    def failed(self, error: Exception, told: list[Followed]) -> None:
        """A capture fails.

        Args:
            error: What Dynamo says.
            told: The calls inside of each other in which it happened, the innermost first.
        """


@dataclass(frozen=True)
class StandIn:
    """A function that Dynamo follows in the place of another.

    Attributes:
        function: Called with ``constants``, then tuples: the last entry of the list that the stand-in before
            it in the graph returned, if there is one; tensors, sizes, modules. Returns a list.
        constants: For its first parameters.
        tensors: As Dynamo has them.
        sizes: As Dynamo has them.
        modules: As Dynamo has them.
        results: The result: numbers stand for entries of the list, in tuples, lists and dicts.
    """

    function: Callable[..., Any]
    constants: Sequence[Any]
    tensors: Sequence[Any]
    sizes: Sequence[Any]
    modules: Sequence[Any]
    results: Any


class _Here(threading.local):
    watcher: Watcher | None = None
    file: str = ""
    refuse: Callable[[Followed], None] | None = None
    refuse_in: str = ""


_here = _Here()
_lock = threading.Lock()


@contextmanager
def watched(watcher: Watcher, file: str) -> Iterator[None]:
    """While open, the watcher is asked about captures of this thread.

    Args:
        watcher: Who is asked.
        file: How the file of the function begins whose captures are meant: others, which Dynamo makes of what
            is behind the end of a graph, come when a part of it has run.
    """
    _install()
    before, _here.watcher, _here.file = (_here.watcher, _here.file), watcher, file
    try:
        yield
    finally:
        _here.watcher, _here.file = before


@contextmanager
def refused(refuse: Callable[[Followed], None], file: str) -> Iterator[None]:
    """While open, captures of this thread end where this raises of a call that Dynamo is about to follow.

    Args:
        refuse: Looks at the call.
        file: As of ``watched``.
    """
    _install()
    before, (_here.refuse, _here.refuse_in) = (_here.refuse, _here.refuse_in), (refuse, file)
    try:
        yield
    finally:
        _here.refuse, _here.refuse_in = before


@functools.cache
def _install() -> None:
    """Once a process; what is split calls it each time."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    def inline(self: Any, fn: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        watcher, function = _here.watcher, getattr(fn, "fn", None)
        if (watcher is None and _here.refuse is None) or not isinstance(
            function, types.FunctionType
        ):
            return plain(self, fn, args, kwargs, *more, **options)
        root = getattr(self.output, "root_tx", None) or self
        if _here.refuse is not None and root.f_code.co_filename.startswith(_here.refuse_in):
            _here.refuse(Followed(function, args, kwargs, _in_graph(self), self))
        if watcher is None or not root.f_code.co_filename.startswith(_here.file):
            return plain(self, fn, args, kwargs, *more, **options)
        call = Followed(function, args, kwargs, _in_graph(self), self)
        stand_in = watcher.entered(call)
        if stand_in is not None:
            return _followed(plain, self, stand_in)
        try:
            return plain(self, fn, args, kwargs, *more, **options)
        except Unsupported as error:
            told = error.__dict__.setdefault("_dynaflow_calls", [])
            told.append(call)
            if root is self:
                watcher.failed(error, told)
            raise

    with _lock:  # two threads may come here at a time
        plain = Translator.inline_user_function_return
        if not getattr(plain, "_dynaflow", False):
            inline._dynaflow = True  # type: ignore[attr-defined]
            Translator.inline_user_function_return = inline


def _in_graph(translator: Any) -> bool:
    output = translator.output
    return bool(output.is_root_tracer()) if hasattr(output, "is_root_tracer") else False


def _followed(plain: Callable[..., Any], translator: Any, made: StandIn) -> Any:
    from torch._dynamo import variables

    built = variables.base.VariableTracker.build
    args = [built(translator, c) for c in made.constants]
    before = getattr(translator.output, "_dynaflow_last", ())
    for each in (before, made.tensors, made.sizes, made.modules):
        args.append(variables.TupleVariable(list(each)))
    parts = plain(translator, variables.UserFunctionVariable(made.function), args, {}).items
    translator.output._dynaflow_last = (parts[-1],)

    def put(spec: Any) -> Any:
        if isinstance(spec, tuple):
            return variables.TupleVariable([put(x) for x in spec])
        if isinstance(spec, list):
            return variables.ListVariable(
                [put(x) for x in spec], mutation_type=variables.base.ValueMutationNew()
            )
        if isinstance(spec, dict):
            return variables.ConstDictVariable(
                {built(translator, k): put(v) for k, v in spec.items()},
                mutation_type=variables.base.ValueMutationNew(),
            )
        return built(translator, None) if spec is None else parts[spec]

    return put(made.results)


def lines_of(error: Exception) -> tuple[str, str]:
    """What Dynamo says of a capture that failed, in a line, and where: file:line of the innermost frame."""
    text = (str(getattr(error, "gb_type", "") or "") or str(error)).splitlines()[0]
    stack = list(getattr(error, "real_stack", None) or ())
    return text, f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


@contextmanager
def autograd_again() -> Iterator[None]:
    """While open, operators of this thread are recorded by autograd, also below its dispatch key."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        key = getattr(torch._C.DispatchKey, name, None)
        if key is not None:
            keys = keys.remove(key)
    for name in torch._C.DispatchKey.__members__:
        if name.startswith("Autograd"):
            keys = keys.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        yield
