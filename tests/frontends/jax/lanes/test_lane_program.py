"""Views of the caller's memory: kept by address, used again in other combinations, bounded."""

from __future__ import annotations

import functools
import itertools
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ffi import lane_program

LARGE = lane_program._SMALL_BYTES // 4 + 64


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of which views are made."""
    made: list[int] = []
    view = lane_program.LaneProgram._view

    def counted(self: Any, index: int, memory: Any) -> Any:
        made.append(memory.ctypes.data)
        return view(self, index, memory)

    monkeypatch.setattr(lane_program.LaneProgram, "_view", counted)
    return made


def three(x: Any, y: Any, z: Any) -> Any:
    return jnp.sort(x) + y, jnp.sort(z) * y


def pools(size: int) -> list[list[Any]]:
    return [
        [jax.random.normal(jax.random.key(10 * n + i), (size,)) for i in range(4)] for n in range(3)
    ]


def check(fast: Any, *arrays: Any) -> None:
    for got, want in zip(fast(*arrays), three(*arrays), strict=True):
        assert (got == want).all()


def test_views_are_used_again(viewed: list[int]) -> None:
    """As in a training loop, whose parameters lie at few addresses in many combinations."""
    fast = dfx.schedule(jax.jit(three), dfx.Branches(), lanes=2, backend="ffi")
    arrays = pools(LARGE)
    for chosen in itertools.product(*arrays):
        check(fast, *chosen)
    for chosen in itertools.product(*arrays[::-1]):  # what was one input's memory is another's
        check(fast, *chosen)
    inputs = {array.unsafe_buffer_pointer() for pool in arrays for array in pool}
    # Each lane looks at an array once; without that it would be some hundred times.
    assert sum(address in inputs for address in viewed) <= 2 * len(inputs)


def test_small_inputs_are_copied_until_they_come_again(viewed: list[int]) -> None:
    fast = dfx.schedule(jax.jit(three), dfx.Branches(), lanes=2, backend="ffi")
    arrays = pools(256)
    inputs = {array.unsafe_buffer_pointer() for pool in arrays for array in pool}
    for chosen in zip(*arrays, strict=True):
        check(fast, *chosen)
    assert not inputs & set(viewed)
    first = [pool[0] for pool in arrays]
    for _ in range(3):
        check(fast, *first)
    again = [address for address in viewed if address in inputs]
    assert set(again) == {x.unsafe_buffer_pointer() for x in first}
    assert len(again) <= 2 * len(first)  # once a lane
    # What was copied for other addresses is not read at these, nor the other way round.
    for chosen in (*itertools.product(*arrays), first, first):
        check(fast, *chosen)
    assert "not 64-byte aligned" not in dfx.explain(fast, *first)


@pytest.mark.parametrize("size", [64, LARGE])
def test_the_views_of_a_program_are_bounded(size: int) -> None:
    fast = dfx.schedule(
        jax.jit(lambda x: jnp.sort(x) + 1), dfx.Sequential(), lanes=1, backend="ffi"
    )
    arrays = [jnp.arange(float(size)) * n for n in range(200)]
    for n, x in enumerate(arrays):
        for _ in range(2):
            assert (fast(x) == jnp.arange(float(size)) * n + 1).all()
    stages = fast._entry((arrays[0],), {})[2].compiled
    programs = [p for stage, _ in stages if stage is not None for p in stage.lane_programs]
    assert programs
    for program in programs:
        assert len(program._views) <= 32
        assert all(0 < len(known) <= 64 for known in program._known)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often lane programs were entered, and how often by a thread while another was inside."""
    counts = {"calls": 0, "together": 0}
    inside: dict[int, int] = {}
    lock = threading.Lock()
    call = lane_program.LaneProgram.__call__

    def counted(self: Any, addresses: tuple[int, ...]) -> None:
        with lock:
            counts["calls"] += 1
            counts["together"] += inside.get(id(self), 0) != 0
            inside[id(self)] = inside.get(id(self), 0) + 1
        try:
            call(self, addresses)
        finally:
            with lock:
                inside[id(self)] -= 1

    monkeypatch.setattr(lane_program.LaneProgram, "__call__", counted)
    return counts


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "directly": lambda fn: fn,
    "in another jit": lambda fn: jax.jit(lambda *xs: fn(*xs)),
    "in a scan": lambda fn: jax.jit(
        lambda *xs: jax.lax.scan(lambda carry, _: (carry, fn(*xs)), 0, None, length=2)[1]
    ),
    "as a jvp": lambda fn: jax.jit(lambda *xs: jax.jvp(fn, xs, xs)[0]),
}


@pytest.mark.parametrize(("strategy", "lanes"), [(dfx.Branches, 2), (dfx.Sequential, 1)])
def test_threads_take_turns_in_a_lane_program(
    entered: dict[str, int], strategy: Any, lanes: int
) -> None:
    """Small inputs at new addresses are copied into one place for each input of a lane program.

    Two threads in one program would read each other's inputs. None has a lock: what runs a lane program
    is the engine alone, for calls from Python, in a caller's jit, loop or transformation (the custom call)
    and for profiles. A lane program belongs to one lane, and a lane does one call after another: lane 0,
    the caller's own thread, in the order of tickets, the others, each one thread, in that of a queue.
    """
    fast = dfx.schedule(jax.jit(mixed), strategy(), lanes=lanes, backend="ffi")
    reference = jax.jit(mixed)
    ways = [way(fast) for way in WAYS.values()]
    errors: list[BaseException] = []

    def arrays(rng: np.random.Generator) -> list[jax.Array]:
        shapes = ((16, 16), (16,), (32, 16))
        return [jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in shapes]

    def work(seed: int, way: Callable[..., Any]) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            xs = arrays(rng)
            for got, want in zip(way(*xs), reference(*xs), strict=True):
                np.testing.assert_allclose(
                    got, np.broadcast_to(want, got.shape), rtol=1e-4, atol=1e-4
                )

    def profiles() -> None:
        for _ in range(3):
            dfx.profile(fast, *xs)

    def watched(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    xs = arrays(np.random.default_rng(99))
    for way in ways:
        way(*xs)  # compiled before all run together
    jobs = [profiles, *(functools.partial(work, n, way) for n, way in enumerate(ways * 2))]
    # Daemons: what hangs is interrupted by the time limit of a test.
    threads = [threading.Thread(target=watched, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert entered["calls"] > 40 * 2 * len(ways)
    assert not entered["together"]


def mixed(a: Any, b: Any, x: Any) -> Any:
    y = x
    for _ in range(3):
        y = jnp.tanh(y @ a + b)
    return jnp.sort(y, axis=0) + b, jnp.sort(-y, axis=0) * a[0]


@pytest.fixture
def alone() -> tuple[Any, Callable[[], tuple[int, ...]], Callable[[], None]]:
    """A lane program, what makes memory for a call that it has not seen, and a call of the whole."""
    fast = dfx.schedule(jax.jit(three), dfx.Branches(), lanes=2, backend="ffi")
    arrays = [pool[0] for pool in pools(LARGE)]
    check(fast, *arrays)
    stages = fast._entry(tuple(arrays), {})[2].compiled
    program = [p for stage, _ in stages if stage is not None for p in stage.lane_programs][0]
    memory = []

    def addresses() -> tuple[int, ...]:
        while True:  # what an earlier call had, and is free again, may come back
            memory.append([lane_program.aligned_bytes(size) for size in program._sizes])
            for one in memory[-1]:
                one[:] = 0
            made = tuple(one.ctypes.data for one in memory[-1])
            if all(known.get(at) is None for at, known in zip(made, program._known, strict=True)):
                return made

    return program, addresses, lambda: check(fast, *[pool[1] for pool in pools(LARGE)])


def _on(thread: str, call: Callable[[], None]) -> BaseException | None:
    """What a call raises on the main thread, or on another."""
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    if thread == "main":
        caught()
    else:
        other = threading.Thread(target=caught)
        other.start()
        other.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("thread", ["main", "other"])
def test_views_that_cannot_be_made_are_an_error_of_the_engine(
    thread: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, addresses, works = alone

    def broken(*_: Any) -> Any:
        raise ValueError("RESOURCE_EXHAUSTED: no memory")

    with monkeypatch.context() as patched:
        patched.setattr(lane_program._compat, "put_view", broken)
        found = _on(thread, lambda: program(addresses()))
    assert isinstance(found, dfx.EngineError) and isinstance(found.__cause__, ValueError)
    assert program.name in str(found) and "RESOURCE_EXHAUSTED: no memory" in str(found)
    works()


class _Late(Exception):
    pass


def _late(*_: Any) -> None:
    raise _Late


@pytest.mark.parametrize(
    "handler", [_late, lambda signum, frame: _late(), functools.partial(_late)]
)
def test_what_a_handler_raises_while_views_are_made_stays_as_it_is(
    handler: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, addresses, works = alone
    put = lane_program._compat.put_view

    def interrupted(*given: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return put(*given)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(lane_program._compat, "put_view", interrupted)
            assert isinstance(_on("main", lambda: program(addresses())), _Late)
    finally:
        signal.signal(signal.SIGUSR1, before)
    works()
