"""Regions as Python code: one straight-line function for each stretch of regions on a lane.

Operators are called one after another with local variables for values, which are dropped after
their last use. Values that other stretches read pass through the call's environment, a list indexed
by value id. Who owns a value: the environment until its only reader takes it out, or until the call
ends if there are several readers or it is a result.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Placed, Ref, place
from dynaflow_xla.frontends.torch.native import calls
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph

Environment = list[Any]

_SIMPLE = (bool, int, str, type(None), type(...))


@dataclass(frozen=True)
class Stretch:
    """Regions that one lane runs without a word to other lanes.

    Attributes:
        regions: Their ids, in order.
        run: Reads values from an environment and leaves there what others read.
        line_regions: Region id for each line of the generated code, the first line first.
    """

    regions: tuple[int, ...]
    run: Callable[[Environment], None]
    line_regions: tuple[int, ...]

    def region_of(self, error: BaseException) -> int:
        """The region in which an exception that ``run`` raised came up."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.run.__code__:  # type: ignore[attr-defined]
                return self.line_regions[trace.tb_lineno - 1]
            trace = trace.tb_next
        return self.regions[0]


class _Writer:
    """Source text of one stretch."""

    def __init__(self, captured: Captured, exported: set[int], taken: set[int]) -> None:
        self.captured = captured
        self.exported = exported
        self.taken = taken
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.lines: list[str] = []
        self.line_regions: list[int] = []
        self.have: set[int] = set()
        # Part of a result -> places it is written to.
        self.slots: dict[int, list[tuple[int, Placed]]] = {}
        for placed in captured.placed:
            for value, slot, _, _ in placed.parts:
                self.slots.setdefault(value, []).append((slot, placed))

    def constant(self, value: Any) -> str:
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"c{len(self.known)}"
            self.names[name] = value
        return name

    def expression(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return f"v{arg.value}"
        if isinstance(arg, _SIMPLE):
            return repr(arg)
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self.expression(item) for item in arg)
            if isinstance(arg, list):
                return f"[{inner}]"
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if isinstance(arg, dict):
            inner = ", ".join(f"{k!r}: {self.expression(v)}" for k, v in arg.items())
            return f"{{{inner}}}"
        if isinstance(arg, slice):
            parts = (self.expression(x) for x in (arg.start, arg.stop, arg.step))
            return f"slice({', '.join(parts)})"
        return self.constant(arg)

    def emit(self, line: str, region: int) -> None:
        self.lines.append(f"    {line}")
        self.line_regions.append(region)

    def load(self, values: Iterable[int], region: int) -> None:
        for value in values:
            if value in self.have or self.is_token(value):
                continue
            self.have.add(value)
            self.emit(f"v{value} = env[{value}]", region)
            if value in self.taken:
                self.emit(f"env[{value}] = None", region)

    def is_token(self, value: int) -> bool:
        return self.captured.graph.values[value].dtype == "token"

    def call(self, index: int, region: int) -> None:
        op = self.captured.graph.ops[index]
        payload: Payload = op.payload
        if all(v in self.have for v in op.outputs) and not op.once:
            return  # repeated in an earlier region of this stretch
        self.load(op.inputs, region)
        function, given, named = calls.call_of(payload, self.captured.examples)
        args = [self.expression(arg) for arg in given]
        args += [f"{k}={self.expression(v)}" for k, v in named.items()]
        call = f"{self.constant(function)}({', '.join(args)})"
        if payload.multiple:
            targets = ", ".join("_" if v is None else f"v{v}" for v in payload.outputs)
            call = f"[{targets}] = {call}" if targets else call
        elif payload.outputs:
            call = f"v{payload.outputs[0]} = {call}"
        self.emit(call, region)
        self.made(op.outputs, region)

    def made(self, values: Iterable[int], region: int) -> None:
        for value in values:
            self.have.add(value)
            if value in self.exported and not self.is_token(value):
                self.emit(f"env[{value}] = v{value}", region)
            for slot, placed in self.slots.get(value, ()):
                part = f"v{value}"
                if placed.runs > 1:
                    axis, runs = placed.axis, placed.runs
                    part += f".unflatten({axis}, ({runs}, {part}.shape[{axis}] // {runs}))"
                write = self.constant(place)
                shared = f", {placed.shared}" if placed.shared else ""
                self.emit(f"env[{slot}] = {write}(env[{slot}], {part}{shared})", region)

    def drop(self, values: Iterable[int], region: int) -> None:
        dead = [v for v in dict.fromkeys(values) if v in self.have and not self.is_token(v)]
        if dead:
            self.emit(f"del {', '.join(f'v{v}' for v in dead)}", region)
            self.have.difference_update(dead)


def build_stretch(
    captured: Captured,
    pg: PartitionedGraph,
    regions: Sequence[int],
    exported: set[int],
    taken: set[int],
    implementations: dict[int, Callable[..., Sequence[Any]]],
) -> Stretch:
    """Generates the code of a stretch.

    Args:
        captured: The graph with its payloads.
        pg: Its regions.
        regions: Region ids, in order.
        exported: Values that somebody outside of the stretch reads.
        taken: Values that only this stretch reads, which it takes out of the environment.
        implementations: Region id -> function of the region's inputs that returns its outputs, for
            regions that do not run operator by operator.
    """
    writer = _Writer(captured, exported, taken)
    steps = _steps(captured, pg, regions, implementations)
    last: dict[int, int] = {}
    for number, (_, _, reads, writes) in enumerate(steps):
        for value in (*reads, *writes):
            last[value] = number
    for number, (region, index, reads, writes) in enumerate(steps):
        if index is not None:
            writer.call(index, region.id)
        else:
            writer.load(reads, region.id)
            name = writer.constant(implementations[region.id])
            args = ", ".join(f"v{v}" for v in reads if not writer.is_token(v))
            data = [v for v in writes if not writer.is_token(v)]
            targets = ", ".join(f"v{v}" for v in data)
            writer.emit(f"[{targets}] = {name}({args})" if data else f"{name}({args})", region.id)
            writer.made(writes, region.id)
        writer.drop((v for v in (*reads, *writes) if last[v] == number), region.id)
    text = "def run(env):\n" + "\n".join(writer.lines or ["    pass"]) + "\n"
    names = [pg.regions[r].name for r in regions]
    filename = f"<dynaflow_xla {captured.graph.name}: {', '.join(names[:3])} #{id(writer):x}>"
    scope: dict[str, Any] = dict(writer.names)
    exec(compile(text, filename, "exec"), scope)  # the text is made of the names above alone
    linecache.cache.pop(filename, None)
    line_regions = (regions[0] if regions else -1, *writer.line_regions)
    return Stretch(tuple(regions), scope["run"], line_regions)


def _steps(
    captured: Captured,
    pg: PartitionedGraph,
    regions: Sequence[int],
    implementations: dict[int, Callable[..., Sequence[Any]]],
) -> list[tuple[Region, int | None, tuple[int, ...], tuple[int, ...]]]:
    """(region, operator or None for a whole region, values read, values made) in order."""
    steps: list[tuple[Region, int | None, tuple[int, ...], tuple[int, ...]]] = []
    for number in regions:
        region = pg.regions[number]
        if number in implementations:
            steps.append((region, None, region.inputs, region.outputs))
            continue
        for index in region.ops:
            op = captured.graph.ops[index]
            steps.append((region, index, op.inputs, op.outputs))
    return steps


def replacement(
    fn: Callable[..., Any], captured: Captured, region: Region, where: str
) -> Callable[..., list[Any]]:
    """A strategy's ``replace`` function, its results checked against what the region makes.

    Raises:
        PlanError: when called: another number of results, another shape or dtype.
    """
    values = [captured.graph.values[v] for v in region.outputs]
    wanted = [v for v in values if v.dtype != "token"]
    if len(wanted) != len(values):
        raise PlanError(
            f"region {region.name!r} draws random numbers and cannot be replaced (at {where})"
        )
    static = not captured.symbolic

    def run(*inputs: Any) -> list[Any]:
        made = fn(*inputs)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        if len(results) != len(wanted):
            raise PlanError(
                f"the replacement of region {region.name!r} (at {where}) must return "
                f"{len(wanted)} values; it returned {len(results)}"
            )
        for value, result in zip(wanted, results, strict=True):
            dtype = str(getattr(result, "dtype", type(result))).removeprefix("torch.")
            shape = tuple(getattr(result, "shape", ()))
            if dtype != value.dtype or (static and shape != value.shape):
                raise PlanError(
                    f"the replacement of region {region.name!r} (at {where}) must return "
                    f"{value.type_str()}; it returned {dtype}{list(shape)}"
                )
        return results

    return run
