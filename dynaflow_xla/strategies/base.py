"""The strategy interface and the recorder that turns a strategy's decisions into a recording."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir import Graph, PartitionedGraph, Region, Source
from dynaflow_xla.recording import Decision, Recording

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MAX_IDLE_READY = 10_000


@dataclass(frozen=True)
class Split:
    """How the batch is cut into nano-batches.

    Attributes:
        count: Number of nano-batches; 1 does not split.
        sizes: Rows of each, or () for as even as possible.
    """

    count: int = 1
    sizes: tuple[int, ...] = ()

    @staticmethod
    def none() -> Split:
        """Do not split."""
        return Split()

    @staticmethod
    def even(count: int) -> Split:
        """``count`` nano-batches of (nearly) the same size."""
        if not isinstance(count, int) or count < 1:
            raise PlanError(f"Split.even takes a count >= 1; got {count!r}")
        return Split(count)

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> Split:
        """Nano-batches of the given numbers of rows."""
        if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise PlanError(f"sizes must be positive integers; got {sizes!r}")
        return Split(len(sizes), tuple(sizes))


@dataclass(frozen=True)
class Context:
    """What a strategy may look at besides the graph.

    Attributes:
        batch_size: Rows of the batch, if known.
        shapes: Shapes of the graph's inputs.
        platform: "cpu", "cuda", ...
        lanes: Number of lanes.
        user: The mapping given as ``schedule(context=...)``.
    """

    batch_size: int | None
    shapes: tuple[tuple[int, ...], ...]
    platform: str
    lanes: int
    user: Mapping[str, Any] = field(default_factory=dict)


class Strategy:
    """Base of all strategies. Override ``schedule``, and ``rules`` or ``split`` where needed.

    Strategy code runs once per input signature, never per call.
    """

    def rules(self, graph: Graph) -> Sequence[Any] | None:
        """Where to cut; None for the default cut."""
        return None

    def split(self, ctx: Context) -> Split:
        """How to cut the batch; the default does not."""
        return Split.none()

    def schedule(self, s: Recorder) -> None:
        """Calls ``s.execute`` once for every region, in an order that respects ``s.ready``."""
        raise NotImplementedError(f"{type(self).__name__} must define schedule(self, s)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True, eq=False)
class Handle:
    """A region of one nano-batch, as a strategy sees it.

    Attributes:
        region: The region.
        nano: Nano-batch number.
        preds, succs: Ids of the regions it depends on, and that depend on it.
        priority: Estimated nanoseconds from its start to the end of the longest path behind it.
    """

    region: Region
    nano: int
    preds: frozenset[int]
    succs: frozenset[int]
    priority: float
    owner: Recorder = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.region.name

    @property
    def tags(self) -> frozenset[str]:
        """Tags of the region, its resource among them."""
        return self.region.tags | {self.region.resource}

    @property
    def resource(self) -> str:
        """Dominant resource."""
        return self.region.resource

    @property
    def flops(self) -> float:
        """Estimated operations."""
        return self.region.flops

    @property
    def bytes_moved(self) -> int:
        """Estimated bytes read and written."""
        return self.region.bytes_moved

    @property
    def cost_ns(self) -> float:
        """Estimated nanoseconds on one lane."""
        return self.region.cost_ns

    @property
    def outer(self) -> bool:
        """Whether it stays in the outer program (its lane is then ignored)."""
        return self.region.outer


def user_line() -> Source | None:
    """The innermost stack frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not os.path.abspath(name).startswith(_PACKAGE + os.sep):
            return Source(name, frame.f_lineno, frame.f_code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class Recorder:
    """What ``Strategy.schedule`` gets: handles of regions that are ready, and ``execute``.

    Attributes:
        graph: The partitioned graph.
        context: See :class:`Context`.
        lanes: Number of lanes.
    """

    def __init__(self, pg: PartitionedGraph, context: Context, strategy: Strategy):
        self.graph = pg
        self.context = context
        self.lanes = context.lanes
        self._strategy = strategy
        preds, succs = pg.predecessors(), pg.successors()
        priority = [0.0] * len(pg.regions)
        for region in reversed(pg.regions):
            after = max((priority[s] for s in succs[region.id]), default=0.0)
            priority[region.id] = region.cost_ns + after
        self._handles = [
            Handle(r, 0, frozenset(preds[r.id]), frozenset(succs[r.id]), priority[r.id], self)
            for r in pg.regions
        ]
        self._missing = [len(p) for p in preds]
        self._ready = {r.id for r in pg.regions if not preds[r.id]}
        self._done: dict[int, Decision] = {}
        self._idle = 0
        self.decisions: list[Decision] = []

    @property
    def remaining(self) -> int:
        """Regions not executed yet."""
        return len(self._handles) - len(self._done)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every region, ready or not, in topological order."""
        return tuple(self._handles)

    def ready(self) -> list[Handle]:
        """Handles of all regions whose inputs are done, in topological order."""
        self._idle += 1
        if self._idle > _MAX_IDLE_READY:
            names = ", ".join(self._handles[r].name for r in sorted(self._ready))
            self._fail(
                f"asked for ready regions {_MAX_IDLE_READY} times without executing one; ready are: "
                f"{names}. Call s.execute(op) for each, or leave the loop"
            )
        return [self._handles[r] for r in sorted(self._ready)]

    def execute(
        self,
        handle: Handle | Iterable[Handle],
        lane: int = 0,
        *,
        replace: Callable[..., Any] | None = None,
    ) -> None:
        """Runs a region on a lane, after all that was executed on that lane before.

        Args:
            handle: From ``ready``.
            lane: 0 to ``lanes`` - 1; ignored for outer regions.
            replace: Another implementation: the region's inputs to its outputs.

        Raises:
            PlanError: executed twice, before its inputs, on a lane out of range, ...
        """
        if isinstance(handle, tuple | list):
            if len(handle) != 1:
                self._fail(
                    "several handles in one execute must be one region of several nano-batches; the "
                    f"batch is not split, got {', '.join(str(getattr(h, 'name', h)) for h in handle)}"
                )
            handle = handle[0]
        if not isinstance(handle, Handle):
            self._fail(f"execute takes a handle from s.ready(); got {handle!r}")
        if handle.owner is not self:
            self._fail(f"region {handle.name!r} is a handle of another recording")
        region = handle.region
        if region.id in self._done:
            first = self._done[region.id]
            self._fail(f"region {handle.name!r} is executed twice (first at {first.source})")
        if region.id not in self._ready:
            waiting = [self._handles[p].name for p in sorted(handle.preds) if p not in self._done]
            self._fail(
                f"region {handle.name!r} is executed before its inputs are done: {', '.join(waiting)}"
            )
        if not region.outer and (
            isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < self.lanes
        ):
            self._fail(
                f"region {handle.name!r}: lane must be an integer from 0 to {self.lanes - 1}; "
                f"got {lane!r}"
            )
        if replace is not None and not callable(replace):
            self._fail(f"region {handle.name!r}: replace must be a function; got {replace!r}")
        decision = Decision(region.id, -1 if region.outer else lane, 0, replace, user_line())
        self._idle = 0
        self.decisions.append(decision)
        self._done[region.id] = decision
        self._ready.discard(region.id)
        for succ in handle.succs:
            self._missing[succ] -= 1
            if self._missing[succ] == 0:
                self._ready.add(succ)

    def _fail(self, what: str) -> NoReturn:
        raise PlanError(f"strategy {self._strategy!r}: {what} (at {user_line()})")


def record(strategy: Strategy, pg: PartitionedGraph, context: Context) -> Recording:
    """Runs a strategy once.

    Raises:
        PlanError: a broken rule, with the region and the user's line; a forgotten region.
        UnsupportedError, or whatever the strategy's own code raises.
    """
    if not isinstance(strategy, Strategy):
        raise PlanError(f"a strategy must be a dynaflow_xla.Strategy; got {strategy!r}")
    split = strategy.split(context)
    if not isinstance(split, Split):
        raise PlanError(f"strategy {strategy!r}: split must return a dfx.Split; got {split!r}")
    if split.count != 1:
        raise PlanError(
            f"strategy {strategy!r} asks for {split.count} nano-batches; splitting the batch is not "
            "in this version: return dfx.Split.none()"
        )
    recorder = Recorder(pg, context, strategy)
    strategy.schedule(recorder)
    if recorder.remaining:
        names = [h.name for h in recorder.handles if h.region.id not in recorder._done]
        where = pg.regions[next(h.region.id for h in recorder.handles if h.name == names[0])].source
        raise PlanError(
            f"strategy {strategy!r} forgot {len(names)} of {len(pg.regions)} regions: "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''} (the first is from {where}). "
            "Loop `while ready := s.ready()` and execute each."
        )
    return Recording(tuple(recorder.decisions))
