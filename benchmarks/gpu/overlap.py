"""How far kernels overlap: a few calls under a profiler, as numbers and as a small Chrome trace."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CALLS = 4
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def overlap(spans: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Of (begin, length): all lengths, when any ran, the span of all, and how many ran at once."""
    total = busy = 0.0
    first = end = None
    for begin, length in sorted(spans):
        total += length
        first = begin if first is None else first
        busy += max(0.0, begin + length - max(begin, begin if end is None else end))
        end = begin + length if end is None else max(end, begin + length)
    if first is None or end is None:
        return {"kernel_us": 0.0, "busy_us": 0.0, "span_us": 0.0, "concurrency": 0.0}
    made = {"kernel_us": total, "busy_us": busy, "span_us": end - first}
    return {k: round(v, 2) for k, v in made.items()} | {
        "concurrency": round(total / busy if busy else 0.0, 3)
    }


def profiled(group: str, run: Callable[[], Any], target: Path) -> dict[str, Any]:
    """Profiles calls, each awaited; the numbers are of all calls but for ``span_us``, which is of the last.

    Args:
        group: "torch", or one of JAX's.
        run: A call.
        target: The trace, without what is not of the GPU (on a CPU: whole).
    """
    events = (_torch if group == "torch" else _jax)(run)
    spans = [(float(e["ts"]), float(e["dur"])) for e in events if e.get("ph") == "X"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(target, "wt") as file:
        json.dump({"traceEvents": events}, file)
    made: dict[str, Any] = {"calls": CALLS, "events": len(spans), **overlap(spans)}
    last = sorted(spans)[len(spans) - len(spans) // CALLS :]
    return {**made, "span_us": overlap(last)["span_us"], "trace": target.name}


def _torch(run: Callable[[], Any]) -> list[dict[str, Any]]:
    import torch

    cuda = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    wait: Callable[[], Any] = torch.cuda.synchronize if cuda else lambda: None
    with torch.no_grad():
        run()
        wait()
        with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as made:
            for _ in range(CALLS):
                run()
                wait()
    with tempfile.TemporaryDirectory() as folder:
        made.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [e for e in events if not cuda or e.get("cat") in KINDS]


def _jax(run: Callable[[], Any]) -> list[dict[str, Any]]:
    import jax

    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(run())
        (path,) = Path(folder).glob("**/*.trace.json.gz")
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    # Only the streams are the kernels' own times; further rows of a device repeat them by module and source.
    rows = {
        (e.get("pid"), e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    streams = {key for key, name in rows.items() if str(name).startswith("Stream")}
    return [e for e in events if "ts" in e and (e.get("pid"), e.get("tid")) in streams]
