"""``debug`` for a torch graph that runs on XLA: the plan of its JAX program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dynaflow_xla.debugging.report import DebugReport
from dynaflow_xla.frontends.jax import debug as jax_debug
from dynaflow_xla.frontends.torch.capture.for_sizes import boxed


def debug(entry: Any, given: Sequence[Any], name: str, rounds: int, seed: int) -> DebugReport:
    """The report of the JAX program, on arrays with the tensors' values."""
    inputs = list(given) if entry.prepare is None else entry.prepare(list(given))
    inputs = boxed(inputs)
    program = entry.program_for(inputs) or entry.program
    found: list[DebugReport] = []

    def run(tensors: Sequence[Any]) -> Any:
        with jax.enable_x64(True):
            arrays = [jax.dlpack.from_dlpack(x.detach().clone()) for x in tensors]
            call = program.call
            inputs = [*call.closed, *arrays]
            found.append(jax_debug.debug_planned(call.made, inputs, name, rounds, seed))
        return program.call(tensors)

    program(inputs, run)
    return found[0]
