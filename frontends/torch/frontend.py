"""The PyTorch frontend as ``dynaflow_xla.dispatch`` knows it, see ``dynaflow_xla.protocols.Frontend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.frontends.torch import scheduled
from dynaflow_xla.frontends.torch.batch.buckets import Bucketed
from dynaflow_xla.frontends.torch.commands import (
    about as about,
    cases as cases,
    copies as copies,
    example as example,
    opponents as opponents,
    wait as wait,
    works as works,
)
from dynaflow_xla.frontends.torch.serving import (
    inlines as inlines,
    kinds as kinds,
    serving as serving,
)
from dynaflow_xla.frontends.torch.signature import backends
from dynaflow_xla.frontends.torch.together import combined as combined, unbound as unbound
from dynaflow_xla.settings import Settings


def schedule(fn: Any, settings: Settings) -> Any:
    """The scheduled form of a module, exported program or function.

    Raises:
        UnsupportedError: JAX is missing, or the settings ask for what there is not.
    """
    return scheduled.schedule(fn, backends.resolved(settings))


def bucketed(
    fast: Any, sizes: Sequence[int], in_axes: Any, out_axes: Any, check: bool
) -> Bucketed | None:
    """The padded callable of ``dynaflow_xla.bucketed``; None for what this frontend did not make."""
    if not hasattr(fast, "_dfx_core"):
        return None
    return Bucketed(fast, sizes, in_axes, out_axes, check)
