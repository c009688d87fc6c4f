"""Instructions that the engine executes for a call and for a step: what a busy machine cannot change.

callgrind counts the benchmark program (csrc/bench) at several numbers of calls and steps; the start of the
process falls out of the differences. Programs have one lane: how long two lanes look for each other is a
matter of time, not of code. The count is compared with the one in ``results/engine-instructions.json``:
it may not be higher by more than 2 % and 2 instructions, if the compiler is the same; another compiler, or
another standard library, counts otherwise, so then the comparison is only told. ``make count-engine``
builds and runs it; without valgrind it says so, and status 0 is what it ends with.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

RESULT = Path(__file__).resolve().parents[1] / "results" / "engine-instructions.json"
CALLS, STEPS = 200, 200
SHARE, LEAST = 0.02, 2.0


def counted(program: Path, steps: int, calls: int) -> int:
    """Instructions of a whole process."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        done = subprocess.run(
            [*command, str(program), "--count", str(steps), str(calls)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    told = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or told is None:
        raise SystemExit(f"callgrind ended with status {done.returncode}: {done.stderr[-400:]}")
    return int(told[1])


def measured(program: Path) -> dict[str, float]:
    """Instructions of a call of one step, and of one step more."""
    few, many = counted(program, 1, CALLS), counted(program, 1, 2 * CALLS)
    call = (many - few) / CALLS
    # A program of more steps is longer to build: calls are doubled there, too.
    few, many = counted(program, 1 + STEPS, CALLS), counted(program, 1 + STEPS, 2 * CALLS)
    return {"call": call, "step": ((many - few) / CALLS - call) / STEPS}


def compiler(program: Path) -> str:
    """What the compiler and the standard library wrote into the program."""
    text = program.read_bytes()
    found = sorted({x.decode() for x in re.findall(rb"GCC: \([^)\x00]+\) [0-9.]+", text)})
    return "; ".join([*found, platform.machine(), *platform.libc_ver()])


def worse(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """What is beyond the rule, in words."""
    return [
        f"a {name} takes {now[name]:.1f} instructions, it took {before[name]:.1f}"
        for name in before
        if now[name] > before[name] * (1 + SHARE) + LEAST
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the built dfx_engine_bench")
    parser.add_argument(
        "--save", action="store_true", help="write the count that others are compared with"
    )
    given = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("not counted: valgrind is not installed")
        return 0
    now, made_by = measured(given.program), compiler(given.program)
    print(", ".join(f"{name}: {value:.1f} instructions" for name, value in now.items()))
    if given.save:
        rule = f"not more than {SHARE:.0%} and {LEAST:g} instructions above, with the same compiler"
        record = {"format": 1, "instructions": now, "compiler": made_by, "rule": rule}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    before = json.loads(RESULT.read_text())
    found = worse(before["instructions"], now)
    for line in found:
        print(line)
    if before["compiler"] != made_by:
        print(f"only told: counted with {before['compiler']}, this is {made_by}")
        return 0
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
