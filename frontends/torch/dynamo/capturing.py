"""Where Dynamo starts: the function that it compiles for a callable, and its settings while it does."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import captures, class_attributes, dynamo_graphs, logs
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.capture.names import ROOT_FILE, ROOT_NAME
from dynaflow_xla.frontends.torch.dynamo import running, uncaptured
from dynaflow_xla.frontends.torch.rewrite import recurrent
from dynaflow_xla.frontends.torch.signature import open_batch

MAX_CAPTURES = 64
"""So many captures of one callable are kept. What comes after runs as the original, with a warning."""

_schedules = itertools.count()


@contextmanager
def _around() -> Iterator[None]:
    """What is open while Dynamo captures for us."""
    before = dynamo_graphs.break_counts()
    with logs.quiet(), uncaptured.not_told(), recurrent.lengths_open(), open_batch.around():
        yield
    if reason := dynamo_graphs.reason_of_break(before):
        running.leave_out(reason)


settings = captures.CompilationSettings(captures.FOR_SCHEDULES, marks.watched, _around)


def root_function(original: Callable[..., Any]) -> types.FunctionType:
    """A function of its own code that calls the original.

    Dynamo keeps what it compiled, and counts recompilations, by code object, and remembers by file
    and line which sizes changed; two schedules must not count against each other. The text is where
    ``inspect`` finds it: functions without a source get one code object for all before torch 2.13.
    """
    class_attributes.mend()
    scope: dict[str, Any] = {}
    text = (
        f"def make({ROOT_NAME}):\n"
        f"    def scheduled(*args, **kwargs):\n"
        f"        return {ROOT_NAME}(*args, **kwargs)\n"
        f"    return scheduled\n"
    )
    file = f"{ROOT_FILE} {next(_schedules)}>"
    exec(compile(text, file, "exec"), scope)
    made: types.FunctionType = scope["make"](original)
    shared = _globals_of_no_module(original)
    if shared is not None:
        made = types.FunctionType(made.__code__, shared, made.__name__, None, made.__closure__)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(made, linecache.cache.pop, file, None)
    given = (scope, None) if shared is None else (shared, made.__code__)
    weakref.finalize(made, captures.forget_graphs, *given).atexit = False
    return made


def _globals_of_no_module(original: Callable[..., Any]) -> dict[str, Any] | None:
    """The globals of what is called, where the module of their name has others: of a plugin, say.

    Dynamo reads the globals of a function that it inlines from the module of their name, which is missing or
    another one then; the globals of the function where it starts it reads where they are.
    """
    function: Any = original
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = function.forward
    elif not isinstance(function, types.FunctionType | types.MethodType):
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    with suppress(ValueError):  # it is wrapped in itself
        function = inspect.unwrap(function)
    found = getattr(function, "__globals__", None)
    name = found.get("__name__") if isinstance(found, dict) else None
    if name is None or getattr(sys.modules.get(name), "__dict__", None) is found:
        return None
    return found
