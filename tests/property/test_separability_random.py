"""Random programs that mix the batch or do not: what is called separable is separable.

Each program is traced at the whole batch and at uneven nano-batch sizes and proved; every merge that the
proof allows is then carried out on random numbers and compared. ``DFX_PROPERTY_EXAMPLES`` sets how many
programs are tried.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import cheap  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from batch_programs import BATCH, SIZES, Program, generate, traced  # noqa: E402

from dynaflow_xla.batch.proof import Mean, Sum, mergers  # noqa: E402
from dynaflow_xla.frontends.jax.batch import separability  # noqa: E402


def merged(spec: Any, parts: list[Any]) -> Any:
    if isinstance(spec, int):
        return np.concatenate(parts, spec)
    if isinstance(spec, Sum):
        return np.sum(parts, 0)
    if isinstance(spec, Mean):
        return sum(p * (n / BATCH) for p, n in zip(parts, SIZES, strict=True))
    return parts[-1]


def agrees(spec: Any, whole: Any, parts: list[Any]) -> bool:
    try:
        got = merged(spec, parts)
    except ValueError:
        return False
    scale = max(1.0, float(np.max(np.abs(whole), initial=0.0)))
    return got.shape == whole.shape and bool(np.allclose(got, whole, rtol=1e-8, atol=1e-8 * scale))


def evaluator(program: Program) -> Callable[..., tuple[list[Any], list[list[Any]]]]:
    """Random numbers -> outputs of the whole batch, and for each output those of the nano-batches."""
    cuts = [slice(None), slice(0, SIZES[0]), slice(SIZES[0], BATCH)]

    def all_runs(args: list[Any]) -> list[list[Any]]:
        return [
            program(*(a if d is None else a[(slice(None),) * d + (cut,)]
                      for a, d in zip(args, program.axes, strict=True)))
            for cut in cuts
        ]  # fmt: skip

    # One compilation a program, as cheap as can be: there are thousands.
    compiled = jax.jit(all_runs, compiler_options=cheap.options())

    def run(rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        args = [jnp.asarray(rng.normal(size=s)) for s in program.shapes(BATCH)]
        whole, *parts = [[np.asarray(x) for x in outs] for outs in compiled(args)]
        return whole, [list(outs) for outs in zip(*parts, strict=True)]

    return run


def check(program: Program, rng: np.random.Generator, tally: Counter[str]) -> None:
    whole, consts = traced(program, BATCH)
    parts = {n: traced(program, n) for n in SIZES}
    proof = separability.prove(
        whole,
        {n: c for n, (c, _) in parts.items()},
        batch=BATCH,
        in_axes=program.axes,
        out_axes=[None] * len(program.outputs),
        consts=[consts, *(c for _, c in parts.values())],
    )
    run_once = evaluator(program)
    runs = [run_once(rng) for _ in range(2)]
    for number, output in enumerate(proof.outputs):
        if not all(np.isfinite(run[0][number]).all() for run in runs):
            tally["not finite"] += 1
            continue
        allowed = mergers(output.state)
        for spec in allowed:
            for run in runs:
                assert agrees(spec, run[0][number], run[1][number]), (
                    f"{output.state} is merged by {spec}, wrongly\n{program}\n{whole.jaxpr}"
                )
        if allowed:
            tally["separable"] += 1
            continue
        # Refused, though some merge gives the right numbers?
        rank = runs[0][0][number].ndim
        true = any(
            all(agrees(spec, run[0][number], run[1][number]) for run in runs)
            for spec in (*range(rank), Sum(), Mean(), None)
        )
        status = "mixed" if output.status == "mixed" else "unproven"
        tally[status] += 1
        if true:
            tally[f"{status}, in truth separable"] += 1
            tally[f"  {output.finding}"[:90]] += 1


EXAMPLES = int(os.environ.get("DFX_PROPERTY_EXAMPLES", "60"))


@pytest.mark.timeout(0)
def test_no_false_separable() -> None:
    rng = np.random.default_rng(int(os.environ.get("DFX_PROPERTY_SEED", "1")))
    tally: Counter[str] = Counter()
    with jax.enable_x64(True):
        for _ in range(EXAMPLES):
            check(generate(rng), rng, tally)
    print(EXAMPLES, "programs")
    for name, count in tally.most_common():
        print(f"{count:6d} {name}")
    assert tally["separable"] > EXAMPLES // 4, (
        "too few programs are proved for the test to say much"
    )
    assert tally["mixed"] > EXAMPLES // 4
