"""Answers one open question about XLA on a GPU: ``python probes.py QUESTION`` prints a line of JSON.

overlap: do the streams of extra clients overlap. in_place: are donated views of foreign memory written.
ordered: has Execute enqueued when it returns, so that raw events order it. reenter: does a compile
beside a custom call that executes hang. streams: do XLA's own stream annotations overlap.
execute_cost: microseconds of host time of an Execute from C++, of what the engine does around it, and
of a call from Python. gates: does a gate that records nothing work in a captured graph, and does it
order.

How far a probe came is on the error stream; so are the stacks of its threads, shortly before the time
limit that ``PROBE_SECONDS`` tells.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import statistics
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_xla.ffi import _compat, _engine, device_lanes, device_steps

# On a stand-in for the driver the probes are rehearsed: fewer of everything, and times mean nothing.
REHEARSAL = bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
N, SHORT, CALLS = (32, 4, 3) if REHEARSAL else (256, 40, 20)
WIDTH, WINDOW = (64, 32) if REHEARSAL else (1024, 1 << 18)
BATCHES, FURTHER, SECONDS = (3, 4, 3) if REHEARSAL else (50, 20, 20)
BATCH = 20  # executions between two waits: an XLA client waits itself before the 33rd under way

NOTHING = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry delay(.param .u64 cycles) { ret; }
\0"""


def say(*what: Any) -> None:
    """How far the probe is, for the answer if it hangs."""
    print(*what, file=sys.stderr, flush=True)


def long(x: Any) -> Any:
    """One kernel of some milliseconds on a few multiprocessors: each element is the greatest of a
    window, which its thread goes through one by one. (A loop of small kernels would be started from
    the host, which is then what takes the time.)"""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (WINDOW,), (1,), "VALID")


def long_input() -> Any:
    return jnp.sin(jnp.arange(WIDTH + WINDOW - 1, dtype=jnp.float32))


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


def launches(executable: Any) -> int:
    """How many operations of an executable the host starts, as far as its HLO says."""
    text = executable.hlo_modules()[0].to_string()
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r" (?:fusion|custom-call|while|copy|call|reduce-window)\(", entry))


def program(
    made: Any, fns: list[Any], x: Any, outs: list[Any], repeat: int = 1
) -> tuple[Any, list[Any]]:
    """An engine program: function i on lane i, some times, from one argument; its steps' counters."""
    made_program = _engine.Program(len(fns), 0, 1, len(fns), 0, "probe")
    source = made_program.add_buffer("arg", 0, 0, x.nbytes)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    counters = []
    for lane, (fn, out) in enumerate(zip(fns, outs, strict=True)):
        place = made_program.add_buffer("result", lane, 0, out.nbytes)
        executable = compiled(made, lane, lambda a, o, fn=fn: fn(a), x, out, donate=(1,))
        say(f"lane {lane} is compiled: {launches(executable)} launches")
        out_spec = jax.ShapeDtypeStruct(out.shape, out.dtype)
        for _ in range(repeat):
            counters.append(
                device_steps.add_step(
                    made_program, made, lane, f"lane {lane}", executable, [], ([spec], [source]),
                    ([out_spec], [place]), [True],
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


def run_on(fns: list[Any], x: Any = None, repeat: int = 1) -> tuple[Any, Any, Any, Any, Any]:
    """The caller's stream, a function that enqueues the program, its arrays and counters."""
    made, caller = lanes(), Caller()
    engine = made.engine(2)
    x = jnp.eye(N, dtype=jnp.float32) * 0.5 if x is None else x
    specs = [jax.eval_shape(fn, x) for fn in fns]
    outs = [jnp.full(spec.shape, -1.0, spec.dtype) + 0 for spec in specs]
    jax.block_until_ready((x, outs))
    built, counters = program(made, fns, x, outs, repeat)
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


def enqueued(call: Any, wait: Any, batch: int = BATCH) -> float:
    """Microseconds of host time a call, the median of some batches; the device may be slower."""
    times = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - begin) / batch * 1e6)
        wait()
    return statistics.median(times)


def enqueue_ms(call: Any, wait: Any) -> float:
    """Milliseconds that one call takes the host, on an idle device, the smallest of some."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        wait()
    return min(times) * 1e3


def overlap() -> dict[str, Any]:
    made = lanes()
    x = long_input()
    number = launches(compiled(made, 0, long, x))
    caller, call, *_ = run_on([long], x)
    one = best(call, caller.wait)
    caller, call, *_ = run_on([long, long], x)
    two, host = best(call, caller.wait), enqueue_ms(call, caller.wait)
    # Where the host is what takes the time, the times say nothing of the device.
    answer = "yes" if two < 1.5 * one else "no" if host < 0.5 * one else "unclear: the host is slow"
    return {
        "answer": answer, "one_ms": one, "two_lanes_ms": two, "enqueue_two_ms": host,
        "launches_a_lane": number,
    }  # fmt: skip


def in_place() -> dict[str, Any]:
    _, _, x, outs, counters = run_on([lambda a: a * 2 + 1])
    right = bool(np.array_equal(np.asarray(outs[0]), np.asarray(x * 2 + 1)))
    copied = counters[0].copied_outputs
    return {"answer": "yes" if right and not copied else "no", "right": right, "copied": copied}


def ordered() -> dict[str, Any]:
    caller, call, x, outs, _ = run_on([long, long], long_input())
    want = np.asarray(jax.jit(long)(x))
    number = launches(compiled(lanes(), 0, long, x))
    whole, host = best(call, caller.wait), enqueue_ms(call, caller.wait)
    pending = right = 0
    for _ in range(CALLS):
        call()
        pending += caller.busy()
        caller.wait()
        right += bool(np.array_equal(np.asarray(outs[1] + 0), want))
    # Events cover Execute if the caller's stream is busy right after it, and done means done.
    answer = "yes" if pending == CALLS and right == CALLS else "no"
    return {
        "answer": answer, "pending": pending, "right": right, "of": CALLS, "whole_ms": whole,
        "enqueue_ms": host, "launches_a_lane": number,
    }  # fmt: skip


def reenter() -> dict[str, Any]:
    import dynaflow_xla as dfx

    fast = dfx.schedule(
        lambda x: (jnp.tanh(x @ x) + 1) + (jnp.sin(x @ x) * 2), strategy="branches", backend="ffi",
        lanes=2,
    )  # fmt: skip
    x = jnp.eye(N) * 0.5
    say("scheduled")
    jax.block_until_ready(fast(x))
    say("called once, nothing beside")
    stop = threading.Event()
    compiles = 0

    def compiler() -> None:
        nonlocal compiles
        size = 128
        while not stop.is_set():
            size += 8
            spec = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
            lowered = jax.jit(lambda a: jax.nn.gelu(a @ a.T) @ a).lower(spec)
            say(f"compile {compiles} begins, beside call {calls}")
            lowered.compile()
            compiles += 1

    thread = threading.Thread(target=compiler, daemon=True, name="compiles")
    calls = 0
    thread.start()
    begin = said = time.time()
    while time.time() - begin < SECONDS:
        made = [fast(x) for _ in range(20)]
        if calls == 0 or time.time() - said > 1:
            said = time.time()
            say(f"{calls + 20} calls are enqueued, {compiles} compiles over")
        jax.block_until_ready(made)
        calls += 20
    say(f"all {calls} calls are over, {compiles} compiles")
    stop.set()
    thread.join(10)
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
    made, caller = lanes(), Caller()
    engine = made.engine(2)
    us: dict[str, float] = {}

    def bare(name: str, used: int, kernel: bool = False) -> None:
        """A program of the engine without executables: each lane records an event, which is nothing."""
        built = _engine.Program(used, used, 0, 0, 0, name)
        for lane in range(used):
            if kernel:
                cycles = [bytes(8)]
                engine.add_kernel_launch(
                    built, lane, name, NOTHING, "delay", (1, 1, 1), (1, 1, 1), 0, cycles, [], []
                )
            else:
                built.add_record(lane, lane)
        built.finish()
        us[name] = enqueued(lambda: engine.run(built, [], [], caller.stream), caller.wait)
        say(name, us[name])

    bare("empty, 1 lane", 1)
    bare("empty, 2 lanes", 2)
    bare("a kernel, 1 lane", 1, kernel=True)

    def double(a: Any) -> Any:
        return a * 2 + 1

    def executables(name: str, used: int, repeat: int) -> None:
        _, call, *_ = kept = run_on([double] * used, repeat=repeat)
        us[name] = enqueued(call, kept[0].wait, max(1, BATCH // repeat))
        say(name, us[name])

    executables("executable, 1 lane", 1, 1)
    executables("executable, 2 lanes", 2, 1)
    many = f"{1 + FURTHER} executables, 1 lane"
    executables(many, 1, 1 + FURTHER)
    # A loop in C++ of nothing but binding and PJRT's Execute.
    us["each further executable"] = (us.pop(many) - us["executable, 1 lane"]) / FURTHER
    x = jnp.eye(N, dtype=jnp.float32)
    held: list[Any] = []
    wait = lambda: (jax.block_until_ready(held), held.clear())  # noqa: E731
    for name, fn in (
        ("jax.jit from Python", jax.jit(double)),
        ("loaded executable from Python", loaded(made, double, x)),
    ):
        fn(x)
        us[name] = enqueued(lambda fn=fn: held.append(fn(x)), wait)
        say(name, us[name])
    return {"answer": f"{us['executable, 1 lane']:.1f} us", "us": us}


def loaded(made: Any, fn: Any, x: Any) -> Any:
    """Calls an executable with the least of Python around it."""
    executable = compiled(made, 0, fn, x)
    own = jax.device_put(x, made.device(0))
    return lambda _: _compat.execute_on_device(executable, [own])


def gates() -> dict[str, Any]:
    handler = _engine.handlers().get("cuda_order_gate")
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
    orders = times["gated"] > 1.15 * times["free"]
    return {"answer": "yes" if same and orders else "no", "same": same, "ms": times}


if __name__ == "__main__":
    if limit := float(os.environ.get("PROBE_SECONDS", 0)):
        faulthandler.dump_traceback_later(0.9 * limit)
    print(json.dumps(globals()[sys.argv[1]]()))
    sys.stdout.flush()
