"""The backend of a function's settings."""

from __future__ import annotations

from dataclasses import replace

import jax

from dynaflow_xla import backends
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.backend import Backend
from dynaflow_xla.settings import MAX_XLA_LANES, XLA_LANES, Settings

DECIDED_LATE = "auto"
"""What it stands for depends on where JAX computes, which is known once JAX has started its devices."""

ON_A_GPU = (
    "backend='auto' is 'xla' here: JAX computes on a GPU, where a compile on another thread may block a call "
    "of backend='ffi' for ever"
)
"""For ``explain``."""


def settled(settings: Settings) -> Settings:
    """The settings with what "auto" stands for where JAX computes: one XLA program on a GPU.

    Raises:
        UnsupportedError: lanes are to have what one program's cannot.
    """
    if settings.backend != DECIDED_LATE or jax.default_backend() != "gpu":
        return settings
    if settings.gpu is not None and settings.gpu.special:
        raise UnsupportedError(
            "one XLA program, which backend='auto' is on a GPU, has no lanes to give priorities or "
            "multiprocessors to: use backend='ffi', or give lanes a number"
        )
    lanes = XLA_LANES if settings.default_lanes else min(settings.lanes, MAX_XLA_LANES)
    return replace(settings, backend="xla", lanes=lanes, lane_cores=1, gpu=None)


def of(settings: Settings) -> Backend:
    """Lanes of cores, or one XLA program, unless another one is asked for.

    Raises:
        UnsupportedError: it runs no JAX function.
    """
    made: Backend = backends.made("jax", settings)
    return made
