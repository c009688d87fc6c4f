"""Random programs that sort rows, work on them in that order, and bring them back or fail to: JAX.

Each is proved at the whole batch and at uneven nano-batches; whatever merge the proof allows is carried out
on several random inputs and compared. Half of the steps mix rows or use the order as a value, so that a proof
that believes too much is noticed. ``DFX_ORDER_EXAMPLES`` sets how many programs are tried.
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
from jax import lax  # noqa: E402

from dynaflow_xla.batch.proof import Mean, Sum, mergers  # noqa: E402
from dynaflow_xla.frontends.jax.batch import separability  # noqa: E402
from dynaflow_xla.frontends.jax.capture import capture  # noqa: E402

BATCH, SIZES = 7, (4, 3)
EXPERTS, D = 3, 4
RNG = np.random.default_rng(5)
ROUTER = jnp.asarray(RNG.normal(size=(D, EXPERTS)))
WEIGHTS = jnp.asarray(RNG.normal(size=(EXPERTS, D, D)))
EXAMPLES = int(os.environ.get("DFX_ORDER_EXAMPLES", "24"))

Made = dict[str, Any]
"""What a program has so far: rows ``x``, ``k`` items a row with ``keys``, their ``order``, items ``y``."""


def _argmax(x: Any) -> tuple[int, Any]:
    return 1, jnp.argmax(x @ ROUTER, -1)


def _top(x: Any) -> tuple[int, Any]:
    return 2, lax.top_k(x @ ROUTER, 2)[1].reshape(-1)


def _clipped(x: Any) -> tuple[int, Any]:
    return 1, jnp.clip(jnp.floor(x[:, 0] * 2).astype(jnp.int32), 0, EXPERTS - 1)


def _unbounded(x: Any) -> tuple[int, Any]:
    return 1, jnp.floor(x[:, 0] * 2).astype(jnp.int32)


KEYS = [_argmax, _top, _clipped, _unbounded]

ORDERS: list[Callable[[Any], Any]] = [
    jnp.argsort,
    lambda keys: jnp.argsort(keys, stable=False),
    lambda keys: lax.sort_key_val(keys, jnp.arange(keys.shape[0]))[1],
    lambda keys: jnp.argsort(-keys),
]


def _sizes(m: Made) -> Any:
    return jnp.bincount(m["keys"], length=EXPERTS)


STEPS: dict[str, Callable[[Made], Any]] = {
    "tanh": lambda m: jnp.tanh(m["y"]),
    "product": lambda m: m["y"] @ WEIGHTS[0],
    "groups": lambda m: lax.ragged_dot(m["y"], WEIGHTS, _sizes(m)),
    "counted": lambda m: lax.ragged_dot(
        m["y"], WEIGHTS, jnp.zeros(EXPERTS, jnp.int32).at[m["keys"]].add(1)
    ),
    "bias": lambda m: m["y"] + WEIGHTS[:, 0][m["keys"][m["order"]]],
    "own": lambda m: m["y"] * m["x"][m["order"] // m["k"]],
    "norm": lambda m: m["y"] - m["y"].mean(-1, keepdims=True),
    "other groups": lambda m: lax.ragged_dot(
        m["y"], WEIGHTS, jnp.bincount((m["keys"] + 1) % EXPERTS, length=EXPERTS)
    ),
    "even groups": lambda m: lax.ragged_dot(
        m["y"], WEIGHTS, jnp.full(EXPERTS, m["y"].shape[0] // EXPERTS)
    ),
    "number": lambda m: m["y"] * (1.0 + m["order"][:, None]),
    "place": lambda m: m["y"] + jnp.arange(m["y"].shape[0])[:, None],
    "neighbour": lambda m: m["y"] + jnp.roll(m["y"], 1, 0),
    "running": lambda m: jnp.cumsum(m["y"], 0),
    "mean": lambda m: m["y"] - m["y"].mean(0),
    "capacity": lambda m: jnp.where(jnp.arange(m["y"].shape[0])[:, None] < 3, m["y"], 0.0),
    "unsorted": lambda m: m["y"] + jnp.repeat(m["x"], m["k"], 0),
    "again": lambda m: m["y"][jnp.argsort(m["keys"][m["order"]])],
}
FINE = 7
"""So many of the steps keep rows apart."""


def _inverse(m: Made) -> Any:
    order = m["order"]
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))


def _summed(y: Any, m: Made) -> Any:
    return y.reshape(-1, m["k"], D).sum(1)


BACKS: dict[str, Callable[[Made], Any]] = {
    "added": lambda m: jnp.zeros_like(m["x"]).at[m["order"] // m["k"]].add(m["y"]),
    "inverse": lambda m: _summed(m["y"][_inverse(m)], m),
    "sorted inverse": lambda m: _summed(m["y"][jnp.argsort(m["order"])], m),
    "set": lambda m: _summed(jnp.zeros_like(m["y"]).at[m["order"]].set(m["y"]), m),
    "segments": lambda m: jax.ops.segment_sum(m["y"], m["order"] // m["k"], m["x"].shape[0]),
    "largest": lambda m: jax.ops.segment_max(m["y"], m["order"] // m["k"], m["x"].shape[0]),
    "total": lambda m: m["y"].sum(0),
    "by expert": lambda m: jax.ops.segment_sum(m["y"], m["keys"][m["order"]], EXPERTS),
    "as sorted": lambda m: m["y"],
    "by order": lambda m: _summed(m["y"][m["order"]], m),
    "first": lambda m: m["x"] + m["y"][:1],
    "the order": lambda m: m["order"],
}


def program(rng: np.random.Generator) -> tuple[Callable[[Any], Any], str]:
    """A program, and its steps."""
    keys, order = KEYS[rng.integers(len(KEYS))], int(rng.integers(len(ORDERS)))
    names = list(STEPS)
    steps = [
        names[rng.integers(FINE if rng.random() < 0.75 else len(names))]
        for _ in range(rng.integers(1, 4))
    ]
    backs = list(BACKS)
    back = backs[rng.integers(6 if rng.random() < 0.6 else len(backs))]

    def run(x: Any) -> Any:
        m: Made = {"x": jnp.tanh(x)}
        m["k"], m["keys"] = keys(m["x"])
        m["order"] = ORDERS[order](m["keys"])
        m["y"] = m["x"][m["order"] // m["k"]]
        for name in steps:
            m["y"] = STEPS[name](m)
        return BACKS[back](m)

    return run, f"{keys.__name__}, order {order}, {steps}, {back}"


def merged(spec: Any, parts: list[Any]) -> Any:
    if isinstance(spec, int):
        return np.concatenate(parts, spec)
    if isinstance(spec, Sum):
        return np.sum(parts, 0)
    if isinstance(spec, Mean):
        return sum(p * (n / BATCH) for p, n in zip(parts, SIZES, strict=True))
    return parts[-1]


def check(
    run: Callable[[Any], Any], text: str, rng: np.random.Generator, tally: Counter[str]
) -> None:
    def traced(rows: int) -> Any:
        closed = jax.make_jaxpr(run)(jnp.zeros((rows, D)))
        return capture.capture(closed, 0, "program"), closed.consts

    whole, consts = traced(BATCH)
    parts = {n: traced(n) for n in SIZES}
    proof = separability.prove(
        whole, {n: c for n, (c, _) in parts.items()}, batch=BATCH, in_axes=[0], out_axes=[None],
        consts=[consts, *(c for _, c in parts.values())],
    )  # fmt: skip
    (output,) = proof.outputs
    allowed = list(mergers(output.state))
    tally["allowed" if allowed else output.status] += 1
    if not allowed:
        return
    cuts = [slice(None), slice(0, SIZES[0]), slice(SIZES[0], BATCH)]
    compiled = jax.jit(lambda x: [run(x[cut]) for cut in cuts], compiler_options=cheap.options())
    for _ in range(4):
        want, *got = map(np.asarray, compiled(jnp.asarray(rng.normal(size=(BATCH, D)))))
        for spec in allowed:
            made = merged(spec, got)
            assert made.shape == want.shape, (text, output.state, spec)
            np.testing.assert_allclose(made, want, rtol=1e-9, atol=1e-9, err_msg=f"{text} {spec}")


@pytest.mark.timeout(0)
def test_no_program_is_believed_wrongly() -> None:
    rng = np.random.default_rng(int(os.environ.get("DFX_ORDER_SEED", "2")))
    tally: Counter[str] = Counter()
    with jax.enable_x64(True):
        for _ in range(EXAMPLES):
            run, text = program(rng)
            check(run, text, rng, tally)
    print(EXAMPLES, "programs", dict(tally))
    assert tally["allowed"] > EXAMPLES // 6, "too few programs are proved for the test to say much"
    assert tally["mixed"] > EXAMPLES // 6
