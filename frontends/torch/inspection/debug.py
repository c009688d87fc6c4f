"""``debug`` and ``check_determinism`` for scheduled torch callables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.debugging import trials
from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.names import leaves_with_paths
from dynaflow_xla.frontends.torch.commands import wait
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.native import native, threads
from dynaflow_xla.frontends.torch.native.entry import NativeEntry
from dynaflow_xla.frontends.torch.native.memory import Environment, Memory
from dynaflow_xla.frontends.torch.native.stretches.regions import Stretch, StretchBody
from dynaflow_xla.frontends.torch.native.stretches.source import FusedOperators
from dynaflow_xla.frontends.torch.opaque import regions as opaque
from dynaflow_xla.frontends.torch.tuning import copying, gradients, keeping
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.plan import Plan


def _bits(x: Any) -> str:
    """Digest of a value."""
    if not isinstance(x, torch.Tensor):
        return repr(x) if isinstance(x, bool | int | float) else type(x).__name__
    told = str(x.dtype), tuple(x.shape)
    with torch.no_grad(), modes.apart():
        x = x.detach()
        if x.is_quantized:
            x = x.int_repr()
        if x.layout is not torch.strided:
            x = x.to_dense()
        x = x.to("cpu").resolve_conj().resolve_neg().contiguous()
        data = x.reshape(-1).view(torch.uint8).numpy() if x.numel() else b""
        return trials.digest(memoryview(data), *told)


def _poison(pattern: int) -> Callable[[Any], None]:
    """Fills a tensor with what nobody means to read; runs of other patterns differ where it is read."""

    def fill(x: Any) -> None:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or not x.numel():
            return
        if x.dtype.is_floating_point or x.dtype.is_complex:
            x.fill_(float("nan") if pattern else -1.5e4)
        elif x.dtype is torch.bool:
            x.fill_(bool(pattern))
        elif not x.is_quantized:
            x.fill_(torch.iinfo(x.dtype).max - pattern)

    return fill


class _Poisoned:
    """The memory of a plan whose parts of results hold poison first; arguments are not written at the end."""

    def __init__(self, memory: Memory, fill: Callable[[Any], None]) -> None:
        self._memory, self._fill = memory, fill
        self.placed, self.results = memory.placed, memory.results
        self.written: list[tuple[int, int]] = []
        self.finish = memory.finish

    def environment(self, inputs: Sequence[Any]) -> Environment:
        env = self._memory.environment(inputs)
        for placed in self.placed:
            self._fill(env[placed.value])
        return env


def _allocating(captured: Captured, fill: Callable[[Any], None]) -> Captured:
    """The same graph, whose operators that only allocate give memory with poison in it."""

    def poisoned(target: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = target(*args, **kwargs)
            fill(made)
            return made

        return call

    ops = tuple(
        replace(op, payload=replace(op.payload, target=poisoned(op.payload.target)))
        if op.payload is not None and modes.allocates(op.payload.target)
        else op
        for op in captured.graph.ops
    )
    return replace(captured, graph=replace(captured.graph, ops=ops))


@dataclass
class Subject:
    """A planned graph with its inputs, for ``dynaflow_xla.debugging``.

    Regions run as they do in a call of their own: operator by operator, compiled, or replaced.

    Attributes:
        entry: The planned graph.
        inputs: Flat inputs of the planned graph.
        name: Of the function.
    """

    entry: NativeEntry
    inputs: Sequence[Any]
    name: str
    _writes: bool = field(init=False)
    _tickets: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        ops = self.entry.captured.graph.ops
        self._tickets = opaque.tickets(self.entry.captured)
        self._writes = any(op.payload is not None and modes.writes(op.payload.target) for op in ops)

    @property
    def plan(self) -> Plan:
        """What a call runs."""
        return self.entry.plan

    @property
    def pg(self) -> PartitionedGraph:
        """The plan's regions."""
        return self.entry.pg

    def round(self, plan: Plan, seed: int, concurrent: bool) -> trials.Round:
        """What watches a run."""
        # Operators that write into their arguments may mean to write into another region's result.
        return trials.Round(plan, _bits, seed, concurrent, lambda _: self._writes)

    def run(self, watch: trials.Round) -> None:
        """Runs a plan on this thread, or on the engine's lanes."""
        entry = self.entry
        fill = _poison(1 if watch.seed else 0)

        def filled(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                with modes.filling(fill):
                    return function(*inputs)

            return call

        made = {
            region: function if isinstance(function, operators.Operator) else filled(function)
            for region, function in entry.implementations.items()
        }

        def compiled(works: Sequence[StretchBody]) -> list[StretchBody]:
            assert entry.compiler is not None
            return [
                replace(work, steps=[
                    replace(s, function=filled(s.function)) if isinstance(s, FusedOperators) else s
                    for s in work.steps
                ])
                for work in entry.compiler(works)
            ]  # fmt: skip

        places: dict[int, int] = {}
        runnable = native.build(
            _allocating(entry.captured, fill), entry.pg, watch.plan, made, fuse=False,
            compiler=compiled if entry.compiler is not None else None,
            watched=lambda stretch: self._watched(stretch, watch, places),
        )  # fmt: skip
        for placed in runnable.memory.placed:
            places.update((value, slot) for value, slot, _, _ in placed.parts)
        runnable.memory = _Poisoned(runnable.memory, fill)  # type: ignore[assignment]
        if not watch.concurrent:
            for stage, _ in runnable.stages:
                stage.program = None
        inputs = list(copying.copies(list(self.inputs)) if self._writes else self.inputs)
        saved = threads.limit()  # as on lanes: sums over several threads have other bits
        try:
            with keeping.random_kept((), {}):
                # On a GPU lanes enqueue on its default stream, whatever stream the caller is on.
                wait(inputs)
                runnable.run(inputs)
        finally:
            threads.restore(saved)

    def _watched(self, stretch: Stretch, watch: trials.Round, places: dict[int, int]) -> Stretch:
        (region,) = stretch.regions
        outputs = [v for v in self.pg.regions[region].outputs if v not in self._tickets]

        def run(env: Environment) -> None:
            watch.begin(region)
            stretch.run(env)
            watch.end(region, [env[places.get(v, v)] for v in outputs])

        return replace(stretch, run=run)

    def compiled(self, seed: int) -> dict[int, tuple[str, ...]] | None:
        """There is no other form: what a call runs is what ``run`` runs, region by region."""
        return None


def _target(core: Core, args: Any, kwargs: Any, caller: str) -> Any:
    """What serves these arguments.

    Raises:
        UnsupportedError: a call changes what cannot be put back, or no graph runs.
    """
    target = core.target(args, kwargs)
    entries = target.all_planned(args, kwargs)
    name = core.options.name
    if lasting := target.changes.lasting(target.original):
        raise UnsupportedError(
            f"{caller} runs a function many times, and a call of {name!r} changes what cannot be put back "
            f"({', '.join(lasting)}). Look at the part of it that only computes: schedule that on its own, "
            "or take the effect out"
        )
    if not entries:
        raise UnsupportedError(
            f"{caller} looks at a plan, and there is none: {target.why_original(args, kwargs)}"
        )
    return target


def debug(core: Core, args: Any, kwargs: Any, rounds: int, seed: int) -> DebugReport:
    """The report of ``dynaflow_xla.debug``, of each graph that a call and its backward run."""
    target = _target(core, args, kwargs, "debug")
    name = core.options.name
    notes = [aside] if (aside := core.beside_the_plan(args, kwargs)) else []
    reports: list[DebugReport] = []

    def look(entry: Any, given: Sequence[Any]) -> None:
        named = name if entry.kind != "backward" else f"the backward of {name}"
        reports.append(_debug(entry, given, named, rounds, seed, tuple(notes)))

    looked, untold = _look(target, args, kwargs, look)
    if len(reports) > 1:
        backward = sum(entry.kind == "backward" for entry in looked)
        parts = f", {backward} of them of the backward" if backward else ""
        notes.append(f"the call runs {len(reports)} graphs{parts}, each looked at on its own")
    notes += untold
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.rounds)
    return replace(
        reports[0], regions=sum(r.regions for r in reports), rounds=dict(counts),
        values=sum(r.values for r in reports), notes=tuple(notes),
    )  # fmt: skip


def _look(
    target: Any,
    args: Any,
    kwargs: Any,
    look: Callable[[Any, Sequence[Any]], None],
) -> tuple[list[Any], list[str]]:
    """Calls ``look`` with each graph that a call on copies and its backward run, and what each is given.

    Returns:
        The graphs, and what is to be told of the backward.

    Raises:
        UnsupportedError: no graph ran.
    """
    looked: list[Any] = []
    failed: list[Exception] = []

    def observer(entry: Any) -> Callable[[Any], list[Any]] | None:
        if failed or any(entry is other for other in looked):
            return None

        def run(inputs: Any) -> list[Any]:
            given = list(inputs)
            looked.append(entry)
            try:
                look(entry, given)
            except Exception as error:
                failed.append(error)
                raise
            return entry(list(given))  # type: ignore[no-any-return]

        return run

    notes: list[str] = []
    kept = keeping.preserved(target.original, target.changes, args, kwargs)
    with kept, running.observing_each(observer):
        try:
            result = target.call(*copying.copies((args, kwargs)), planned=True)
        except Exception:
            if failed:
                raise failed[0] from None
            raise
        try:
            gradients.of(result)
        except Exception as error:
            if failed:
                raise failed[0] from None
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            notes.append(f"the backward is not looked at: {told}")
    if not looked:
        raise UnsupportedError(f"{target.options.name!r} did not run a captured graph")
    return looked, notes


def _debug(
    entry: Any, given: Sequence[Any], name: str, rounds: int, seed: int, notes: Sequence[str]
) -> DebugReport:
    if not isinstance(entry, NativeEntry):
        if not hasattr(entry, "program_for"):
            raise UnsupportedError(
                f"debug cannot look at {name!r} here: torch_xla runs it as one program"
            )
        return _on_xla(entry, given, name, rounds, seed)
    inputs = list(given) if entry.prepare is None else entry.prepare(list(given))
    return trials.debug(Subject(entry, inputs, name), rounds, seed, notes)


def _on_xla(entry: Any, given: Sequence[Any], name: str, rounds: int, seed: int) -> DebugReport:
    """Of a graph that runs on XLA: the plan of the JAX program that it became."""
    from dynaflow_xla.frontends.torch.on_xla import looked_at

    return looked_at.debug(entry, given, name, rounds, seed)  # type: ignore[no-any-return]


def check_determinism(core: Core, args: Any, kwargs: Any, runs: int) -> DeterminismReport:
    """The report of ``dynaflow_xla.check_determinism``: of whole calls with their gradients, on copies."""
    target = _target(core, args, kwargs, "check_determinism")

    def call() -> list[tuple[str, str]]:
        with keeping.preserved(target.original, target.changes, args, kwargs):
            given = copying.copies((args, kwargs))
            result = target.call(*given, planned=True)
            leaves = leaves_with_paths(result)
            told = [
                (
                    "result" + pytree.keystr(path),
                    _bits(x) if isinstance(x, torch.Tensor) else repr(x),
                )
                for path, x in leaves
            ]
            try:
                found = gradients.of(result)
            except Exception:  # the call has no backward: its results are compared
                return told
            named = gradients.names(target.original, *given)
            return told + [
                (f"the gradient of {named.get(id(leaf), 'a tensor')}", _bits(gradient))
                for leaf, gradient in found
            ]

    def subjects() -> list[Subject]:
        made: list[Subject] = []

        def look(entry: Any, given: Sequence[Any]) -> None:
            if isinstance(entry, NativeEntry):
                inputs = list(given) if entry.prepare is None else entry.prepare(list(given))
                made.append(Subject(entry, copying.copies(inputs), core.options.name))

        _look(target, args, kwargs, look)
        return made

    return trials.check_determinism(core.options.name, runs, call, subjects)
