"""Plans whose gates get slices: XLA puts such custom calls into fusions, where results are not in place.

The values of what these plans read were whatever lay in the memory (jaxlib 0.11.2, 0.12.0). First seen
on an H100, in a plan inside of a larger program: XLA had merged its products, whose parts are then slices.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

pytestmark = pytest.mark.filterwarnings("ignore::dynaflow_xla.errors.FallbackWarning")

MERGED = {"xla_gpu_dot_merger_threshold_mb": 32}
"""As XLA has it by default; this environment turns it off."""


def merged(x: Any, w: Any) -> Any:
    """Its products become slices of one where XLA merges them."""
    parts = [jnp.tanh(x @ w * (i + 1)) @ w for i in range(4)]
    return sum(parts), parts[0] * 2


def of_a_product(x: Any, w: Any) -> Any:
    y = x @ w
    parts = [jnp.tanh(y[32 * i : 32 * i + 32] @ w) @ w for i in range(4)]
    return sum(parts), parts[0] * 2


def of_results(x: Any, w: Any) -> Any:
    parts = [(jnp.tanh(x @ w * (i + 1)) @ w)[:64] for i in range(4)]
    return sum(p @ w for p in parts), parts[0] * 2


def split(x: Any, w: Any) -> Any:
    parts = [jnp.sin(t @ w) for t in jnp.split(jnp.tanh(x @ w), 4, axis=0)]
    return jnp.concatenate([p @ w for p in parts]), parts[1] + 1


def sorted_parts(x: Any, w: Any) -> Any:
    y = jnp.sort(x @ w, -1)
    parts = [jnp.cumsum(y[32 * i : 32 * i + 32], 0) for i in range(4)]
    return sum(jnp.sort(p @ w, -1) for p in parts), parts[2]


CASES = [merged, of_a_product, of_results, split, sorted_parts]


def given(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((128, 128)) / 8, jnp.float32) for _ in range(2)]


def on_cpu(fn: Any, args: list[Any]) -> list[Any]:
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.tree.leaves(jax.jit(fn)(*(jax.device_put(np.asarray(a), cpu) for a in args)))


@pytest.mark.parametrize("where", ["top level", "inside", "inside, with options", "merged"])
@pytest.mark.parametrize("strategy", [dfx.Branches(), RoundRobin()], ids=["branches", "rr"])
@pytest.mark.parametrize("fn", CASES)
def test_values(fn: Any, strategy: Any, where: str) -> None:
    fast = dfx.schedule(jax.jit(fn), strategy, lanes=dfx.Lanes(3), backend="xla")
    args = given(0)
    call: Any = fast
    if where != "top level":
        outer = jax.jit(lambda *a: jax.tree.map(lambda t: t * 1.0, fast(*a)))
        options = {"merged": MERGED, "inside": {}}.get(where) if where != "inside, with options" else (
            dfx.compiler_options(fast, *args)
        )  # fmt: skip
        call = outer.lower(*args).compile(compiler_options=options)
    for seed in range(3):
        args = given(seed)
        for want, got in zip(on_cpu(fn, args), jax.tree.leaves(call(*args)), strict=True):
            np.testing.assert_allclose(np.asarray(want), np.asarray(got), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", CASES)
def test_with_the_options_of_the_plan_no_gate_has_to_copy(fn: Any) -> None:
    fast = dfx.schedule(jax.jit(fn), RoundRobin(), lanes=dfx.Lanes(3), backend="xla")
    args = given(0)
    options = dfx.compiler_options(fast, *args)
    text = jax.jit(lambda *a: fast(*a)).lower(*args).compile(compiler_options=options).as_text()
    fusions = re.findall(r"^%dynamic-slice-fusion.*?^\}", text, re.S | re.M)
    assert '"dfx_order"' in text and not any('"dfx_order"' in f for f in fusions)
