"""Measures a machine's numbers (``machine.Numbers``): what its cores are worth, and what lanes cost on it.

Everything is measured through what users have: plain functions with all cores and with one, and small
functions under plans with one lane and with several.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from numbers import Real
from typing import Any

from dynaflow_xla import api, dispatch, machine
from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import UnsupportedError, bad_argument, checks
from dynaflow_xla.ir.rules import Op
from dynaflow_xla.machine import Numbers, figures
from dynaflow_xla.protocols import Frontend
from dynaflow_xla.strategies.base import Recorder, Strategy
from dynaflow_xla.strategies.sequential import Sequential
from dynaflow_xla.tuning import quiet
from dynaflow_xla.watching import telling

FRAMEWORKS = ("jax", "torch")

WORK: dict[machine.Kind, list[tuple[tuple[int, ...], float]]] = {
    "products": [((1024, 1024), 1.0), ((1024, 1024), 0.05)],
    "convolutions": [((8, 64, 32, 32), 1.0), ((256, 64, 3, 3), 0.1)],
    "elements": [((1 << 18,), 1.0), ((1 << 18,), 1.0)],
    "serial": [((1 << 18,), 1.0)],
}
"""By kind of work the shapes of a function that is nothing else, and what random values are multiplied by."""

_SMALL_PRODUCT = [((8, 256), 1.0), ((256, 512), 0.1)]
"""Hardly enough for XLA to share it out."""
_LITTLE = [((8,), 1.0), ((8,), 1.0)]
_HANDED_OVER = [((256,), 1.0)]
"""Enough for XLA to hand the program to a thread of its own."""

_RECURRENT = [((64, 8, 64), 1.0), ((256, 64), 0.1), ((256, 64), 0.1), ((256,), 0.1)]
"""Steps, rows and width of an LSTM, and its weights."""

_CROSSINGS = 8
_PAUSE_S = 1e-3
"""Between calls that measure what lanes cost: in a program they sleep until there is work."""

_COPIED = 32 << 20
_MOST_BUSY = 0.2

Tell = Callable[[str], None]


class _Deal(Strategy):
    """Regions to lanes in turns.

    Args:
        lanes: How many.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def rules(self, graph: Any) -> Any:
        """Every operator is a region."""
        return [Op("*")]

    def schedule(self, s: Recorder) -> None:
        """In the order in which they become ready."""
        turn = 0
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=turn % self.lanes)
                turn += 1


def measure_machine(budget_s: float = 20.0, tell: Tell = lambda _: None) -> Numbers:
    """Measures what planning assumes of this machine, keeps it on disk, and uses it from now on.

    Until then what is assumed follows the processor's vectors. Plans that were made stay; decisions of
    ``Auto`` that were made with other numbers are made again. ``dynaflow-xla doctor --measure`` does the
    same, ``dynaflow-xla cache clear --kind machine`` forgets it.

    Args:
        budget_s: About so many seconds; compiling does not count. The machine should have nothing else to do.
        tell: Told what is measured now.

    Returns:
        The numbers; their attributes say what they are and in which units.

    Raises:
        UnsupportedError: neither framework is installed, or none of them computes on a CPU by default.
        PlanError: ``budget_s`` is no time.
        RuntimeError: the machine is busy, this process may not use all of its cores, or the numbers cannot be
            a machine's: such times are not kept.
    """
    seconds = checks.real(budget_s)
    if seconds is None or not 0 < seconds < 3600:
        raise bad_argument(
            budget_s, Real, f"budget_s must be seconds between 0 and 3600; got {budget_s!r}"
        )
    made = _measured(seconds, tell)
    try:
        machine.keep(made)
    except private_files.Broken as error:
        raise quiet.Disturbed(
            f"what was measured is not kept: {error}. Measure again when the machine is quiet"
        ) from error
    except OSError as error:
        telling.fallback(
            f"the measured numbers cannot be kept on disk ({error}); they hold for this process",
        )
        machine.use(made)
    return made


def _busy(seconds: float = 0.5) -> float:
    """Cores' worth of work that others do while this process rests, as the system counts it."""
    before = _used_s()
    start = time.perf_counter()
    time.sleep(seconds)
    return max(0.0, _used_s() - before) / (time.perf_counter() - start)


def _used_s() -> float:
    """Seconds that the cores of this process have worked since the system started; 0 if it does not say."""
    usable = os.sched_getaffinity(0)
    ticks = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        for line in file:
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in usable:
                # Of users, nice ones, the system, and interrupts.
                ticks += sum(int(counts[n]) for n in (0, 1, 2, 5, 6))
    return ticks / os.sysconf("SC_CLK_TCK")


def _measured(budget_s: float, tell: Tell) -> Numbers:
    if (busy := _busy()) > _MOST_BUSY:
        raise quiet.Disturbed(
            f"a machine is measured while it is quiet; other programs use {busy:.2g} of its "
            f"{machine.cores()} cores now. Measure again when they have ended"
        )
    frontends = {
        name: dispatch.frontend(name)
        for name in FRAMEWORKS
        if importlib.util.find_spec(name) is not None
    }
    present = [name for name in frontends if _on_cores(frontends[name])]
    if not present:
        why = "neither is installed"
        if frontends:
            why = f"{' and '.join(frontends)} compute elsewhere by default: set JAX_PLATFORMS=cpu for JAX"
        raise UnsupportedError(f"cores are measured with JAX or PyTorch on a CPU; {why}")
    if limits := _limits(frontends):
        raise quiet.Disturbed(
            f"a machine is measured with all cores that this process may use, {machine.cores()}; "
            f"{', '.join(limits)}. Measure again without that"
        )
    tell("copies")
    known, fresh = copies()
    shared: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    costs: dict[str, float] = {}
    each = budget_s / (len(present) * (len(WORK) + 3))
    for framework in present:
        frontend = frontends[framework]
        for kind in WORK:
            tell(f"{framework}: {kind}")
            one, every, estimated = work_ns(frontend, kind, each)
            now = machine.numbers().speed(framework, kind)
            speeds[f"{framework} {kind}"] = now * estimated / one
            named = "rows" if (framework, kind) == ("torch", "elements") else str(kind)
            if named in machine.ASSUMED.shared and machine.cores() > 1:
                shared.setdefault(named, []).append(share(one / every, machine.cores()))
        if "fork_ns" not in costs and machine.cores() > 1:
            tell(f"{framework}: lanes")
            costs = lanes_ns(frontend) | fork_ns(frontend, each)
        if "steps" in frontend.works() and machine.cores() > 1:
            tell(f"{framework}: steps of recurrent layers")
            costs |= step_ns(frontend, each)
    about = [f"{name} {frontends[name].about()['version']}" for name in present]
    before = machine.numbers()  # of a framework that is not installed here they stay
    return replace(
        before,
        copy_bytes_per_ns=known,
        fresh_copy_bytes_per_ns=fresh,
        shared={**before.shared, **{k: statistics.mean(v) for k, v in shared.items()}},
        speeds={**before.speeds, **speeds},
        measured=f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ} with {', '.join(about)}",
        **{name: _possible(name, ns) for name, ns in costs.items()},
    )


def _possible(name: str, ns: float) -> float:
    """A difference of two times, which noise makes nothing or less, as no machine has it."""
    assumed: float = getattr(machine.ASSUMED, name)
    return min(max(ns, 2 * assumed / figures.FARTHEST), assumed * figures.FARTHEST / 2)


def share(speed_up: float, cores: int) -> float:
    """What of a work more cores share, by Amdahl's law, if so many are so much faster than one."""
    found = (1.0 - 1.0 / max(speed_up, 1.0)) / (1.0 - 1.0 / cores)
    return min(found, 0.99)


def copies() -> tuple[float, float]:
    """Bytes a nanosecond that one core copies into memory in use, and into memory never touched."""
    source, used = (mmap.mmap(-1, _COPIED) for _ in range(2))
    for block in (source, used):
        block.write(b"\1" * _COPIED)
    took: tuple[list[int], list[int]] = ([], [])
    for _ in range(7):
        _copy(used, source, took[0])
        with mmap.mmap(-1, _COPIED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            _copy(fresh, source, took[1])
    source.close()
    used.close()
    known, new = (_COPIED / statistics.median(times) for times in took)
    return known, min(new, known)


def _copy(to: mmap.mmap, source: mmap.mmap, took: list[int]) -> None:
    places = [ctypes.c_char.from_buffer(block) for block in (to, source)]
    start = time.perf_counter_ns()
    ctypes.memmove(ctypes.addressof(places[0]), ctypes.addressof(places[1]), _COPIED)
    took.append(time.perf_counter_ns() - start)


def _arguments(frontend: Frontend, shapes: Any) -> tuple[Any, ...]:
    return tuple(frontend.example(shape, "float32", n) * by for n, (shape, by) in enumerate(shapes))


def _opponents(frontend: Frontend, function: Any, args: Any) -> tuple[Any, Any]:
    """Calls with one core, and with all."""
    runs = frontend.opponents(function, args, {})
    one = next(run for name, run in runs.items() if "one" in name)
    return one, next(iter(runs.values()))


def _on_cores(frontend: Frontend) -> bool:
    """Whether a framework computes on a CPU's cores where nobody says where."""
    args = _arguments(frontend, WORK["serial"])
    return any("one" in name for name in frontend.opponents(frontend.works()["serial"], args, {}))


def _limits(frontends: Mapping[str, Frontend]) -> list[str]:
    """What keeps programs of this process from all of its cores."""
    cores = machine.cores()
    found = [
        f"{name}={os.environ[name]} is set in the environment"
        for name in machine.THREAD_VARIABLES
        if os.environ.get(name, "").isdigit() and int(os.environ[name]) < cores
    ]
    for name, frontend in frontends.items():
        threads = frontend.about().get("threads", cores)
        if threads < cores and not found:
            found.append(f"{name} has {threads} threads")
    quota = machine.quota_cores()
    if quota is not None and quota < cores:
        found.append(f"the container may use {quota:.3g} cores' worth of time")
    return found


def work_ns(frontend: Frontend, kind: machine.Kind, budget_s: float) -> tuple[float, float, float]:
    """Nanoseconds of one kind of work: on one core, on all, and on one as operators' costs have it."""
    function, args = frontend.works()[kind], _arguments(frontend, WORK[kind])
    one, every = _opponents(frontend, function, args)
    took = _fastest({"one": one, "all": every}, budget_s)
    graph = api.graph(api.schedule(function, strategy=Sequential(), lanes=2), *args)
    return took["one"], took["all"], sum(region.cost_ns for region in graph.regions)


def fork_ns(frontend: Frontend, budget_s: float) -> dict[str, float]:
    """What a short product takes longer on all cores than its work alone would."""
    function, args = frontend.works()["products"], _arguments(frontend, _SMALL_PRODUCT)
    one, every = _opponents(frontend, function, args)
    took = _fastest({"one": one, "all": every}, budget_s)
    gain = machine.ASSUMED.speed_up("products", machine.cores())
    return {"fork_ns": took["all"] - took["one"] / gain}


def step_ns(frontend: Frontend, budget_s: float) -> dict[str, float]:
    """What a step of a recurrent layer loses for each further thread that shares it."""
    function, args = frontend.works()["steps"], _arguments(frontend, _RECURRENT)
    one, every = _opponents(frontend, function, args)
    # How long threads wait for each other varies by itself: the shortest time is of luck, not of quiet.
    took = {
        n: statistics.median(t) for n, t in _times({"one": one, "all": every}, budget_s).items()
    }
    steps, cores = _RECURRENT[0][0][0], machine.cores()
    lost = took["all"] - took["one"] / machine.ASSUMED.speed_up("products", cores)
    return {"step_ns": lost / steps / (cores - 1)}


def lanes_ns(frontend: Frontend) -> dict[str, float]:
    """What it costs to go to lanes, to wake a second one, to pass a value, and to have no lanes."""
    works = frontend.works()
    args = _arguments(frontend, _LITTLE)
    pair, chain = works["pair"], works["chain"]
    took = _apart(
        frontend,
        {
            "original": pair,
            "one lane": api.schedule(pair, _Deal(1), lanes=2),
            "two lanes": api.schedule(pair, _Deal(2), lanes=2),
            "chain on one": api.schedule(chain, _Deal(1), lanes=2),
            "chain on two": api.schedule(chain, _Deal(2), lanes=2),
        },
        args,
    )
    serial = works["serial"]
    alone = _apart(
        frontend,
        {"original": serial, "one lane": api.schedule(serial, _Deal(1), lanes=2)},
        _arguments(frontend, _HANDED_OVER),
    )
    lanes = took["one lane"] - took["original"]
    wake = took["two lanes"] - took["one lane"]
    handed = (took["chain on two"] - took["chain on one"] - wake) / _CROSSINGS
    return {
        "lanes_ns": lanes,
        "program_ns": lanes + alone["original"] - alone["one lane"],
        "lane_wake_ns": wake,
        "hand_over_ns": handed,
    }


def _fastest(calls: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, float]:
    """Least nanoseconds of a call: what else runs on a machine only ever adds to them."""
    return {name: min(times) for name, times in _times(calls, budget_s).items()}


def _times(calls: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, list[float]]:
    """Nanoseconds of calls, in turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles
    until = time.perf_counter() + budget_s
    while not all(took.values()) or time.perf_counter() < until:
        for name, call in calls.items():
            call()  # wakes threads
            start = time.perf_counter_ns()
            call()
            took[name].append(time.perf_counter_ns() - start)
    return took


def _apart(
    frontend: Frontend, calls: Mapping[str, Any], args: Any, rounds: int = 200
) -> dict[str, float]:
    """Median nanoseconds of single calls, a pause before each."""
    took: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(3):
        for call in calls.values():
            frontend.wait(call(*args))
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(_PAUSE_S)
            start = time.perf_counter_ns()
            frontend.wait(call(*args))
            took[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(times) for name, times in took.items()}
