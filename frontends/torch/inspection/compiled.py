"""Scheduled torch callables with ``backend="xla"``: compiled for a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.readback import deviceless
from dynaflow_xla.frontends.jax.readback.report import CompiledReport
from dynaflow_xla.frontends.jax.xla import xla_options
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.on_xla import entry as on_xla
from dynaflow_xla.frontends.torch.on_xla.backend import ProgramOnXla


def _entry(fast: Core, caller: str, args: Any, kwargs: Any) -> on_xla.XlaEntry:
    if not isinstance(fast.backend, ProgramOnXla):
        raise UnsupportedError(
            f"{caller} is for backend='xla'; {fast.options.name!r} was scheduled with "
            f"backend={fast.options.backend!r}. Use schedule(..., backend='xla')."
        )
    return fast.planned(args, kwargs)  # type: ignore[return-value]


def compile_report(fast: Core, args: Any, kwargs: Any, target: object = None) -> CompiledReport:
    """The report of ``dynaflow_xla.compile``. With gradients it is the forward program that is read back.

    Raises:
        UnsupportedError: another backend, or arguments that run several graphs.
    """
    entry = _entry(fast, "compile", args, kwargs)
    program = entry.program
    made, closed = program.call.made, program.call.closed
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed] + program.function.specs()
    planned = jax.jit(lambda *xs: made(*xs))
    # Inline: its operators keep the marks, by which the report counts what became of them.
    original = jax.jit(lambda *xs: program.function(*xs[len(closed) :], inline=True))
    with jax.enable_x64(True), on_xla.matmul_precision():
        return deviceless.report_of(
            made, {"scheduled": planned, "original": original}, (tuple(inputs), {}), target
        )


def compiler_options(fast: Core, args: Any, kwargs: Any) -> dict[str, Any]:
    """The XLA options that the plan of these arguments needs (``dynaflow_xla.compiler_options``)."""
    return xla_options.for_entry(_entry(fast, "compiler_options", args, kwargs).program.call.made)
