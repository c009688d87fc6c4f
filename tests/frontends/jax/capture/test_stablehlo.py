"""StableHLO modules as JAX functions: the module of a JAX function, read back, is that function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy
stablehlo = pytest.importorskip("dynaflow_xla.frontends.jax.capture.stablehlo")


def _matrix(n: int = 6, m: int = 4) -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=(n, m)), jnp.float32)


@jax.jit
def _nested(x: Any) -> Any:
    return jnp.tanh(x) + 1


def _loop(x: Any) -> Any:
    return jax.lax.while_loop(lambda v: v.sum() < 50, lambda v: v * 1.5 + x.max(), abs(x))


def _branch(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v * x.max(), x)


FUNCTIONS = {
    "elementwise": lambda x: jnp.exp(x) * 2 - jnp.where(x > 0, x, -x),
    "dot": lambda x: x @ x.T + jnp.arange(6, dtype=jnp.float32),
    "sort": lambda x: jnp.sort(x, axis=0)[::-1],
    "reduce": lambda x: (x.sum(0), jnp.argmax(x, 1), x.max()),
    "nested": lambda x: _nested(_nested(x)) * _nested(x.T).T,
    "loop": _loop,
    "branch": _branch,
    "convolution": lambda x: jax.lax.conv(
        x[None, None], jnp.ones((2, 1, 3, 3), jnp.float32), (1, 1), "SAME"
    ),
    "gather": lambda x: x[jnp.array([0, 2, 5])].at[1].add(3.0),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 7 * jnp.eye(6)),
    "with itself": lambda x: (x @ x[:4], x * x, jnp.einsum("ij,kj->ik", x, x), x[:4] @ x[:4]),
    "softmax": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_round_trip(name: str) -> None:
    fn, x = FUNCTIONS[name], _matrix()
    with jax.enable_x64(True):
        code = jax.jit(fn).lower(x).as_text().encode()
    read = stablehlo.StableHLOFunction(code, lambda _: None)
    with jax.enable_x64(True):  # random bits are 64-bit words
        want = jax.tree_util.tree_leaves(jax.jit(fn)(x))
        got = jax.jit(read)(x)
    assert len(want) == len(got)
    for w, g in zip(want, got, strict=True):
        assert w.dtype == g.dtype
        np.testing.assert_allclose(np.asarray(w, np.float64), np.asarray(g, np.float64), rtol=1e-6)


def _convolved(groups: int, batch_groups: int, dilation: int) -> Any:
    kernel = jnp.ones((8, 4 // groups, 3, 3), jnp.float32)

    def convolved(x: Any) -> Any:
        image = jnp.broadcast_to(x[None, None], (4, 4, 6, 4))
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), ((1, 1), (1, 1)), lhs_dilation=(dilation, dilation),
            feature_group_count=groups, batch_group_count=batch_groups,
        )  # fmt: skip

    return convolved


ESTIMATED = {
    "dot": (FUNCTIONS["dot"], ("dot_general",)),
    "with itself": (FUNCTIONS["with itself"], ("dot_general", "mul")),
    "sort": (FUNCTIONS["sort"], ("sort",)),
    "convolution": (FUNCTIONS["convolution"], ("conv_general_dilated",)),
    "grouped": (_convolved(2, 1, 1), ("conv_general_dilated",)),
    "grouped by batch": (_convolved(1, 2, 1), ("conv_general_dilated",)),
    "dilated": (_convolved(1, 1, 2), ("conv_general_dilated",)),
}


@pytest.mark.parametrize("name", ESTIMATED)
def test_kinds_and_estimates_are_those_of_jax(name: str) -> None:
    from dynaflow_xla.frontends.jax.capture import capture

    x = _matrix()
    function, compared = ESTIMATED[name]
    kinds = []
    for fn in (function, stablehlo.StableHLOFunction(
        jax.jit(function).lower(x).as_text().encode(), lambda _: None)):  # fmt: skip
        graph = capture.capture(jax.make_jaxpr(fn)(x), 0, "f").graph
        kinds.append(
            {op.kind: (op.flops, op.cost_ns, op.spread) for op in graph.ops if op.kind in compared}
        )
    assert kinds[0] == kinds[1]
    assert set(kinds[0]) == set(compared)


def test_a_solution_counts_its_right_hand_sides() -> None:
    from dynaflow_xla.frontends.jax.capture import capture

    code = """
    func.func @main(%a: tensor<64x64xf32>, %b: tensor<64x3xf32>) -> tensor<64x3xf32> {
      %0 = "stablehlo.triangular_solve"(%a, %b) <{left_side = true, lower = true,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}>
        : (tensor<64x64xf32>, tensor<64x3xf32>) -> tensor<64x3xf32>
      return %0 : tensor<64x3xf32>
    }"""
    read = stablehlo.StableHLOFunction(code.encode(), lambda _: None)
    jaxpr = jax.make_jaxpr(read)(jnp.eye(64), jnp.ones((64, 3)))
    (op,) = capture.capture(jaxpr, 0, "f").graph.ops
    assert op.flops == 64 * 64 * 3


def test_calls_inside_of_regions_are_refused() -> None:
    from dynaflow_xla import UnsupportedError

    code = """
    func.func @main(%a: tensor<4xf32>, %more: tensor<i1>) -> tensor<4xf32> {
      %r = stablehlo.while(%x = %a) : tensor<4xf32>
        cond { stablehlo.return %more : tensor<i1> }
        do {
          %y = func.call @g(%x) : (tensor<4xf32>) -> tensor<4xf32>
          stablehlo.return %y : tensor<4xf32>
        }
      return %r : tensor<4xf32>
    }
    func.func private @g(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }
    """
    with pytest.raises(UnsupportedError, match="inside of its regions"):
        stablehlo.StableHLOFunction(code.encode(), lambda _: None)


def test_what_is_no_tensor_or_has_effects_is_refused() -> None:
    from dynaflow_xla import UnsupportedError

    text = "func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }"
    with pytest.raises(UnsupportedError, match="sizes must be fixed"):
        stablehlo.StableHLOFunction(text.encode(), lambda _: None)
    with pytest.raises(UnsupportedError, match="main"):
        stablehlo.StableHLOFunction(b"module {}", lambda _: None)
