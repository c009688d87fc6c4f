"""Calls that could hang: many at once, from several threads, forked, interrupted, at the end."""

from __future__ import annotations

import os
import textwrap

import pytest
from watched import run

pytest.importorskip("jax")

TOGETHER = {
    "calls": {
        "a_thousand_calls_without_waiting": """
    outer = jax.jit(lambda x: fast(x) @ jnp.eye(32))
    outs = [fast(x) for _ in range(1000)]
    check(outs[-1]); check(outs[0])
    outs = [outer(x) for _ in range(1000)]
    check(outs[-1])
    y = x
    for _ in range(1000):  # a training loop: each call needs the one before, nothing blocks
        y = y * 0.99 + 1e-6 * outer(y)
    assert np.isfinite(np.asarray(y)).all()
    """,
        # Lanes of three cores and of one, and regions on all cores between them, on a machine that has fewer.
        "hundreds_of_calls_of_lanes_of_different_widths": """
    from unittest import mock

    class Uneven(RoundRobin):
        def schedule(self, s):
            turn = 0
            while ready := s.ready():
                for op in ready:
                    turn += 1
                    width = "all" if turn % 5 == 0 else (3, 1)[turn % 2]
                    s.execute(op, lane=turn % 2, width=width)

    with mock.patch.object(os, "sched_getaffinity", lambda _: set(range(8))):
        mixed = dfx.schedule(work, Uneven(), lanes=2)
        assert dfx.plan(mixed, x).widths == {0: 3, 1: 1}
        assert any(launch.lane < 0 for launch in dfx.plan(mixed, x).launches)
        check(mixed(x))

    def loop(_):
        outs = [(mixed(x), fast(x)) for _ in range(100)]
        for pair in outs:
            check(pair[0]); check(pair[1])

    at_once(4, loop)
    outs = [mixed(x) for _ in range(300)]
    check(outs[-1])
    """,
        "a_thousand_calls_of_two_functions_by_turns": """
    other = dfx.schedule(lambda x: jnp.sort(x) @ jnp.sort(x.T), dfx.Branches(wide=False), lanes=LANES)
    outs = [(fast(x), other(x)) for _ in range(1000)]
    check(outs[-1][0])
    """,
    },
    "stages": {
        "callbacks_between_stages_without_waiting": """
    def f(x):
        y = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype),
                              jnp.sort(x))
        return jnp.sort(-y) + jnp.cos(y)
    g = spread(f)
    outs = [g(x) for _ in range(200)]
    np.testing.assert_allclose(outs[-1], jax.jit(f)(x), rtol=1e-5)
    """,
        # Several independent batched LAPACK calls deadlock stock JAX on a small pool; lanes do not.
        "batched_linear_algebra_on_two_lanes": """
    def f(x):
        a = x @ x.T + 40 * jnp.eye(32)
        batch = jnp.stack([a, a + jnp.eye(32), a * 2, a + 3 * jnp.eye(32)])
        return [jnp.linalg.cholesky(batch * (i + 1)).sum() for i in range(4)]
    g = spread(f)
    for _ in range(20):
        out = g(x)
    assert np.isfinite(np.asarray(jnp.stack(out))).all()
    """,
        "fault_in_flight_many_times": """
    def g(flag, x):
        a, b = jnp.sort(x), jnp.cos(x)
        n = jax.ffi.ffi_call("dfx_test_fail", jax.ShapeDtypeStruct((), jnp.int32))(flag)
        return jnp.sort(a @ b + n), jnp.sort(b - a + n), jnp.sort(a * b)
    faulty = spread(g)
    raised = 0
    for i in range(200):
        try:
            jax.block_until_ready(faulty(jnp.int32(i % 2), x))
        except (dfx.EngineError, jax.errors.JaxRuntimeError):
            raised += 1
    assert raised == 100, raised
    check(fast(x))
    """,
    },
    "threads": {
        "eight_threads_with_a_dot_in_the_outer_program": """
    outer = jax.jit(lambda x: fast(x @ jnp.eye(32)) @ jnp.eye(32))
    outer(x)

    def loop(_):
        outs = [outer(x) for _ in range(100)]
        for out in outs:
            check(out)

    at_once(8, loop)
    """,
        "threads_that_make_their_first_call_together": """
    made = [spread(lambda x, i=i: work(x) + i) for i in range(4)]
    barrier = threading.Barrier(8)

    def loop(i):
        barrier.wait()
        for _ in range(20):
            check(np.asarray(made[i % 4](x)) - i % 4)

    at_once(8, loop)
    """,
        "compiling_while_another_thread_calls": """
    stop = threading.Event()
    def loop():
        while not stop.is_set():
            fast(x)
    t = threading.Thread(target=loop); t.start()
    for i in range(5):
        check(np.asarray(spread(lambda x, i=i: work(x) + i)(x)) - i)
    stop.set(); t.join()
    """,
        "a_busy_python_thread": """
    stop = threading.Event()
    def spin():
        n = 0
        while not stop.is_set():
            n += 1
    t = threading.Thread(target=spin); t.start()
    for _ in range(50):
        check(fast(x))
    stop.set(); t.join()
    """,
    },
}
"""Programs that end, and leave the process as it was: those of a group run in one, by turns."""


@pytest.mark.parametrize("group", TOGETHER)
def test_calls_end(group: str) -> None:
    code = ""
    for name, part in TOGETHER[group].items():
        code += f"print({name!r}, flush=True)\n" + textwrap.dedent(part)
    run(code + "print('done')\n")


def test_keyboard_interrupt_during_a_call() -> None:
    """Python loses an interrupt that meets a finaliser or a weak reference's callback: it is sent again."""
    run("""
    import signal
    # A shell that starts a job in the background has it ignore interrupts, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    big = jnp.asarray(np.random.default_rng(0).random((512, 512)), jnp.float32)
    fast(big).block_until_ready()
    interrupted = 0
    for i in range(10):
        for attempt in range(3):
            timer = threading.Timer(0.02 + 0.003 * i, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()  # on a busy machine it may fire before the next line
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    fast(big).block_until_ready()
            except KeyboardInterrupt:
                interrupted += 1
                break
            finally:
                timer.join()
        check(fast(x))
    assert interrupted == 10, interrupted
    print("done")
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_use() -> None:
    run("""
    import warnings
    warnings.simplefilter("ignore")
    check(fast(x))
    pid = os.fork()
    if pid == 0:
        try:
            fast(x)
        except dfx.EngineError as error:
            os._exit(7 if "fork" in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(10)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    check(fast(x))  # the parent is as it was
    print("done")
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_worker_ends() -> None:
    """A multiprocessing worker that never computes (a bare fork hangs in JAX's exit handlers)."""
    run("""
    import multiprocessing, warnings
    warnings.simplefilter("ignore")
    check(fast(x))
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=print, args=("child",))
    worker.start(); worker.join(300)
    assert worker.exitcode == 0, worker.exitcode
    check(fast(x))
    print("done")
    """)


@pytest.mark.parametrize("how", ["main", "thread", "exception"])
def test_exit_with_work_in_flight(how: str) -> None:
    code = {
        "main": "outs = [fast(big) for _ in range(16)]",
        "thread": """
    threading.Thread(target=lambda: [fast(big) for _ in range(16)]).start()
    """,
        "exception": """
    outs = [fast(big) for _ in range(16)]
    try:
        raise SystemExit(0)
    finally:
        outs.append(fast(big))
    """,
    }[how]
    run(
        """
    big = jnp.asarray(np.random.default_rng(0).random((512, 512)), jnp.float32)
    fast(big)
    print("done", flush=True)
    """
        + code
    )


def test_exit_while_a_daemon_thread_calls() -> None:
    """It ends. (With what status is not the package's choice: stock JAX may abort here, too.)"""
    run(
        """
    big = jnp.asarray(np.random.default_rng(0).random((256, 256)), jnp.float32)
    fast(big)
    def loop():
        while True:
            fast(big)
    threading.Thread(target=loop, daemon=True).start()
    time.sleep(0.3)
    print("done", flush=True)
    """,
        any_status=True,
    )


def test_exit_from_an_exit_handler_that_calls() -> None:
    """A call after the engine was shut down gives an error or the value, and no hang."""
    run("""
    import atexit
    def late():
        try:
            check(fast(x))
        except Exception:
            pass
        print("done", flush=True)
    atexit.register(late)
    fast(x)
    """)


def test_deleted_while_the_outer_executable_lives() -> None:
    run("""
    import gc, weakref
    outer = jax.jit(lambda x: fast(x) + 0)
    compiled = outer.lower(x).compile()
    check(outer(x)); check(compiled(x))
    ref = weakref.ref(fast)
    fast = None
    globals().pop("fast")
    outer_twin = jax.jit(lambda x: x)
    for _ in range(3):
        gc.collect()
    for _ in range(10):
        check(outer(x)); check(compiled(x))
    del outer
    gc.collect()
    for _ in range(10):
        check(compiled(x))
    print("done")
    """)


def test_made_and_dropped_many_times() -> None:
    run("""
    import gc
    for i in range(10):
        one = dfx.schedule(lambda x, i=i: jnp.sort(x) * i + jnp.cos(x), dfx.Branches(wide=False), lanes=LANES)
        out = one(x)
        jax.grad(lambda x: one(x).sum())(x)
        del one
    for _ in range(3):  # what one collection frees may hold more
        gc.collect()
    left = sum(type(thing).__name__ == "LaneProgram" for thing in gc.get_objects())
    assert left == 0, f"{left} lane programs outlive their schedules"
    check(fast(x))
    print("done")
    """)


def test_wide_and_narrow_launches_of_many_calls() -> None:
    """Phases of lanes and regions on all cores, in lanes wider than the machine, from several threads."""
    run("""
    class Mixed(RoundRobin):
        def schedule(self, s):
            count = 0
            while ready := s.ready():
                for op in ready:
                    count += 1
                    s.execute(op, lane=count % LANES, width="all" if count % 3 == 0 else None)

    mixed = [
        dfx.schedule(work, Mixed(), lanes=lanes)
        for lanes in (LANES, dfx.Lanes(LANES, width=2), dfx.Lanes(LANES, width=5))
    ]
    for f in mixed:
        check(f(x))

    def calls(number):
        pending = []
        for i in range(60):
            pending.append(mixed[(i + number) % len(mixed)](x))
            if i % 20 == 19:
                for got in pending:
                    check(got)
                pending = []

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    check(jax.jit(lambda x: sum(f(x) for f in mixed) / len(mixed))(x))
    print("done")
    """)
