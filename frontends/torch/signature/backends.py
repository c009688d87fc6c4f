"""The backend of a callable's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dynaflow_xla.errors import optional
from dynaflow_xla.frontends.torch.backend import Backend
from dynaflow_xla.frontends.torch.native.backend import NativeBackend
from dynaflow_xla.settings import Settings

_DEFAULT = "torch"


def _on_xla() -> Any:
    """JAX is optional, and only these backends need it."""
    optional.require("jax", "running a PyTorch model on XLA", "jax")
    from dynaflow_xla.frontends.torch.on_xla import backend

    return backend


BACKENDS: Mapping[str, Callable[[Settings], Backend]] = {
    "torch": NativeBackend,
    "ffi": lambda settings: _on_xla().LanesOnXla(settings),
    "xla": lambda settings: _on_xla().ProgramOnXla(settings),
}
"""By the name that users give it."""


def of(settings: Settings) -> Backend:
    """The backend that runs a callable's graphs.

    Raises:
        UnsupportedError: it lacks a package, or does not do what the settings ask for.
    """
    return BACKENDS[settings.backend](settings)


def resolved(settings: Settings) -> Settings:
    """The settings with a backend's name in place of "auto"; raises as ``of``."""
    if settings.backend not in BACKENDS:
        settings = replace(settings, backend=_DEFAULT)
    of(settings)
    return settings
