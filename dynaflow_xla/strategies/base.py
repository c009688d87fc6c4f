"""The strategy interface and the recorder that turns a strategy's decisions into a recording."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NoReturn

from dynaflow_xla.errors import PlanError, PlanTypeError, UnsupportedError, bad_argument, checks
from dynaflow_xla.ir.graph import Graph, Region, Source
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.strategies.splits.split import Split as Split

_PACKAGE = __name__.partition(".")[0]
_MAX_IDLE_READY = 10_000
_AS_WRITTEN = (
    "region {!r} runs as it was written: a replacement is of the function itself, and this graph is made of "
    "it (a derivative, or a mapped function)"
)


def not_replaced(notes: Iterable[str]) -> list[str]:
    """Those notes of a plan that tell of replacements which it does not run."""
    return [note for note in notes if _AS_WRITTEN.partition("{!r}")[2] in note]


@dataclass(frozen=True)
class Context:
    """What a strategy may look at besides the graph.

    Attributes:
        batch_size: Rows of the batch, if known.
        shapes: Shapes of the graph's inputs.
        platform: "cpu", "cuda", ...
        lanes: Number of lanes.
        user: The mapping given as ``schedule(context=...)``.
        cores: What a region has that is executed with ``width="all"``; 0 where lanes are no cores, as on a
            GPU: then there is no such width.
        lane_cores: Cores of one lane, where the strategy says nothing else.
        free_widths: Whether lanes have ``lane_cores`` only because nobody asked for another number. They have
            none where ``cores`` is 0.
        derived: The graph is not the function itself but made of it: a pass of a derivative (in PyTorch
            the forward of a training step, too), or its batched form under ``vmap``. Regions in it may
            have other inputs and outputs.
        program_ns: What the framework takes, beside the regions' own work, where any region has all cores:
            it hands the whole program to threads of its own. With every region on a lane it does not. 0
            where that makes no difference, as inside of a larger program.
        caller_ns: A program of one lane, lane 0, of up to so much work runs on the thread that calls it, with
            no program around it; 0: none does.
        one_lane_ns: So much work is long enough to be on one lane where more cores gain nothing: the lane
            costs next to nothing then. 0: it never is, as in PyTorch, or where calls give arrays away, into
            which all cores write results and lanes would copy them.
        copies: Whether a value that another lane reads is copied at both ends. PyTorch passes tensors (the
            simulator counts a copy there, too).
        python_ns: What a plan with lanes takes more, once a call, where Python calls the lanes.
    """

    batch_size: int | None
    shapes: tuple[tuple[int, ...], ...]
    platform: str
    lanes: int
    user: Mapping[str, Any] = field(default_factory=dict)
    cores: int = 0
    lane_cores: int = 1
    free_widths: bool = False
    derived: bool = False
    program_ns: float = 0.0
    caller_ns: float = 0.0
    one_lane_ns: float = 0.0
    python_ns: float = 0.0
    copies: bool = True

    def share(self, lanes: int) -> int:
        """Cores of each of so many lanes, if no others are used: an even share of all, for ``execute``.

        It is ``lane_cores`` where the user said how many cores a lane has, or where lanes have none. All
        cores for one lane are those of the program around the lanes.

        Args:
            lanes: How many, at least 1.
        """
        count = checks.integer(lanes)
        if count is None or count < 1:
            raise bad_argument(lanes, Integral, f"lanes must be an integer >= 1; got {lanes!r}")
        if not self.free_widths:
            return self.lane_cores
        return max(self.lane_cores, self.cores // count)


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
        raise UnsupportedError(f"{type(self).__name__} must define schedule(self, s)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True, eq=False)
class Handle:
    """A region of one nano-batch, as a strategy sees it.

    Attributes:
        region: The region.
        nano: Number of its nano-batch, 0 if the batch is not split or the region runs once for all.
        preds, succs: Ids of the regions it depends on, and that depend on it.
        priority: Estimated nanoseconds from its start to the end of the longest path behind it.
    """

    region: Region
    preds: frozenset[int]
    succs: frozenset[int]
    priority: float
    owner: Recorder = field(repr=False)

    @property
    def id(self) -> int:
        """Number of the region; ids are an order in which regions may run."""
        return self.region.id

    @functools.cached_property
    def needs(self) -> frozenset[int]:
        """As ``preds``, of what a strategy executes: what puts nano-batches together is looked through."""
        return self.owner.needs(self.preds)

    @property
    def nano(self) -> int:
        """Number of its nano-batch, 0 if the batch is not split or the region runs once for all."""
        return self.region.nano

    @property
    def name(self) -> str:
        """Name of the region, the same for every nano-batch."""
        return self.region.name.removesuffix(f"@{self.region.nano}")

    @property
    def function(self) -> str:
        """Of several functions that make one plan (``dfx.together``) the name of its own; else ""."""
        return self.region.function

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
        """Estimated nanoseconds on one core."""
        return self.region.cost_ns

    def cost_at(self, cores: int) -> float:
        """Estimated nanoseconds on so many cores: what a sort gains by them is nothing.

        Args:
            cores: As many as a lane has (``context.lane_cores``) or may have, or all (``context.cores``).
        """
        number = checks.integer(cores)
        if number is None or number < 1:
            raise bad_argument(cores, Integral, f"cores must be an integer >= 1; got {cores!r}")
        context = self.owner.context
        wide = number >= context.cores > context.lane_cores
        return self.region.cost_at(number, wide=wide)

    @property
    def outer(self) -> bool:
        """Whether it stays in the outer program (its lane is then ignored)."""
        return self.region.outer


def user_line() -> Source | None:
    """The innermost stack frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] != _PACKAGE:
            return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class Recorder:
    """What ``Strategy.schedule`` gets: handles of regions that are ready, and ``execute``.

    Attributes:
        graph: The partitioned graph.
        context: See :class:`Context`.
    """

    def __init__(
        self, pg: PartitionedGraph, context: Context, strategy: Strategy, *, joint: bool = True
    ):
        self.graph = pg
        self.context = context
        self._strategy = strategy
        preds, succs = pg.predecessors(), pg.successors()
        priority = [0.0] * len(pg.regions)
        for region in reversed(pg.regions):
            after = max((priority[s] for s in succs[region.id]), default=0.0)
            priority[region.id] = region.cost_at(context.lane_cores) + after
        self._handles = [
            Handle(r, frozenset(preds[r.id]), frozenset(succs[r.id]), priority[r.id], self)
            for r in pg.regions
        ]
        self._missing = [len(p) for p in preds]
        self._ready = {r.id for r in pg.regions if not preds[r.id]}
        self._merges = {r.id for r in pg.regions if r.merge}
        self._done: dict[int, Decision] = {}
        self._joint = joint
        self._idle = 0
        self.decisions: list[Decision] = []
        self.notes: dict[str, None] = {}
        self.widths: dict[int, int] = {}  # what was asked for, by lane
        self._asked: dict[int, tuple[str, Source | None]] = {}  # for which region, and where

    @property
    def lanes(self) -> int:
        """Number of lanes; ``schedule(lanes=...)`` and ``dfx.Lanes`` give another one."""
        return self.context.lanes

    @property
    def remaining(self) -> int:
        """Regions not executed yet."""
        return len(self._handles) - len(self._done.keys() | self._merges)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every region, ready or not, in topological order; not those that put nano-batches together."""
        return tuple(h for h in self._handles if not h.region.merge)

    def needs(self, preds: Iterable[int]) -> frozenset[int]:
        """Of some regions those that a strategy executes, and of the others what these need."""
        found: set[int] = set()
        for pred in preds:
            found |= self.needs(self._handles[pred].preds) if pred in self._merges else {pred}
        return frozenset(found)

    def ready(self) -> list[Handle]:
        """Handles of all regions whose inputs are done, in topological order."""
        self._idle += 1
        if self._idle > _MAX_IDLE_READY:
            names = ", ".join(self._handles[r].region.name for r in sorted(self._ready))
            self._fail(
                f"asked for ready regions {_MAX_IDLE_READY} times without executing one; ready are: "
                f"{names}. Call s.execute(op) for each, or leave the loop"
            )
        if self._ready <= self._merges:
            self._run_merges(0)  # of inputs that come in parts
        return [self._handles[r] for r in sorted(self._ready - self._merges)]

    def execute(
        self,
        handle: Handle | Iterable[Handle],
        lane: int = 0,
        *,
        width: int | str | None = None,
        replace: Callable[..., Any] | None = None,
    ) -> None:
        """Runs a region on a lane, after all that was executed on that lane before; or on all cores.

        Args:
            handle: From ``ready``; several, if they are one region of several nano-batches: then they
                run as one batch (in a backward pass one after another).
            lane: 0 to ``lanes`` - 1; ignored for outer regions and with ``width="all"``.
            width: Cores that it runs on. Left out: those of its lane. ``"all"``, or as many as there are
                and more than a lane has: every core, in the program around the lanes. It then starts when
                all that was executed before is done, and what is executed later starts when it is done;
                such regions one after another are one piece for the compiler. A smaller number: its lane
                has so many cores, in the whole plan, in place of ``context.lane_cores``. Lanes may have
                more together than there are, and take turns then.
            replace: Another implementation: the region's inputs to its outputs. It is of the function
                itself: in the passes of a derivative (``context.derived``) each region runs as written.

        Raises:
            PlanError: executed twice, before its inputs, on a lane out of range or with two widths, ...
        """
        given = None if isinstance(handle, Handle) else checks.items(handle)
        several: tuple[Any, ...] = (handle,) if given is None else given
        for one in several:
            self._check(one)
        handles: tuple[Handle, ...] = several
        self._check_group(handles)
        first = handles[0]
        number = checks.integer(lane)
        if not first.outer and (number is None or not 0 <= number < self.lanes):
            self._fail(
                f"region {first.name!r}: lane must be an integer from 0 to {self.lanes - 1}; "
                f"got {lane!r}",
                type(bad_argument(lane, Integral, "")),
            )
        wide = self._wide(first, number, width)
        if replace is not None and not callable(replace):
            self._fail(
                f"region {first.name!r}: replace must be a function; got {replace!r}", PlanTypeError
            )
        if replace is not None and first.outer:
            self._fail(f"region {first.name!r} stays in the outer program and cannot be replaced")
        if replace is not None and self.context.derived:
            self.notes[_AS_WRITTEN.format(first.name)] = None
            replace = None
        place = -1 if wide or first.outer or number is None else number
        if self._joint and len(handles) > 1:
            group = tuple(h.region.id for h in handles)
            self._decide(handles, Decision(first.region.id, place, group, replace, user_line()))
        else:
            for one in handles:
                self._decide((one,), Decision(one.region.id, place, (), replace, user_line()))
        self._run_merges(place if place >= 0 or self.context.cores else 0)

    def _wide(self, handle: Handle, lane: int | None, width: Any) -> bool:
        """Whether a width is that of all cores; keeps one of a lane's.

        Tells what becomes of all cores where there is no such width.
        """
        if width is None:
            return False
        cores, own = self.context.cores, self.context.lane_cores
        number = checks.integer(width)
        if number == own or (number is not None and 1 <= number < max(cores, own if cores else 0)):
            if not handle.outer and lane is not None:
                self._lane_width(handle.name, lane, number)
            return False
        if width != "all" and (number is None or number != cores):
            few = f"the cores of a lane ({own})"
            if cores:
                few = f"a number of cores from 1 to {cores} (dfx.Lanes(n, width=...) gives more)"
            self._fail(
                f"region {handle.name!r}: width must be 'all', or {few}; got {width!r}",
                type(bad_argument(width, (Integral, str), "")),
            )
        if not cores:
            self.notes.setdefault(
                "width='all' is a lane here: whoever runs this plan has no lanes of cores"
            )
        return bool(cores)

    def _lane_width(self, name: str, lane: int, cores: int) -> None:
        """Keeps how many cores a lane has: a lane is compiled for one number."""
        if self.widths.setdefault(lane, cores) == cores:
            self._asked.setdefault(lane, (name, user_line()))
            return
        first, source = self._asked[lane]
        self._fail(
            f"region {name!r}: lane {lane} has {self.widths[lane]} cores since region {first!r} (at "
            f"{source}), and a lane has the same in the whole plan; got width={cores}. Use another lane, or "
            "width='all'"
        )

    def finish(self) -> None:
        """What puts inputs alone together, if nothing else was there to execute."""
        self._run_merges(0)

    def _run_merges(self, lane: int) -> None:
        """What puts nano-batches together runs where the last of them ran."""
        while merges := sorted(self._ready & self._merges):
            for merge in merges:
                one = self._handles[merge]
                self._decide((one,), Decision(merge, lane, (), None, user_line()))

    def _decide(self, handles: Sequence[Handle], decision: Decision) -> None:
        self._idle = 0
        self.decisions.append(decision)
        for handle in handles:
            self._done[handle.region.id] = decision
            self._ready.discard(handle.region.id)
            for succ in handle.succs:
                self._missing[succ] -= 1
                if self._missing[succ] == 0:
                    self._ready.add(succ)

    def _check(self, handle: Any) -> None:
        """That a handle may be executed now."""
        if not isinstance(handle, Handle):
            self._fail(f"execute takes a handle from s.ready(); got {handle!r}", PlanTypeError)
        if handle.owner is not self:
            self._fail(f"region {handle.name!r} is a handle of another recording")
        region = handle.region
        if region.id in self._done:
            first = self._done[region.id]
            self._fail(f"region {region.name!r} is executed twice (first at {first.source})")
        if region.id not in self._ready and handle.preds <= self._done.keys() | self._merges:
            self._run_merges(0)
        if region.id not in self._ready:
            waiting = [
                self._handles[p].region.name for p in sorted(handle.preds) if p not in self._done
            ]
            self._fail(
                f"region {region.name!r} is executed before its inputs are done: {', '.join(waiting)}"
            )

    def _check_group(self, handles: Sequence[Handle]) -> None:
        """That several handles are one region of several nano-batches."""
        names = ", ".join(h.region.name for h in handles)
        if not handles or len({h.name for h in handles}) > 1 or len({h.nano for h in handles}) < len(
            handles
        ):  # fmt: skip
            self._fail(
                "several handles in one execute must be one region of several nano-batches; "
                f"got {names or 'none'}"
            )
        if len(handles) > 1 and handles[0].outer:
            self._fail(f"{names} stay in the outer program and cannot run as one batch")

    def _fail(self, what: str, kind: type[PlanError] = PlanError) -> NoReturn:
        raise kind(f"strategy {self._strategy!r}: {what} (at {user_line()})")


def sizes_of(strategy: Strategy, context: Context) -> tuple[tuple[int, ...], Split]:
    """Rows of each nano-batch that a strategy asks for, () if it does not split; and its Split.

    Where the cost model is to choose, these are even ones; ``Split.tried`` has the others.

    Raises:
        PlanError: there is no batch, the sizes do not make up the batch, or its conditions cannot be met.
    """
    split = strategy.split(context)
    if not isinstance(split, Split):
        raise PlanTypeError(f"strategy {strategy!r}: split must return a dfx.Split; got {split!r}")
    if split.count == 1 and not split.sizes:
        return (), split
    batch = context.batch_size
    if batch is None:
        raise PlanError(
            f"strategy {strategy!r} asks for {split.count} nano-batches, so schedule must know the "
            "batch: pass in_axes (as for jax.vmap), e.g. schedule(f, strategy, in_axes=(None, 0))"
        )
    if split.count > batch:
        raise PlanError(
            f"strategy {strategy!r} asks for {split.count} nano-batches; the batch has {batch} "
            f"row{'s' if batch != 1 else ''}. Where batches may be so small, ask for as many at most: "
            f"split(ctx) can return dfx.Split.even(min({split.count}, ctx.batch_size or 1))"
        )
    if split.sizes and sum(split.sizes) != batch:
        raise PlanError(
            f"strategy {strategy!r}: nano-batches of {list(split.sizes)} rows must make up the batch of "
            f"{batch}; they have {sum(split.sizes)}"
        )
    try:
        sizes = split.of_batch(batch)
    except PlanError as error:
        raise PlanError(f"strategy {strategy!r}: {error}") from None
    return (sizes if len(sizes) > 1 else ()), split


def _ran(strategy: Strategy, result: Any) -> None:
    """An error where ``schedule`` gave what has not run: a generator, or a coroutine."""
    if inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result):
        kind = type(result).__name__.replace("_", " ")
        if not inspect.isasyncgen(result):
            result.close()
        raise PlanError(
            f"strategy {strategy!r}: schedule returned a {kind}, so its body did not run; write it as a "
            "plain function, without yield and async"
        )


def record(
    strategy: Strategy, pg: PartitionedGraph, context: Context, *, joint: bool = True
) -> Recording:
    """Runs a strategy once.

    Args:
        strategy: Decides.
        pg: The regions.
        context: What the strategy may look at.
        joint: Whether several nano-batches can run as one batch; else they run one after another.

    Raises:
        PlanError: a broken rule, with the region and the user's line; a forgotten region.
        UnsupportedError, or whatever the strategy's own code raises.
    """
    if not isinstance(strategy, Strategy):
        raise PlanTypeError(f"a strategy must be a dynaflow_xla.Strategy; got {strategy!r}")
    recorder = Recorder(pg, context, strategy, joint=joint)
    schedule: Callable[[Recorder], Any] = strategy.schedule
    _ran(strategy, schedule(recorder))
    recorder.finish()
    if recorder.remaining:
        left = [h.region for h in recorder.handles if h.region.id not in recorder._done]
        names, where = [region.name for region in left], left[0].source
        raise PlanError(
            f"strategy {strategy!r} forgot {len(names)} of {len(pg.regions)} regions: "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''} (the first is from {where}). "
            "Loop `while ready := s.ready()` and execute each."
        )
    return Recording(tuple(recorder.decisions), tuple(recorder.notes), recorder.widths)
