"""The backend of a function's settings."""

from __future__ import annotations

from dynaflow_xla.frontends.jax.backend import Backend
from dynaflow_xla.frontends.jax.lanes.backend import LaneBackend
from dynaflow_xla.frontends.jax.xla.backend import ProgramBackend
from dynaflow_xla.settings import Settings


def of(settings: Settings) -> Backend:
    """Lanes, unless one program is asked for."""
    return ProgramBackend(settings) if settings.backend == "xla" else LaneBackend(settings)
