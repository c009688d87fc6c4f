"""OpenMP workers that spin after work of the caller's do not take the lanes' cores."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from watched import ended, told, watched

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.frontends.torch.native import native, threads  # noqa: E402


class Towers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(128, 128)
        self.left, self.right = torch.nn.LSTM(128, 64), torch.nn.LSTM(128, 64)

    def forward(self, x: Any) -> Any:
        y = self.wide(x)
        return self.wide(torch.cat([self.left(y)[0], self.right(y.flip(0))[0]], -1))


@pytest.mark.parametrize("team", [True, False])
@pytest.mark.parametrize(("long_ns", "cores", "times"), [(0.0, 2, 3), (1e12, 2, 0), (0.0, 64, 0)])
def test_workers_run_the_lanes_or_end_before_long_work_on_them(
    long_ns: float, cores: int, times: int, team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a call, if the lanes need the cores; the values are those of the original each time."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    model, x = Towers().eval(), torch.randn(9, 4, 128)
    monkeypatch.setattr(threads, "LONG_NS", long_ns)
    teams: list[int] = []
    ends: list[int] = []
    real_team, real_end = threads.team, threads.end_workers
    usable = team and "GOMP_parallel" in threads._openmp()
    monkeypatch.setattr(
        threads, "team", lambda: (teams.append(1), real_team() if team else None)[1]
    )
    monkeypatch.setattr(threads, "end_workers", lambda: ends.append(1) or real_end())
    strategy = dfx.Branches(wide=False)
    fast = dfx.schedule(model, strategy, lanes=2, rules=[dfx.Module(torch.nn.LSTM)])
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            fast(x)
            teams.clear()
            ends.clear()
            monkeypatch.setattr(machine, "cores", lambda: cores)
            for _ in range(3):
                x = torch.randn(9, 4, 128)
                want = model(x)
                torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
                assert torch.get_num_threads() == 2
                torch.testing.assert_close(model(x), want)  # the workers are made again
    finally:
        torch.set_num_threads(before)
    assert len(teams) == times
    assert len(ends) == (0 if usable else times)


def _tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lanes of any length take the cores of workers."""
    if "GOMP_parallel" not in threads._openmp():
        pytest.skip("this PyTorch has no GOMP_parallel")
    monkeypatch.setattr(threads, "LONG_NS", 0.0)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _scheduled(model: Any) -> Any:
    rules = [dfx.Module(torch.nn.LSTM)]
    return dfx.schedule(model, dfx.Branches(wide=False), lanes=2, rules=rules)


def test_a_worker_keeps_its_state_of_pythons(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no thread of Python's: a state that is made and deleted at each call takes 100 us."""
    model, x = Towers().eval(), torch.randn(9, 4, 128)
    fast = _scheduled(model)
    mine, calls = threading.local(), []
    real = native._run

    def run(stretch: Any, env: Any) -> None:
        mine.count = getattr(mine, "count", 0) + 1
        calls.append((threading.get_native_id(), mine.count))
        real(stretch, env)

    monkeypatch.setattr(native, "_run", run)
    with torch.no_grad():
        model(x), fast(x)
        calls.clear()
        for _ in range(5):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    workers = [call for call in calls if call[0] != threading.get_native_id()]
    counts = {thread: [n for other, n in workers if other == thread] for thread, _ in workers}
    assert counts and all(found == sorted(set(found)) for found in counts.values()), calls


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux only")
def test_lanes_run_on_the_worker_that_spins(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Towers().eval(), torch.randn(9, 4, 128)
    fast = _scheduled(model)
    ran: set[int] = set()
    real = native._run

    def run(stretch: Any, env: Any) -> None:
        ran.add(threading.get_native_id())
        real(stretch, env)

    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(threads, "others_run", lambda: True)
        threads.end_workers()
        before = _tasks()
        torch.exp(torch.randn(1024, 1024))
        (worker,) = _tasks() - before
        monkeypatch.setattr(native, "_run", run)
        on_it = 0
        for _ in range(400):
            ran.clear()
            torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
            on_it += ran == {threading.get_native_id(), worker}
            if on_it == 20:
                break
            time.sleep(0.005)
        assert worker in _tasks()
    # A lane's own thread that still spins after an earlier call may be faster than the worker, now and then.
    assert on_it == 20


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_callers_with_workers_of_their_own_share_the_lanes(
    two_threads: None, compiler: str | None
) -> None:
    model = Towers().eval()
    fast = _scheduled(model) if compiler is None else dfx.schedule(
        model, dfx.Branches(wide=False), lanes=2, rules=[dfx.Module(torch.nn.LSTM)], compiler=compiler
    )  # fmt: skip
    failures: list[BaseException] = []

    def call() -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    x = torch.randn(9, 4, 128)
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    call()
    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    call()
    for caller in callers:
        caller.join()
    assert not failures, failures[0]


def test_an_error_in_a_lane_of_a_worker_is_the_callers(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next call works."""
    model, x = Towers().eval(), torch.randn(9, 4, 128)
    fast = _scheduled(model)
    real = native._run
    main = threading.get_native_id()

    def run(stretch: Any, env: Any) -> None:
        if threading.get_native_id() != main:
            raise ValueError("on the worker")
        real(stretch, env)

    with torch.no_grad():
        want = model(x)
        fast(x)
        with monkeypatch.context() as patched:
            patched.setattr(native, "_run", run)
            for _ in range(50):  # the caller takes a lane whose worker is late
                torch.exp(torch.randn(1024, 1024))
                try:
                    fast(x)
                except dfx.EngineError as error:
                    assert "on the worker" in str(error)
                    break
            else:
                pytest.fail("no worker ran a lane in 50 calls")
        torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux only")
def test_only_workers_that_spin_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that sleep stay; ended ones are made again by as many."""
    if "omp_pause_resource_all" not in threads._openmp():
        pytest.skip("this PyTorch has no omp_pause_resource_all")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a = torch.randn(512, 512)
        want = a @ a
        with_workers = _tasks()
        monkeypatch.setattr(threads, "others_run", lambda: False)
        assert not threads.end_workers()
        assert _tasks() == with_workers
        monkeypatch.setattr(threads, "others_run", lambda: True)
        assert threads.end_workers()
        assert len(_tasks()) < len(with_workers)
        threads.make_workers()
        made = _tasks()
        assert len(made) == len(with_workers)
        torch.testing.assert_close(a @ a, want)
        assert _tasks() == made
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="threads have clocks on Linux only"
)
def test_a_thread_that_computes_is_seen_and_one_that_sleeps_is_not() -> None:
    """Of several looks, since cores may be taken away at any time."""
    until = time.monotonic() + 20

    def seen(wanted: bool) -> bool:
        while time.monotonic() < until:
            if threads.others_run() is wanted:
                return True
            time.sleep(0.01)
        return False

    assert seen(False)
    stop = threading.Event()

    def compute() -> None:
        data = bytes(1 << 22)
        while not stop.is_set():
            hashlib.sha256(data)  # without the GIL

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert seen(True)
    finally:
        stop.set()
        thread.join()
    assert seen(False)


def test_where_threads_are_not_listed_workers_are_taken_to_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: str) -> Any:
        raise OSError("no such folder")

    monkeypatch.setattr(threads.os, "listdir", refused)
    assert threads.others_run()


def test_ending_workers_again_and_again() -> None:
    a = torch.randn(512, 512)
    want = a @ a
    for _ in range(20):
        threads.end_workers()
        torch.testing.assert_close(a @ a, want)


FORKED = """
import os, signal
import torch
import dynaflow_xla as dfx
from dynaflow_xla import machine
from dynaflow_xla.frontends.torch.native import threads

class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(128, 128)
        self.left, self.right = torch.nn.LSTM(128, 64), torch.nn.LSTM(128, 64)

    def forward(self, x):
        y = self.wide(x)
        return self.wide(torch.cat([self.left(y)[0], self.right(y.flip(0))[0]], -1))

threads.LONG_NS = 0.0
machine.cores = lambda: 2
torch.set_num_threads(2)
model = Towers().eval()
with torch.no_grad():
    given = [torch.randn(9, 4, 128) for _ in range(3)]
    wanted = [model(x) for x in given]
    torch.exp(torch.randn(1024, 1024))  # shared with a worker
    fast = dfx.schedule(model, dfx.Branches(wide=False), lanes=2, rules=[dfx.Module(torch.nn.LSTM)])
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it would hold the parent's output open for ever
        failed = 1
        try:
            for x, want in zip(given, wanted):
                torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
            failed = len({i.lane for i in dfx.plan(fast, x).instructions if hasattr(i, "lane")}) < 2
        finally:
            os._exit(failed)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_no_workers() -> None:
    """OpenMP waits for ever for those that its parent had; PyTorch alone does so on the first shared work."""
    done = ended(watched() + FORKED, limit_s=200)
    assert "child ended with 0" in done.stdout, told(done)


OPENMP = """
static int threads = 3;
int omp_get_max_threads(void) { return threads; }
void omp_set_num_threads(int n) { threads = n; }
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
"""
PARALLEL = """
void GOMP_parallel(void (*body)(void *), void *data, unsigned n, unsigned flags) { body(data); }
"""
PRELOADED = """
import torch
from dynaflow_xla.frontends.torch.native import threads

torch.set_num_threads(3)
saved = threads.limit(1)
print("limited to", torch.get_num_threads())
threads.restore(saved)
print("restored to", torch.get_num_threads())
print("team", threads.team() is not None)
"""


@pytest.fixture
def openmp(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Path of a small library of OpenMP's functions; the parameter says whether of all that a team needs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a library with")
    source, library = tmp_path / "openmp.c", tmp_path / "libopenmp.so"
    source.write_text(OPENMP + (PARALLEL if request.param else ""))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return str(library)


@pytest.mark.parametrize(("openmp", "team"), [(True, True), (False, False)], indirect=["openmp"])
def test_a_library_that_was_preloaded_is_pytorchs(openmp: str, team: bool) -> None:
    """As Intel advises for its own; where functions of another would mix with it, there is no team."""
    done = ended(watched() + PRELOADED, limit_s=200, LD_PRELOAD=openmp)
    assert "limited to 1\nrestored to 3\n" in done.stdout, told(done)
    assert f"team {team}" in done.stdout


@pytest.mark.parametrize("openmp", [True], indirect=True)
def test_a_library_that_is_loaded_later_is_not(openmp: str) -> None:
    """It is in the process's scope, but PyTorch's calls were bound before."""
    loaded = f"import torch, ctypes; ctypes.CDLL({openmp!r}, ctypes.RTLD_GLOBAL)\n"
    done = ended(watched() + loaded + PRELOADED, limit_s=200)
    assert "limited to 1\nrestored to 3\n" in done.stdout, told(done)
