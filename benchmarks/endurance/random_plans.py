"""Random programs and plans against a reference machine, and changed plans, which have to be refused.

    python -P benchmarks/endurance/random_plans.py [--minutes 5] [--seed 0] [--out FILE.json]

Of each random program: plans of random lanes and orders, whole and split in nano-batches, run by a machine
that starts whatever the plan allows (tests/property/test_plan_runs.py); values are those of the program, bit
for bit. Of each split plan every kind of change that its meaning does not survive is shown to the validator.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dynaflow_xla.errors import PlanError
from dynaflow_xla.planning.validate import validate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests/support", "tests/property")]

import test_plan_runs as runs  # noqa: E402
from common.environment import stamp  # noqa: E402
from common.records import save  # noqa: E402


def equal(machine: Any, want: Any) -> bool:
    """Whether a plan makes the program's values."""
    return all(np.array_equal(a, b) for a, b in zip(machine.run(), want, strict=True))


def main() -> None:
    """Runs until the time is over; the result is written every ten seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begin = time.monotonic()
    counts = dict.fromkeys(("programs", "plans", "runs", "wrong", "mutants", "missed"), 0)
    bad: list[str] = []
    record = {
        "benchmark": "random-plans", "first_seed": given.seed, "environment": stamp(),
        "counts": counts, "bad": bad,
    }  # fmt: skip
    saved, seed = begin, given.seed
    while time.monotonic() - begin < 60 * given.minutes:
        seed += 1
        draw = random.Random(seed)
        ops, lanes, fine = draw.randint(1, 16), draw.randint(1, 4), draw.random() < 0.5
        graph = runs.Program(seed, ops, outer_share=draw.choice((0.0, 0.2))).graph(4)
        pg = runs.cut(graph, fine)
        made: list[tuple[Any, Any, Any, Any]] = [(runs.plan_of(pg, seed, lanes), pg, {}, graph)]
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(2, 3))]
        whole, expanded = runs.split(runs.Program(seed, 1 + ops // 2), sizes, fine)
        for plan, cut in (
            (runs.plan_of(expanded.pg, seed, min(lanes, 3)), expanded),
            runs.grouped_plan(expanded, seed, min(lanes, 3)),
        ):
            made.append((plan, cut.pg, cut.merge_reads, whole))
        counts["programs"] += 2
        for plan, pg, merges, program in made:
            counts["plans"] += 1
            inputs = runs.inputs_of(program, seed)
            want = runs.evaluate(program, inputs)
            for turn in range(3):
                counts["runs"] += 1
                if not equal(runs.Machine(plan, pg, merges, inputs, random.Random(turn)), want):
                    counts["wrong"] += 1
                    bad.append(f"seed {seed}: other values")
        for what, mutant in runs.mutants(runs.plan_of(expanded.pg, seed, 2)):
            counts["mutants"] += 1
            try:
                validate(mutant, expanded.pg)
            except PlanError:
                continue
            counts["missed"] += 1
            bad.append(f"seed {seed}: {what}")
        record["seconds"] = round(time.monotonic() - begin, 1)
        if time.monotonic() - saved > 10:
            saved = time.monotonic()
            save(record, given.out)
    print(save(record, given.out), counts, *bad[:20], sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
