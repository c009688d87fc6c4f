"""The toy backend for PyTorch: the methods of ``frontends/torch/backend.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.frontends.torch.capture.context import context_of
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import record
from toy_backend import LAUNCHED


@dataclass
class TurnEntry:
    options: Any
    kind: str
    captured: Any
    pg: Any
    plan: Any
    seconds: dict[str, float]
    backward: Any = None
    later: Callable[[], Any] | None = None
    prepare: Callable[[Sequence[Any]], list[Any]] | None = None
    finish: Callable[[list[Any]], list[Any]] | None = None
    notes: tuple[str, ...] = ()
    streams = False
    graphed = False
    without_python = 0

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        graph = self.captured.graph
        values = dict(zip(graph.inputs, inputs, strict=True))
        for launch in self.plan.instructions:
            if not isinstance(launch, Launch):
                continue
            LAUNCHED.append(launch.name)
            for number in self.pg.regions[launch.region].ops:
                payload = graph.ops[number].payload
                args, kwargs = payload.mapped(lambda ref: values[ref.value])
                made = payload.target(*args, **kwargs)
                outs = made if payload.multiple else (made,)
                values.update(
                    (v, x) for v, x in zip(payload.outputs, outs, strict=True) if v is not None
                )
        wanted = self.captured.outputs
        return [values[o] if isinstance(o, int) else o[1] for o in wanted]

    def release(self) -> None:
        return None

    def describe(self) -> list[str]:
        return ["one region after another"]

    def stamped(self) -> Any:
        raise UnsupportedError("the toy backend measures nothing")


class InTurn:
    in_place = True
    whole_layers = False
    whole_cells = False
    compiles = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def capture_options(self) -> dict[str, Any]:
        return {}

    def for_arrays(self, original: Any) -> Any:
        raise UnsupportedError("the toy backend has no JAX program of a PyTorch function")

    def lower(self, gm: Any, kind: str) -> None:
        pass

    def whole(self, gm: Any, kind: str, name: str, batch: int | None = None) -> TurnEntry:
        return self.fixed(capture(gm, name), kind, batch)

    def by_size(self, gm: Any, kind: str, name: str, batch: int | None, warn: Any) -> TurnEntry:
        return self.whole(gm, kind, name, batch)

    def fixed(self, captured: Any, kind: str, batch: int | None) -> TurnEntry:
        pg = partition(captured.graph, None)
        context = context_of(captured, self.settings, batch, kind)
        recording = record(self.settings.strategy, pg, context)
        plan = build_plan(
            pg,
            recording,
            lanes=self.settings.lanes,
            strategy_text=repr(self.settings.strategy),
            cores=context.cores,
        )
        validate(plan, pg)
        return TurnEntry(self.settings, kind, captured, pg, plan, {})

    def split(self, nano: Any) -> Any:
        raise UnsupportedError("the toy backend does not split a batch")

    def place(self, entries: Any) -> list[str]:
        return ["toy"]

    def told(self, entry: Any) -> str:
        return "toy (in turn)"
