"""What fresh memory costs calls, and what ``keep_memory`` saves.

    python benchmarks/machine/fresh_memory.py

What malloc does is the process's, so each measurement is a process of its own, by turns with memory kept and
without. A case is called plainly, and under ``Branches``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment, measure, records

import dynaflow_xla as dfx
from dynaflow_xla.machine import memory

Ways = dict[str, Callable[[], Any]]


def _jax(fn: Callable[..., Any], *shape: int) -> Ways:
    import jax
    import numpy as np

    x = jax.device_put(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    plain, fast = jax.jit(fn), dfx.schedule(fn, dfx.Branches(), lanes=2)
    return {
        "plain": lambda: jax.block_until_ready(plain(x)),
        "branches": lambda: jax.block_until_ready(fast(x)),
    }


def _torch(fn: Callable[..., Any], *args: Any) -> Ways:
    fast = dfx.schedule(fn, dfx.Branches(), lanes=2)
    return {"plain": lambda: fn(*args), "branches": lambda: fast(*args)}


def _elementwise(x: Any) -> Any:
    return x * 2 + 1


def jax_elementwise() -> Ways:
    """JAX: x * 2 + 1 of 64 MiB."""
    return _jax(_elementwise, 4096, 4096)


def jax_attention() -> Ways:
    """JAX: attention of 8 x 16 heads over 256 positions."""
    import jax

    def attention(q: Any) -> Any:
        scores = jax.nn.softmax(q @ q.swapaxes(-1, -2) / 8)
        return scores @ q

    return _jax(attention, 8, 16, 256, 64)


def jax_normalization() -> Ways:
    """JAX: normalization and softmax of the rows of 64 MiB."""
    import jax

    def both(x: Any) -> Any:
        return (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1), jax.nn.softmax(x)

    return _jax(both, 4096, 4096)


def jax_sums() -> Ways:
    """JAX: cumulative sums of 64 MiB along both axes."""
    import jax.numpy as jnp

    return _jax(lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)), 4096, 4096)


def torch_elementwise() -> Ways:
    """PyTorch: x * 2 + 1 of 64 MiB."""
    import torch

    return _torch(_elementwise, torch.randn(4096, 4096))


def torch_softmax() -> Ways:
    """PyTorch: softmax of the rows of 64 MiB."""
    import torch

    return _torch(lambda x: torch.softmax(x, -1), torch.randn(4096, 4096))


def torch_mlp() -> Ways:
    """PyTorch: two dense layers of 1024 and 4096 with GELU, 4096 rows."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
    )
    return _torch(model.eval(), torch.randn(4096, 1024))


def torch_mamba() -> Ways:
    """PyTorch: Mamba of transformers, from a small config."""
    import torch
    from cpu import transformers_models

    torch.manual_seed(0)
    model, args = transformers_models.MODELS["Mamba"]()
    return _torch(model.eval(), *args)


CASES: dict[str, Callable[[], Ways]] = {
    case.__name__: case
    for case in (
        jax_elementwise, jax_attention, jax_normalization, jax_sums,
        torch_elementwise, torch_softmax, torch_mlp, torch_mamba,
    )
}  # fmt: skip


def calls(case: str, keep: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds and page faults of calls in this process, the ways in turns."""
    warnings.simplefilter("ignore")
    if keep:
        dfx.keep_memory()
    if case.startswith("torch"):
        import torch

        torch.set_grad_enabled(False)
    ways = CASES[case]()
    found: dict[str, Any] = {way: {"ms": [], "pages": []} for way in ways}
    for number in range(2 * rounds):  # the heap grows in the first half
        for way, run in ways.items():
            before, start = memory.faults(), time.perf_counter()
            run()
            took = (time.perf_counter() - start) * 1e3
            if number >= rounds:
                found[way]["ms"].append(took)
                found[way]["pages"].append(memory.faults() - before)
    with open("/proc/self/statm") as file:
        found["resident_mib"] = int(file.read().split()[1]) * 4096 / 2**20
    return found


def medians(case: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by way and kind of process, over all of its calls."""
    return {
        f"{way}, {kind}": statistics.median(ms for one in made for ms in one[way]["ms"])
        for way in ("plain", "branches")
        for kind, made in case["processes"].items()
    }


def table(record: dict[str, Any]) -> str:
    """The rows of ``docs/memory.md``."""
    lines = ["| call | plain ms | kept | `Branches` ms | kept |", "|---|---|---|---|---|"]
    for case in record["cases"].values():
        cells = (f"{ms:.3g}" for ms in medians(case).values())
        lines.append(f"| {case['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="calls of each way in a process")
    parser.add_argument("--processes", type=int, default=3, help="of each kind")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "fresh-memory.json")
    parser.add_argument("--calls", nargs=2, metavar=("CASE", "KEEP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        print(json.dumps(calls(options.calls[0], options.calls[1] == "kept", options.rounds)))
        return 0
    cases: dict[str, Any] = {}
    with measure.Contention() as contention:
        for case in CASES:
            kinds: dict[str, list[Any]] = {"fresh": [], "kept": []}
            for _ in range(options.processes):
                for kind, made in kinds.items():
                    done = subprocess.run(
                        [sys.executable, __file__, "--calls", case, kind, "--rounds", str(options.rounds)],
                        capture_output=True, text=True, check=True,
                    )  # fmt: skip
                    made.append(json.loads(done.stdout.splitlines()[-1]))
            title = (CASES[case].__doc__ or "").splitlines()[0].rstrip(".")
            cases[case] = {"title": title, "processes": kinds}
            told = {name: round(ms, 2) for name, ms in medians(cases[case]).items()}
            print(case, told, flush=True)
    record = {
        "format": 1, "benchmark": "fresh-memory", "environment": environment.stamp(),
        "rounds": options.rounds, "fault_ns": memory.fault_ns(), "contention": contention.as_dict(),
        "cases": cases,
    }  # fmt: skip
    print(table(record))
    print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
