"""The functions of a case in each framework, its opponents and ours, on a GPU or on its stand-in.

A variant is made when it is called: it warms up, checks its values against the plain function's, and
returns a :class:`Ready`, which measures: from a number of calls to microseconds a call. They are in order
of importance, as there may not be time to prepare them all. PyTorch is timed by CUDA events.
JAX gives no stream to record events on: it is timed by the clock, the last call awaited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

TOLERANCE = 0.15  # of the largest value: bfloat16 rounded in other places, and differences of it


BUDGET_S = 10.0  # of Auto, while it is prepared
MODES = ("CONCURRENT", "LHS", "CONCURRENT_REGIONS")


@dataclass
class Ready:
    """A variant that was compiled, has run, and has the right values.

    Attributes:
        measure: From a number of calls to microseconds a call.
        run: One call.
        difference: Of its values, over their largest.
        tell: What it is, in its own words, and microseconds that its plan was predicted to take.
        decide: Auto's decision anew, within so many seconds; returns what was decided.
    """

    measure: Callable[[int], float]
    run: Callable[[], Any]
    difference: float
    tell: Callable[[], tuple[str, float | None]] = lambda: ("", None)
    decide: Callable[[float], str] | None = None


Makers = dict[str, Callable[[], Ready]]


def ours_ready(made: Ready, fast: Any, args: Any, auto: bool) -> Ready:
    """With what the scheduled function says of itself."""
    import dynaflow_xla as dfx

    def tell() -> tuple[str, float | None]:
        lines = dfx.explain(fast, *args).splitlines()
        lines = [line for line in lines if "cases.py:" not in line]  # a row for each region
        kept = lines[:4] if auto else []  # what was chosen and why; the end is of the plan
        predicted = dfx.simulate(fast, *args).total_ns / 1e3
        return "\n".join([*kept, *lines[max(len(kept), len(lines) - 8) :]])[:1500], predicted

    def decide(seconds: float) -> str:
        choice = dfx.tune(fast, *args, budget_s=seconds)
        medians = {name: round(ms * 1e3, 1) for name, ms in choice.medians_ms.items()}
        made.run()
        return (
            f"chosen: {choice.name}; {choice.reason}; medians us {medians}; decided in "
            f"{choice.seconds:.1f} s\n"
        )

    made.tell, made.decide = tell, decide if auto else None
    return made


class Wrong(Exception):
    """A variant does not compute what the plain function does."""


def compare(wanted: Sequence[Any], got: Sequence[Any]) -> float:
    """Largest difference over the largest value of each output; raises Wrong above the tolerance."""
    if len(wanted) != len(got):
        raise Wrong(f"{len(got)} results, {len(wanted)} are right")
    worst = 0.0
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if want.shape != have.shape or not np.isfinite(have).all():
            raise Wrong(f"result {number} has shape {have.shape} or is not finite")
        scale = float(np.abs(want).max()) or 1.0
        worst = max(worst, float(np.abs(want - have).max()) / scale)
    if worst > TOLERANCE:
        raise Wrong(f"results differ by {worst:.3g} of their largest value")
    return worst


class Cuda:
    """What the torch variants need of a GPU."""

    name = "cuda"
    backend: str | None = None  # of torch.compile

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def time(self, run: Callable[[], Any], calls: int) -> float:
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / calls

    def graph(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """One sequential CUDA graph of a call, and its results."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = run()
        return captured.replay, results

    def wait(self) -> None:
        self.torch.cuda.synchronize()


class Dry(Cuda):
    """The same on a CPU: every line of the benchmark runs, and no number means anything."""

    name = "cpu"
    backend = "eager"

    def time(self, run: Callable[[], Any], calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begin) * 1e6 / calls

    def graph(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        return run, run()

    def wait(self) -> None:
        return None


def torch_functions(torch: Any) -> SimpleNamespace:
    f = torch.nn.functional
    return SimpleNamespace(
        tanh=torch.tanh, silu=f.silu, exp=torch.exp, sqrt=torch.sqrt,
        softmax=lambda x: torch.softmax(x, -1), concat=torch.cat,
        conv=lambda x, w: f.conv2d(x, w, padding="same"),
        down=lambda x: f.avg_pool2d(x, 2),
        up=lambda x: f.interpolate(x, scale_factor=2, mode="nearest"),
    )  # fmt: skip


def jax_functions(jax: Any) -> SimpleNamespace:
    jnp = jax.numpy

    def down(x: Any) -> Any:
        b, c, h, w = x.shape
        return x.reshape(b, c, h // 2, 2, w // 2, 2).mean((3, 5))

    def conv(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    return SimpleNamespace(
        tanh=jnp.tanh, silu=jax.nn.silu, exp=jnp.exp, sqrt=jnp.sqrt,
        softmax=lambda x: jax.nn.softmax(x, -1), concat=jnp.concatenate,
        conv=conv, down=down, up=lambda x: jnp.repeat(jnp.repeat(x, 2, 2), 2, 3),
    )  # fmt: skip


def values(shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Arguments as float32: each scaled so that products keep their size."""
    rng = np.random.default_rng(0)
    made = []
    for shape in shapes:
        inner = int(np.prod(shape[1:])) if len(shape) == 4 else shape[-1]
        made.append((rng.standard_normal(shape) / max(1, inner) ** 0.5).astype(np.float32))
    return made


def torch_variants(case: Any, lanes: int, dry: bool) -> Makers:
    """Opponents and ours in PyTorch."""
    import torch

    import dynaflow_xla as dfx

    device = Dry(torch) if dry else Cuda(torch)
    fn = case.make(torch_functions(torch))
    args = [torch.from_numpy(a).to(device.name, torch.bfloat16) for a in values(case.shapes)]

    def numbers(results: Any) -> list[Any]:
        flat = torch.utils._pytree.tree_leaves(results)
        return [x.float().cpu().numpy() for x in flat]

    torch.set_grad_enabled(False)
    wanted = numbers(fn(*args))

    def timed(run: Callable[[], Any], results: Any = None) -> Ready:
        for _ in range(4):
            made = run()
        device.wait()
        difference = compare(wanted, numbers(made if results is None else results))
        return Ready(lambda calls: device.time(run, calls), run, difference)

    def graph() -> Ready:
        return timed(*device.graph(lambda: fn(*args)))

    def copied() -> Ready:
        static = list(args)  # what a user gives at every call may be other tensors
        replay, results = device.graph(lambda: fn(*static))
        flat, tree = torch.utils._pytree.tree_flatten(results)

        def call(*given: Any) -> Any:
            for mine, other in zip(static, given, strict=True):
                if mine is not other:
                    mine.copy_(other)
            replay()
            return torch.utils._pytree.tree_unflatten([x.clone() for x in flat], tree)

        return timed(lambda: call(*args))

    def ours(strategy: Any, **options: Any) -> Ready:
        fast = dfx.schedule(fn, strategy=strategy, backend="torch", lanes=lanes, **options)
        auto = isinstance(strategy, dfx.Auto)
        made = ours_ready(timed(lambda: fast(*args)), fast, args, auto)
        if options:  # a decision anew compiles anew
            made.decide = None
        return made

    def replayed(strategy: str) -> Ready:
        """Our graph alone, as "torch one graph" is one alone: without what a call does around it."""
        fast = dfx.schedule(fn, strategy=strategy, backend="torch", lanes=lanes)
        for _ in range(3):
            fast(*args)
        captured = getattr(fast._dfx_core.planned(tuple(args), {}).runner, "_last", None)
        if captured is None:
            raise RuntimeError("nothing is captured here")
        results = captured.results.outputs
        return timed(captured.replay, results)

    def exported() -> Ready:
        """Without guards: the program was captured ahead."""

        class Module(torch.nn.Module):
            def forward(self, *tensors: Any) -> Any:
                return fn(*tensors)

        program = torch.export.export(Module(), tuple(args))
        fast = dfx.schedule(program, strategy="branches", backend="torch", lanes=lanes)
        return timed(lambda: fast(*args))

    def compiled(mode: str | None) -> Ready:
        more = {"backend": device.backend} if device.backend else {"mode": mode}
        made = torch.compile(fn, **more)
        return timed(lambda: made(*args))

    auto = dfx.Auto(budget_s=BUDGET_S)
    made: Makers = {
        "torch eager": lambda: timed(lambda: fn(*args)),
        "torch one graph": graph,
        "dfx torch branches": lambda: ours("branches"),
        "dfx torch branches, replay": lambda: replayed("branches"),
        "dfx torch auto": lambda: ours(auto),
        "dfx torch branches, exported": exported,
        "dfx torch sequential": lambda: ours("sequential"),
        "torch one graph, copied": copied,
        "torch.compile graphs": lambda: compiled("reduce-overhead"),
        "dfx torch branches inductor": lambda: ours("branches", compiler="inductor"),
        "torch.compile": lambda: compiled(None),
        "dfx torch auto compiled": lambda: ours(auto, compiler="auto"),
    }
    if dry and case.name != "qkv":  # on a CPU Inductor compiles for long
        del made["dfx torch branches inductor"], made["dfx torch auto compiled"]
    if dry:  # there are no graphs
        del made["dfx torch branches, replay"]
    return made


def _jax_case(case: Any) -> tuple[Any, list[Any], Callable[[Any], Ready]]:
    import jax
    import jax.numpy as jnp

    fn = case.make(jax_functions(jax))
    args = [jnp.asarray(a, jnp.bfloat16) for a in values(case.shapes)]

    def numbers(results: Any) -> list[Any]:
        return [np.asarray(x, np.float32) for x in jax.tree_util.tree_leaves(results)]

    wanted = numbers(jax.jit(fn)(*args))

    def timed(run: Any) -> Ready:
        for _ in range(3):
            made = jax.block_until_ready(run(*args))
        difference = compare(wanted, numbers(made))

        def measure(calls: int) -> float:
            begin = time.perf_counter()
            for _ in range(calls - 1):
                run(*args)
            jax.block_until_ready(run(*args))
            return (time.perf_counter() - begin) * 1e6 / calls

        return Ready(measure, lambda: run(*args), difference)

    return fn, args, timed


def jax_variants(case: Any, lanes: int, dry: bool) -> Makers:
    """Plain jit, jit in each command-buffer mode, and ours as one XLA program in each of them."""
    import jax

    import dynaflow_xla as dfx

    fn, args, timed = _jax_case(case)

    def compiled(options: dict[str, Any]) -> Ready:
        return timed(jax.jit(fn).lower(*args).compile(compiler_options=options))

    def mode(name: str) -> Ready:
        options: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
        return compiled({**options, "xla_gpu_command_buffer_scheduling_mode": name})

    def ours(options: dict[str, Any] | None = None) -> Ready:
        fast = dfx.schedule(
            fn, strategy="branches", backend="xla", lanes=lanes, compiler_options=options
        )
        return ours_ready(timed(fast), fast, args, False)

    def ours_in(name: str) -> Ready:
        return ours({"xla_gpu_command_buffer_scheduling_mode": name})

    made: Makers = {
        "jax jit": lambda: timed(jax.jit(fn)),
        "dfx xla branches": ours,  # the mode is CONCURRENT
    }
    made |= {f"jax jit {name}": lambda name=name: mode(name) for name in MODES}
    made |= {"jax jit no graph": lambda: compiled({"xla_gpu_enable_command_buffer": ""})}
    made |= {f"dfx xla branches {name}": lambda name=name: ours_in(name) for name in MODES[1:]}
    return made


def ffi_variants(case: Any, lanes: int, dry: bool) -> Makers:
    """Lanes that are clients of their own, in a process of their own: a hang there costs no more."""
    import jax

    import dynaflow_xla as dfx

    fn, args, timed = _jax_case(case)

    def ours(strategy: Any, backend: str = "ffi") -> Ready:
        fast = dfx.schedule(fn, strategy=strategy, backend=backend, lanes=lanes)
        return ours_ready(timed(fast), fast, args, isinstance(strategy, dfx.Auto))

    return {
        "jax jit": lambda: timed(jax.jit(fn)),
        "dfx ffi branches": lambda: ours("branches"),
        "dfx ffi sequential": lambda: ours("sequential"),
        # The default backend is these lanes, too.
        "dfx jax auto": lambda: ours(dfx.Auto(budget_s=BUDGET_S), "auto"),
    }


GROUPS = {"torch": torch_variants, "jax": jax_variants, "ffi": ffi_variants}
