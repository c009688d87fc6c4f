"""``dynaflow-xla trace``: timelines of a function, or of what a script schedules and calls."""

from __future__ import annotations

import functools
import http.server
import re
import runpy
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dynaflow_xla as dfx
from dynaflow_xla import dispatch
from dynaflow_xla.cli.console import CommandOutput
from dynaflow_xla.cli.targets import Target, TargetError, check_folder
from dynaflow_xla.cli.timing.bench import FRAMEWORKS
from dynaflow_xla.combined import Together
from dynaflow_xla.errors import checks

SUFFIXES = (".html", ".json", ".pftrace", ".png", ".svg")
_PERFETTO = "https://ui.perfetto.dev"
_PORT = 9001
"""The one port of this machine from which Perfetto's page may load a trace."""


def of_script(path: Path, args: Sequence[str]) -> list[Target]:
    """Runs a script as ``python script.py`` does; each scheduled function with its last call's arguments.

    The arguments are copies: the call, or the script after it, may change or give away its own. The script's
    folder stays on Python's path: the functions may import from there when they are traced.

    Calls that are traced by JAX (inside somebody's ``jit``) have no values and are left out.

    Raises:
        TargetError: there is no such script, or it calls nothing that is scheduled.
    """
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    calls: dict[int, Target] = {}
    before = sys.argv
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        with _Recorded(calls):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise TargetError(f"{path} ended with exit status {error.code}") from error
    finally:
        sys.argv = before
    if not calls:
        raise TargetError(
            f"{path} called nothing that dfx.schedule or dfx.together returned, outside of other programs"
        )
    return list(calls.values())


def _kept(call: Target) -> Target:
    """The call with copies of its arguments; with the error why not, if they cannot be copied."""
    loaded = [name for name in FRAMEWORKS if dispatch.is_loaded(name)]
    given = call.args, dict(call.kwargs)
    try:
        for name in loaded:
            given = dispatch.frontend(name).copies(given)
    except dfx.DynaflowError as error:
        return replace(call, args=(), kwargs={}, lost=str(error))
    return replace(call, args=given[0], kwargs=given[1])


class _Recorded:
    """While it is entered, scheduled callables keep the arguments of their last call."""

    def __init__(self, calls: dict[int, Target]) -> None:
        self.calls = calls
        # Whether in a call of several functions, which calls a scheduled one of its own.
        self._within = threading.local()
        self._patched: dict[type, Any] = {}
        self._names = ("schedule", "together")

    def __enter__(self) -> None:
        self._before = {name: getattr(dfx, name) for name in self._names}
        for name, made in self._before.items():
            setattr(dfx, name, self._watched(made))

    def __exit__(self, *_: object) -> None:
        for name, made in self._before.items():
            setattr(dfx, name, made)
        for cls, own in self._patched.items():
            if own is None:
                del cls.__call__  # the inherited one again
            else:
                cls.__call__ = own  # type: ignore[method-assign]

    def _watched(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def watched(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            if make is self._before["schedule"] and not args and kwargs.get("fn") is None:
                return lambda fn: self._watch(made(fn))  # used as a decorator
            return self._watch(made)

        return watched

    def _watch(self, fast: Any) -> Any:
        cls = type(fast)
        if cls not in self._patched:
            called = cls.__call__
            self._patched[cls] = cls.__dict__.get("__call__")

            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                if getattr(self._within, "call", False) or dispatch.is_traced((args, kwargs)):
                    return called(this, *args, **kwargs)
                name = checks.name_of(this)
                self.calls[id(this)] = _kept(Target(name, this, args, kwargs))
                self._within.call = isinstance(this, Together)
                try:
                    return called(this, *args, **kwargs)
                finally:
                    self._within.call = False

            cls.__call__ = call
        return fast


def timeline(target: Target, fast: Any, predicted: bool) -> dfx.Timeline:
    """Measured, or with ``predicted`` simulated."""
    if target.lost:
        raise dfx.UnsupportedError(target.lost)
    look = dfx.simulate if predicted else dfx.profile
    return look(target.bound(fast), *target.args)


def check(path: Path) -> None:
    """Whether a timeline can be written there: before it is measured.

    Raises:
        TargetError: there is no such form, or no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise TargetError(f"a timeline is written as {', '.join(SUFFIXES)}; got {path}")
    check_folder(path)


def write(made: dfx.Timeline, path: Path) -> Path:
    """Writes a timeline in the form that the suffix says.

    Raises:
        TargetError: there is no such form, or it cannot be written.
    """
    check(path)
    try:
        if path.suffix == ".html":
            return made.to_html(path)
        if path.suffix in (".png", ".svg"):
            return made.plot(path)
        return made.to_perfetto(path)
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error.strerror}") from error


def numbered(path: Path, name: str, number: int, count: int) -> Path:
    """Where the timeline of one of several functions goes."""
    if count == 1:
        return path
    plain = re.sub(r"\W+", "_", name).strip("_") or "function"
    return path.with_name(f"{path.stem}-{number}-{plain}{path.suffix}")


def open_in_browser(path: Path, out: CommandOutput, wait_s: float = 60.0) -> None:
    """A page or a picture in the browser; a trace in Perfetto's page, which loads it from this process."""
    if path.suffix not in (".json", ".pftrace"):
        url = path.resolve().as_uri()
        if not webbrowser.open(url):
            out.aside(f"no browser could be opened; open {url}")
        return
    taken = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != f"/{path.name}":  # nothing else of this machine is given away
                self.send_error(404)
                return
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", _PERFETTO)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            taken.set()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    try:
        server = http.server.HTTPServer(("127.0.0.1", _PORT), Handler)
    except OSError as error:
        out.aside(f"port {_PORT} is taken ({error.strerror}); open {path} at {_PERFETTO} by hand")
        return
    with server:
        url = f"{_PERFETTO}/#!/?url=http://127.0.0.1:{_PORT}/{path.name}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if not webbrowser.open(url):
            out.aside(f"no browser could be opened; within {wait_s:.0f} s open {url}")
        if not taken.wait(wait_s):
            out.aside(f"the trace was not asked for; open {path} at {_PERFETTO} by hand")
        server.shutdown()
