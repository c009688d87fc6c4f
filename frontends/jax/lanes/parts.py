"""What one stage of a plan reads, makes and hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.capture.physical import from_physical, to_physical
from dynaflow_xla.frontends.jax.regions.functions import cut_view
from dynaflow_xla.ir.graph import PartitionedGraph
from dynaflow_xla.planning.plan import Launch, Plan


class StageParts:
    """One stage of a plan: its launches, and where their values come from and go to."""

    def __init__(
        self,
        captured: Captured,
        pg: PartitionedGraph,
        plan: Plan,
        instructions: list[Any],
        functions: dict[int, Callable[..., list[Any]]],
        needed_later: set[int],
        compiler_options: dict[str, Any] | None,
    ):
        self.captured, self.pg, self.plan = captured, pg, plan
        self.instructions = instructions
        self.functions = functions
        self.compiler_options = compiler_options
        launches = [i for i in instructions if isinstance(i, Launch)]
        self.producer_lane: dict[int, int] = {}
        self.reader_lanes: dict[int, set[int]] = {}
        arguments: dict[int, None] = {}
        for launch in launches:
            region = pg.regions[launch.region]
            for value in region.inputs:
                if value in self.producer_lane:
                    self.reader_lanes.setdefault(value, set()).add(launch.lane)
                else:
                    arguments[value] = None
            for value in region.outputs:
                self.producer_lane[value] = launch.lane
        # What lanes read from outside: inputs of the stage, and views of them.
        self.arguments = tuple(arguments)
        self.views = {view.value: view for view in pg.graph.views if view.value in arguments}
        self.inputs = tuple(dict.fromkeys(self._whole(v) for v in arguments))
        self.joins = {
            join.value: join
            for join in pg.graph.joins
            if join.value in needed_later and self.producer_lane.keys() >= set(join.parts)
        }
        self.outputs = (*(v for v in self.producer_lane if v in needed_later), *self.joins)
        self.lanes = tuple(sorted({launch.lane for launch in launches}))
        self.launches = launches
        self.result_writes: list[tuple[int, int]] = []  # value, buffer
        self.shared_buffer: dict[int, int] = {}

    def _whole(self, value: int) -> int:
        """The input that an argument is, or is a part of."""
        view = self.views.get(value)
        return value if view is None else self.pg.graph.inputs[view.input]

    def reference(self, *args: Any) -> list[Any]:
        """The stage as plain traceable code, over arrays (keys as their words)."""
        avals = self.captured.avals
        env = {v: from_physical(x, avals[v]) for v, x in zip(self.inputs, args, strict=True)}
        for view in self.views.values():
            env[view.value] = cut_view(view, env[self._whole(view.value)])
        for launch in self.launches:
            region = self.pg.regions[launch.region]
            outs = self.functions[launch.region](*[env[v] for v in region.inputs])
            env.update(zip(region.outputs, outs, strict=True))
        for join in self.joins.values():
            env[join.value] = jax.lax.concatenate([env[v] for v in join.parts], join.axis)
        return [to_physical(env[v], avals[v]) for v in self.outputs]
