"""The toy backend for JAX functions: the methods of ``frontends/jax/backend.py``."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.planning.instructions import Launch
from toy_backend import LAUNCHED


class TurnEntry(Planned):
    def __call__(self, *inputs: Any) -> list[Any]:
        memory = self.bind(inputs)
        for launch in self.plan.instructions:
            if isinstance(launch, Launch):
                LAUNCHED.append(launch.name)
                outs = self.functions[launch.region](*[memory[b] for b in launch.ins])
                made = dict(zip(self.pg.regions[launch.region].outputs, outs, strict=True))
                memory.write(launch, made)
        return self.flat_outputs(memory)

    def where(self) -> str:
        return "toy (in turn)"

    def account(self) -> list[str]:
        return ["one region after another"]

    def measured(self, inputs: Any, name: str) -> Any:
        raise UnsupportedError(f"{name!r}: the toy backend measures nothing")


class InTurn:
    fused = frozenset[str]()
    plans_loops = False
    copies_results = False
    on_several_devices = False

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def platform(self) -> str:
        return "cpu"

    def cores(self) -> int:
        return 0

    def place(self) -> tuple[str, ...]:
        return ("toy",)

    def unavailable(self) -> str:
        return ""

    def options_by_plan(self) -> bool:
        return False

    def compiler_options(self, made: Any) -> dict[str, Any]:
        return {}

    def refuse(self, captured: Any) -> None:
        if any(op.kind == "while" for op in captured.graph.ops):
            raise UnsupportedError("the toy backend runs no loops")

    def rules(self, rules: Any, captured: Any) -> Any:
        return rules

    def whole(self, captured: Any) -> Any:
        return captured

    def regions(self, pg: Any) -> Any:
        return pg

    def kernel(self, kernel: Any, captured: Any, region: Any) -> Any:
        raise UnsupportedError("the toy backend has no kernels")

    def build(self, **planned: Any) -> TurnEntry:
        return TurnEntry(**planned)
