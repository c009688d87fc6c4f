"""Random programs whose rows meet, split at random: values and gradients against the original.

``python -P tests/support/joins_sweep.py --programs N [--frameworks torch,jax] [--seed S] [--out FILE]``
makes programs of the steps in tests/frontends/jax/batch/test_joins.py and in PyTorch's, N of each framework
in turns, for at most ``--seconds``, and writes a line of JSON for each; ``--table FILE...``
counts such lines, and with ``--out`` writes the counts (benchmarks/results/joins-sweep.json).

PyTorch programs are captured and run as a user's are. JAX's are traced, proved, split and planned as a user's
are; what comes of that is evaluated operator by operator (compiling it is most of the time of so small a
program), but every hundredth, which is compiled for lanes and run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dynaflow_xla as dfx

FRONTENDS = Path(__file__).parent.parent / "frontends"
SIZES = [(3, 2), (2, 4), (2, 3, 2), (5, 4, 3), (4, 4), (6, 3, 2)]
FEWER = [(3, 2), (2, 3), (2, 3, 2)]
"""For what is compiled operator by operator, shape by shape."""

LANES_EVERY = 100


def steps_of(framework: str) -> Any:
    """The module of tests with the steps."""
    path = FRONTENDS / framework / "batch/test_joins.py"
    spec = importlib.util.spec_from_file_location(f"joins_{framework}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Different(Exception):
    """Values that are not the original's."""


def _close(got: Any, want: Any, rtol: float, atol: float) -> None:
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype != want.dtype or not np.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        raise Different(f"{np.abs(got - want).max()} apart")


def joins_in(fast: Any, x: Any) -> int:
    """How many joins and completed totals ``explain`` names."""
    return sum(line.startswith("note: joined") for line in dfx.explain(fast, x).splitlines())


class Torch:
    """Programs as a user's are."""

    def __init__(self) -> None:
        import torch
        from torch._dynamo import guards

        # Dynamo times each new guard for 50 ms, a quarter of a small program's time.
        if hasattr(guards, "profile_guard_manager"):
            guards.profile_guard_manager = lambda *_: 0.0
        torch.set_num_threads(1)
        self.torch, self.steps = torch, steps_of("torch").STEPS

    def run(self, names: list[str], sizes: tuple[int, ...], grad: bool, seed: int) -> int:
        """Compares; returns the number of joins."""
        torch = self.torch

        def f(x: Any) -> Any:
            for name in names:
                x = self.steps[name](x)
            return x

        torch._dynamo.reset()
        torch.manual_seed(seed)
        split = dfx.NanoBatch(sizes)
        lanes = 1 + (seed % 4 == 0)  # threads that meet are slow on a busy machine
        fast = dfx.schedule(f, split, in_axes=0, backend="torch", check=False, lanes=lanes)
        rows = sum(sizes)
        x, y = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=grad) for _ in range(2))
        with torch.no_grad():
            y.copy_(x)
        want, got = f(x), fast(y)
        _close(got.detach(), want.detach(), 1e-7, 1e-7)
        if grad:
            weight = torch.randn_like(want)
            (want * weight).sum().backward()
            (got * weight).sum().backward()
            _close(y.grad, x.grad, 1e-6, 1e-7)
        return joins_in(fast, y)


class Jax:
    """Programs up to their plans as a user's are; the rest operator by operator."""

    def __init__(self) -> None:
        import jax

        from dynaflow_xla.frontends.jax.transform import primitive

        self.jax, self.program = jax, primitive.program_p
        self.steps = steps_of("jax").STEPS

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Each operator by itself: compiled once for all programs that have it."""
        from jax.extend.core import Literal

        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            ins = [read(atom) for atom in eqn.invars]
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive is self.program:
                planned = eqn.params["program"].entry
                traced = self.jax.make_jaxpr(planned.__call__)(*ins)
                made = self.evaluate(traced.jaxpr, traced.consts, ins)
            elif inner is not None and eqn.primitive.name in _CALLS:
                closed = hasattr(inner, "consts")
                made = self.evaluate(
                    inner.jaxpr if closed else inner, inner.consts if closed else (), ins
                )
            else:
                bound = eqn.primitive.bind(*ins, **eqn.params)
                made = bound if eqn.primitive.multiple_results else [bound]
            values.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def run(self, names: list[str], sizes: tuple[int, ...], grad: bool, seed: int) -> int:
        """Compares; returns the number of joins."""
        jax, jnp = self.jax, self.jax.numpy
        on_lanes = seed % LANES_EVERY == 0

        def f(x: Any) -> Any:
            for name in names:
                x = self.steps[name](x)
            return x

        x = jnp.asarray(np.random.default_rng(seed).standard_normal((sum(sizes), 4)), jnp.float32)
        weight = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        backend = "ffi" if on_lanes else "xla"
        fast = dfx.schedule(
            f, dfx.NanoBatch(sizes), in_axes=0, check=False, lanes=2, backend=backend
        )

        def result(fn: Any) -> Any:
            if on_lanes:
                return fn(x)
            traced = jax.make_jaxpr(fn)(x)
            (made,) = self.evaluate(traced.jaxpr, traced.consts, (x,))
            return made

        _close(result(fast), result(f), 1e-3, 1e-4)
        if grad:
            _close(
                *(result(jax.grad(lambda x, g=g: jnp.sum(g(x) * weight))) for g in (fast, f)),
                1e-3,
                1e-3,
            )
        return joins_in(fast, x)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "remat", "checkpoint")


def sweep(
    frameworks: Sequence[str], programs: int, seed: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A record for each program, frameworks in turns."""
    runners = {name: {"torch": Torch, "jax": Jax}[name]() for name in frameworks}
    end = time.monotonic() + seconds
    for number in range(programs):
        for framework, runner in runners.items():
            if time.monotonic() > end:
                return
            own = seed * 1_000_003 + number
            draw = random.Random(own)
            names = draw.choices(sorted(runner.steps), k=draw.randint(1, 5))
            few = framework == "jax" and own % LANES_EVERY
            sizes, grad = draw.choice(FEWER if few else SIZES), draw.random() < 0.3
            record = {
                "framework": framework,
                "seed": own,
                "program": names,
                "sizes": sizes,
                "grad": grad,
            }
            began, told, joins = time.perf_counter(), "", 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    joins, outcome = runner.run(names, sizes, grad, own), "equal"
                except dfx.DynaflowError as error:
                    broken = "internal error" in str(error)
                    outcome, told = "raw" if broken else "refused", str(error)[:500]
                except Different as error:
                    outcome, told = "wrong", str(error)
                except Exception as error:
                    outcome, told = "raw", repr(error)[:500]
            took = round(time.perf_counter() - began, 3)
            yield {**record, "outcome": outcome, "joins": joins, "told": told, "seconds": took}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Counts of records, as a table."""
    outcomes = ("equal", "refused", "wrong", "raw")
    lines = [
        f"| framework | programs | with joins | gradients, too | {' | '.join(outcomes)} |",
        "|---" * 8 + "|",
    ]
    for framework in sorted({r["framework"] for r in records}):
        of = [r for r in records if r["framework"] == framework]
        counts = Counter(r["outcome"] for r in of)
        cells = (len(of), sum(r["joins"] > 0 for r in of), sum(r["grad"] for r in of))
        lines.append(
            f"| {framework} | {' | '.join(map(str, (*cells, *(counts[o] for o in outcomes))))} |"
        )
    return "\n".join(lines)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of records: their numbers, and all of those that are not equal."""
    made: dict[str, Any] = {}
    for framework in sorted({r["framework"] for r in records}):
        of = [r for r in records if r["framework"] == framework]
        joins = Counter(r["joins"] for r in of)
        made[framework] = {
            "programs": len(of),
            "different": len({json.dumps([r["program"], r["sizes"], r["grad"]]) for r in of}),
            "gradients": sum(r["grad"] for r in of),
            "outcomes": dict(Counter(r["outcome"] for r in of)),
            "by_number_of_joins": {str(n): joins[n] for n in sorted(joins)},
            "seeds": sorted({r["seed"] // 1_000_003 for r in of}),
            "not_equal": [r for r in of if r["outcome"] != "equal"],
        }
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frameworks", default="torch,jax")
    parser.add_argument("--programs", type=int, default=100, help="of each framework")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, help="a file that lines of JSON are added to")
    parser.add_argument("--table", type=Path, nargs="+", help="such files, to be counted")
    options = parser.parse_args()
    if options.table:
        lines = [line for file in options.table for line in file.read_text().splitlines()]
        records = [json.loads(line) for line in lines]
        print(table(records))
        if options.out is not None:
            sys.path.insert(0, str(FRONTENDS.parents[1] / "benchmarks"))
            from common.environment import stamp
            from common.records import save

            found = {"benchmark": "joins-sweep", "environment": stamp(), **summary(records)}
            save(found, options.out)
        return 0
    records = []
    for record in sweep(
        options.frameworks.split(","), options.programs, options.seed, options.seconds
    ):
        records.append(record)
        if record["outcome"] not in ("equal", "refused"):
            print(record, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(table(records))
    return sum(r["outcome"] in ("wrong", "raw") for r in records)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYNAFLOW_XLA_CACHE_DIR"] = folder
        code = main()
    sys.exit(bool(code))
