"""Scheduled functions inside shard_map on several host devices: values and gradients of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[2] / "support"

# One process for each strategy: the number of devices is fixed when JAX starts.
PROGRAM = """
sys.path.insert(0, {support!r})
jax.config.update("jax_disable_most_optimizations", True)
from jax.sharding import PartitionSpec as P
from function_table import CASES
from strategies import STRATEGIES, SPLITS
from transformations import inexact, total, values

mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

def sharded(fn, case):
    # Each device has the rows of a seed of its own; every result is kept, device by device.
    def local(*stacked):
        args = jax.tree_util.tree_map(lambda x: x[0], stacked)
        return jax.tree_util.tree_map(lambda x: x[None], fn(*args))
    return jax.jit(jax.shard_map(
        local, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=False))

def close(want, got, tolerance):
    want, got = jax.tree_util.tree_leaves(want), jax.tree_util.tree_leaves(got)
    assert len(want) == len(got)
    for w, g in zip(want, got):
        assert (w.dtype, w.shape) == (g.dtype, g.shape)
        if not inexact(w):
            if jax.dtypes.issubdtype(w.dtype, jax.dtypes.prng_key):
                w, g = jax.random.key_data(w), jax.random.key_data(g)
            np.testing.assert_array_equal(np.asarray(w), np.asarray(g))
            continue
        a, b = np.asarray(w), np.asarray(g)
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        scale = float(np.max(np.abs(a), initial=0.0))
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * scale)

for name in {names!r}:
    case = CASES[name]
    original = jax.jit(case.fn)
    axes = dict(in_axes=case.in_axes, out_axes=case.out_axes) if {strategy!r} in SPLITS else {{}}
    fast = dfx.schedule(original, STRATEGIES[{strategy!r}](), lanes=LANES, **axes)
    args = jax.tree_util.tree_map(
        lambda *xs: jnp.stack(xs), case.arguments(0), case.arguments(1))
    tolerance = max(case.tolerance, 2e-4)
    close(sharded(original, case)(*args), sharded(fast, case)(*args), tolerance)
    if case.wrt:
        def gradient(f):
            return lambda *a: jax.grad(lambda *z: total(f(*z)), case.wrt)(*a)
        close(sharded(gradient(original), case)(*args), sharded(gradient(fast), case)(*args), tolerance)
    print(name)
"""

NAMES = (
    "attention", "experts_all", "conv_2d", "lstm", "cholesky", "sort_rows", "cross_entropy_with_metrics",
    "dropout_with_keys_of_rows", "integers", "complex_product", "layers_scanned",
)  # fmt: skip


@pytest.mark.parametrize("strategy", ["branches", "nano_2", "nano_uneven", "dual_batch"])
def test_inside_shard_map(strategy: str, run_program: Any) -> None:
    """Four functions a strategy, all of them together each function."""
    turn = ["branches", "nano_2", "nano_uneven", "dual_batch"].index(strategy)
    names = NAMES[turn % 4 :: 4] + NAMES[(turn + 1) % 4 :: 4][:1]
    program = PROGRAM.format(support=str(SUPPORT), names=names, strategy=strategy)
    assert run_program(program, devices=2).split() == list(names)
