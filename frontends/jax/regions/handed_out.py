"""Loops over elements that XLA:CPU hands to several threads: whether that pays, and how to have none.

XLA decides that when it compiles (``cpu-parallel-task-assigner``), by sizes that know nothing of what a
hand-over costs. JAX takes options for whole programs only, hence for plans whose program is not a part of a
larger one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.work import NO_SPREAD

_LARGEST_BYTES = 8192
"""XLA hands no loop over arrays of that size to several threads, unless it computes much for each element: in
its reckoning 200,000 cycles do, of which a byte takes 10 and an operation one or two."""

_FORK_NS = 25_000.0
"""What a hand-over takes in a step, at most: threads hardly sleep between steps, but do not spin either."""

_SHARE = 0.02
"""What less of the whole is saved by is not worth a program of its own."""

_OPTION = "xla_disable_hlo_passes"

OPTIONS = {_OPTION: "cpu-parallel-task-assigner"}
"""What to compile with."""


def is_any(pg: PartitionedGraph) -> bool:
    """Whether XLA would hand something in these regions to other threads without ``OPTIONS``."""
    values, ops = pg.graph.values, pg.graph.ops
    return any(region.spread != NO_SPREAD for region in pg.regions) or any(
        values[v].bytes > _LARGEST_BYTES
        for region in pg.regions
        for i in region.ops
        for v in (*ops[i].inputs, *ops[i].outputs)
    )


def options_are_free(options: Mapping[str, Any]) -> bool:
    """Whether ``OPTIONS`` take no user's option's place."""
    return not (
        _OPTION in options
        or _OPTION in os.environ.get("XLA_FLAGS", "")
        or _compat.leaves_out_passes()
    )


def costs_more_than_it_gains(jaxpr: Any) -> bool:
    """Whether a function's steps of ``scan`` and ``while`` hand out loops that are too short for it.

    What follows in such a step waits for each of them. (An LSTM of 128 rows and 128 units: 6.3 ms, without
    5.7; matrix products use all cores either way.) Loops outside of steps overlap, and decide nothing.

    Args:
        jaxpr: The function's.
    """
    cores = machine.cores()
    if cores < 2:
        return False
    steps = costs.elements_in_steps(jaxpr)
    lost = steps.forks * min(_FORK_NS, machine.numbers().fork_ns)
    if lost <= steps._replace(forks=0.0).saved_ns(cores):
        return False
    return lost > _SHARE * costs.original_ns(jaxpr, cores)
