"""Paired timing: every round times each variant once, in an order drawn anew, in one process.

What disturbs a machine for a while then disturbs all variants alike; ratios are formed from samples
of the same rounds, and their spread comes from resampling rounds, not single samples. What a variant
leaves behind (threads that still spin, caches) meets each other one equally often: hence the drawn
order, and untimed calls before each sample.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dynaflow_xla.machine import distance

Run = Callable[[], Any]

STEADY = {"warm_ms": 20.0, "sample_ms": 30.0}
"""For ``paired``: samples of a program's steady speed, each of several calls: on some machines the threads of
a pool wait for each other on one core in every third call, and in the first ones after a rest."""


def one_thread(fn: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    """Returns a run of ``fn``, jitted for a client whose pool has one thread.

    This is the second baseline: for small work, one thread is often faster than XLA's pool, and a
    schedule that only beats the pool has gained nothing.
    """
    from dynaflow_xla.ffi import xla

    return _on_device(fn, args, xla.lane_device(0))


def in_caller(fn: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    """Returns a run of ``fn``, jitted for a client that runs programs on the thread that calls them.

    That is ``jax_cpu_enable_async_dispatch=False``, which a process has to choose before its first
    array: a hand-over less for who waits for the results anyway.
    """
    return _on_device(fn, args, _caller_device())


@functools.cache
def _caller_device() -> Any:
    from jaxlib import xla_client

    return xla_client.make_cpu_client(asynchronous=False).local_devices()[0]


def _on_device(fn: Callable[..., Any], args: tuple[Any, ...], device: Any) -> Run:
    from jax.sharding import SingleDeviceSharding

    placed = SingleDeviceSharding(device)
    jitted = jax.jit(fn, in_shardings=placed, out_shardings=placed)
    moved = jax.device_put(args, device)

    def run() -> Any:
        return jax.block_until_ready(jitted(*moved))

    return run


def blocking(fn: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    """Returns a run of ``fn`` that ends when the results are there."""

    def run() -> Any:
        return jax.block_until_ready(fn(*args))

    return run


def one_blas_thread() -> AbstractContextManager[Any]:
    """Returns a context in which OpenBLAS, hence LAPACK inside XLA:CPU, uses one thread."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")  # type: ignore[no-any-return]


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """So many intra-op threads of PyTorch."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Contention:
    """Measures how much of the machine *other* processes use while a measurement runs (Linux).

    Args:
        children: Processes that take part in the measurement and live longer; they count as this one.

    Attributes:
        own_cores: Cores that this process and its ended children kept busy, on average.
        others_cores: Cores that all other processes kept busy; None where it is not known.
        steal_cores: Cores that the hypervisor took; None where it is not known.
    """

    def __init__(self, children: Sequence[int] = ()) -> None:
        self._children = tuple(children)

    def __enter__(self) -> Contention:
        self.own_cores = 0.0
        self.others_cores: float | None = None
        self.steal_cores: float | None = None
        self._machine = _machine_seconds()
        self._own, self._wall = self._own_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._wall
        own = self._own_seconds() - self._own
        machine = _machine_seconds()
        self.own_cores = own / wall
        if machine is not None and self._machine is not None:
            self.others_cores = max(0.0, machine[0] - self._machine[0] - own) / wall
            self.steal_cores = (machine[1] - self._machine[1]) / wall

    def _own_seconds(self) -> float:
        return sum(os.times()[:4]) + sum(map(_seconds_of, self._children))

    def as_dict(self) -> dict[str, float | None]:
        """Returns the three numbers, rounded."""
        names = ("own_cores", "others_cores", "steal_cores")
        values = {name: getattr(self, name) for name in names}
        return {name: None if x is None else round(x, 3) for name, x in values.items()}


def _seconds_of(process: int) -> float:
    """The seconds that a running process was busy; 0 where it is not known."""
    try:
        # Behind the name, which may hold anything, parentheses too.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _machine_seconds() -> tuple[float, float] | None:
    """Returns the seconds that all cores together were busy, and were stolen, since boot."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, steal = fields
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


class Samples(dict[str, list[float]]):
    """Name -> milliseconds a call, one value a round.

    Attributes:
        far: The same of rounds while the hypervisor had the two cores far from each other.
        rounds: How many count.
        far_counted: How many of these were such all the same: the cores did not come near.
        round_trips_ns: Of all rounds in order how far they were, see ``dynaflow_xla.machine.distance``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, []) for name in names)
        self.far: dict[str, list[float]] = {name: [] for name in self}
        self.rounds = self.far_counted = 0
        self.round_trips_ns: list[float] = []

    def add(self, taken: Mapping[str, float], trips_ns: Sequence[float], spare: int) -> bool:
        """Adds a round.

        Args:
            taken: Its samples.
            trips_ns: How far the cores were before it, and after.
            spare: So many rounds of far cores are kept apart.

        Returns:
            Whether it counts.
        """
        kept_apart = len(self.round_trips_ns) - self.rounds
        self.round_trips_ns.append(round(max(trips_ns), 1))
        far = distance.is_far(self.round_trips_ns[-1])
        counts = not far or kept_apart >= spare
        self.rounds += counts
        self.far_counted += far and counts
        for name, ms in taken.items():
            (self if counts else self.far)[name].append(ms)
        return counts

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "samples_ms": dict(self), "samples_far_ms": self.far, "far_counted": self.far_counted,
            "round_trips_ns": self.round_trips_ns,
        }  # fmt: skip


def paired(
    runs: dict[str, Run],
    rounds: int,
    *,
    sample_ms: float = 2.0,
    warmup: int = 3,
    warm_ms: float = 0.0,
    rest_ms: float = 0.0,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    tick: Callable[[], None] | None = None,
) -> tuple[Samples, int]:
    """Times the runs against each other.

    A virtual machine's two cores are near to each other or far, for seconds at a time, as the hypervisor has
    it. Rounds while they are far are kept apart, and taken again: up to three times as many as are wanted.

    Args:
        runs: Name -> run.
        rounds: Samples of each.
        sample_ms: A sample repeats the call until it takes about this long, so that the clock and
            the loop do not count.
        warmup: Calls of each before the first sample.
        warm_ms: Before each sample the same run is called untimed for so long, once at least. Without, a
            sample tells how a program begins whose threads rested while other variants ran.
        rest_ms: Before each sample rest so long. A thread of OpenBLAS spins for about 100 ms (2^28
            clock ticks) after each call it took part in, whoever runs then: without the rest a
            sample would carry the cost of the variant before it.
        contexts: Name -> what a run's samples are taken in; entering it is not timed.
        tick: Called after each round that counts.

    Returns:
        The samples; and the calls in one sample.
    """
    around = dict.fromkeys(runs, nullcontext) | dict(contexts or {})
    fastest = math.inf
    for name, run in runs.items():
        with around[name]():
            for _ in range(warmup):
                t0 = time.perf_counter()
                run()
                fastest = min(fastest, (time.perf_counter() - t0) * 1e3)
    calls = max(1, min(2000, math.ceil(sample_ms / fastest)))
    samples = Samples(runs)
    names = list(runs)
    rng = np.random.default_rng(0)
    enabled = gc.isenabled()
    gc.disable()
    try:
        while samples.rounds < rounds:
            taken = {}
            begin_ns = distance.round_trip_ns()
            for name in rng.permutation(names).tolist():
                run = runs[name]
                with around[name]():
                    if rest_ms > 0.0:
                        time.sleep(rest_ms / 1e3)
                    warm(run, warm_ms)
                    t0 = time.perf_counter()
                    for _ in range(calls):
                        run()
                    taken[name] = (time.perf_counter() - t0) * 1e3 / calls
            trips_ns = begin_ns, distance.round_trip_ns()
            if samples.add(taken, trips_ns, spare=3 * rounds) and tick is not None:
                tick()
    finally:
        if enabled:
            gc.enable()
    return samples, calls


def warm(run: Run, warm_ms: float) -> None:
    """Calls ``run`` for so many milliseconds, once at least."""
    end = time.perf_counter() + warm_ms / 1e3
    run()
    while time.perf_counter() < end:
        run()


def first_calls(
    runs: dict[str, Run],
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, float]:
    """Calls each run once; returns the milliseconds that took, compiling and choosing included."""
    around = dict.fromkeys(runs, nullcontext) | dict(contexts or {})
    made = {}
    for name, run in runs.items():
        with around[name]():
            t0 = time.perf_counter()
            run()
            made[name] = (time.perf_counter() - t0) * 1e3
    return made


def timed(
    runs: dict[str, Run],
    baselines: Mapping[str, Sequence[str]],
    rounds: int,
    *,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    rest_ms: float = 0.0,
    sample_ms: float = 2.0,
    warm_ms: float = 0.0,
    tick: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Times the runs of one case; returns what every result file says about a case.

    Args:
        runs: Name -> run.
        baselines: Name of a scheduled run -> the runs that it is compared with.
        rounds: Samples of each.
        contexts, rest_ms, sample_ms, warm_ms, tick: As for ``paired``.
    """
    if rounds < 2:
        raise ValueError(f"a ratio needs two rounds or more; got {rounds}")
    with Contention() as contention:
        samples, calls = paired(
            runs,
            rounds,
            rest_ms=rest_ms,
            sample_ms=sample_ms,
            warm_ms=warm_ms,
            contexts=contexts,
            tick=tick,
        )
    return {
        "calls_per_sample": calls,
        **samples.as_dict(),
        "statistics_ms": {name: statistics(values) for name, values in samples.items()},
        "ratios": {name: ratio(samples, name, among) for name, among in baselines.items()},
        "rest_ms": rest_ms,
        "warm_ms": warm_ms,
        "contention": contention.as_dict(),
    }


def timed_us(
    groups: Mapping[str, dict[str, Run]], rounds: int, tick: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Times groups of runs of some microseconds; returns what a result file says about all of them.

    Args:
        groups: Name of a group -> its runs, which take turns.
        rounds: Samples of each run, of calls for a millisecond.
        tick: Called with a group's name before it is measured.
    """
    samples: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    with Contention() as contention:
        for name, runs in groups.items():
            if tick is not None:
                tick(name)
            took, calls[name] = paired(runs, rounds, sample_ms=1.0, warmup=50)
            samples |= {run: [ms * 1e3 for ms in values] for run, values in took.items()}
    return {
        "calls_per_sample": calls,
        "contention": contention.as_dict(),
        "statistics_us": {name: statistics(values) for name, values in samples.items()},
        "samples_us": samples,
    }


def statistics(samples: Sequence[float]) -> dict[str, float]:
    """Returns median, quartiles and extremes, in the unit of the samples."""
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {
        "median": float(median), "q1": float(q1), "q3": float(q3), "iqr": float(q3 - q1),
        "min": float(min(samples)), "max": float(max(samples)),
    }  # fmt: skip


def ratio(
    samples: dict[str, list[float]], scheduled: str, baselines: Sequence[str], resamples: int = 2000
) -> dict[str, Any]:
    """Returns the scheduled median over the better baseline's, with a 95 % interval.

    Which baseline is better is seen in one half of the rounds, and what it is compared with is its median
    in the other half; both ways, and the geometric mean. The smallest of several medians of the same rounds
    is too small by chance: the original itself, timed once more, would lose against it.

    The interval is a bootstrap over rounds: each resample draws rounds, for all variants the same.

    Args:
        samples: Name -> milliseconds, one a round.
        scheduled: Whose ratio.
        baselines: The better one is the opponent.
        resamples: Of the bootstrap.
    """
    table = np.asarray([samples[name] for name in (scheduled, *baselines)])  # [variants, rounds]
    if table.shape[1] < 2:
        raise ValueError("a ratio needs two rounds: one to choose the opponent, one to compare")
    best = min(baselines, key=lambda name: float(np.median(samples[name])))
    rng = np.random.default_rng(0)
    halves = [table[:, start::2] for start in (0, 1)]
    # Each half is drawn from itself: a round in both would choose and be compared.
    drawn = [half[:, rng.integers(0, half.shape[1], (resamples, half.shape[1]))] for half in halves]
    low, high = np.percentile(_of_halves([np.moveaxis(d, 1, 0) for d in drawn]), [2.5, 97.5])
    return {
        "ratio": float(_of_halves([half[None] for half in halves])[0]),
        "low": float(low),
        "high": float(high),
        "baseline": best,
    }


def _of_halves(halves: Sequence[Any]) -> Any:
    """The ratios of the first variant, see ``ratio``; each half is [tables, variants, rounds]."""
    medians = [np.median(half, axis=2) for half in halves]  # [tables, variants]
    rows = np.arange(len(medians[0]))
    made = [
        there[:, 0] / there[rows, 1 + here[:, 1:].argmin(axis=1)]
        for here, there in (medians, medians[::-1])
    ]
    return np.sqrt(made[0] * made[1])
