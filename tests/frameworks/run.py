"""Runs the frameworks' own tests on scheduled functions, and writes a table of what came of them.

``python -P tests/frameworks/run.py --jax-tests CHECKOUT/tests [--suites NAME ...] [--modes NAME ...]
[--limit SECONDS] [--keep FOLDER] [--out FILE.json] [--page FILE.md]``

JAX's tests are not in its packages: they come from a checkout of the installed version. Each suite runs
with ``jax.jit`` replaced by ``dynaflow_xla.schedule(jax.jit(...))``, once a mode (``scheduled_jit.MODES``).
A test that does not pass so is run as it is, too: if it does not pass then, here, it says nothing about a
schedule and is left out. What asserts on how JAX traces or compiles, not on values, is named in
``excluded.toml`` with the reason. A suite that runs into its limit keeps what it had until then, and says
so. With ``--keep`` each outcome is a line of a file there: the next run with the same folder goes on where
this one stopped. What ``--out`` holds of other suites and modes stays there. A test that takes its process
with it is wrong, and the others still run. The command fails if anything is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUITES = (
    "lax_control_flow_test",
    "lax_autodiff_test",
    "nn_test",
    "custom_root_test",
    "generated_fun_test",
    "random_test",
    "api_test",
)
CASES = os.environ.get("JAX_NUM_GENERATED_CASES", "3")
UNOPTIMIZED = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "") not in ("", "0")
QUICK = os.environ.get("JAX_SKIP_SLOW_TESTS", "") not in ("", "0")
NANO = "nano-batches"
MODES = ("branches", "lanes", "auto", "xla", NANO)
NO_TESTS = 5
"""Status of pytest when nothing is left to run."""


def checkout(folder: str) -> Path:
    """JAX's tests, of the installed version.

    Raises:
        SystemExit: they are not there, or of another version.
    """
    import jax

    tests = Path(folder).resolve()
    if not (tests / f"{SUITES[0]}.py").is_file():
        sys.exit(
            f"{folder!r} does not hold JAX's tests ({SUITES[0]}.py): JAX_TESTS must be the "
            f"folder tests/ of a checkout of jax-v{jax.__version__} "
            f"(git clone --branch jax-v{jax.__version__} https://github.com/jax-ml/jax)"
        )
    said = tests.parent / "jax" / "version.py"
    found = re.search(r'^_version = "([^"]+)"', said.read_text(), re.M) if said.is_file() else None
    version = found[1] if found else "unknown"
    if version != jax.__version__:
        sys.exit(
            f"{folder!r} is of JAX {version}, installed is {jax.__version__}: "
            f"git checkout jax-v{jax.__version__} there"
        )
    return tests


def excluded(suite: str) -> dict[str, str]:
    """Patterns of test names, and why they are left out."""
    told = tomllib.loads((HERE / "excluded.toml").read_text()).get(suite, {})
    return {pattern: reason for reason, patterns in told.items() for pattern in patterns}


def outcomes(
    tests: Path,
    suite: str,
    mode: str,
    limit: float,
    only: Collection[str] = (),
    match: str = "",
    lines: Path | None = None,
) -> tuple[dict[str, Any], bool]:
    """What came of each test, or of some, and whether all of them ran.

    Args:
        tests: The folder.
        suite: The file's name.
        mode: How it is scheduled.
        limit: Seconds for all of them; 0: nothing runs, what was kept is told.
        only: The tests; all, if there are none.
        match: Of these, what their names have to fit, as ``pytest -k``.
        lines: Where outcomes are kept. Tests that have one there are not run again.
    """
    file = str(tests / f"{suite}.py")
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        if lines is None:
            lines = Path(folder, "outcomes.jsonl")
        lines.touch()
        environment = os.environ | {
            "DFX_MODE": mode, "DFX_OUTCOMES": str(lines.resolve()), "DFX_TESTS": str(tests),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_GENERATED_CASES": CASES,
            "DYNAFLOW_XLA_CACHE_DIR": folder,
        }  # fmt: skip
        command = [
            sys.executable, "-P", "-m", "pytest", "-q", "-p", "scheduled_jit",
            "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests), "--timeout", "300",
            *(["-k", match] if match else []), *([f"{file}::{test}" for test in only] or [file]),
        ]  # fmt: skip
        marked = lines.with_suffix(".whole")
        whole = limit <= 0 and marked.exists()
        while not whole and limit > 0:
            try:
                done = subprocess.run(
                    command, env=environment, cwd=folder, capture_output=True, text=True,
                    timeout=max(1.0, until - time.monotonic()),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                break
            whole = done.returncode in (0, 1, NO_TESTS)
            if not whole:
                print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
                if not died(lines, done.returncode):
                    break
        if whole and not only and not match:
            marked.touch()
        found = read(lines)
    return {test: line for test, line in found.items() if line["outcome"] != "started"}, whole


def read(lines: Path) -> dict[str, Any]:
    """The last line of each test. One that was cut, because its process was stopped, is none."""
    found = {}
    for text in lines.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["test"]] = line
    return found


def died(lines: Path, status: int) -> bool:
    """Writes that a test took its process with it; whether one was running."""
    running = [test for test, line in read(lines).items() if line["outcome"] == "started"]
    with lines.open("a") as file:
        for test in running:
            why = f"the process died with status {status}"
            file.write(json.dumps({"test": test, "outcome": "failed", "why": why}) + "\n")
    return bool(running)


def compared(
    plain: dict[str, Any], found: dict[str, Any], left_out: dict[str, str]
) -> dict[str, Any]:
    """The outcomes of a mode, counted, of tests that pass as they are."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    without: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    wrong = {}
    for test, line in found.items():
        name = test.replace("::", ".")
        if line["outcome"] == "skipped" or plain.get(test, line)["outcome"] in (
            "failed",
            "skipped",
        ):
            continue
        pattern = next((p for p in left_out if fnmatch.fnmatchcase(name, p)), None)
        if pattern is not None and line["outcome"] != "passed":
            without[left_out[pattern]] += 1
            continue
        outcome = "wrong" if line["outcome"] == "failed" else line["outcome"]
        counts[outcome] += 1
        counts["planned"] += outcome == "passed" and line.get("plans", 0) > 0
        functions.update(line.get("functions", {}))
        if outcome == "refused" and line["why"]:
            reasons[line["why"]] += 1
        elif outcome == "wrong":
            wrong[name] = line["why"]
    return {
        "passed": counts["passed"],
        "planned": counts["planned"] if any("plans" in line for line in found.values()) else "",
        "without_batch": counts["whole"],
        "refused": counts["refused"], "wrong": counts["wrong"],
        "excluded": sum(without.values()), "reasons": dict(reasons.most_common()),
        "excluded_reasons": dict(without.most_common()), "failures": wrong,
        "functions": dict(functions.most_common()),
    }  # fmt: skip


def with_others(
    rows: list[dict[str, Any]], out: Path | None, made: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows, and those of other suites and modes that a file has of the same JAX and cases."""
    before: list[dict[str, Any]] = []
    if out is not None and out.is_file():
        told = json.loads(out.read_text())
        if all(told.get(key) == value for key, value in made.items()):
            before = told["rows"]

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["suite"], row["match"], row["mode"]

    new = {place(row) for row in rows}
    merged = [*rows, *(row for row in before if place(row) not in new)]
    order = {name: number for number, name in enumerate((*SUITES, *MODES))}
    return sorted(merged, key=lambda row: (order[row["suite"]], order[row["mode"]], row["match"]))


def page(result: dict[str, Any]) -> str:
    """The table as a page of the documentation."""
    head = [
        "# The frameworks' own tests on scheduled functions",
        "",
        "After this page you know which of JAX's own tests pass when `jax.jit` schedules what it makes.",
        "",
        f"Made by `make test-frameworks JAX_TESTS=...`; do not edit. JAX {result['jax']}, its tests of "
        "the same version, on a CPU. A test counts if it passes without a schedule. *Refused*: an error of "
        "dynaflow_xla that names what it does not do. *Wrong*: everything else. *Excluded*: tests of how JAX "
        "traces or compiles, by name in `tests/frameworks/excluded.toml`.",
        "",
        "*Planned*: passed, and at least one function of the test had a plan; the others give nothing to "
        "`jax.jit` or, with `auto`, only inside of a trace. What a test gives to `check_grads` is jitted. "
        "A suite that is stopped at its limit is told of as far as it came. "
        f"Generated cases of a test: {result['cases']}"
        f"{', without those that JAX calls slow' if result['quick'] else ''}"
        f"{'; XLA optimizes little (JAX_DISABLE_MOST_OPTIMIZATIONS)' if result['unoptimized'] else ''}.",
        "",
        f"With `{NANO}` the batch is guessed, as these functions name none: axis 0 of all arrays with "
        "equally many rows, else of the first or the last of them alone "
        "(`tests/frameworks/nano_jit.py`). What cannot be "
        "proved to keep its values then runs as it is. A test passes if at least one function of it was "
        "split; it is refused if none of those with a batch could be split, and *without a batch* if "
        "there is none.",
        "",
        "| suite | mode | passed | planned | without a batch | refused | wrong | excluded | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reasons: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for row in result["rows"]:
        parts = [] if row["whole"] else ["stopped at its limit"]
        parts += [f"only names that fit `{row['match']}`"] if row["match"] else []
        keys = ("passed", "planned", "without_batch", "refused", "wrong", "excluded")
        numbers = " | ".join(str(row.get(key, "")) for key in keys)
        head.append(f"| `{row['suite']}` | {row['mode']} | {numbers} | {'; '.join(parts)} |")
        reasons.update(row["reasons"])
        functions.update(row.get("functions", {}))
        left_out.update(row["excluded_reasons"])
    split = functions.pop("split", 0)
    if functions or split:
        head += [
            "",
            "## Functions in nano-batches",
            "",
            f"{split} were split, each counted once a test and signature. The others:",
            "",
        ]
        head += [f"- {number}: {why}" for why, number in functions.most_common()]
    for title, counted in (("Why refused", reasons), ("Why excluded", left_out)):
        head += ["", f"## {title}", ""]
        head += [f"- {number}: {why}" for why, number in counted.most_common()] or ["Nothing is."]
    return "\n".join(head) + "\n"


def main() -> None:
    """Runs what is asked for, and writes the result after each suite."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jax-tests", required=True)
    parser.add_argument("--suites", nargs="+", default=list(SUITES))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for a suite in a mode; 0: what was kept"
    )
    parser.add_argument("--match", default="", help="only tests whose names fit, as pytest -k")
    parser.add_argument(
        "--keep", type=Path, help="folder of outcomes, to go on where a run stopped"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    tests = checkout(asked.jax_tests)
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    import jax

    rows: list[dict[str, Any]] = []
    for suite in asked.suites:
        for mode in asked.modes:
            kept = None if asked.keep is None else asked.keep / f"{suite}-{mode}.jsonl"
            found, whole = outcomes(tests, suite, mode, asked.limit, match=asked.match, lines=kept)
            if not found:
                continue
            # What was refused in nano-batches ran as it is, and passed.
            asks = ("failed",) if mode == NANO else ("failed", "refused")
            bad = [test for test, line in found.items() if line["outcome"] in asks]
            kept = None if asked.keep is None else asked.keep / f"{suite}-original.jsonl"
            plain = (
                outcomes(tests, suite, "original", asked.limit, bad, lines=kept)[0] if bad else {}
            )
            row = {
                "suite": suite,
                "match": asked.match,
                "mode": mode,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
                "whole": whole,
            }
            rows.append(row | compared(plain, found, excluded(suite)))
            shown = {k: v for k, v in rows[-1].items() if k != "excluded_reasons"}
            print(json.dumps(shown, indent=1), flush=True)
            result = {
                "jax": jax.__version__,
                "cases": CASES,
                "quick": QUICK,
                "unoptimized": UNOPTIMIZED,
            }
            result["rows"] = with_others(rows, asked.out, result)
            if asked.out:
                asked.out.write_text(json.dumps(result, indent=1) + "\n")
            if asked.page:
                asked.page.write_text(page(result))
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
