"""Changed and cut bytes for every decoder, for a number of minutes; one line of results.

    python benchmarks/fuzz_decoders.py --minutes 60 --out benchmarks/results

Each input has 300 s, however slow and busy the machine: what takes longer is counted as hung.
The seed of each crash is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests/support", "tests/property")]

from decoders import crash, mutated  # noqa: E402
from environment import stamp  # noqa: E402
from test_decoders import ALL  # noqa: E402


class Hung(BaseException):
    """An input took too long."""


def _hung(*_: Any) -> None:
    raise Hung


def main() -> None:
    """Runs until the time is over, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGALRM, _hung)
    until = time.monotonic() + 60 * given.minutes
    inputs = dict.fromkeys((d.name for d in ALL), 0)
    total = hung = 0
    crashes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        seed = given.seed
        while time.monotonic() < until:
            seed += 1
            for decoder in ALL:
                draw = random.Random(seed)
                data = mutated(draw.choice(decoder.examples), draw)
                signal.alarm(300)
                found = crash(decoder, data, Path(folder))
                signal.alarm(0)
                inputs[decoder.name] += 1
                total += len(data)
                if found.startswith(f"{decoder.name}: Hung"):
                    hung += 1
                if found:
                    crashes.append(f"seed {seed}: {found}")
                    print(crashes[-1], flush=True)
    now = datetime.now(UTC)
    record = {
        "minutes": given.minutes, "first_seed": given.seed, "inputs": inputs,
        "all_inputs": sum(inputs.values()), "bytes": total, "crashes": len(crashes) - hung, "hung": hung,
        "environment": stamp(),
    }  # fmt: skip
    print(json.dumps(record))
    if given.out is not None:
        name = f"fuzz-decoders-{now:%Y-%m-%dT%H%M%SZ}.json"
        (given.out / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
