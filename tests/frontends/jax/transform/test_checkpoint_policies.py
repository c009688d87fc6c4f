"""``jax.checkpoint`` around scheduled functions: its policy is asked for their operators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name

import dynaflow_xla as dfx

policies = jax.checkpoint_policies
LANES = dfx.Branches(wide=False, margin=-1.0)
A = jnp.asarray(np.random.default_rng(0).standard_normal((7, 9)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((9, 5)), jnp.float32)


def one_result(a: Any, w: Any) -> Any:
    return (jnp.cos(checkpoint_name(jnp.sin(a @ w) * 2, "kept")) ** 3).sum()


def several(a: Any, w: Any) -> Any:
    first = jnp.tanh(a @ w)
    second = checkpoint_name(jnp.tanh(first @ w.T @ w), "kept")
    return jnp.sin(second), (second * first).sum(), first


def loops(a: Any, w: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        return jax.nn.relu(carry @ w.T @ w), carry.sum()

    return jax.lax.scan(step, a @ w, None, length=3)


def chooses(a: Any, w: Any) -> Any:
    return jax.lax.cond(a.sum() > 0, lambda x: jnp.sin(x @ w.T), lambda x: x @ w.T, a @ w)


@jax.custom_jvp
def half(x: Any) -> Any:
    return jnp.sin(x)


@half.defjvp
def _half(primals: Any, tangents: Any) -> Any:
    return half(primals[0]), tangents[0] * 0.5


@jax.custom_vjp
def bounded(x: Any) -> Any:
    return x * 1


bounded.defvjp(lambda x: (x * 1, x), lambda x, ct: (jnp.clip(ct, -abs(x), abs(x)),))


def own_rules(a: Any, w: Any) -> Any:
    return half(jax.nn.relu(a @ w)) @ w.T


def own_reverse_rules(a: Any, w: Any) -> Any:
    return bounded(a @ w) @ w.T


POLICIES = {
    "by name": policies.save_only_these_names("kept"),
    "products": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "no policy": None,
}


def total(results: Any) -> Any:
    return sum((i + 1) * x.sum() for i, x in enumerate(jax.tree.leaves(results)))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    "f",
    [one_result, several, loops, chooses, own_rules, own_reverse_rules],
    ids=lambda f: f.__name__,
)
def test_policies_are_asked_for_operators(f: Any, policy: Any) -> None:
    fast = dfx.schedule(jax.jit(f), LANES)
    want, got = (
        sorted(str(x) for x, _ in saved_residuals(jax.checkpoint(g, policy=policy), A, W))
        for g in (jax.jit(f), fast)
    )
    if (
        f is not loops or policy is not policies.everything_saveable
    ):  # of a scan JAX saves what it reads
        assert want == got

    def everything(g: Any) -> Any:
        again = jax.checkpoint(g, policy=policy)

        def loss(a: Any, w: Any) -> Any:
            return total(again(a, w))

        def around(a: Any) -> Any:  # and in a checkpoint that has the same policy
            return jnp.tanh(loss(a, W)) * a

        def turns(a: Any) -> Any:
            step = jax.checkpoint(
                lambda x, _: (x * 0.9 + 0.001 * total(g(x, W)), None), policy=policy
            )
            return jax.lax.scan(step, a, None, length=2)[0].sum()

        forwards = () if f is own_reverse_rules else (jax.jvp(loss, (A, W), (A, W)),)
        return (
            jax.value_and_grad(loss, (0, 1))(A, W),
            jax.jit(jax.grad(loss, (0, 1)))(A, W),
            *forwards,
            jax.vmap(jax.grad(loss), in_axes=(0, None))(jnp.stack([A, 2 * A]), W),
            jax.grad(lambda a: jax.grad(loss)(a, W).sum())(A),
            jax.grad(lambda a: jax.checkpoint(around, policy=policy)(a).sum())(A),
            jax.grad(turns)(A),
        )

    for x, y in zip(
        jax.tree.leaves(everything(jax.jit(f))), jax.tree.leaves(everything(fast)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_of_a_split_function_all_or_nothing_is_kept() -> None:
    fast = dfx.schedule(
        jax.jit(one_result), dfx.NanoBatch(2), in_axes=(0, None), out_axes=dfx.Sum()
    )
    again = jax.checkpoint(fast, policy=policies.dots_saveable)
    a = jnp.concatenate([A, A])
    for x, y in zip(jax.grad(again, (0, 1))(a, W), jax.grad(one_result, (0, 1))(a, W), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_policy_of_another_memory_is_told() -> None:
    fast = dfx.schedule(jax.jit(one_result), LANES)
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    again = jax.checkpoint(fast, policy=policy)
    with pytest.warns(dfx.FallbackWarning, match="in another memory"):
        got = jax.grad(again)(A, W)
    np.testing.assert_allclose(got, jax.grad(one_result)(A, W), rtol=1e-4, atol=1e-4)
