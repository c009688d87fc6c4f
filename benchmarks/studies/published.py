"""Published strategies on small models: what the simulator predicts for an H200, and what this CPU measured.

For an H200 a region takes the longest of a kernel's launch, its operations and its bytes, at the rates below,
and a hand-over between lanes the time of an edge of a CUDA graph. Lanes share the device, so a plan is never
predicted to be shorter than all work of one kind at its full rate. On the CPU the original and the
schedule run in turns; the ratio is that of the medians, and all samples are in the result.

``python -P benchmarks/studies/published.py [--predict]`` writes ``results/published-<date>.json``;
``--markdown FILE`` prints the table of such a result.
"""

from __future__ import annotations

import argparse
import inspect
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import dynaflow_xla as dfx
from dynaflow_xla.timelines.simulator import simulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests/support")]
import msgspec  # noqa: E402
import published_models as models  # noqa: E402
from common import records  # noqa: E402
from common.environment import stamp  # noqa: E402

FLOPS_PER_NS, BYTES_PER_NS, NETWORK_BYTES_PER_NS = 400_000.0, 4_000.0, 450.0
LAUNCH_NS, EDGE_NS = 2_000.0, 1_000.0
ROWS, TOKENS, ROUNDS = 8, 256, 15


def h200(fast: Any, *args: Any) -> float:
    """How many times faster than all regions one after another."""
    plan, pg = dfx.plan(fast, *args), dfx.graph(fast, *args)
    busy: dict[str, float] = {}
    costs: dict[int, float] = {}
    for region in pg.regions:
        rate = NETWORK_BYTES_PER_NS if region.resource == "network" else BYTES_PER_NS
        kind = "network" if region.resource == "network" else "bytes"
        work = {"flops": region.flops / FLOPS_PER_NS, kind: region.bytes_moved / rate}
        costs[region.id] = max(LAUNCH_NS, *work.values())
        for what, ns in work.items():
            busy[what] = busy.get(what, 0.0) + ns
    made = simulate(plan, pg, costs, handoff_ns=EDGE_NS, launch_ns=0.0, bytes_per_ns=1e12)
    return sum(costs.values()) / max(float(made.total_ns), *busy.values())


def cpu(fast: Any, original: Any, args: Any, wait: Any) -> dict[str, list[float]]:
    """Milliseconds of calls of the original and of the schedule, in turns."""
    times: dict[str, list[float]] = {"original": [], "scheduled": []}
    for turn in range(ROUNDS + 3):
        for name, call in (("original", original), ("scheduled", fast)):
            began = time.perf_counter()
            wait(call(*args))
            if turn > 2:
                times[name].append(round((time.perf_counter() - began) * 1e3, 4))
    return times


def ratio(samples: dict[str, list[float]]) -> float:
    """How many times faster than the original, of medians."""
    return statistics.median(samples["original"]) / statistics.median(samples["scheduled"])


def papers(cls: type) -> str:
    """The papers that a strategy's file names, as arXiv numbers."""
    told = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return ", ".join(dict.fromkeys(re.findall(r"arXiv:[0-9.]*[0-9]", told)))


def lines(cls: type) -> int:
    """Lines of a strategy without its docstrings and blank lines."""
    import ast

    tree = ast.parse(inspect.getsource(cls))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            del body[0]
    return len({node.lineno for node in ast.walk(tree) if hasattr(node, "lineno")})


def arrays(framework: str) -> tuple[Any, Any, Any, Any]:
    """Namespace, weights, rows, and what waits for results."""
    wide = {
        k: np.tile(v, (16,) * v.ndim) / 16 ** (v.ndim - 1) for k, v in models.parameters().items()
    }
    x = np.random.default_rng(1).normal(size=(ROWS, TOKENS, 16 * models.WIDTH)).astype(np.float32)
    if framework == "jax":
        return (
            jnp,
            {k: jnp.asarray(v) for k, v in wide.items()},
            jnp.asarray(x),
            jax.block_until_ready,
        )
    p = {k: torch.tensor(v.astype(np.float32)) for k, v in wide.items()}
    return torch, p, torch.tensor(x), lambda y: y


def cases(xp: Any, p: Any, x: Any) -> dict[str, tuple[str, Any, Any, tuple[Any, ...]]]:
    """By strategy: the model, the scheduled function, the original, arguments."""
    grad = jax.grad if xp is jnp else torch.func.grad

    def block(p: Any, x: Any) -> Any:
        return models.block(xp, p, x)

    def branches(p: Any, x: Any) -> Any:
        return models.branches(xp, p, x)

    def decode(p: Any, x: Any, cache: Any) -> Any:
        return models.decode(xp, p, x, cache)

    def step(p: Any, x: Any) -> Any:
        return models.step(xp, grad, p, x)

    def made(fn: Any, strategy: Any, **options: Any) -> Any:
        original = jax.jit(fn) if xp is jnp else fn
        return fn.__name__, dfx.schedule(fn, strategy, lanes=2, **options), original, (p, x)

    rows = {"in_axes": (None, 0)}
    s = dfx.published
    both = dfx.together(
        block, decode, names=("prefill", "decode"), strategy=s.PODAttention(), lanes=2
    )
    calls = ((p, x), (p, x[:, 0], x))
    apart = (jax.jit(block), jax.jit(decode)) if xp is jnp else (block, decode)
    return {
        "NanoFlow": made(block, s.NanoFlow(), **rows),
        "TwoBatchOverlap": made(block, s.TwoBatchOverlap(), **rows),
        "SingleBatchOverlap": made(block, s.SingleBatchOverlap()),
        "Opara": made(branches, s.Opara()),
        "Nimble": made(branches, s.Nimble()),
        "IOS": made(branches, s.IOS()),
        "PODAttention": ("block, decode", both, lambda a, b: (apart[0](*a), apart[1](*b)), calls),
        "TokenWeave": made(block, s.TokenWeave(models.norm), **rows),
        "Fused": made(block, s.Fused(models.norm)),
        "OptimizerBesideBackward": made(step, s.OptimizerBesideBackward()),
        "LanesByResource": made(block, s.LanesByResource()),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of a result."""
    measured = [(key, title) for key, title in CPU if key in rows[0].get("samples_ms", {})]
    columns = ["Strategy", "paper", "lines", "model", "H200, predicted", *(t for _, t in measured)]
    head = "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"
    body = []
    for r in rows:
        found = [r["h200"], *(ratio(r["samples_ms"][key]) for key, _ in measured)]
        cells = (
            f"`{r['strategy']}`",
            r["paper"],
            r["lines"],
            r["model"],
            *(f"{x:.2f}" for x in found),
        )
        body.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([head, *body])


CPU = (("jax", "CPU, JAX"), ("torch", "CPU, PyTorch"))


def main() -> None:
    """Predicts, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", type=Path, help="print the table of this result")
    given = parser.parse_args()
    if given.markdown is not None:
        print(markdown(msgspec.json.decode(given.markdown.read_bytes())["rows"]))
        return
    torch.set_grad_enabled(False)
    environment = stamp()
    found: dict[str, dict[str, Any]] = {}
    for framework in ("jax",) if given.predict else ("jax", "torch"):
        xp, p, x, wait = arrays(framework)
        for name, (model, fast, original, args) in cases(xp, p, x).items():
            row = found.setdefault(name, {"strategy": name, "model": model})
            cls = getattr(dfx.published, name)
            row["paper"], row["lines"] = papers(cls), lines(cls)
            if framework == "jax":
                row["h200"] = round(h200(fast, *args), 2)
            if not given.predict:
                measured = row.setdefault("samples_ms", {})
                measured[framework] = cpu(fast, original, args, wait)
    rows = list(found.values())
    print(markdown(rows))
    record = {"benchmark": "published", "environment": environment, "rows": rows}
    print(records.save(record, given.out).name)


if __name__ == "__main__":
    main()
