"""What goes wrong in a step, at any place of any lane, is told to the caller, and the next call works."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from watched import ON_LANES, WATCHED, run

STEPS = (
    WATCHED
    + """
import gc, random, resource, signal, warnings
from dynaflow_xla.errors import EngineError
from dynaflow_xla.ffi import _engine

warnings.simplefilter("ignore")  # of fork
LANES, STEPS = 3, 9

class Graph:
    # Steps on lanes: each looks whether what it waits for has run, and may do a bad thing.
    def __init__(self, seed):
        draw = random.Random(seed)
        self.behind = [draw.sample(range(n), min(n, draw.randrange(3))) for n in range(STEPS)]
        self.lane = [draw.randrange(LANES) for _ in range(STEPS)]
        made = _engine.Program(LANES, STEPS, 0, 0, 4096, f"graph {seed}")
        for n in range(STEPS):
            for m in self.behind[n]:
                if self.lane[m] != self.lane[n]:
                    made.add_wait(self.lane[n], m)
            made.add_python_launch(self.lane[n], f"step {n}", lambda _, n=n: self.step(n), [], [])
            made.add_record(self.lane[n], n)
        made.finish()
        self.program = made

    def step(self, n):
        assert self.ran.issuperset(self.behind[n]), (n, self.ran)
        self.bad.get(n, lambda: None)()
        self.ran.add(n)

    def call(self, **bad):
        self.ran, self.bad = set(), {int(name[1:]): what for name, what in bad.items()}
        self.program.run([], [])
        return self.ran == set(range(STEPS))

graphs = [Graph(seed) for seed in range(3)]
for graph in graphs:
    assert graph.call()
"""
)
"""Programs of the engine alone, with steps in Python."""

IN_STEPS = """
class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def raising(error):
    def bad():
        raise error
    return bad

def in_a_thread():
    one = threading.Thread(target=gc.collect)
    one.start()
    one.join()

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
# A KeyboardInterrupt is raised again when the call is over.
signal.signal(signal.SIGINT, lambda *_: signals.append(1))

FAILING = {
    "bad value": raising(ValueError("bad value")),
    "SystemExit": raising(SystemExit(3)),
    "MemoryError": raising(MemoryError()),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "StopIteration": raising(StopIteration()),
    "x" * 99_999: raising(ValueError("x" * 99_999)),
    "udcff": raising(ValueError(chr(0xdcff))),
    "Unprintable": raising(Unprintable()),
    "nested runs would deadlock": lambda: graphs[0].program.run([], []),
}
HARMLESS = [
    lambda: time.sleep(0.001), gc.collect, in_a_thread, fork,
    lambda: os.kill(os.getpid(), signal.SIGUSR1), object,
]
injected = 0
for graph in graphs:
    for n in range(STEPS):
        for text, bad in FAILING.items():
            try:
                graph.call(**{f"n{n}": bad})
            except EngineError as error:
                assert text in str(error), (text, str(error)[:200])
            else:
                raise AssertionError(f"{text} in step {n} went unnoticed")
            assert graph.call()
            injected += 1
        for harmless in HARMLESS:
            assert graph.call(**{f"n{n}": harmless})
        for m in range(n):
            try:
                graph.call(**{f"n{n}": FAILING["bad value"], f"n{m}": FAILING["SystemExit"]})
            except EngineError as error:
                assert "bad value" in str(error) or "SystemExit" in str(error)
            assert graph.call()
assert injected == 243 and signals
stats = _engine.stats()
assert stats["live"] == 0 and stats["threads"] == LANES - 1, stats
print("done")
"""

WITHOUT_MEMORY_OR_THREADS = """
def refused(program, *texts):
    try:
        program.run([], [])
    except EngineError as error:
        assert any(text in str(error) for text in texts), error
    else:
        raise AssertionError("it ran")

large = _engine.Program(2, 1, 0, 0, 1 << 50, "large")
large.add_python_launch(0, "none", print, [], [])
large.finish()
for _ in range(20):
    refused(large, "no memory for a call of 'large', which needs 1125899906842624 bytes")
    assert all(graph.call() for graph in graphs)

# No address space is left for the stack of a thread.
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
limits = resource.getrlimit(resource.RLIMIT_AS)
more = _engine.Program(9, 0, 0, 0, 0, "nine lanes")
for lane in range(9):
    more.add_python_launch(lane, "none", lambda _: None, [], [])
more.finish()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), limits[1]))
try:
    for _ in range(20):
        refused(more, "cannot start lane", "no memory for a call")
        assert all(graph.call() for graph in graphs)
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
more.run([], [])
assert _engine.stats()["threads"] == 8
print("done")
"""


@pytest.mark.parametrize("code", [IN_STEPS, WITHOUT_MEMORY_OR_THREADS], ids=["steps", "memory"])
def test_faults_of_the_engines_steps(code: str) -> None:
    pytest.importorskip("dynaflow_xla.ffi._engine")
    run(code, before=STEPS)


REGIONS = """
FAULTS = 6
fail = jax.ffi.ffi_call("dfx_test_fail", jax.ShapeDtypeStruct((), jnp.int32))
ERRORS = (dfx.EngineError, jax.errors.JaxRuntimeError, ValueError)

def chain(flags, x):
    a, b = x, jnp.sort(x)
    for k in range(FAULTS):
        a, b = jnp.sort(b * 0.5 - a + fail(flags[k])), jnp.cos(a)
    return a, b

row = x[0]
none = jnp.zeros(FAULTS, jnp.int32)
faulty = spread(chain)
ways = {
    "alone": faulty,
    "in a program": jax.jit(lambda flags, x: faulty(flags, x * 1)),
    "in a loop": jax.jit(lambda flags, x: jax.lax.fori_loop(0, 2, lambda i, c: faulty(flags, c[0]), (x, x))),
    "mapped": lambda flags, x: jax.vmap(faulty, (None, 0))(flags, jnp.stack([x, -x])),
}
for name, way in ways.items():
    good = [np.asarray(v) for v in way(none, row)]
    for k in range(FAULTS):
        for other in ((k + 1) % FAULTS, (k + 3) % FAULTS):
            try:
                jax.block_until_ready(way(none.at[other].set(77).at[k].set(k + 1), row))
            except ERRORS as error:
                assert f"injected fault {k + 1}" in str(error) or "injected fault 77" in str(error), error
            else:
                raise AssertionError(f"a fault at {k} went unnoticed: {name}")
            for got, wanted in zip(way(none, row), good, strict=True):
                np.testing.assert_array_equal(got, wanted)

# From many threads, each its own faults.
def calls(seed):
    draw = np.random.default_rng(seed)
    for _ in range(25):
        k = int(draw.integers(FAULTS + 1))
        flags = none if k == FAULTS else none.at[k].set(1000 * seed + k + 1)
        try:
            got = jax.block_until_ready(faulty(flags, row))
            assert k == FAULTS, "unnoticed"
            np.testing.assert_array_equal(got[0], first)
        except ERRORS as error:
            assert k < FAULTS and f"injected fault {1000 * seed + k + 1}" in str(error), error

def watched_calls(seed):
    try:
        calls(seed)
    except BaseException as error:
        wrong.append(error)

first, wrong = np.asarray(faulty(none, row)[0]), []
threads = [threading.Thread(target=watched_calls, args=(seed,)) for seed in range(1, 5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong

# NaN made by any region are those of the original; where JAX is to look for them, it finds them.
def makes_nan(k, x):
    a, b = x, jnp.sort(x)
    for n in range(FAULTS):
        a, b = jnp.where(k == n, jnp.nan, 1.0) * jnp.cos(a * b), jnp.maximum(a, b) + 1
    return a, b

made, plain = spread(makes_nan), jax.jit(makes_nan)
for k in range(FAULTS + 1):
    for got, wanted in zip(made(k, row), plain(k, row), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
with jax.debug_nans(True):
    for f in (made, jax.jit(made)):
        try:
            f(FAULTS - 1, row)
        except FloatingPointError:
            continue
        raise AssertionError("NaN went unnoticed")
print("done")
"""

AROUND = """
import random, signal

# Callbacks that call back: another scheduled function, JAX itself, and the same function again.
def back(v):
    v = np.asarray(v)
    return np.asarray(fast(x)).sum() + np.asarray(jax.jit(jnp.sin)(v)) + np.asarray(again(v, depth=1))

def again(v, depth):
    if depth == 3:
        return v
    shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
    got = jax.pure_callback(lambda u: np.asarray(again(np.asarray(u), depth + 1)), shape, jnp.sort(v))
    return jnp.sort(-got)

def calls_back(y):
    z = jax.pure_callback(back, jax.ShapeDtypeStruct(y.shape, y.dtype), jnp.sort(y))
    return jnp.sort(-z) + jnp.cos(y), jnp.sort(y)

called = spread(calls_back)
for got, wanted in zip(called(x[0]), jax.jit(calls_back)(x[0]), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
jax.block_until_ready([called(x[0]) for _ in range(10)])

# What a signal's handler raises comes out of the call as it is, and nothing else does.
class Late(Exception):
    pass

def late(*_):
    # Python loses one that meets a finaliser: the signal comes again, but raises only after so many
    # that none of them finds the round over.
    global ticks
    ticks += 1
    if ticks % 20 == 1:
        raise Late

outer = jax.jit(lambda x: fast(x) * 1)
signal.signal(signal.SIGALRM, late)
for f in (fast, outer):
    for k in range(40):
        for _ in range(2):
            check(f(x))
        ticks = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.0001 * (k % 23), 0.05)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                f(x)
        except Late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            continue
        raise AssertionError("no signal came")
    check(f(x))

# Forks while other threads call.
stop = threading.Event()

def loop():
    while not stop.is_set():
        fast(x)

busy = threading.Thread(target=loop)
busy.start()
import warnings
warnings.simplefilter("ignore")
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            fast(x)
        except dfx.EngineError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
busy.join()
check(fast(x))

# Cores go, and come back.
cores = os.sched_getaffinity(0)
tasks = [int(task) for task in os.listdir("/proc/self/task")]
for left in ({min(cores)}, {max(cores)}, cores):
    for task in [0, *tasks]:
        try:
            os.sched_setaffinity(task, left)
        except ProcessLookupError:
            pass  # the thread has ended
    for _ in range(20):
        check(fast(x))
    fresh = dfx.schedule(lambda x, n=len(left), c=min(left): work(x) + 0 * n * c, "branches")
    check(fresh(x))

# The package, imported once more.
for name in [name for name in sys.modules if name.startswith("dynaflow_xla")]:
    del sys.modules[name]
import dynaflow_xla
assert dynaflow_xla is not dfx
try:
    dynaflow_xla.schedule(work, "branches")(x)
except RuntimeError as error:
    assert "has the engine of dynaflow_xla already" in str(error), error
else:
    raise AssertionError("two engines in one process")
check(fast(x))
print("done")
"""


@pytest.mark.parametrize("code", [REGIONS, AROUND], ids=["regions", "around"])
def test_faults_of_regions_and_around_calls(code: str) -> None:
    pytest.importorskip("jax")
    run(code, before=ON_LANES)


def test_a_compiling_process_that_is_killed_leaves_its_work_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some die at once, some are killed while they work; nothing of them is left."""
    torch = pytest.importorskip("torch")
    worker = pytest.importorskip("dynaflow_xla.frontends.torch.native.compiling.worker")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif mkdir "{tmp_path}/first" 2>/dev/null; then kill -9 $$; fi\n'
        f'echo $$ > "{tmp_path}/running"\nexec sleep 600\n'
    )
    python.chmod(0o700)
    monkeypatch.setattr(worker.sys, "executable", str(python))
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda _: {0, 1})
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    requests = [(module, [torch.zeros(2, 2)], str(tmp_path / f"{n}.json")) for n in range(2)]
    running = tmp_path / "running"

    def kill() -> None:
        while not (running.exists() and running.read_text().strip()):
            time.sleep(0.01)
        os.kill(int(running.read_text()), 9)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    before = len(os.listdir("/proc/self/fd"))
    worker.compile_all("aoti", {}, requests)
    killer.join()
    assert not any(os.path.exists(path) for _, _, path in requests)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not Path(f"/proc/{running.read_text().strip()}").exists()
