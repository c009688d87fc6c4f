"""``debug`` and ``why`` for a torch graph that runs on XLA: the plan of its JAX program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from dynaflow_xla.debugging.report import DebugReport
from dynaflow_xla.frontends.jax import debug as jax_debug
from dynaflow_xla.frontends.torch.capture.for_sizes import boxed
from dynaflow_xla.timelines.timeline import Timeline

T = TypeVar("T")


def debug(entry: Any, given: Sequence[Any], name: str, rounds: int, seed: int) -> DebugReport:
    """The report of the JAX program, on arrays with the tensors' values."""
    return _look(
        entry, given, lambda made, ins: jax_debug.debug_planned(made, ins, name, rounds, seed)
    )


def alone(entry: Any, given: Sequence[Any], name: str, cores: int) -> Timeline | None:
    """The JAX program's regions one after another, on arrays with the tensors' values."""
    return _look(entry, given, lambda made, ins: jax_debug.alone_planned(made, ins, name, cores))


def _look(entry: Any, given: Sequence[Any], look: Callable[[Any, Sequence[Any]], T]) -> T:
    """What is found out about the planned JAX program and its inputs."""
    inputs = list(given) if entry.prepare is None else entry.prepare(list(given))
    inputs = boxed(inputs)
    program = entry.program_for(inputs) or entry.program
    found: list[T] = []

    def run(tensors: Sequence[Any]) -> Any:
        with jax.enable_x64(True):
            arrays = [jax.dlpack.from_dlpack(x.detach().clone()) for x in tensors]
            call = program.call
            found.append(look(call.made, [*call.closed, *arrays]))
        return program.call(tensors)

    program(inputs, run)
    return found[0]
