"""Benchmarks on a GPU: every case, each opponent beside ours in the same run.

PyTorch runs are timed by CUDA events around ``--inner`` calls. JAX gives no stream to record events
on, so its runs are timed by the clock around as many calls, the last one awaited. Samples are taken in
rotating order; all of them are written, with the machine, to ``benchmarks/results/gpu-<date>.json``.
What cannot run is written with its reason. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
Timed = Callable[[int], float]  # calls -> microseconds a call


def torch_variants(case: Any, lanes: int) -> dict[str, Callable[[], Timed]]:
    """Opponents and ours in PyTorch, made when called."""
    import torch

    import dynaflow_xla as dfx

    f = SimpleNamespace(
        tanh=torch.tanh, silu=torch.nn.functional.silu, exp=torch.exp, sqrt=torch.sqrt,
        softmax=lambda x: torch.softmax(x, -1),
    )  # fmt: skip
    fn = case.make(f)
    generator = torch.Generator("cuda").manual_seed(0)
    args = [torch.randn(s, device="cuda", generator=generator) / s[-1] ** 0.5 for s in case.shapes]
    args = [a.to(torch.bfloat16) for a in args]

    def timed(run: Any) -> Timed:
        def measure(calls: int) -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.no_grad():
                first.record()
                for _ in range(calls):
                    run()
                last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e3 / calls

        with torch.no_grad():
            for _ in range(4):
                run()
        torch.cuda.synchronize()
        return measure

    def graph() -> Timed:
        captured = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            fn(*args)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad(), torch.cuda.graph(captured):
            fn(*args)
        return timed(captured.replay)

    def ours(strategy: str) -> Timed:
        fast = dfx.schedule(fn, strategy=strategy, backend="torch", lanes=lanes)
        return timed(lambda: fast(*args))

    def compiled(mode: str | None) -> Timed:
        made = torch.compile(fn, mode=mode)
        return timed(lambda: made(*args))

    return {
        "torch eager": lambda: timed(lambda: fn(*args)),
        "torch one graph": graph,
        "torch.compile": lambda: compiled(None),
        "torch.compile graphs": lambda: compiled("reduce-overhead"),
        "dfx torch sequential": lambda: ours("sequential"),
        "dfx torch branches": lambda: ours("branches"),
    }


def jax_variants(case: Any, lanes: int) -> dict[str, Callable[[], Timed]]:
    """Opponents and ours in JAX, made when called."""
    import jax
    import jax.numpy as jnp

    import dynaflow_xla as dfx

    f = SimpleNamespace(
        tanh=jnp.tanh, silu=jax.nn.silu, exp=jnp.exp, sqrt=jnp.sqrt,
        softmax=lambda x: jax.nn.softmax(x, -1),
    )  # fmt: skip
    fn = case.make(f)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, jnp.bfloat16) for s in case.shapes]

    def timed(run: Any) -> Timed:
        def measure(calls: int) -> float:
            begin = time.perf_counter()
            for _ in range(calls - 1):
                run(*args)
            jax.block_until_ready(run(*args))
            return (time.perf_counter() - begin) * 1e6 / calls

        for _ in range(3):
            jax.block_until_ready(run(*args))
        return measure

    def mode(name: str) -> Timed:
        options: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
        options["xla_gpu_command_buffer_scheduling_mode"] = name
        return timed(jax.jit(fn).lower(*args).compile(compiler_options=options))

    def ours(backend: str, strategy: str) -> Timed:
        return timed(dfx.schedule(fn, strategy=strategy, backend=backend, lanes=lanes))

    made = {"jax jit": lambda: timed(jax.jit(fn))}
    for name in ("LHS", "CONCURRENT", "CONCURRENT_REGIONS"):
        made[f"jax jit {name}"] = lambda name=name: mode(name)
    for backend in ("xla", "ffi"):
        made[f"dfx {backend} branches"] = lambda b=backend: ours(b, "branches")
    return made


def measure_case(case: Any, options: Any) -> dict[str, Any]:
    """Samples of every variant that runs, and why the others do not."""
    makers: dict[str, Callable[[], Timed]] = {}
    failed: dict[str, str] = {}
    for framework, variants in (("torch", torch_variants), ("jax", jax_variants)):
        if framework not in options.frameworks:
            continue
        try:
            makers |= variants(case, options.lanes)
        except Exception as error:  # a framework that is missing is a result, too
            failed[framework] = f"{type(error).__name__}: {error}"
    ready: dict[str, Timed] = {}
    for name, make in makers.items():
        if time.monotonic() > options.deadline:
            failed[name] = "no time left"
            continue
        try:
            ready[name] = make()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
    samples: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(options.rounds):
        if time.monotonic() > options.deadline:
            break
        for name in names[number % len(names) :] + names[: number % len(names)] if names else []:
            samples[name].append(ready[name](options.inner))
    return {"note": case.note, "shapes": case.shapes, "samples_us": samples, "failed": failed}


def gpu_stamp() -> dict[str, Any]:
    """Name, driver and clocks of the GPU, as far as the packages here tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "name": pynvml.nvmlDeviceGetName(device),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
        }
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}


def draw(record: dict[str, Any], target: Path) -> None:
    """A bar for each variant and case: how much faster than one sequential CUDA graph or plain jit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = record["cases"]
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(9, 2.2 * len(cases)), squeeze=False)
    for axis, (name, case) in zip(axes[:, 0], cases.items(), strict=True):
        medians = {k: float(np.median(v)) for k, v in case["samples_us"].items() if v}
        axis.barh(list(medians), list(medians.values()))
        axis.set_title(f"{name}: median microseconds a call", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=80)


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", help="default: all")
    parser.add_argument("--frameworks", nargs="*", default=["torch", "jax"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=20, help="calls a sample")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=420, help="then what is left is left out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds

    import environment
    import gpu_cases

    from dynaflow_xla.ffi import _engine

    if problem := _engine.cuda_problem():
        print(f"bench-gpu: nothing to measure: {problem}")
        return 0
    stamp = {**environment.stamp(), "gpu": gpu_stamp()}
    record: dict[str, Any] = {
        "format": 1, "benchmark": "gpu", "environment": stamp, "rounds": options.rounds,
        "calls_per_sample": options.inner, "lanes": options.lanes, "cases": {},
    }  # fmt: skip
    date = stamp["date"].replace(":", "").replace("+0000", "Z")
    path = options.out or RESULTS / f"gpu-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in gpu_cases.CASES:
        if options.cases and case.name not in options.cases:
            continue
        made = record["cases"][case.name] = measure_case(case, options)
        for name, values in made["samples_us"].items():
            if values:
                print(f"{case.name:16} {name:22} median {np.median(values):9.1f} us", flush=True)
        for name, why in made["failed"].items():
            print(f"{case.name:16} {name:22} {why.splitlines()[0][:100]}", flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")  # what is there survives a time limit
    print(f"wrote {path}")
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
