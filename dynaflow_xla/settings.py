"""What the user asked ``schedule`` for, checked once: the same for every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from dynaflow_xla import backends, machine, selection as _selection
from dynaflow_xla.errors import (
    PlanError,
    PlanTypeError,
    UnsupportedError,
    bad_argument,
    checks,
)
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.kernels import Lanes, thread_lanes
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.dual_batch import DualBatch
from dynaflow_xla.strategies.nano_batch import NanoBatch
from dynaflow_xla.strategies.search import Search
from dynaflow_xla.strategies.sequential import Sequential
from dynaflow_xla.watching import telling

XLA_LANES = 8
"""Lanes by default of one XLA program, and of PyTorch's streams. A GPU runs whatever nodes of a graph are
ready. With few lanes regions would wait for each other for the lane's sake, and each such wait is a gate."""

MAX_XLA_LANES = 64
"""Most lanes of one XLA program."""

_MAX_DEFAULT_LANES = 8

_told = False
"""Whether it was said why there is one lane by default."""

_BY_NAME: dict[str, Callable[[], Strategy]] = {
    "auto": Auto,
    "branches": Branches,
    "dual_batch": DualBatch,
    "nano_batch": NanoBatch,
    "search": Search,
    "sequential": Sequential,
}


@dataclass(frozen=True)
class Settings:
    """Arguments of ``schedule``.

    Attributes:
        name: Of the function, for messages.
        strategy: What decides; with ``selection`` it stands for nothing.
        lanes: Number of lanes.
        rules: Where to cut; None: the strategy's rules, else the default cut.
        user: The user's data for the strategy.
        in_axes: Where the batch is, as given.
        out_axes: How results are put together, as given.
        batch_size: Rows that the batch must have.
        backend: As given: "auto", or a name in ``backends.BACKENDS``.
        target: Path of the text of the GPU to compile for.
        compiler: How PyTorch regions run.
        compiler_options: For the compiler.
        check: Compare what could not be proved.
        gpu: Lanes with properties of a GPU's.
        selection: What to choose among at each call.
        lane_cores: Cores of one lane.
        default_cut: The graph is not the one that the user's and the strategy's rules are for.
        candidate: It is a candidate of ``Auto``, which measures what its plans cost, and keeps the original
            where lanes cannot run.
        default_lanes: The user gave no number of lanes.
    """

    name: str
    strategy: Strategy
    lanes: int
    rules: tuple[Any, ...] | None = None
    user: Any = field(default_factory=dict, hash=False, compare=False)
    in_axes: Any = None
    out_axes: Any = 0
    batch_size: int | None = None
    backend: str = "auto"
    target: str | None = None
    compiler: str = "eager"
    compiler_options: dict[str, Any] | None = field(default=None, hash=False, compare=False)
    check: bool = True
    gpu: Lanes | None = None
    selection: _selection.Recipe | None = None
    default_cut: bool = False
    lane_cores: int = 1
    candidate: bool = field(default=False, compare=False)
    default_lanes: bool = field(default=False, compare=False)

    @property
    def gpu_lanes(self) -> bool:
        """Whether JAX functions are to have lanes on a GPU, too, where that is the default device."""
        return self.backend == "ffi"

    @property
    def free_widths(self) -> bool:
        """Whether the user leaves it to the strategy how many cores a lane has."""
        return self.gpu is None or self.gpu.width is None

    def lanes_on(self, gpu: bool) -> int:
        """As asked for; else as many threads as there are cores for, or a GPU's usual number of streams."""
        return XLA_LANES if gpu and self.default_lanes else self.lanes

    def lane_cores_of(self, cores: int) -> int:
        """Cores of one lane where there are so many; 0: what was planned for when it was scheduled.

        ``lane_cores`` is what the process could use when the function was scheduled. What there is may have
        become less since, or be PyTorch's number of threads.
        """
        return max(1, cores // self.lanes) if cores and self.free_widths else self.lane_cores

    @property
    def one_pass(self) -> bool:
        """Whether lanes of a CPU run cumulative operators of JAX in one pass."""
        return self.gpu is None or self.gpu.one_pass

    @property
    def how(self) -> Any:
        """What decides: a strategy, or what chooses among several."""
        return self.strategy if self.selection is None else self.selection


def checked(
    fn: Any,
    *,
    strategy: Any,
    in_axes: Any,
    out_axes: Any,
    batch_size: Any,
    backend: Any,
    lanes: Any,
    rules: Sequence[Any] | None,
    context: Any,
    select: Any,
    target: Any,
    compiler: Any,
    compiler_options: Mapping[str, Any] | None,
    check: bool,
) -> Settings:
    """The settings of a function; arguments as of ``schedule``, ``target`` still as given.

    Raises:
        PlanError: an argument is out of range.
        RuleError: ``rules`` holds something that is no rule.
        UnsupportedError: arguments that exclude each other.
    """
    selection = _selection.recipe(strategy, select, context, resolve_strategy)
    made = Sequential() if selection is not None else resolve_strategy(strategy)
    _check_place(backend, target, compiler)
    if target is not None:
        backend = "xla"
    lanes = _perhaps_streams(lanes, backend)
    count = resolve_lanes(lanes, backend)
    special = lanes if isinstance(lanes, Lanes) else None
    if special is not None and backends.one_program(backend) and (special.special or special.width):
        raise UnsupportedError(
            "one XLA program has no lanes to give priorities, multiprocessors or cores to: use "
            "backend='ffi' or 'torch', or give lanes a number"
        )
    rows = _check_batch(in_axes, out_axes, batch_size)
    if context is not None and not isinstance(context, Mapping):
        raise PlanTypeError(f"context must be a mapping for the strategy; got {context!r}")
    if compiler_options is not None and not isinstance(compiler_options, Mapping):
        raise PlanTypeError(
            "compiler_options must be a mapping from an option's name to its value; got "
            f"{compiler_options!r}"
        )
    compares = checks.flag("check", check)
    return Settings(
        name=checks.name_of(fn),
        strategy=made,
        lanes=count,
        rules=None if rules is None else as_rules(rules),
        user=dict(context or {}),
        in_axes=in_axes,
        out_axes=out_axes,
        batch_size=rows,
        backend=backend,
        target=target,
        compiler=compiler,
        compiler_options=dict(compiler_options) if compiler_options else None,
        check=compares,
        gpu=special,
        lane_cores=lane_cores(lanes, count, backend),
        selection=selection,
        default_lanes=lanes is None,
    )


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy object behind a name or object; PlanError if there is none."""
    if isinstance(strategy, Strategy):
        return strategy
    given: Any = strategy
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    if isinstance(given, type) and issubclass(given, Strategy):
        raise PlanTypeError(f"pass an instance: strategy={given.__name__}(), not the class")
    raise bad_argument(
        given,
        str,
        f"strategy must be one of {', '.join(sorted(_BY_NAME))} or a dynaflow_xla.Strategy; "
        f"got {strategy!r}",
    )


def resolve_lanes(lanes: int | Lanes | None, backend: str = "ffi") -> int:
    """Checked lane count; PlanError if it is no count, or too many.

    One program: 64. Threads: one a core. ``Lanes`` are streams where there is a GPU; where there is
    none it is told when that is known.
    """
    global _told
    if backends.one_program(backend):
        if lanes is None:
            return XLA_LANES
        count = lanes.count if isinstance(lanes, Lanes) else checks.integer(lanes)
        if count is None or not 0 < count <= MAX_XLA_LANES:
            raise bad_argument(
                lanes,
                Integral,
                f"lanes must be an integer from 1 to {MAX_XLA_LANES}; got {lanes!r}",
            )
        return count
    if lanes is None:
        if not _told and (why := machine.bound_by()):
            _told = True
            telling.fallback(f"by default there is one lane: {why}")
        return min(max(1, machine.cores()), _MAX_DEFAULT_LANES)
    if isinstance(lanes, Lanes):
        return lanes.count
    count = checks.integer(lanes)
    if count is None or count < 1:
        raise bad_argument(
            lanes, Integral, f"lanes must be an integer >= 1 or dfx.Lanes(...); got {lanes!r}"
        )
    return thread_lanes(count)


def _perhaps_streams(lanes: Any, backend: str) -> Any:
    """More plain lanes than cores as ``Lanes``, where they may be a GPU's: that is known at a call only.

    Where they turn out to be threads after all they are refused then.
    """
    count = None if lanes is None or isinstance(lanes, Lanes) else checks.integer(lanes)
    if count is None or count <= machine.cores() or backends.one_program(backend):
        return lanes
    return Lanes(count) if machine.may_have_gpu() else lanes


def lane_cores(lanes: int | Lanes | None, count: int, backend: str = "ffi") -> int:
    """Cores of each of ``count`` lanes that are threads: as asked for, or an even share of the machine's."""
    if backends.one_program(backend):
        return 1
    if isinstance(lanes, Lanes) and lanes.width is not None:
        return lanes.width
    return max(1, machine.cores() // count)


def _check_batch(in_axes: Any, out_axes: Any, batch_size: Any) -> int | None:
    """The checked ``batch_size``."""
    rows = None if batch_size is None else checks.integer(batch_size)
    if batch_size is not None and (rows is None or rows < 1):
        raise bad_argument(
            batch_size, Integral, f"batch_size must be a positive integer; got {batch_size!r}"
        )
    given_out = checks.integer(out_axes) != 0
    if in_axes is None and (batch_size is not None or given_out):
        given = "batch_size" if batch_size is not None else "out_axes"
        raise PlanError(
            f"{given} is given without in_axes, so there is no batch: pass in_axes, too"
        )
    return rows


def _check_place(backend: Any, target: Any, compiler: Any) -> None:
    if not isinstance(backend, str) or backend not in ("auto", *backends.BACKENDS):
        raise bad_argument(backend, str, f"backend must be {backends.names()}; got {backend!r}")
    if target is not None and backend not in ("auto", "xla"):
        raise PlanError(
            f"target={target!r} is for backend='xla'; backend={backend!r} runs on this machine"
        )
    if not isinstance(compiler, str) or compiler not in ("eager", "inductor", "aoti", "auto"):
        raise bad_argument(
            compiler, str, f"compiler must be eager, inductor, aoti or auto; got {compiler!r}"
        )
