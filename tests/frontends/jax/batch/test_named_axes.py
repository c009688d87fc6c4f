"""Batch axes by parameter name, and results with named fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


def model(ids: jax.Array, weight: jax.Array, *, mask: jax.Array | None = None) -> Output:
    x = ids * jnp.sum(weight)
    if mask is not None:
        x = x * mask
    return Output(jnp.sort(x, axis=-1), jnp.mean(x**2))


OUT = {"loss": dfx.Mean()}
NAMED = {"ids": 0, "mask": 0}


@pytest.fixture
def data() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    return {
        "ids": jax.random.normal(keys[0], (6, 8)),
        "weight": jax.random.normal(keys[1], (4,)),
        "mask": jax.random.normal(keys[2], (6, 8)),
    }


def split(in_axes: Any, **options: Any) -> Any:
    options = {"out_axes": OUT, **options}
    return dfx.schedule(jax.jit(model), dfx.NanoBatch([4, 2]), in_axes=in_axes, **options)


def check(fast: Any, assert_same: Any, *args: Any, **kwargs: Any) -> None:
    assert_same(model(*args, **kwargs), fast(*args, **kwargs))
    names = {op.name for op in dfx.graph(fast, *args, **kwargs).regions}
    assert any(name.endswith("@1") for name in names), "it is split"


def test_a_mapping_holds_for_both_ways_of_passing(data: Any, assert_same: Any) -> None:
    fast = split(NAMED)
    check(fast, assert_same, **data)
    check(fast, assert_same, data["ids"], data["weight"], mask=data["mask"])
    check(fast, assert_same, data["ids"], weight=data["weight"], mask=data["mask"])
    check(fast, assert_same, data["ids"], data["weight"])


def test_a_pair_of_places_and_names(data: Any, assert_same: Any) -> None:
    check(split(((), {"ids": 0, "mask": 0})), assert_same, **data)
    fast = split(((0, None), {"mask": 0}))
    check(fast, assert_same, data["ids"], data["weight"], mask=data["mask"])
    jax.grad(lambda w: fast(data["ids"], w, mask=data["mask"]).loss)(data["weight"])


def test_gradients_of_a_call_by_keyword(data: Any, assert_same: Any) -> None:
    fast = split(NAMED)

    def loss(f: Any) -> Any:
        return jax.grad(lambda w: f(ids=data["ids"], weight=w, mask=data["mask"]).loss)

    assert_same(loss(model)(data["weight"]), loss(fast)(data["weight"]))


def test_static_arguments_by_name(data: Any, assert_same: Any) -> None:
    def scaled(x: jax.Array, times: int) -> jax.Array:
        return jnp.sort(x, axis=-1) * times

    jitted = jax.jit(scaled, static_argnames="times")
    fast = dfx.schedule(jitted, dfx.NanoBatch(2), in_axes={"x": 0})
    assert_same(scaled(data["ids"], 3), fast(data["ids"], 3))
    assert_same(scaled(data["ids"], 3), fast(x=data["ids"], times=3))
    for call in (lambda f: f(data["ids"], 3), lambda f: f(data["ids"], times=3)):
        with pytest.raises(dfx.PlanError, match="must be None, because .* static"):
            call(dfx.schedule(jitted, dfx.NanoBatch(2), in_axes={"x": 0, "times": 0}))


def test_wrong_names(data: Any) -> None:
    with pytest.raises(
        dfx.PlanError, match="in_axes names 'idz'; the function has ids, mask, weight"
    ):
        split({"idz": 0})(**data)
    with pytest.raises(
        dfx.PlanError, match="out_axes names 'los'; the result has 'logits', 'loss'"
    ):
        split(NAMED, out_axes={"los": dfx.Mean()})(**data)
    with pytest.raises(dfx.SeparabilityError):
        split(NAMED, out_axes={"loss": dfx.Sum()})(**data)


def test_a_dictionary_of_results_by_name(data: Any, assert_same: Any) -> None:
    def plain(ids: jax.Array) -> dict[str, Any]:
        return {"a": jnp.sort(ids, axis=-1), "b": [jnp.sum(ids**2), None], "c": ids.T * 2}

    fast = dfx.schedule(
        jax.jit(plain), dfx.NanoBatch(2), in_axes={"ids": 0}, out_axes={"b": dfx.Sum(), "c": 1}
    )
    assert_same(plain(data["ids"]), fast(data["ids"]))
    assert_same(plain(data["ids"]), fast(ids=data["ids"]))
