"""The backend of a function's settings."""

from __future__ import annotations

from dynaflow_xla import backends
from dynaflow_xla.frontends.jax.backend import Backend
from dynaflow_xla.settings import Settings


def of(settings: Settings) -> Backend:
    """Lanes of cores, unless another one is asked for.

    Raises:
        UnsupportedError: it runs no JAX function.
    """
    made: Backend = backends.made("jax", settings)
    return made
