"""Regions as Python code: one straight-line function for each stretch of regions on a lane.

Operators are called one after another, most of them without Python (see ``interpreted``); values are
dropped after their last use. Values that other stretches read pass through the call's environment, a
list indexed by value id. Who owns a value: the environment until its only reader takes it out, or until the
call ends if there are several readers or it is a result.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, MappingProxyType
from typing import Any

import torch

from dynaflow_xla.errors import DynaflowError, PlanError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.capture.sizes import expression
from dynaflow_xla.frontends.torch.native.memory import Environment, MergedResult
from dynaflow_xla.frontends.torch.native.stretches.interpreted import FxProgram
from dynaflow_xla.frontends.torch.native.stretches.source import Code, FusedOperators, Step
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph


@dataclass(frozen=True)
class Stretch:
    """Regions that one lane runs without a word to other lanes.

    Attributes:
        regions: Their ids, in order.
        reads: Values of others that they read.
        makes: Values that they make.
        run: Reads values from an environment and leaves there what others read.
        lines: By code object that ``run`` is made of, the region of each of its lines.
        operators: How many it runs, regions that run as a whole among them.
        interpreted: How many of them run without Python.
        programs: What was compiled of it, in order.
        compiled: How many of its operators are in these.
        name: Its regions, for people.
    """

    regions: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    run: Callable[[Environment], None]
    lines: dict[CodeType, tuple[int, ...]]
    operators: int
    interpreted: int
    programs: tuple[Callable[..., Sequence[Any]], ...] = ()
    compiled: int = 0
    name: str = ""

    def region_of(self, error: BaseException) -> int:
        """The region in which an exception that ``run`` raised came up."""
        trace, found = error.__traceback__, self.regions[0]
        while trace is not None:
            if (lines := self.lines.get(trace.tb_frame.f_code)) is not None:
                found = lines[trace.tb_lineno - 1]
            trace = trace.tb_next
        return found


@dataclass(frozen=True)
class StretchBody:
    """What a stretch runs, before it is code.

    Attributes:
        regions: Region ids, in order.
        steps: Operators and functions of regions, in order; what is compiled as one program.
        exported: Values that somebody outside of the stretch reads.
        taken: Values that only this stretch reads, which it takes out of the environment.
        wanted: Values that are needed as soon as they are made: those exported, and parts of results.
        threads: Intra-op threads that a compiler is to count on; 0: those of the process.
    """

    regions: tuple[int, ...]
    steps: Sequence[Step | FusedOperators]
    exported: set[int]
    taken: set[int]
    wanted: set[int]
    threads: int = 0


def build_stretch(
    captured: Captured, pg: PartitionedGraph, work: StretchBody, placed: Sequence[MergedResult] = ()
) -> Stretch:
    """Generates the code of a stretch.

    Args:
        captured: The graph with its payloads.
        pg: Its regions.
        work: What it runs.
        placed: Results that are put together in place.
    """
    regions, steps = work.regions, work.steps
    names = ", ".join(pg.regions[r].name for r in regions[:3])
    code = Code(captured, f"{captured.graph.name}: {names}", work.exported, work.taken, placed)
    last = {v: number for number, step in enumerate(steps) for v in (*step.reads, *step.writes)}
    until = interpreted = 0
    for group, run in _groups(captured, steps):
        begin, until = until, until + len(group)
        if run is None or not run.pays():
            for number, step in enumerate(group, begin):
                if isinstance(step, FusedOperators):
                    code.program(step)
                else:
                    code.step(step)
                dead = [v for v in (*step.reads, *step.writes) if last[v] == number]
                code.drop(dead, step.region)
        else:
            plain = [step for step in group if isinstance(step, Step)]
            results = [v for v in run.made if last[v] >= until or code.wanted(v) or v in run.drawn]
            code.interpreted(run, plain, results)
            interpreted += len(group)
            dead = [v for v in (*run.inputs, *results) if last[v] < until]
            code.drop(dead, group[-1].region)
    makes = dict.fromkeys(v for step in steps for v in step.writes)
    reads = dict.fromkeys(v for step in steps for v in step.reads if v not in makes)
    programs = [step for step in steps if isinstance(step, FusedOperators)]
    compiled = sum(len(p.steps) for p in programs)
    return Stretch(
        tuple(regions), tuple(reads), tuple(makes), code.function("env"), code.regions,
        len(steps) - len(programs) + compiled, interpreted, tuple(p.function for p in programs),
        compiled, names + (", ..." if len(regions) > 3 else ""),
    )  # fmt: skip


def _groups(
    captured: Captured, steps: Sequence[Step | FusedOperators]
) -> list[tuple[list[Step | FusedOperators], FxProgram | None]]:
    """Neighbouring steps that run together: in the interpreter of graphs, or from Python."""
    groups: list[tuple[list[Step | FusedOperators], FxProgram | None]] = []
    for step in steps:
        if isinstance(step, Step) and step.payload is not None:
            run = groups[-1][1] if groups else None
            if run is not None and not run.full() and run.add(step.payload):
                groups[-1][0].append(step)
                continue
            run = FxProgram(captured)
            if run.add(step.payload):
                groups.append(([step], run))
                continue
        groups.append(([step], None))
    return groups


def steps_of(
    captured: Captured,
    pg: PartitionedGraph,
    regions: Sequence[int],
    implementations: dict[int, Callable[..., Sequence[Any]]],
    read_as: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
) -> list[Step]:
    """What regions run, in order; operators that stand in several of them run in the first.

    Args:
        captured: The graph with its payloads.
        pg: Its regions.
        regions: Region ids, in order.
        implementations: For regions that do not run operator by operator a function of the inputs that
            returns the outputs, or one operator of PyTorch's with one output.
        read_as: Region id -> input -> value that is read for it, where that is another one.
    """
    steps: list[Step] = []
    made: set[int] = set()
    for number in regions:
        region = pg.regions[number]
        other = read_as.get(number, {})
        if number in implementations:
            function = implementations[number]
            reads = tuple(other.get(v, v) for v in region.inputs)
            call = None
            if type(function) is operators.Operator:
                call = Payload(function, tuple(map(Ref, reads)), {}, region.outputs, False)
            steps.append(Step(number, call, function, reads, region.outputs))
            made.update(region.outputs)
            continue
        for index in region.ops:
            op = captured.graph.ops[index]
            if op.once or not made.issuperset(op.outputs):
                payload = _renamed(op.payload, other) if other else op.payload
                reads = tuple(other.get(v, v) for v in op.inputs)
                steps.append(Step(number, payload, None, reads, op.outputs, index))
                made.update(op.outputs)
    return steps


def _renamed(payload: Payload, names: Mapping[int, int]) -> Payload:
    args, kwargs = payload.mapped(lambda ref: Ref(names.get(ref.value, ref.value)))
    return replace(payload, args=args, kwargs=kwargs)


def replacement(
    fn: Callable[..., Any], captured: Captured, region: Region, where: str
) -> Callable[..., list[Any]]:
    """A strategy's ``replace`` function, its results checked against what the region makes.

    Raises:
        PlanError: it does not take the region's inputs; when called: it raised, or returns another number of
            results, another shape or dtype.
    """
    which = f"the replacement of region {region.name!r} (at {where})"
    given = [captured.graph.values[v] for v in region.inputs]
    takes = f"{len(given)} inputs {[f'{v.dtype}{list(v.shape)}' for v in given]}"
    signature = None
    with contextlib.suppress(ValueError, TypeError):  # of some it cannot be read
        signature = inspect.signature(fn)
    if signature is not None:
        try:
            signature.bind(*given)
        except TypeError as error:
            raise PlanError(f"{which} must take its {takes}: {error}") from error
    values = [captured.graph.values[v] for v in region.outputs]
    wanted = [v for v in values if v.dtype != "token"]
    if len(wanted) != len(values):
        raise PlanError(
            f"region {region.name!r} draws random numbers and cannot be replaced (at {where})"
        )
    shapes = _Shapes(captured, region) if captured.symbolic else None

    def run(*inputs: Any) -> list[Any]:
        expected = [v.shape for v in wanted] if shapes is None else shapes.at(inputs)
        try:
            made = fn(*inputs)
        except (DynaflowError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise PlanError(
                f"{which} raised {type(error).__name__}: {error}; it gets {takes}"
            ) from error
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        if len(results) != len(wanted):
            raise PlanError(f"{which} must return {len(wanted)} values; it returned {len(results)}")
        for value, wish, result in zip(wanted, expected, results, strict=True):
            if not isinstance(result, torch.Tensor):
                raise PlanError(
                    f"{which} must return {value.dtype} tensors; it returned {type(result).__name__}"
                )
            dtype, shape = str(result.dtype).removeprefix("torch."), tuple(result.shape)
            fits = len(shape) == len(wish) and all(
                n in (None, m) for n, m in zip(wish, shape, strict=True)
            )
            if dtype != value.dtype or not fits:
                shown = ", ".join("?" if n is None else str(n) for n in wish)
                raise PlanError(
                    f"{which} must return {value.dtype}[{shown}]; it returned {dtype}{list(shape)}"
                )
        return results

    return run


class _Shapes:
    """Shapes of a region's results at the sizes of a call, where sizes are open in the graph.

    Args:
        captured: The graph.
        region: The region.
    """

    _MOST = 64

    def __init__(self, captured: Captured, region: Region) -> None:
        self._inputs = [_sizes(captured.examples[v]) for v in region.inputs]
        self._outputs = [_sizes(captured.examples[v]) for v in region.outputs]
        self._known: dict[tuple[Any, ...], list[tuple[int | None, ...]]] = {}

    def at(self, inputs: Sequence[Any]) -> list[tuple[int | None, ...]]:
        """For each result its shape; None for a size that inputs do not tell."""
        given = tuple(tuple(getattr(x, "shape", ())) for x in inputs)
        found = self._known.get(given)
        if found is None:
            values = {
                size: actual
                for sizes, shape in zip(self._inputs, given, strict=True)
                for size, actual in zip(sizes, shape, strict=False)
                if getattr(size, "is_Symbol", False)
            }
            found = [tuple(_at(size, values) for size in sizes) for sizes in self._outputs]
            if len(self._known) < self._MOST:
                self._known[given] = found
        return found


def _sizes(example: Any) -> tuple[Any, ...]:
    return tuple(expression(size) for size in getattr(example, "shape", ()))


def _at(size: Any, values: Mapping[Any, int]) -> int | None:
    """A size where some symbols are known."""
    known = size if isinstance(size, int) else size.xreplace(values)
    return None if getattr(known, "free_symbols", None) else int(known)
