"""Traces of scheduled functions: what they are inside of one, and functions captured from one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.jax.capture import capture

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


_state = threading.local()


def capturing() -> bool:
    """Whether this thread is inside the capture of a scheduled function (nested ones then inline)."""
    return bool(_engine.capturing())


class Capturing:
    """A block in which scheduled functions are their originals."""

    def __enter__(self) -> None:
        _engine.enter_capture()

    def __exit__(self, *_: object) -> None:
        _engine.leave_capture()


@contextlib.contextmanager
def tracing_afresh() -> Iterator[None]:
    """A block in which scheduled functions are traced at each call, whatever JAX has of them already."""
    before = getattr(_state, "afresh", None)
    _engine.enter_capture()
    _state.afresh = _engine.capture_depth()
    try:
        yield
    finally:
        _engine.leave_capture()
        _state.afresh = before


def afresh() -> bool:
    """Whether this call is one of those, and not inside a capture."""
    at = getattr(_state, "afresh", None)
    return at is not None and at == _engine.capture_depth()


def capture_function(
    fn: Callable[..., Any], specs: Sequence[Any], n_consts: int, name: str, *, merge: bool = False
) -> capture.Captured:
    """Traces a flat function over flat values and captures it, with the constants that it meets."""
    with Capturing():
        closed = jax.make_jaxpr(fn)(*specs)
    captured = capture.capture(closed, n_consts, name, merge=merge)
    return replace(captured, consts=tuple(closed.consts))


def exact_types(captured: capture.Captured) -> Any:
    """Context in which 64-bit values keep their type, whatever the caller's setting."""
    wide = any(getattr(a.dtype, "name", "") in _WIDE for a in captured.avals)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
