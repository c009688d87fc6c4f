"""Dynamo's captures: its settings while it makes them, those it keeps, and a way to them without it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch._compat import modes

CONVERTING = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "convert_frame.py")
"""The file of what Dynamo does with a frame before that runs."""

GRAPH, BEHIND = "__compiled_fn", "__resume"
"""How the names begin that Dynamo gives to a graph, and to a function that goes on behind a break."""


def never_compile(code: types.CodeType) -> None:
    """Keeps Dynamo from compiling a frame of this code by itself; inlining it stays possible."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def without_compile(fn: Any) -> Any:
    """The module that ``torch.compile`` was given; anything else as it is."""
    return fn._orig_mod if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) else fn


HOOKS_GUARDED: Mapping[str, Any] = {"skip_nnmodule_hook_guards": False}
"""Dynamo's settings by which hooks that modules get after the capture are noticed."""

FOR_SCHEDULES: Mapping[str, Any] = {
    "allow_rnn": True,
    "use_numpy_random_stream": True,
    "allow_unspec_int_on_nn_module": True,
    **HOOKS_GUARDED,
}
"""Recurrent modules are captured, too; Dynamo breaks graphs at them by default. An integer of a module, which
may count its calls, is taken as any by the second capture, as integers among arguments are."""


class CompilationSettings:
    """Dynamo's settings while it compiles for us, and only then.

    Dynamo settings belong to a thread; to set them at each call would cost 20 us. No two of these may hold
    for one compilation: they end in the order in which they began.

    Args:
        wanted: The settings.
        ours: Whether the compilation that starts now on this thread is one of those they are for.
        around: Makes what else is open while it lasts.
    """

    def __init__(
        self,
        wanted: Mapping[str, Any],
        ours: Callable[[], bool],
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._wanted, self._ours, self._around = wanted, ours, around
        self._here = threading.local()
        # A backward is compiled inside of the captured function if that calls ``backward``. Dynamo would
        # then compile the hooks too, and wait for the lock under which it calls them.
        self._hooks = torch.compiler.disable(self._start), torch.compiler.disable(self._end)

    def for_calls(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What ``torch.compile`` made, called so that these settings hold whenever it compiles.

        Dynamo calls its hooks when the first of all threads' compilations begins, and when the last one ends,
        whoever's that is. Beside others a call opens the settings itself, and closes what stayed open.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._begin_call()
            try:
                return compiled(*args, **kwargs)
            finally:
                if getattr(self._here, "patch", None) is not before:
                    self._end(None)

        return call

    def _begin_call(self) -> Any:
        """Registers the hooks, which ``torch._dynamo.reset`` may have removed; returns what is open."""
        handler = torch._dynamo.callback.callback_handler
        start, end = self._hooks
        if start not in handler.start_callbacks:
            handler.register_start_callback(start)
            handler.register_end_callback(end)
        before = getattr(self._here, "patch", None)
        if before is None and _compilations() > 0 and self._ours():
            self._open()
        return before

    def begun(self) -> int:
        """How many compilations of ours began on this thread."""
        return getattr(self._here, "begun", 0)

    def _start(self, _: Any) -> None:
        if getattr(self._here, "patch", None) is None and self._ours():
            self._open()

    def _open(self) -> None:
        self._here.begun = self.begun() + 1
        self._here.patch = contextlib.ExitStack()
        self._here.patch.enter_context(torch._dynamo.config.patch(**self._wanted))
        self._here.patch.enter_context(self._around())

    def _end(self, _: Any) -> None:
        patch = getattr(self._here, "patch", None)
        if patch is not None:
            self._here.patch = None
            patch.close()


def _compilations() -> int:
    """How many compilations go on, of all threads; 0 where PyTorch does not say."""
    handler = torch._dynamo.callback.callback_handler
    return int(getattr(handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0))


_TAKES_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def compiled(fn: Callable[..., Any], kept: int, **options: Any) -> Callable[..., Any]:
    """``torch.compile``, for a function of which so many captures are kept and which any thread may call.

    Args:
        fn: The function.
        kept: How many captures of it, and of each function that it calls behind a break, are kept.
        **options: Of ``torch.compile``.
    """
    if _TAKES_LIMIT:
        return _while_nobody_traces(torch.compile(fn, recompile_limit=kept, **options))
    _ask_for_limit()
    called = _while_nobody_traces(torch.compile(fn, **options))

    def call(*args: Any, **kwargs: Any) -> Any:
        before, _limit.kept = _limit.kept, kept
        try:
            return called(*args, **kwargs)
        finally:
            _limit.kept = before

    return call


class _Limit(threading.local):
    """How many captures of a function Dynamo keeps in calls of this thread; 0: what its setting says."""

    kept = 0


_limit = _Limit()


@functools.cache
def _ask_for_limit() -> None:
    """Lets Dynamo keep more captures in calls of ours, before torch 2.13, which takes a number a function.

    A function behind a break has one code for all schedules of its class, and each of them captures it anew.
    The setting is one for all threads, so it stays as it is.
    """
    from torch._dynamo import convert_frame

    by_setting = convert_frame.exceeds_recompile_limit

    def exceeds(size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, kind = by_setting(size, compile_id)
        if exceeded and kind == "recompile_limit" and not size.will_compilation_exceed(_limit.kept):
            most = torch._dynamo.config.accumulated_recompile_limit
            return compile_id.frame_compile_id >= most, "accumulated_recompile_limit"
        return exceeded, kind

    convert_frame.exceeds_recompile_limit = exceeds


def forget_graphs(scope: dict[str, Any], code: types.CodeType | None) -> None:
    """Gives up what was compiled for a function that is gone, by the names that it has in its globals.

    Dynamo's guards of objects that live on, such as a function of PyTorch's, keep the globals for good. The
    names stay: Dynamo deletes them, if it ever frees the code.

    Args:
        scope: Its globals.
        code: Of the function, if they are others' too.
    """
    names = list(scope) if code is None else _named_by_captures(code, scope)
    scope.update((name, None) for name in names if name.startswith(GRAPH) and name in scope)


def _named_by_captures(code: types.CodeType, scope: Mapping[str, Any]) -> list[str]:
    """What is named in the captures of a function, and of those that go on behind its breaks."""
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    names: list[str] = []
    codes = [code] if entries is not None else []
    for each in codes:  # it grows
        for entry in entries(each):
            found = getattr(entry.code, "co_names", ())  # it may be given up already
            names += found
            behind = (scope[n].__code__ for n in found if n.startswith(BEHIND) and n in scope)
            codes += [more for more in behind if more not in codes]
    return names


STILL_S, WAIT_S = 10.0, 600.0
"""Seconds that a call waits for traces of others which stay where they are, and for those that go on. A trace
that waits for the call itself would never end."""

_LOOKS = 5
"""So often in a row nobody traces before PyTorch's flag counts as wrong: a trace may begin between two."""


def _while_nobody_traces(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` made, for threads that call it while others trace with ``torch.fx``.

    PyTorch keeps one flag of that for all threads, and refuses every call of theirs before anything of it
    ran. The calls wait until that trace is done.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        began, moved, seen, alone = 0.0, 0.0, None, 0
        while True:
            try:
                return compiled(*args, **kwargs)
            except RuntimeError as error:
                if not _refused(error):
                    raise
                tracing = _tracing()
                if threading.get_ident() in tracing:
                    raise
                alone = 0 if tracing else alone + 1
                if alone == _LOOKS:
                    raise RuntimeError(_FLAG_STAYED) from error
                now = time.monotonic()
                began = began or now
                if tracing != seen:
                    seen, moved = tracing, now
                if now > min(moved + STILL_S, began + WAIT_S):
                    raise RuntimeError(_WAITED.format(now - began)) from error
            time.sleep(0.001)

    return call


_FLAG_STAYED = (
    "PyTorch refuses every call of a compiled function, as a flag of torch.fx says that something is traced; "
    "no thread traces. Where traces of two threads overlap, before torch 2.14 that flag stays for good, and "
    "so may what a trace puts in the place of torch.nn.Module's methods. Start the process anew, and trace "
    "in one thread at a time (a lock around torch.fx.symbolic_trace)"
)
_WAITED = (
    "another thread traces with torch.fx, and meanwhile PyTorch refuses calls of compiled functions in every "
    "thread (before torch 2.14); this call waited {:.0f} s. If that trace waits for this call, neither ends: "
    "call what it needs before the trace, or in the thread that traces call the original"
)


def _refused(error: RuntimeError) -> bool:
    """Whether the outermost wrapper of ``torch.compile`` raised this, and nothing that it called."""
    inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
    outermost = inside is not None and inside.tb_next is None
    return outermost and str(error).startswith("Detected that you are using FX to symbolically")


def _tracing() -> dict[int, tuple[int, int]]:
    """The threads on which a trace of ``torch.fx`` is open, and where each of them is."""
    # Dynamo puts a wrapper there as soon as it compiles, which traces that began before have not.
    code, found = inspect.unwrap(torch.fx.Tracer.trace).__code__, {}
    for thread, innermost in sys._current_frames().items():
        frame: types.FrameType | None = innermost
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            found[thread] = id(innermost), innermost.f_lasti
    return found


def captures_of(fn: types.FunctionType, given: Mapping[str, Any]) -> tuple[int, str]:
    """How many captures of a function are kept, and why the last does not fit a call.

    Args:
        fn: The function.
        given: The call's local names.
    """
    from torch._dynamo import eval_frame

    entries = eval_frame._debug_get_cache_entry_list(fn.__code__)
    if not entries:
        return 0, ""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    scope = {**given, **{name: cell.cell_contents for name, cell in cells}}
    told = entries[-1].guard_manager.check_verbose(scope).verbose_code_parts
    reason = str(told[0]).partition("#")[0].strip() if told else "a guard of the last fails"
    return len(entries), reason


def in_parts(fn: types.FunctionType) -> bool:
    """Whether a kept capture of a function ends before the function does, and goes on in another."""
    from torch._dynamo import eval_frame

    entries = eval_frame._debug_get_cache_entry_list(fn.__code__)
    return any(name.startswith("__resume") for entry in entries for name in entry.code.co_names)


_SHORTCUT_TESTED = frozenset({"2.11", "2.12", "2.13", "2.14", "2.15"})


class Shortcut:
    """What Dynamo compiled for a function, called without Dynamo where its guards hold.

    The wrapper of ``torch.compile`` puts Dynamo into the interpreter for whatever the function may
    call, which costs 8 us. Code that is one whole graph calls nothing else. PyTorch calls its own
    precompiled functions in this way: guards, then code. The names are private, so this is for the
    versions that it was tested with; in others every call goes through the wrapper.

    Args:
        fn: A function of ``*args`` and ``**kwargs``, and what it closes over.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        from torch._dynamo import eval_frame, guards

        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        self._fn = fn
        self._closed = {name: cell.cell_contents for name, cell in cells}
        self._state: Any = eval_frame
        self._entries: Any = getattr(eval_frame, "_debug_get_cache_entry_list", None)
        self._callback: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
        self._valid = getattr(guards, "GuardManagerWrapper", None)
        names = (self._entries, self._callback, getattr(eval_frame, "_stance", None), self._valid)
        tested = ".".join(torch.__version__.split(".")[:2]) in _SHORTCUT_TESTED
        self.usable = tested and None not in names
        self._made: Recent[int, tuple[types.CodeType, types.FunctionType | None]] = Recent(64)

    def find(self, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """What was compiled for such arguments, or None: the wrapper has to be asked."""
        if not self.usable or self._callback() is not None:  # inside of somebody's torch.compile
            return None
        stance = self._state._stance
        if stance.stance != "default" or stance.backend is not None:
            return None
        if torch._C._is_tracing() or modes.modes_active():
            return None
        given = {"args": args, "kwargs": kwargs, **self._closed}
        # Looked up anew: entries go when Dynamo is reset, and when something guarded is freed.
        for entry in self._entries(self._fn.__code__):
            manager = entry.guard_manager
            if type(manager) is self._valid and manager.check(given):
                return self._function(entry.code)
        return None

    def _function(self, code: types.CodeType) -> Callable[..., Any] | None:
        known = self._made.get(id(code))
        if known is None:
            graphs = [n for n in code.co_names if n.startswith(GRAPH)]
            whole = len(graphs) == 1 and not any(n.startswith(BEHIND) for n in code.co_names)
            fn = self._fn
            made = types.FunctionType(code, fn.__globals__, fn.__name__, None, fn.__closure__)
            known = self._made[id(code)] = (code, made if whole else None)
        return known[1]
