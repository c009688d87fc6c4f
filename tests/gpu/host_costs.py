"""What PyTorch's calls cost the host on a GPU: ``python host_costs.py`` prints a line of JSON.

Microseconds of host time on an idle device, and for what launches kernels the device's time, too.
Where PyTorch or CUDA is missing the answer is "not asked".
"""

from __future__ import annotations

import cProfile
import faulthandler
import importlib.util
import io
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, BATCH, KERNELS, BRANCHES, LINES = 200, 20, 50, 4, 25


def host_us(torch: Any, call: Callable[[], Any]) -> float:
    """Microseconds a call, the median of batches so small that no queue of the driver is full."""
    for _ in range(BATCH):
        call()
    times = []
    for _ in range(CALLS // BATCH):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - begin) / BATCH * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(times), 2)


def device_us(torch: Any, call: Callable[[], Any], calls: int = 50) -> float:
    """Microseconds a call between two events of the stream; where the host is slower, its time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / calls * 1e3, 2)


def graph_of(torch: Any, kernels: int, branches: int = 1) -> Any:
    """A graph of small kernels, in as many chains side by side."""
    values = [torch.zeros(256, device="cuda") for _ in range(branches)]
    streams = [torch.cuda.Stream() for _ in range(branches - 1)]
    for value in values:
        value.add_(1)  # the kernel is loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caller = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(caller)
        for k in range(kernels):
            with torch.cuda.stream([caller, *streams][k % branches]):
                values[k % branches].add_(1)
        for stream in streams:
            caller.wait_stream(stream)
    # Kept with it: what the graph writes to, and the streams.
    return graph, values, streams


def branches_of(torch: Any) -> tuple[Any, Any, list[Any]]:
    """A function of 8 branches, the same scheduled, and its arguments."""
    import dynaflow_xla as dfx

    def fn(x: Any, *weights: Any) -> Any:
        total = torch.zeros_like(x)
        for made in [torch.relu(x @ w) for w in weights]:
            total = total + made
        return total

    args = [torch.randn(64, 256, device="cuda")]
    args += [torch.randn(256, 256, device="cuda") / 16 for _ in range(8)]
    fast = dfx.schedule(fn, strategy="branches", backend="torch", lanes=dfx.Lanes(4))
    for _ in range(6):  # the first calls plan, and may measure
        fast(*args)
    return fn, fast, args


def profile_of(torch: Any, call: Callable[[], Any]) -> str:
    """The functions of 200 calls that take the most time of their own."""
    torch.cuda.synchronize()
    with cProfile.Profile() as profile:
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(LINES)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def host_costs() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"answer": "not asked", "why": "PyTorch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"answer": "not asked", "why": "this PyTorch finds no CUDA device"}
    with torch.no_grad():
        return measured(torch)


def measured(torch: Any) -> dict[str, Any]:
    host: dict[str, float] = {}
    device: dict[str, float] = {}

    def cost(name: str, call: Callable[[], Any], launches: bool = False) -> None:
        host[name] = host_us(torch, call)
        if launches:
            device[name] = device_us(torch, call)
        print(name, host[name], device.get(name, ""), file=sys.stderr, flush=True)

    event, stream, small = torch.cuda.Event(), torch.cuda.Stream(), torch.zeros(256, device="cuda")
    event.record()
    cost("nothing", lambda: None)
    cost("current_stream", torch.cuda.current_stream)
    cost("is_current_stream_capturing", torch.cuda.is_current_stream_capturing)
    cost("clone", small.clone, launches=True)
    cost("record", event.record)
    cost("wait_event", lambda: stream.wait_event(event))
    for kernels, branches in ((1, 1), (KERNELS, 1), (KERNELS, BRANCHES)):
        graph, *kept = graph_of(torch, kernels, branches)
        cost(f"replay of {kernels} in {branches}", graph.replay, launches=True)
        torch.cuda.synchronize()
        del graph, kept
    a, b = torch.randn(64, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    cost("mm", lambda: torch.mm(a, b), launches=True)
    fn, fast, args = branches_of(torch)
    cost("8 branches, eager", lambda: fn(*args), launches=True)
    cost("8 branches, scheduled", lambda: fast(*args), launches=True)
    return {
        "answer": f"{host['8 branches, scheduled']:.0f} us a scheduled call of 8 branches",
        "host_us": host,
        "device_us": device,
        "profile": profile_of(torch, lambda: fast(*args)),
    }


if __name__ == "__main__":
    if limit := float(os.environ.get("PROBE_SECONDS", 0)):
        faulthandler.dump_traceback_later(0.9 * limit)
    print(json.dumps(host_costs()))
    sys.stdout.flush()
