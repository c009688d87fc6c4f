"""Functions of arrays by reference (``jax.new_ref``)."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def changes(ref: Any, x: Any) -> Any:
    ref[...] = ref[...] + jnp.sort(x)
    return ref[0]


def reads(ref: Any, x: Any) -> Any:
    return ref[0] + jnp.sort(x)


@jax.custom_vjp
def stashed(ref: Any, x: Any) -> Any:
    return x


def stash(ref: Any, slope: Any) -> Any:
    ref[...] = slope
    return None, slope


stashed.defvjp(lambda ref, x: (x, ref), stash)


def changes_when_differentiated(ref: Any, x: Any) -> Any:
    return jax.numpy.sin(stashed(ref, jnp.sort(x)))


def changes_when_a_loop_is_differentiated(ref: Any, x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        return jnp.sin(stashed(ref, jnp.sin(x))), ()

    return jax.lax.scan(step, x, None, length=2)[0]


def ignores(ref: Any, x: Any) -> Any:
    return jnp.sort(x)


def changes_in_a_loop(ref: Any, x: Any) -> Any:
    def step(i: Any, total: Any) -> Any:
        ref[i] = x[i]
        return total + x[i]

    return jax.lax.fori_loop(0, 3, step, jnp.sort(x[0]))


def makes(ref: Any, x: Any) -> Any:
    own = jax.new_ref(x)
    own[0] = jnp.sort(x[0])
    return own[...]


@pytest.mark.parametrize("fn", [changes, reads, changes_in_a_loop, makes, ignores])
def test_arrays_by_reference(fn: Any, assert_same: Any) -> None:
    """Lanes say that they take none; what else runs them changes them as the original does."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
    for strategy in ("sequential", "branches"):
        with pytest.raises(dfx.UnsupportedError, match=r"jax\.new_ref.*backend='xla'"):
            dfx.schedule(fn, strategy)(jax.new_ref(x), x)
    expected, kept = jax.new_ref(x), []
    want = jax.jit(fn)(expected, x)
    for options in ({"strategy": "branches", "backend": "xla"}, {"strategy": "auto"}):
        ref = jax.new_ref(x)
        assert_same(want, dfx.schedule(fn, **options)(ref, x))
        kept.append(ref[...])
    assert_same([expected[...]] * 2, kept)


@pytest.mark.parametrize(
    "uses",
    [changes_when_differentiated, changes_when_a_loop_is_differentiated],
    ids=["call", "loop"],
)
def test_a_reference_for_a_derivative(uses: Any, assert_same: Any) -> None:
    """Nothing but the derivative uses it."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(8), jnp.float32)

    def slopes(fn: Any, ref: Any) -> Any:
        return jax.grad(lambda ref, x: fn(ref, x).sum(), 1)(ref, x), ref[...]

    want = slopes(jax.jit(uses), jax.new_ref(x))
    for options in ({"strategy": "branches", "backend": "xla"}, {"strategy": "auto"}):
        fast = dfx.schedule(uses, **options)
        assert_same(want, slopes(fast, jax.new_ref(x)))
    fast = dfx.schedule(uses, "branches")
    with pytest.raises(dfx.UnsupportedError, match=r"jax\.new_ref.*backend='xla'"):
        slopes(fast, jax.new_ref(x))


def test_explain_says_why_auto_keeps_the_original() -> None:
    x = jnp.ones((3, 8), jnp.float32)
    fast = dfx.schedule(makes, "auto")
    told = dfx.explain(fast, jax.new_ref(x), x)
    assert "the original runs" in told and "\nno plan: " in told and "jax.new_ref" in told
    fast(jax.new_ref(x), x)
    told = dfx.explain(fast, jax.new_ref(x), x)
    assert told.count("jax.new_ref") == 1 and "auto: the original runs; " in told
    with pytest.raises(dfx.UnsupportedError, match="jax.new_ref"):
        dfx.explain(dfx.schedule(makes, "branches"), jax.new_ref(x), x)


def test_a_schedule_between_reads_and_writes(assert_same: Any) -> None:
    fast = dfx.schedule(lambda x: jnp.sort(x) * 2, "branches")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)

    @jax.jit
    def run(ref: Any) -> None:
        ref[...] = fast(ref[...])

    ref = jax.new_ref(x)
    run(ref)
    assert_same(jnp.sort(x) * 2, ref[...])
