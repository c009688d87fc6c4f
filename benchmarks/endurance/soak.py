"""Millions of calls: memory, threads and file descriptors stay as they are; and concurrent, nested calls end.

    python -P benchmarks/endurance/soak.py [--calls N] [--scheduled N] [--together N] [--out FILE.json]

Three parts, each in a process of its own, with a watchdog that reports calls longer than a minute:

- ``engine``: calls of engine programs with scratch, a tenth of them on two lanes with hand-overs both ways,
  and one in a thousand fails there;
- ``scheduled``: calls of a scheduled JAX function on two lanes, alone and inside of a program;
- ``together``: calls from eight threads at once, of four kinds: alone, inside of a program, in a loop, and
  with a callback that calls another scheduled function. Values are compared.

What is left after a tenth of the calls is compared with what is there at the end. The result is written
after each hundredth. Status 1: something grew, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common.environment import stamp
from common.records import save

PARTS = ("engine", "scheduled", "together")
MOST_GROWTH_MIB = 8.0
"""What an allocator's free lists come and go by."""


def now() -> dict[str, float]:
    """Resident memory in MiB, threads, open file descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


class Soak:
    """Counts calls, and looks at the process after each hundredth of them."""

    def __init__(self, calls: int, tell: Callable[[dict[str, Any]], None]):
        self.calls, self.done, self.wrong = calls, 0, 0
        self._tell, self._samples = tell, list[dict[str, float]]()
        self._begin, self._lock = time.monotonic(), threading.Lock()

    def count(self, calls: int, wrong: int = 0) -> None:
        """So many more calls have ended."""
        with self._lock:
            before = self.done * 100 // self.calls
            self.done += calls
            self.wrong += wrong
            if self.done * 100 // self.calls > before:
                self._samples.append({"calls": self.done, **now()})
                self._tell(self.result())

    def result(self) -> dict[str, Any]:
        """What there is so far."""
        settled = [s for s in self._samples if s["calls"] * 10 >= self.calls]
        growth = {
            key: round(settled[-1][key] - settled[0][key], 2) if settled else 0.0
            for key in ("mib", "threads", "descriptors")
        }
        return {
            "calls": self.done, "wanted": self.calls, "wrong": self.wrong, "growth": growth,
            "seconds": round(time.monotonic() - self._begin, 1),
            "samples": [{k: round(v, 2) for k, v in s.items()} for s in self._samples[::10]],
        }  # fmt: skip


def engine(soak: Soak) -> None:
    """Programs of the engine alone."""
    from dynaflow_xla.errors import EngineError
    from dynaflow_xla.ffi import _engine

    def fails(_: Any) -> None:
        raise ValueError("on purpose")

    def alone(bytes_: int) -> Any:
        made = _engine.Program(1, 0, 0, 0, bytes_, "alone")
        made.add_c_launch(0, "only", 0, 0, [], [])
        made.finish()
        return made

    def program(bytes_: int, bad: bool) -> Any:
        made = _engine.Program(2, 2, 0, 0, bytes_, "soak")
        for lane, mine, other in ((0, 0, 1), (1, 1, 0)):
            made.add_c_launch(lane, "first", 0, 0, [], [])
            made.add_record(lane, mine)
            made.add_wait(lane, other)
            if bad and lane:
                made.add_python_launch(lane, "second", fails, [], [])
            else:
                made.add_c_launch(lane, "second", 0, 0, [], [])
        made.finish()
        return made

    good = [program(size, False).run for size in (0, 4096, 1 << 20)]
    one = [alone(size).run for size in (0, 4096, 1 << 16)]
    bad = program(4096, True).run
    none: list[int] = []
    while soak.done < soak.calls:
        for _ in range(33):
            for run in good:
                run(none, none)
        for _ in range(300):
            for run in one:
                run(none, none)
        try:
            bad(none, none)
            soak.count(1000, 1)
        except EngineError:
            soak.count(1000)


def _functions() -> tuple[Any, Any, Any]:
    """A scheduled function on two lanes, its argument and its value."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import dynaflow_xla as dfx

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from round_robin import RoundRobin

    def work(x: Any) -> Any:
        return jnp.sort(x, axis=-1) @ x.T + jnp.cos(jnp.sort(-x, axis=0))

    x = jnp.asarray(np.random.default_rng(0).random((16, 16)), jnp.float32)
    return dfx.schedule(work, RoundRobin(), lanes=2), x, np.asarray(jax.jit(work)(x))


def scheduled(soak: Soak) -> None:
    """A scheduled function, alone and inside of a program."""
    import jax
    import numpy as np

    fast, x, want = _functions()
    outer = jax.jit(lambda x: fast(x) * 1)
    while soak.done < soak.calls:
        for _ in range(50):
            alone, inside = fast(x), outer(x)
        wrong = sum(not np.allclose(got, want, rtol=1e-4, atol=1e-4) for got in (alone, inside))
        soak.count(100, wrong)


def together(soak: Soak) -> None:
    """Four kinds of calls from eight threads at once."""
    import jax
    import numpy as np

    fast, x, want = _functions()

    def back(v: Any) -> Any:
        return np.asarray(fast(v))

    def calls_back(x: Any) -> Any:
        return jax.pure_callback(back, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 1

    kinds = [
        (fast, want),
        (jax.jit(lambda x: fast(x) * 1), want),
        (jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: fast(x) + 0 * c, x)), want),
        (jax.jit(calls_back), want),
    ]
    nested = (1, 1, 3, 1)  # calls of the scheduled function in a call of each kind
    for f, _ in kinds:
        f(x)

    def loop(number: int) -> None:
        turn = number
        while soak.done < soak.calls:
            f, wanted = kinds[turn % len(kinds)]
            wrong = 0
            for _ in range(20):
                wrong += not np.allclose(f(x), wanted, rtol=1e-4, atol=1e-4)
            soak.count(20 * nested[turn % len(kinds)], wrong)
            turn += 1

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def part(name: str, calls: int) -> None:
    """Runs a part in this process; each line of its output is what there is so far."""
    soak = Soak(calls, lambda made: print(json.dumps(made), flush=True))
    {"engine": engine, "scheduled": scheduled, "together": together}[name](soak)


def main() -> None:
    """Runs the parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=10_000_000)
    parser.add_argument("--scheduled", type=int, default=300_000)
    parser.add_argument("--together", type=int, default=100_000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    wanted = dict(zip(PARTS, (given.calls, given.scheduled, given.together), strict=True))
    if given.part is not None:
        part(given.part, wanted[given.part])
        return
    record: dict[str, Any] = {"benchmark": "soak", "environment": stamp(), "parts": {}}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DYNAFLOW_XLA_WATCHDOG_S": "60"}
    good = True
    for name in PARTS:
        if not wanted[name]:
            continue
        command = [sys.executable, "-P", __file__, "--part", name]
        command += [f"--{'calls' if name == 'engine' else name}", str(wanted[name])]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                record["parts"][name] = json.loads(line)
                save(record, given.out)
            said = process.stderr.read()
        made = record["parts"].setdefault(name, {})
        made |= {"status": process.returncode, "reports": said.count("has run for")}
        save(record, given.out)
        growth = made.get("growth", {})
        good &= (
            process.returncode == 0
            and made.get("calls", 0) >= wanted[name]
            and not made["wrong"]
            and growth["mib"] <= MOST_GROWTH_MIB
            and growth["threads"] <= 0
            and growth["descriptors"] <= 0
        )
        print(name, {key: value for key, value in made.items() if key != "samples"}, said[-2000:])
    sys.exit(not good)


if __name__ == "__main__":
    main()
