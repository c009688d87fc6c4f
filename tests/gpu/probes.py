"""Answers one open question about XLA on a GPU: ``python probes.py QUESTION`` prints a line of JSON.

overlap: do the streams of extra clients overlap. in_place: are donated views of foreign memory written.
ordered: has Execute enqueued when it returns, so that raw events order it. reenter: does a compile
beside a custom call that executes hang. streams: do XLA's own stream annotations overlap.
execute_cost: microseconds of an Execute from C++. gates: does a gate that records nothing work in a
captured graph, and does it order.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_xla.ffi import _engine, device_lanes, device_steps

# On a stand-in for the driver the probes are rehearsed: fewer of everything, and times mean nothing.
REHEARSAL = bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
N, CHAIN, SHORT, CALLS = (32, 10, 4, 3) if REHEARSAL else (256, 400, 40, 20)
EXECUTIONS, SECONDS = (50, 3) if REHEARSAL else (2000, 30)


def chain(x: Any) -> Any:
    """Small kernels, one after another: alone they leave the device almost idle."""
    return jax.lax.fori_loop(0, CHAIN, lambda i, c: jnp.tanh(c @ x), x)


def short(x: Any) -> Any:
    """The same without a loop."""
    for _ in range(SHORT):
        x = jnp.tanh(x @ x)
    return x


def lanes() -> device_lanes.CudaLanes:
    """Two lanes on the default device."""
    made = device_lanes.cuda_lanes(jax.devices()[0])
    made.engine(2)
    return made


def compiled(made: Any, lane: int, fn: Any, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """An executable of one lane."""
    sharding = jax.sharding.SingleDeviceSharding(made.device(lane))
    jitted = jax.jit(
        fn, in_shardings=sharding, out_shardings=sharding, keep_unused=True, donate_argnums=donate
    )
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
    return jitted.trace(*specs).lower().compile().runtime_executable()


def program(made: Any, fns: list[Any], x: Any) -> tuple[Any, list[Any]]:
    """An engine program: function i on lane i, all from one argument; and its steps' counters."""
    made_program = _engine.Program(len(fns), 0, 1, len(fns), 0, "probe")
    source = made_program.add_buffer("arg", 0, 0, x.nbytes)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    counters = []
    for lane, fn in enumerate(fns):
        place = made_program.add_buffer("result", lane, 0, x.nbytes)
        executable = compiled(made, lane, lambda a, o, fn=fn: fn(a), x, x, donate=(1,))
        counters.append(
            device_steps.add_step(
                made_program, made, lane, f"lane {lane}", executable, [], ([spec], [source]),
                ([spec], [place]), [True],
            )
        )  # fmt: skip
    made_program.finish()
    return made_program, counters


class Caller:
    """A stream of the default context, and waiting for it, through the driver."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.driver.cuCtxSetCurrent(context) == 0
        stream = ctypes.c_void_p()
        assert self.driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
        self.stream = int(stream.value or 0)

    def busy(self) -> bool:
        return self.driver.cuStreamQuery(ctypes.c_void_p(self.stream)) == 600

    def wait(self) -> None:
        assert self.driver.cuStreamSynchronize(ctypes.c_void_p(self.stream)) == 0


def run_on(fns: list[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Lanes, engine, caller, a function that enqueues the program, its arrays and counters."""
    made, caller = lanes(), Caller()
    engine = made.engine(2)
    x = jnp.eye(N, dtype=jnp.float32) * 0.5
    outs = [jnp.full((N, N), -1.0) + 0 for _ in fns]
    jax.block_until_ready((x, outs))
    built, counters = program(made, fns, x)
    places = [o.unsafe_buffer_pointer() for o in outs]

    def call() -> None:
        engine.run(built, [x.unsafe_buffer_pointer()], places, caller.stream)

    call()
    caller.wait()
    return caller, call, x, outs, counters


def best(call: Any, wait: Any, repeat: int = CALLS) -> float:
    """Milliseconds, the smallest of some."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def overlap() -> dict[str, Any]:
    caller, call, *_ = run_on([chain])
    one = best(call, caller.wait)
    caller, call, *_ = run_on([chain, chain])
    two = best(call, caller.wait)
    return {"answer": "yes" if two < 1.5 * one else "no", "one_ms": one, "two_lanes_ms": two}


def in_place() -> dict[str, Any]:
    _, _, x, outs, counters = run_on([lambda a: a * 2 + 1])
    right = bool(np.array_equal(np.asarray(outs[0]), np.asarray(x * 2 + 1)))
    copied = counters[0].copied_outputs
    return {"answer": "yes" if right and not copied else "no", "right": right, "copied": copied}


def ordered() -> dict[str, Any]:
    caller, call, x, outs, _ = run_on([chain, chain])
    want = np.asarray(jax.jit(chain)(x))
    pending = right = 0
    for _ in range(CALLS):
        call()
        pending += caller.busy()
        caller.wait()
        right += bool(np.allclose(np.asarray(outs[1] + 0), want, atol=1e-4))
    # Events cover Execute if the caller's stream is busy right after it, and done means done.
    answer = "yes" if pending == CALLS and right == CALLS else "no"
    return {"answer": answer, "pending": pending, "right": right, "of": CALLS}


def reenter() -> dict[str, Any]:
    import dynaflow_xla as dfx

    fast = dfx.schedule(
        lambda x: (jnp.tanh(x @ x) + 1) + (jnp.sin(x @ x) * 2), strategy="branches", backend="ffi",
        lanes=2,
    )  # fmt: skip
    x = jnp.eye(N) * 0.5
    jax.block_until_ready(fast(x))
    stop = threading.Event()
    compiles = 0

    def compiler() -> None:
        nonlocal compiles
        size = 128
        while not stop.is_set():
            size += 8
            spec = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
            jax.jit(lambda a: jax.nn.gelu(a @ a.T) @ a).lower(spec).compile()
            compiles += 1

    thread = threading.Thread(target=compiler, daemon=True)
    thread.start()
    begin = time.time()
    calls = 0
    while time.time() - begin < SECONDS:
        jax.block_until_ready([fast(x) for _ in range(20)])
        calls += 20
    stop.set()
    thread.join(30)
    return {"answer": "no hang", "calls": calls, "compiles": compiles}


def streams() -> dict[str, Any]:
    from jax.experimental.compute_on import compute_on

    def on(k: int) -> Any:
        space = jax.memory.Space.Device
        return compute_on(short, compute_type=f"gpu_stream:{k}", out_memory_spaces=space)

    x = jnp.eye(N) * 0.5
    times: dict[str, float] = {}
    plain, annotated = lambda a: short(a) + short(a * 2), lambda a: on(1)(a) + on(2)(a * 2)
    modes: list[tuple[str, dict[str, Any]]] = [("off", {"xla_gpu_enable_command_buffer": ""})]
    modes += [(m, {"xla_gpu_command_buffer_scheduling_mode": m, "xla_gpu_graph_min_graph_size": 1})
              for m in ("LHS", "CONCURRENT", "CONCURRENT_REGIONS")]  # fmt: skip
    for name, fn in (("plain", plain), ("annotated", annotated)):
        for mode, options in modes:
            try:
                run = jax.jit(fn).lower(x).compile(compiler_options=options)
                jax.block_until_ready(run(x))
                times[f"{name} {mode}"] = best(lambda r=run: jax.block_until_ready(r(x)), int)
            except Exception as error:
                times[f"{name} {mode}"] = -1.0
                print(f"{name} {mode}: {error}", file=sys.stderr)
    serial = times["plain off"]
    wins = [k for k, v in times.items() if 0 < v < 0.7 * serial]
    return {"answer": "yes" if wins else "no", "overlap": wins, "ms": times}


def execute_cost() -> dict[str, Any]:
    caller, call, *_ = run_on([lambda a: a * 2 + 1])
    repeat = EXECUTIONS
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    enqueue = (time.perf_counter() - begin) / repeat * 1e6
    caller.wait()
    return {"answer": f"{enqueue:.1f} us", "us_with_fork_join_and_binding": enqueue}


def gates() -> dict[str, Any]:
    handler = _engine.handlers().get("order_gate")
    if handler is None:
        return {"answer": "not asked", "why": "this version has no order gate"}
    jax.ffi.register_ffi_target("probe_gate", handler, platform="CUDA")

    def gate(x: Any, after: Any) -> Any:
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("probe_gate", [spec], input_output_aliases={0: 0})(x, after)[0]

    def two(x: Any, order: bool) -> Any:
        a, y = short(x), x * 2
        return a, short(gate(y, a) if order else y)

    x = jnp.eye(N) * 0.5
    options = {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    }
    times, values = {}, {}
    for name, order in (("free", False), ("gated", True)):
        run = jax.jit(lambda a, o=order: two(a, o)).lower(x).compile(compiler_options=options)
        values[name] = jax.block_until_ready(run(x))
        times[name] = best(lambda r=run: jax.block_until_ready(r(x)), int)
    same = all(np.array_equal(a, b) for a, b in zip(*values.values(), strict=True))
    orders = times["gated"] > 1.3 * times["free"]
    return {"answer": "yes" if same and orders else "no", "same": same, "ms": times}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
    sys.stdout.flush()
