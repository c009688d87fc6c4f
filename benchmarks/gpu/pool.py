"""The workers of a GPU benchmark: many prepare side by side, one at a time measures.

Nearly all time of such a benchmark goes into imports and compilation, which need cores and hardly a GPU, and
measuring needs the GPU for oneself. So each case of a group has a process that imports, compiles and checks
what it will measure, says that it is ready and waits, blocked on a pipe. When all are ready, or the time to
prepare is over, they measure one after another. One that is late is stopped (SIGSTOP), goes on alone after
the others, and measures then. What dies or hangs while it prepares a variant begins again without that one.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ORDER = ("torch", "jax", "ffi")
PREPARE_SHARE = {"torch": 0.7, "jax": 0.6, "ffi": 0.45}  # of the time to prepare, for one worker
VARIANT_S = {"torch": 90.0, "jax": 60.0, "ffi": 30.0}  # then it is taken to hang
START_S = 75.0  # the same of imports and the plain function's values
DRY_S = 400.0  # both of these, on a CPU whose two cores also compile
MEASURE_S = {"torch": 14.0, "jax": 12.0, "ffi": 6.0}  # at most; less where the time is short
HUNG_S = 6.0  # beyond that, without traces
GRACE_S, LATE_S = 3.0, 25.0  # until late workers are stopped; for each of them when it goes on
STARTS = 4  # of one worker
CACHE_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir="


class Worker:
    """One case of one group, in one process after another.

    Attributes:
        state: "waiting", "preparing", "ready", "late" or "over".
        ended: How it ended if not well.
    """

    def __init__(self, group: str, case: str, kind: str, folder: Path, ask: dict[str, Any]) -> None:
        self.group, self.case, self.kind, self.ask = group, case, kind, ask
        self.folder = folder / f"{group}-{case}"
        self.folder.mkdir()
        self.target = self.folder / "done.json"
        self.state, self.ended, self.doing = "waiting", "", "start"
        self.notes: list[str] = []
        self.without: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.since = self.started = 0.0
        self.starts, self.took = 0, 0.0
        self.cache = group != "torch"
        self.lines: list[str] = []
        self._rest = b""

    def environment(self) -> dict[str, str]:
        """Caches of its own, so that no lock and no decision of another worker is met."""
        made = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        made |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        made |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        made |= {"TRITON_CACHE_DIR": str(self.folder / "triton")}
        made |= {"DYNAFLOW_XLA_CACHE_DIR": str(self.folder / "decisions")}
        if self.ask["dry"] and not os.environ.get("DYNAFLOW_XLA_STANDIN"):
            made["JAX_PLATFORMS"] = "cpu"
        if self.cache:  # all variants of a case get the same kernels for the same operators
            kept = self.folder.parent / f"autotuned-{self.case}"
            kept.mkdir(exist_ok=True)
            made["XLA_FLAGS"] = f"{made.get('XLA_FLAGS', '')} {CACHE_FLAG}{kept}".strip()
        return made

    def start(self, until: float, share: float) -> None:
        """Begins to prepare; what hung or died before is left out."""
        if self.process is not None:
            self.close()
        now = time.monotonic()
        # The two clocks are one: Linux counts it for all processes.
        mine_until = min(until, now + share * PREPARE_SHARE[self.group])
        to_worker, self.go = os.pipe()
        self.told, from_worker = os.pipe()
        file = self.folder / "ask.json"
        file.write_text(
            json.dumps(
                {
                    **self.ask, "group": self.group, "case": self.case, "prepare_until": mine_until,
                    "without": self.without, "reads": to_worker, "writes": from_worker,
                    "target": str(self.target),
                }
            )
        )  # fmt: skip
        with open(self.folder / "stderr", "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(file)], stdin=subprocess.DEVNULL,
                stdout=errors, stderr=errors, env=self.environment(), process_group=0,
                pass_fds=(to_worker, from_worker),
            )  # fmt: skip
        os.close(to_worker)
        os.close(from_worker)
        self.state, self.doing, self._rest = "preparing", "start", b""
        self.since = now
        self.started = self.started or now
        self.starts += 1

    def read(self) -> bool:
        """Takes what the process said; False when it is over."""
        got = os.read(self.told, 65536)
        *lines, self._rest = (self._rest + got).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            self.lines.append(word)
            if word == "begin":
                self.doing, self.since = rest, time.monotonic()
            elif word == "ready":
                self.state, self.took = "ready", time.monotonic() - self.started
        return bool(got)

    def limit(self) -> float:
        """Seconds for what it does now."""
        if self.ask["dry"]:
            return DRY_S
        return START_S if self.doing == "start" else VARIANT_S[self.group]

    def close(self) -> str:
        """Ends the process and what it started, if it has not ended; says how it had ended."""
        process = self.process
        if process is None:
            return ""
        os.close(self.go)
        try:
            status: int | None = process.wait(1.5 if self.state == "over" else 0.3)
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers, too
        except ProcessLookupError:
            pass
        process.wait()
        os.close(self.told)
        self.process = None
        if not status:
            return ""
        tail = (self.folder / "stderr").read_text(errors="replace")[-1200:]
        return f"ended with status {status}: {tail}"

    def again(self, why: str) -> None:
        """It died or hung while it prepared: it begins again without what it did, a few times."""
        why = self.close() or why
        self.notes.append(f"{self.doing}: {why}")
        self.state = "waiting"
        if self.starts >= STARTS:
            self.over(f"in {self.doing}: {why}")
        elif self.doing != "start":
            self.without[self.doing] = why[:400]
        elif self.cache:  # a flag that this XLA does not know ends a process at once
            self.cache = False
        else:
            self.over(why)

    def over(self, why: str = "") -> None:
        """Nothing more is expected of it."""
        self.state = "over"
        self.ended = self.ended or why
        self.ended = self.close() or self.ended

    def made(self) -> dict[str, Any]:
        """What it measured and what failed, as far as it was written."""
        try:
            made: dict[str, Any] = json.loads(self.target.read_text())
        except (OSError, ValueError):
            made = {"samples_us": {}, "failed": dict(self.without)}
            if not self.without or self.ended:
                made["failed"][self.group] = self.ended or "no time left"
        if not any(made["samples_us"].values()) and self.ended:
            made["failed"][self.group] = self.ended
        return {**made, "prepared_in_s": round(self.took, 1), "notes": self.notes}


class Pool:
    """All workers of a run.

    Args:
        workers: In order of importance.
        jobs: So many prepare at once.
        prepare_until: By ``time.monotonic``.
        end: Nothing runs after it.
        report: Called for a worker when it is over.
    """

    def __init__(
        self,
        workers: list[Worker],
        jobs: int,
        prepare_until: float,
        end: float,
        report: Callable[[Worker], None],
    ) -> None:
        self.workers, self.jobs, self.report = workers, jobs, report
        self.prepare_until, self.end = prepare_until, end
        self._selector = selectors.DefaultSelector()

    def of(self, *states: str) -> list[Worker]:
        return [w for w in self.workers if w.state in states]

    def run(self) -> None:
        """Prepares and measures; no process is left, whatever happens."""
        try:
            self._prepare()
            for worker in self.of("waiting"):
                worker.ended = worker.ended or "no time left to prepare it"
                self._over(worker)
            for worker in self.of("preparing"):
                worker.state = "late"
                os.killpg(worker.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
            print(
                f"prepared: {len(self.of('ready'))} workers are ready, {len(self.of('late'))} late, "
                f"{len(self.of('over'))} left out; {self.end - time.monotonic():.0f} s are left",
                flush=True,
            )
            for worker in self.of("ready"):
                self._measure(worker)
            for worker in self.of("late"):
                self._finish(worker)
        finally:
            for worker in self.workers:
                if worker.state != "over":
                    self._over(worker, "no time left")

    def _over(self, worker: Worker, why: str = "") -> None:
        self._forget(worker)
        worker.over(why)
        self.report(worker)

    def _forget(self, worker: Worker) -> None:
        if worker.process is not None:
            try:
                self._selector.unregister(worker.told)
            except KeyError:
                pass

    def _prepare(self) -> None:
        began = time.monotonic()
        while self.of("waiting", "preparing"):
            now = time.monotonic()
            if now > self.prepare_until + GRACE_S:
                return
            busy = len(self.of("preparing"))
            if now < self.prepare_until:
                for worker in self.of("waiting")[: max(0, self.jobs - busy)]:
                    worker.start(self.prepare_until, self.prepare_until - began)
                    self._selector.register(worker.told, selectors.EVENT_READ, worker)
            elif not busy:
                return
            self._listen(0.2)
            for worker in self.of("preparing"):
                if time.monotonic() - worker.since > worker.limit():
                    self._again(worker, f"killed after {worker.limit():.0f} s: it hung")

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            worker: Worker = key.data
            if not worker.read():
                self._again(worker, "ended")

    def _again(self, worker: Worker, why: str) -> None:
        self._forget(worker)
        worker.again(why)
        if worker.state == "over":
            self.report(worker)

    def _finish(self, worker: Worker) -> None:
        """One that was stopped ends what it prepares, alone, and measures."""
        until = min(time.monotonic() + LATE_S, self.end - HUNG_S)
        os.killpg(worker.process.pid, signal.SIGCONT)  # type: ignore[union-attr]
        while worker.state == "late" and time.monotonic() < until:
            if self._said(worker, until) is None:
                break
        if worker.state == "ready":
            self._measure(worker)
        else:
            self._over(worker, f"late: it was killed in {worker.doing}")

    def _said(self, worker: Worker, until: float) -> bool | None:
        """Waits for one worker to say something: None, it is over; False, it says nothing."""
        chosen = selectors.DefaultSelector()
        chosen.register(worker.told, selectors.EVENT_READ)
        found = chosen.select(max(0.0, until - time.monotonic()))
        chosen.close()
        return (True if worker.read() else None) if found else False

    def _measure(self, worker: Worker) -> None:
        left = self.end - time.monotonic() - HUNG_S
        # Most use less than their share, and leave the rest.
        shares = sum(MEASURE_S[w.group] for w in self.of("ready", "late"))
        share = 1.5 * left * MEASURE_S[worker.group] / shares
        seconds = DRY_S if worker.ask["dry"] else MEASURE_S[worker.group]
        seconds = min(seconds, share, left)
        if seconds < 0.5:
            self._over(worker, "no time left to measure it")
            return
        traced = 20.0 if worker.case in worker.ask["traces"] else 0.0
        until = min(time.monotonic() + seconds + HUNG_S + traced, self.end)
        worker.lines.clear()
        try:
            os.write(worker.go, f"go {seconds}\n".encode())
        except OSError as error:
            self._over(worker, f"died while it waited: {error}")
            return
        while "end" not in worker.lines:
            said = self._said(worker, until)
            if said is None:
                self._over(worker, "died while it measured")
                return
            if not said and time.monotonic() >= until:
                self._over(
                    worker, f"killed after {seconds + HUNG_S:.0f} s: it hung, or was too slow"
                )
                return
        self._over(worker)
