"""The backend of a callable's settings."""

from __future__ import annotations

from dataclasses import replace

from dynaflow_xla import backends
from dynaflow_xla.frontends.torch.backend import Backend
from dynaflow_xla.settings import Settings


def of(settings: Settings) -> Backend:
    """The backend that runs a callable's graphs.

    Raises:
        UnsupportedError: it runs no PyTorch, lacks a package, or does not do what the settings ask for.
    """
    made: Backend = backends.made("torch", settings)
    return made


def resolved(settings: Settings) -> Settings:
    """The settings with a backend's name in place of "auto"; raises as ``of``."""
    if settings.backend == "auto":
        settings = replace(settings, backend=backends.DEFAULTS["torch"])
    of(settings)
    return settings
