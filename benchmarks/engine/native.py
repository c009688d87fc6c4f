"""What the engine costs without Python, from C++ (csrc/bench): ``make bench-engine``.

Runs the benchmark program, adds statistics and the stamp, and writes the result. The costs inside
Python and JAX are measured by ``overhead.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

STEPS = 1000
GOALS_NS = {"step": 30.0, "hand_over": 1000.0}


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the built dfx_engine_bench")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, help="default: results/engine-native-<date>.json")
    options = parser.parse_args()

    import numpy as np
    from common import environment, measure, records
    from rich.console import Console
    from rich.table import Table

    console = Console()
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    with measure.Contention() as contention:
        done = subprocess.run(
            [options.program.resolve(), str(options.rounds)], stdout=subprocess.PIPE, check=True
        )
    samples: dict[str, list[float]] = json.loads(done.stdout)

    def slope(short: str, long: str, units: int) -> list[float]:
        return [(b - a) / units for a, b in zip(samples[short], samples[long], strict=True)]

    # Samples of one round belong together, so the slope is formed in each round.
    derived = {
        "step": slope("1_lane_1_step", "1_lane_1000_steps", STEPS - 1),
        "step_and_hand_over": slope("2_lanes_2_steps", "2_lanes_1000_steps", STEPS - 2),
    }
    statistics = {}
    table = Table("nanoseconds", "median", "p10", "p90", "goal")
    for name, values in {**derived, **samples}.items():
        p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
        statistics[name] = {"median": median, "p10": p10, "p90": p90, "samples": len(values)}
        goal = GOALS_NS.get(name)
        verdict = "" if goal is None else f"<= {goal:.0f}: {'met' if median <= goal else 'MISSED'}"
        table.add_row(name, *(f"{x:.1f}" for x in (median, p10, p90)), verdict)
    console.print(table)
    console.print(f"contention: {contention.as_dict()}")

    record = {
        "format": 1, "benchmark": "engine-native", "environment": stamp, "rounds": options.rounds,
        "contention": contention.as_dict(), "goals_ns": GOALS_NS, "statistics_ns": statistics,
        "samples_ns": samples,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
