"""One case of one group of a GPU benchmark, in a process of its own: ``worker.py ASK.json``.

It prepares every variant, says over a pipe what it does and that it is ready, and waits there for ``go`` and
the seconds it has. Then the GPU is its own: it measures, writes what it measured, and ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

SAMPLE_US = 10_000.0  # a sample takes about so long at most
DECIDE_S = 5.0  # for each decision of Auto's, on a GPU of its own
WARM_S = 0.15  # clocks of a GPU fall while nothing runs


class Worker:
    """What is prepared, and what came of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.reader = os.fdopen(options["reads"])
        self.writer = os.fdopen(options["writes"], "w", buffering=1)
        self.ready: dict[str, Any] = {}
        self.done: dict[str, Any] = {
            "samples_us": {}, "difference": {}, "failed": dict(options["without"]), "told": {},
            "predicted_us": {}, "calls_per_sample": 0, "overlap": {},
        }  # fmt: skip

    def write(self) -> None:
        """Everything so far: what comes next may hang."""
        target = Path(self.options["target"])
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.done))
        scratch.replace(target)

    def prepare(self) -> None:
        """Makes and checks every variant that there is time for."""
        from gpu import cases as gpu_cases, variants as gpu_variants

        options, failed = self.options, self.done["failed"]
        case = next(c for c in gpu_cases.CASES if c.name == options["case"])
        if options["dry"]:
            case = gpu_cases.small(case)
        try:
            makers = gpu_variants.GROUPS[options["group"]](case, options["lanes"], options["dry"])
        except Exception as error:  # a framework that is missing is a result, too
            failed[options["group"]] = f"{type(error).__name__}: {error}"
            return
        for name, make in makers.items():
            if name in failed:
                continue
            if time.monotonic() > options["prepare_until"]:
                failed[name] = "no time left to prepare it"
                continue
            print(f"begin {name}", file=self.writer)
            try:
                made = self.ready[name] = make()
                self.done["difference"][name] = made.difference
                self._tell(name, made)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:500]}"

    def _tell(self, name: str, made: Any) -> None:
        try:
            told, predicted = made.tell()
        except Exception as error:  # the times count without it
            told, predicted = f"{type(error).__name__}: {str(error)[:300]}", None
        if told:
            self.done["told"][name] = told[-1500:]
        if predicted:
            self.done["predicted_us"][name] = round(predicted, 2)

    def measure(self, seconds: float) -> None:
        """Auto's decisions, then rounds over all variants."""
        until = time.monotonic() + seconds
        deciding = {name: made for name, made in self.ready.items() if made.decide is not None}
        if deciding:  # which may hang: first without it
            everything = self.ready
            self.ready = {name: made for name, made in everything.items() if name not in deciding}
            self.rounds(time.monotonic() + seconds / 3)
            self.write()
            self.ready = {k: v for k, v in everything.items() if k not in self.done["failed"]}
        for name, made in deciding.items():
            # What was decided beside other processes was measured beside them.
            try:
                said = made.decide(max(0.5, min(DECIDE_S, (until - time.monotonic()) / 3)))
            except Exception as error:
                said = f"not decided anew: {type(error).__name__}: {str(error)[:300]}\n"
            self._tell(name, made)
            self.done["told"][name] = (said + self.done["told"].get(name, ""))[:1500]
        self.rounds(until)

    def rounds(self, until: float) -> None:
        """Samples of all variants, each round in another order."""
        lengths, begin = self._each(1), time.monotonic()
        while lengths and time.monotonic() - begin < WARM_S:
            lengths = self._each(2)
        if not lengths:
            return
        calls = int(SAMPLE_US / max(1.0, statistics.median(lengths.values())))
        calls = self.done["calls_per_sample"] = max(2, min(self.options["inner"], calls))
        samples: dict[str, list[float]] = {name: [] for name in self.ready}
        for number in range(self.options["rounds"]):
            if number >= 3 and time.monotonic() > until:
                break
            for name, took in self._each(calls, number).items():
                samples[name].append(took)
        for name in self.done["failed"]:
            samples.pop(name, None)
        self.done["samples_us"] = samples

    def _each(self, calls: int, shift: int = 0) -> dict[str, float]:
        """A sample of each; one that fails is left out from then on."""
        made: dict[str, float] = {}
        names = list(self.ready)
        shift %= max(1, len(names))
        for name in names[shift:] + names[:shift]:
            try:
                made[name] = self.ready[name].measure(calls)
            except Exception as error:
                self.done["failed"][name] = f"{type(error).__name__}: {str(error)[:500]}"
                del self.ready[name]
        return made

    def trace(self) -> None:
        """Profiles the best of ours and the opponent, into small files."""
        from gpu import overlap as gpu_overlap

        medians = {k: statistics.median(v) for k, v in self.done["samples_us"].items() if v}
        ours = [k for k in medians if k.startswith("dfx") and "auto" not in k]
        plain = "torch one graph" if self.options["group"] == "torch" else "jax jit"
        chosen = [plain] if plain in medians else []
        chosen += [min(ours, key=medians.__getitem__)] if ours else []
        folder = Path(self.options["trace_folder"])
        for name in chosen:
            target = folder / f"{self.options['case']}-{name.replace(' ', '_')}.json.gz"
            try:
                profiled = gpu_overlap.profiled(self.options["group"], self.ready[name].run, target)
            except Exception as error:
                profiled = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            self.done["overlap"][name] = profiled


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # none outlives the program that asked
    worker = Worker(json.loads(Path(sys.argv[1]).read_text()))
    worker.prepare()
    worker.write()
    gc.collect()
    gc.freeze()
    print("ready", file=worker.writer)
    word, _, seconds = worker.reader.readline().partition(" ")
    if word == "go":
        worker.measure(float(seconds))
        worker.write()
        if worker.options["case"] in worker.options["traces"]:
            worker.trace()
            worker.write()
        print("end", file=worker.writer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what was measured is written: taking frameworks down in order takes seconds


if __name__ == "__main__":
    raise SystemExit(main())
