"""What the stand-in for the driver was used for, as result files: ``make standin-results``.

``plans``: random plans run there, searched for races and wrong values. ``matrix FILE``: the rows of
tests/frontends/jax/test_matrix.py that the plugin of the stand-in's tests wrote. There is no GPU in it, and
no number here says anything about one.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment

RESULTS = Path(__file__).resolve().parents[1] / "results"
MEANING = "on a stand-in for the driver: no GPU was used"
DELAY_US = 40
# What a kernel without values is called, by a part of its name or its library's.
LIBRARIES = {
    "cusolver": "cuSOLVER", "cudnn": "cuDNN", "cuFFT": "cuFFT", "cublas": "cuBLAS", "linalg": "jaxlib",
}  # fmt: skip


def plans(first: int, count: int, dropped: int) -> dict[str, Any]:
    """Random plans as they are; and some of them without each of their waits."""
    import driver_trace
    import kernel_plans
    from standin_plugin import DRIVER

    assert DRIVER is not None
    made_by = kernel_plans.Plans(DRIVER)
    counts: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    begin = time.monotonic()
    DRIVER.delay(DELAY_US)
    for seed in range(first, first + count):
        made = made_by.planned(seed)
        trace, right = made_by.run(made, seed)
        kernels, races = trace.kernels(), trace.races()
        waits = sum(t[0] == "wait" for t in made.stage.told)
        counts.update(
            plans=1, launches=len(kernels), waits=waits, with_a_race=bool(races), wrong=not right,
            pairs_of_launches=len(kernels) * (len(kernels) - 1) // 2,
            pairs_without_an_order=sum(
                not trace.ordered(a, b) for i, b in enumerate(kernels) for a in kernels[:i]
            ),
        )  # fmt: skip
        if races or not right:
            bad.append(f"plan {seed}: {driver_trace.report(races) or 'wrong values'}")
    DRIVER.delay(0)
    for seed in range(first, first + dropped):
        made = made_by.planned(seed)
        told = [t for t in made.stage.told if t[0] in ("step", "record", "wait")]
        for drop in range(sum(t[0] == "wait" for t in told)):
            trace, _ = made_by.run(made, seed, made_by.without(made, drop))
            needed, found = kernel_plans.unordered(told, drop), bool(trace.races())
            counts.update(waits_dropped=1, of_these_needed=needed, missed=needed and not found)
            if needed != found:
                bad.append(f"plan {seed} without its wait {drop}: {found=}, {needed=}")
    return {
        "first_seed": first, "plans_whose_waits_were_dropped": dropped, "delay_us": DELAY_US,
        "counts": dict(counts), "bad": bad, "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def _uncomputed(why: str) -> str:
    """The library or kernel that a skipped test's reason names."""
    names = why.removeprefix("Skipped: nobody computes ")
    found = next((kind for word, kind in LIBRARIES.items() if word in names), "")
    return f"{found}: {names.split(',')[0]}" if found and found != names else names


def matrix(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The outcomes of the matrix's tests, one a row."""
    counts: collections.Counter[str] = collections.Counter()
    uncomputed: collections.Counter[str] = collections.Counter()
    lines, bad = [], []
    for row in rows:
        name = row["test"].partition("[")[2].rstrip("]") or row["test"]
        values = row["test"].startswith("test_equal")
        outcome = {"passed": "right", "skipped": "not computed"}.get(row["outcome"], "failed")
        backend = name.rpartition("-")[2]
        if outcome == "failed":
            bad.append({"test": row["test"], "why": row.get("why", "")})
        elif outcome == "not computed":
            what = _uncomputed(row["why"])
            uncomputed[what] += 1
            if row.get("call") in (
                "ended",
                "AssertionError",
            ):  # a call that a library failed went on
                bad.append(
                    {"test": row["test"], "why": f"{what} was not computed, and nothing was raised"}
                )
        elif not values:
            outcome = "as it must"  # refused, or about the matrix itself
        key = f"{outcome}_{backend}" if values else outcome
        counts.update({"ran": 1, key.replace(" ", "_"): 1, "launches": row["launches"]})
        lines.append([row["test"], outcome, row["launches"]])
    return {
        "counts": dict(counts), "not_computed": dict(uncomputed), "bad": bad, "rows": lines
    }  # fmt: skip


def main() -> int:
    """Writes one result file; the exit status is 1 if something in it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plans", "matrix"))
    parser.add_argument("rows", nargs="?", type=Path)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--dropped", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    head = {"benchmark": f"gpu-standin-{options.what}", "meaning": MEANING}
    stamp = environment.stamp()
    flags = stamp["variables"].get("XLA_FLAGS", "").split()  # without a folder of this machine
    stamp["variables"]["XLA_FLAGS"] = " ".join(f for f in flags if "data_dir" not in f)
    head |= {"command": "make standin-results", "environment": stamp}
    if options.what == "plans":
        made = plans(options.first, options.plans, options.dropped)
    else:
        made = matrix([json.loads(line) for line in options.rows.read_text().splitlines()])
    out = options.out or RESULTS / f"{head['benchmark']}.json"
    out.write_text(json.dumps(head | made, indent=1) + "\n")
    print(f"{out}: {made['counts']}")
    return 1 if made["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
