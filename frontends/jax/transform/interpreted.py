"""What looks into functions operator by operator, and has to see the original's: ``checkify``, say.

``jax.debug_key_reuse`` looks, too, but changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.transform.derivatives import jvp_p, linear_p
from dynaflow_xla.frontends.jax.transform.primitive import ScheduledProgram, program_p
from dynaflow_xla.watching import telling

Flat = Callable[..., list[Any]]


def _seen(program: ScheduledProgram, by: str) -> Flat:
    telling.fallback(
        f"{program!r} is called under {by}, which has to see every operator, so the original runs there. "
        "Schedule what the transformation returns",
    )
    return program.plain


def _rules(by: str) -> dict[Any, Callable[..., Flat]]:
    """Primitive -> what it stands for, from its parameters."""
    return {
        program_p: lambda program: _seen(program, by),
        jvp_p: lambda program, wanted: _seen(program.pair(wanted).jvp, by),
        linear_p: lambda pair, residuals: _seen(pair.tangent, by),
    }


for _primitive, _plain in _rules("checkify").items():
    interpreters.check_as(_primitive, _plain)
    _compat.needs_devices(_primitive)  # of custom_partitioning inside, say

interpreters.keys_as(program_p, lambda program: (program.plain, program.in_avals))
# It begins with the operands and results of the function itself; tangents are no keys.
interpreters.keys_as(jvp_p, lambda program, wanted: (program.plain, program.in_avals))
interpreters.keys_left(linear_p, passed_on=False)  # used up when residuals were made

_sparse_known = False


def look_for_sparsify() -> None:
    """Tells ``sparsify`` of scheduled functions, if somebody imported it."""
    global _sparse_known
    if not _sparse_known and "jax.experimental.sparse.transform" in sys.modules:
        for primitive, plain in _rules("sparsify").items():
            interpreters.sparse_as(primitive, plain)
        _sparse_known = True
