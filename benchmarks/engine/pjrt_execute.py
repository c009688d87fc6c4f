"""What one XLA executable costs as an engine step: ``make bench-pjrt`` (builds the C++ program).

The program ``dfx_pjrt_bench`` runs a step that does nothing, an XLA executable that writes its output
in place, and one whose output is copied; all through the engine, without Python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the built dfx_pjrt_bench")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=2000, help="a round")
    parser.add_argument("--out", type=Path, help="default: results/pjrt-execute-<date>.json")
    options = parser.parse_args()

    from common import environment, measure, records

    stamp = environment.stamp()
    print(environment.summary(stamp))
    with measure.Contention() as contention:
        done = subprocess.run(
            [options.program, str(options.rounds), str(options.calls)],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    printed = json.loads(done.stdout)
    calls = printed.pop("calls_a_round")
    switches = printed.pop("switches_a_call")
    samples = {name: [ns / 1e3 for ns in values] for name, values in printed.items()}
    statistics = {name: measure.statistics(values) for name, values in samples.items()}
    for name, s in statistics.items():
        waits = f"{switches[name]:.4f} waits for another thread a call"
        print(f"{name:22} median {s['median']:7.3f} us   min {s['min']:7.3f} us   {waits}")
    base = statistics["no_op_step"]["median"]
    derived = {
        f"{name}_over_no_op_us": statistics[name]["median"] - base
        for name in statistics if name != "no_op_step"
    }  # fmt: skip
    record = {
        "format": 1, "benchmark": "pjrt-execute", "environment": stamp, "rounds": options.rounds,
        "calls_per_sample": calls, "contention": contention.as_dict(), "derived": derived,
        "switches_a_call": switches, "statistics_us": statistics, "samples_us": samples,
    }  # fmt: skip
    print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
