"""Changed and cut bytes for every decoder, for a number of minutes; one line of results.

    python benchmarks/endurance/fuzz_decoders.py --minutes 60 --out benchmarks/results

Each input has 300 s, however slow and busy the machine: what takes longer is counted as hung.
The seed of each crash is printed. The record is written each minute; ``--go-on FILE`` adds to one.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests/support", "tests/property")]

from common.environment import stamp  # noqa: E402
from decoders import crash, mutated  # noqa: E402
from test_decoders import ALL  # noqa: E402


class Hung(BaseException):
    """An input took too long."""


def _hung(*_: Any) -> None:
    raise Hung


def main() -> None:
    """Runs until the time is over, and writes what was found, each minute as far as it came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for the record")
    parser.add_argument("--go-on", type=Path, help="a record to add to, from its last seed on")
    given = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGALRM, _hung)
    path: Path | None = given.go_on
    record: dict[str, Any] = {
        "minutes": 0.0, "first_seed": given.seed, "last_seed": given.seed,
        "inputs": {d.name: 0 for d in ALL}, "all_inputs": 0, "bytes": 0, "crashes": 0, "hung": 0,
    }  # fmt: skip
    if path is not None:
        record = json.loads(path.read_text())
    elif given.out is not None:
        path = given.out / f"fuzz-decoders-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
    before, begin = record["minutes"], time.monotonic()
    written = begin
    while (now := time.monotonic()) < begin + 60 * given.minutes:
        record["last_seed"] += 1
        with tempfile.TemporaryDirectory() as folder:
            _round(record, Path(folder))
        if path is not None and now - written > 60:
            written = now
            _write(record, path, before + (now - begin) / 60)
    record["environment"] = stamp()
    if path is not None:
        _write(record, path, before + (time.monotonic() - begin) / 60)
    print(json.dumps(record))


def _round(record: dict[str, Any], folder: Path) -> None:
    """One input for each decoder."""
    seed = record["last_seed"]
    for decoder in ALL:
        draw = random.Random(seed)
        data = mutated(draw.choice(decoder.examples), draw)
        signal.alarm(300)
        found = crash(decoder, data, folder)
        signal.alarm(0)
        record["inputs"][decoder.name] += 1
        record["all_inputs"] += 1
        record["bytes"] += len(data)
        if found:
            record["hung" if found.startswith(f"{decoder.name}: Hung") else "crashes"] += 1
            print(f"seed {seed}: {found}", flush=True)


def _write(record: dict[str, Any], path: Path, minutes: float) -> None:
    record["minutes"] = round(minutes, 1)
    path.write_text(json.dumps({"environment": stamp()} | record, indent=1) + "\n")


if __name__ == "__main__":
    main()
