"""What a scheduled call costs the plain call after it.

    python benchmarks/machine/neighbour.py [--only NAMES]

A plain call (eager PyTorch, or ``jax.jit``) is timed right after a call of the same model: plain, scheduled,
or under ``torch.compile`` (which says what any other program between costs). Ways take turns in an order
drawn anew each round; each is called twice before the plain call is timed. A case that is in the result file
already is measured again only if it is named.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment, measure, records
from rich.console import Console
from rich.table import Table

import dynaflow_xla as dfx

Run = Callable[[], Any]
PLAIN = "plain"


def torch_model(name: str) -> dict[str, Run]:
    """Ways to call one of ``transformers_models``; Ways that its batch proof refuses are left out."""
    import torch
    from cpu import transformers_models

    torch.manual_seed(0)
    model, args = transformers_models.MODELS[name]()
    return torch_ways(model.eval(), args)


def torch_bilstm() -> dict[str, Run]:
    """Dense layers around two LSTMs, in PyTorch."""
    import torch
    from cpu import width

    made = width.torch_bilstm(*width.SHAPES[0])
    torch.manual_seed(0)
    return {PLAIN: made["eager"]} | {n: made[n] for n in ("branches", "sequential", "auto")}


def torch_ways(model: Any, args: tuple[Any, ...]) -> dict[str, Run]:
    """Ways to call a module without gradients."""
    import torch

    def call(fn: Any) -> Any:
        with torch.no_grad():
            return fn(*args)

    ways = {
        PLAIN: model,
        "torch.compile": torch.compile(model, dynamic=False),
        "branches": dfx.schedule(model, dfx.Branches()),
        "branches, compiled": dfx.schedule(model, dfx.Branches(), compiler="inductor"),
        "sequential": dfx.schedule(model, dfx.Sequential()),
        "nano-batches": dfx.schedule(model, dfx.NanoBatch(2)),
        "auto": dfx.schedule(model, dfx.Auto()),
    }
    want, made = call(model), {}
    for name, fn in ways.items():
        try:
            torch.testing.assert_close(call(fn), want, rtol=2e-3, atol=2e-3)
        except dfx.errors.DynaflowError as error:
            print(f"{name} left out: {str(error).splitlines()[0]}")
            continue
        made[name] = lambda fn=fn: call(fn)
    return made


def jax_ways(fn: Any, args: tuple[Any, ...], **more: Any) -> dict[str, Run]:
    """Ways to call a JAX function, until its results are there."""
    import jax

    ways: dict[str, Any] = {
        PLAIN: jax.jit(fn),
        "branches": dfx.schedule(jax.jit(fn), dfx.Branches(), lanes=2),
        "sequential": dfx.schedule(jax.jit(fn), dfx.Sequential(), lanes=2),
        "auto": dfx.schedule(jax.jit(fn), dfx.Auto(), lanes=2),
    }
    if more:
        ways["nano-batches"] = dfx.schedule(jax.jit(fn), dfx.NanoBatch(2), lanes=2, **more)
    return {name: measure.blocking(way, args) for name, way in ways.items()}


def jax_bilstm() -> dict[str, Run]:
    """Dense layers around two LSTMs, in JAX."""
    from cpu import width

    fn, _, args = width.dense_bilstm(*width.SHAPES[0])
    return jax_ways(fn, args)


def jax_products() -> dict[str, Run]:
    """Two products of 1024 x 1024 matrices, which XLA spreads over all cores."""
    import jax

    keys = jax.random.split(jax.random.key(0), 3)
    x, v, w = (jax.random.normal(key, (1024, 1024)) for key in keys)
    return jax_ways(lambda x, v, w: (x @ v, x @ w), (x, v, w), in_axes=(0, None, None))


def jax_mlp() -> dict[str, Run]:
    """Two tiny MLPs beside each other."""
    import jax
    from models import cases

    first, second, key = jax.random.split(jax.random.key(0), 3)
    both = [cases.mlp_parameters(k, [64] * 4) for k in (first, second)]
    x = jax.random.normal(key, (32, 64))
    return jax_ways(lambda p, x: [cases.mlp(m, x) for m in p], (both, x), in_axes=(None, 0))


CASES: dict[str, Callable[[], dict[str, Run]]] = {
    **{f"{n}, PyTorch": lambda n=n: torch_model(n) for n in ("BART", "ViT", "Llama")},
    "LSTMs between dense layers, PyTorch": torch_bilstm,
    "LSTMs between dense layers, JAX": jax_bilstm,
    "products of 1024, JAX": jax_products,
    "tiny MLPs, JAX": jax_mlp,
}


def measured(ways: dict[str, Run], seconds: float, pause_s: float) -> dict[str, Any]:
    """Milliseconds of plain calls by what came before, and their ratios to those after plain ones."""
    for _ in range(3):
        for way in ways.values():
            way()
    plain = ways[PLAIN]
    samples: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    with measure.Contention() as contention:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name in random.sample(list(ways), len(ways)):
                way = ways[name]
                way()
                way()
                if pause_s:
                    time.sleep(pause_s)
                start = time.perf_counter()
                plain()
                samples[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    return {
        "after_ms": samples, "contention": contention.as_dict(),
        "statistics_ms": {n: measure.statistics(s) for n, s in samples.items()},
        "ratio": {n: measure.ratio(samples, n, [PLAIN]) for n in ways if n != PLAIN},
    }  # fmt: skip


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="parts of names, separated by ;")
    parser.add_argument("--seconds", type=float, default=25.0, help="for each case")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="before the plain call")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "neighbour.json")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = json.loads(given.out.read_text())["cases"] if given.out.exists() else {}
    table = Table("case", "after", "median ms", "ratio", "95 %")
    random.seed(0)
    for name, make in CASES.items():
        if given.only and not any(part in name for part in given.only.split(";")):
            continue
        if not given.only and name in rows:
            continue
        started, stamp = time.perf_counter(), environment.stamp()
        row = measured(make(), given.seconds, given.pause_ms / 1e3)
        rows[name] = row | {
            "environment": stamp, "pause_ms": given.pause_ms, "seconds": time.perf_counter() - started,
        }  # fmt: skip
        for way, of in row["statistics_ms"].items():
            to = row["ratio"].get(way, {"ratio": 1.0, "low": 1.0, "high": 1.0})
            spread = f"{to['low']:.2f}-{to['high']:.2f}"
            table.add_row(name, way, f"{of['median']:.3g}", f"{to['ratio']:.3f}", spread)
        record = {
            "format": 1, "benchmark": "neighbour", "environment": stamp, "cases": rows
        }  # fmt: skip
        records.save(record, given.out)
        print(name, row["contention"])
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
