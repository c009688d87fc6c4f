"""One group of a GPU benchmark, in a process of its own: ``gpu_worker.py OPTIONS.json``.

What it measured is written after each case, so that a group that hangs keeps what it had.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def measure_case(case: Any, options: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Samples of every variant that runs, and why the others do not."""
    import gpu_variants

    failed: dict[str, str] = {}
    ready: dict[str, Any] = {}
    differences: dict[str, float] = {}
    try:
        makers = gpu_variants.GROUPS[options["group"]](case, options["lanes"], options["dry"])
    except Exception as error:  # a framework that is missing is a result, too
        return {"samples_us": {}, "failed": {options["group"]: f"{type(error).__name__}: {error}"}}
    for name, make in makers.items():
        if time.monotonic() > deadline:
            failed[name] = "no time left"
            continue
        try:
            ready[name], differences[name] = make()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
    samples: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(options["rounds"]):
        if number >= 3 and time.monotonic() > deadline:
            break
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            samples[name].append(ready[name](options["inner"]))
    return {"samples_us": samples, "difference": differences, "failed": failed}


def main() -> int:
    options = json.loads(Path(sys.argv[1]).read_text())
    if options["dry"] and not os.environ.get("DYNAFLOW_XLA_STANDIN"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import gpu_cases

    begin, target = time.monotonic(), Path(options["target"])
    cases = [c for c in gpu_cases.CASES if not options["cases"] or c.name in options["cases"]]
    done: dict[str, Any] = {}
    for number, case in enumerate(cases):
        if options["dry"]:
            case = gpu_cases.small(case)
        left = options["seconds"] - (time.monotonic() - begin)
        # What an earlier case did not use is there for the later ones.
        done[case.name] = measure_case(
            case, options, time.monotonic() + left / (len(cases) - number)
        )
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(done))
        scratch.replace(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
