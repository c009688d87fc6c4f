"""What the engine itself costs: ``python benchmarks/engine/overhead.py [--rounds N] [--out FILE]``.

``--old CHECKOUT`` compares with another version: both measure everything in turns, each in a process of its
own, as in ``cpu/versions.py``, which says what a checkout needs.

Three levels, all without work in the steps:

- a program of C steps that do nothing, called from Python (``_engine.Program.run``); the cost of one
  step and of one cross-lane hand-off is the slope between a short and a long program;
- a compiled JAX function ``jit(x + 1)``, and the same with a program of one or two C steps behind it,
  through the custom call ``dfx_run``: the difference is what a plan adds inside a ``jit``;
- a schedule of two tiny XLA regions on two lanes, at top level and inside somebody's ``jit``.

``native.py`` measures the engine without Python.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

ROOT = Path(__file__).resolve().parents[2]
STEPS = 1000
GOALS = {
    "c_1_lane_2_steps_added_inside_jit_us": 20.0,
    "c_2_lanes_2_steps_added_inside_jit_us": 20.0,
}


def no_op_program(lanes: int, steps: int) -> Any:
    """Returns a program of ``steps`` empty C steps that go round the lanes, each after the last."""
    from dynaflow_xla.ffi import _engine

    handoffs = steps - 1 if lanes > 1 else 0
    program = _engine.Program(
        lanes=lanes, events=handoffs, args=1, results=1, scratch_bytes=0,
        name=f"no-op, {steps} steps, {lanes} lanes",
    )  # fmt: skip
    source = program.add_buffer("arg", 0, 0, 4)
    target = program.add_buffer("result", 0, 0, 4)
    for step in range(steps):
        lane = step % lanes
        if handoffs and step > 0:
            program.add_wait(lane, step - 1)
        program.add_c_launch(lane, f"step {step}", 0, 0, [source], [target])
        if handoffs and step < handoffs:
            program.add_record(lane, step)
    program.finish()
    return program


def engine_runs() -> dict[str, Callable[[], Any]]:
    """Returns runs of empty programs from Python."""
    import numpy as np

    source, target = np.zeros(16, np.float32), np.zeros(16, np.float32)
    addresses = [source.ctypes.data], [target.ctypes.data]

    def run(lanes: int, steps: int) -> Callable[[], Any]:
        program = no_op_program(lanes, steps)
        # The arrays travel with the closure: the program knows addresses only.
        return lambda _keep=(source, target): program.run(*addresses)

    return {
        "c_1_lane_1_step": run(1, 1),
        "c_1_lane_2_steps": run(1, 2),
        f"c_1_lane_{STEPS}_steps": run(1, STEPS),
        "c_2_lanes_2_steps": run(2, 2),
        f"c_2_lanes_{STEPS}_steps": run(2, STEPS),
    }


def custom_call_runs() -> dict[str, Callable[[], Any]]:
    """Returns runs of empty programs through ``dfx_run`` in a compiled JAX function."""
    import jax
    import jax.numpy as jnp

    from dynaflow_xla.ffi import xla

    xla.ensure_registered()
    x = jnp.zeros(1, jnp.float32)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def through(lanes: int, steps: int) -> Callable[[], Any]:
        program = no_op_program(lanes, steps)
        name = f"benchmark-no-op-{lanes}-{steps}"
        program.register(name)
        call = jax.jit(lambda v: jax.ffi.ffi_call(xla.RUN_TARGET, spec)(v + 1, plan=name))
        jax.block_until_ready(call(x))  # resolves the name while the program is certainly alive
        return lambda _keep=program: jax.block_until_ready(call(x))

    add = jax.jit(lambda v: v + 1)
    return {
        "jit_x_plus_1": lambda: jax.block_until_ready(add(x)),
        "jit_x_plus_1_c_1_lane_1_step": through(1, 1),
        "jit_x_plus_1_c_1_lane_2_steps": through(1, 2),
        "jit_x_plus_1_c_2_lanes_2_steps": through(2, 2),
    }


def schedule_runs() -> tuple[dict[str, Callable[[], Any]], str]:
    """Returns runs of two tiny XLA regions on two lanes, and the plan as text."""
    import jax
    import jax.numpy as jnp

    import dynaflow_xla as dfx

    class TwoLanes(dfx.Strategy):
        """Region after region to lane 0, 1, 0, 1, ..."""

        def schedule(self, s: Any) -> None:
            turn = 0
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=turn % 2)
                    turn += 1

    def tiny(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        with dfx.mark("first"):
            a = jnp.sin(x) + 1
        with dfx.mark("second"):
            b = jnp.cos(y) + 1
        return a, b

    x, y = jnp.ones(64), jnp.ones(64)
    plain = jax.jit(tiny)
    fast = dfx.schedule(plain, strategy=TwoLanes(), lanes=2)
    used = {i.lane for i in dfx.plan(fast, x, y).instructions if hasattr(i, "lane")}
    if used != {0, 1}:
        raise SystemExit(f"the plan must use lanes 0 and 1; it uses {sorted(used)}")
    dfx.verify(fast, x, y)
    outer = jax.jit(lambda p, q: jax.tree.map(lambda v: v * 2, fast(p, q)))
    outer_plain = jax.jit(lambda p, q: jax.tree.map(lambda v: v * 2, plain(p, q)))
    runs = {
        "xla_plain_top_level": lambda: jax.block_until_ready(plain(x, y)),
        "xla_2_lanes_top_level": lambda: jax.block_until_ready(fast(x, y)),
        "xla_plain_inside_jit": lambda: jax.block_until_ready(outer_plain(x, y)),
        "xla_2_lanes_inside_jit": lambda: jax.block_until_ready(outer(x, y)),
    }
    here = str(ROOT) + os.sep
    return runs, dfx.explain(fast, x, y).replace(here, "")


def all_runs() -> tuple[dict[str, dict[str, Callable[[], Any]]], str]:
    """Returns all runs by group, and the plan of the last as text."""
    of_schedule, explained = schedule_runs()  # it makes the process's first array
    groups = {"engine": engine_runs(), "custom_call": custom_call_runs(), "schedule": of_schedule}
    return groups, explained


def serve() -> None:
    """A version's process, see ``versions.answering``."""
    from cpu import versions

    versions.answering(_questions)


def _questions() -> dict[str, Callable[[Any], Any]]:
    runs = {name: run for group in all_runs()[0].values() for name, run in group.items()}
    counts: dict[str, int] = {}

    def make(sample_us: float) -> dict[str, int]:
        """Calls everything until it is warm; how many calls take that long."""
        for name, run in runs.items():
            fastest = float("inf")
            for _ in range(50):
                begin = time.perf_counter()
                run()
                fastest = min(fastest, time.perf_counter() - begin)
            counts[name] = max(1, min(1000, round(sample_us / (fastest * 1e6))))
        return counts

    def turn(order: list[str]) -> dict[str, float]:
        """Microseconds a call."""
        took = {}
        for name in order:
            run, calls = runs[name], counts[name]
            for _ in range(
                20
            ):  # lanes and caches are awake, and what the other version left is gone
                run()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            took[name] = (time.perf_counter() - begin) / calls * 1e6
        return took

    return {"make": make, "turn": turn}


def derived_of(medians: Mapping[str, float]) -> dict[str, float]:
    """What the engine adds, from microseconds of the runs."""

    def slope_ns(short: str, long: str, units: int) -> float:
        return (medians[long] - medians[short]) * 1e3 / units

    def added_us(without: str, run: str) -> float:
        return medians[run] - medians[without]

    return {
        "step_ns": slope_ns("c_1_lane_1_step", f"c_1_lane_{STEPS}_steps", STEPS - 1),
        "step_and_handoff_ns": slope_ns("c_2_lanes_2_steps", f"c_2_lanes_{STEPS}_steps", STEPS - 2),
        **{
            f"c_{kind}_added_inside_jit_us": added_us("jit_x_plus_1", f"jit_x_plus_1_c_{kind}")
            for kind in ("1_lane_2_steps", "2_lanes_2_steps")
        },
        **{
            f"xla_2_lanes_added_{where}_us": added_us(f"xla_plain_{where}", f"xla_2_lanes_{where}")
            for where in ("top_level", "inside_jit")
        },
    }


def compared(both: Mapping[str, Any], rounds: int, sample_us: float = 2000.0) -> dict[str, Any]:
    """Measures the versions "old" and "new" in turns.

    Returns:
        Microseconds of every round, their statistics and what follows of the medians, by version; and of
        new to old the median of the rounds' ratios and its quartiles, by run.
    """
    import random
    import statistics as of_numbers

    from common import measure

    calls = {which: version.ask("make", sample_us) for which, version in both.items()}
    names = sorted(set(calls["old"]) & set(calls["new"]))
    samples: dict[str, dict[str, list[float]]] = {
        which: {name: [] for name in names} for which in both
    }
    for _ in range(rounds):
        # Run by run: a core's speed changes by a quarter within seconds.
        for name in random.sample(names, len(names)):
            for which in random.sample(list(both), len(both)):
                samples[which][name].append(both[which].ask("turn", [name])[name])
    statistics = {
        which: {name: measure.statistics(values) for name, values in of.items()}
        for which, of in samples.items()
    }
    ratios = {
        name: [n / o for n, o in zip(samples["new"][name], samples["old"][name], strict=True)]
        for name in names
    }
    return {
        "calls_per_sample": calls,
        "new_to_old": {name: of_numbers.median(of) for name, of in ratios.items()},
        "new_to_old_quartiles": {
            name: of_numbers.quantiles(of, n=4) for name, of in ratios.items()
        },
        "derived": {
            which: derived_of({name: s["median"] for name, s in of.items()})
            for which, of in statistics.items()
        },
        "statistics_us": statistics,
        "samples_us": samples,
    }


def compare(old: Path, new: Path, rounds: int, out: Path | None) -> int:
    """Compares two checkouts, prints and writes; returns the exit status."""
    from common import environment, measure, records
    from cpu import versions
    from rich.console import Console
    from rich.table import Table

    console = Console()
    both = {
        which: versions.Version(path.resolve(), "engine.overhead")
        for which, path in (("old", old), ("new", new))
    }
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    started = time.perf_counter()
    with measure.Contention([version.process.pid for version in both.values()]) as contention:
        made = compared(both, rounds)
    for version in both.values():
        version.end()
    table = Table("run", "old us", "new us", "new / old", "quartiles")
    for name, ratio in made["new_to_old"].items():
        middle = [made["statistics_us"][which][name]["median"] for which in both]
        low, _, high = made["new_to_old_quartiles"][name]
        row = [f"{us:.2f}" for us in middle]
        table.add_row(name, *row, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
    for name in made["derived"]["new"]:
        table.add_row(name, *(f"{made['derived'][which][name]:.2f}" for which in both), "", "")
    console.print(table)
    console.print(f"contention: {contention.as_dict()}")
    record = {
        "format": 1, "benchmark": "engine-overhead-versions", "environment": stamp, "rounds": rounds,
        "commits": {which: version.commit for which, version in both.items()},
        "seconds": time.perf_counter() - started, "contention": contention.as_dict(), **made,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, out)}")
    return 0


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="default: results/engine-overhead-<date>.json")
    parser.add_argument("--old", type=Path, help="a checkout that can be imported, to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, help="another; default: this one")
    options = parser.parse_args()
    if options.old is not None:
        return compare(options.old, options.new, options.rounds, options.out)

    from common import environment, measure, records
    from rich.console import Console
    from rich.table import Table

    console = Console()
    groups, explained = all_runs()
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    started = time.perf_counter()
    timed = measure.timed_us(
        groups, options.rounds, lambda name: console.print(f"measuring {name}")
    )
    statistics = timed["statistics_us"]
    derived = derived_of({name: s["median"] for name, s in statistics.items()})
    table = Table("run", "median us", "IQR", "min")
    for name, s in statistics.items():
        table.add_row(name, *(f"{s[k]:.2f}" for k in ("median", "iqr", "min")))
    console.print(table)
    for name, value in derived.items():
        goal = GOALS.get(name)
        verdict = "" if goal is None else f" (<= {goal:g}: {'met' if value <= goal else 'MISSED'})"
        console.print(f"{name}: {value:.1f}{verdict}")
    console.print(f"contention: {timed['contention']}")

    record = {
        "format": 1, "benchmark": "engine-overhead", "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, "goals": GOALS, "derived": derived, **timed,
        "schedule": explained,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
