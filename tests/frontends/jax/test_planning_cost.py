"""Planning traces a function a fixed number of times, whatever the number of its layers or regions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.transform import programs

WIDTH = 8


def model(layers: int) -> tuple[Any, tuple[Any, ...], list[int]]:
    """A scanned model, shapes for it, and how often its layer was traced."""
    traces = [0]

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        traces[0] += 1
        x = jax.nn.standardize(h, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w["q"], x))
        return h + jax.nn.gelu(jnp.einsum("bqk,bkd->bqd", scores, x) @ w["v"]), None

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    return (
        loss,
        ({"q": weights, "v": weights}, jax.ShapeDtypeStruct((6, 4, WIDTH), jnp.float32)),
        traces,
    )


def split(fn: Any, sizes: Any) -> Any:
    return dfx.schedule(fn, dfx.NanoBatch(sizes), in_axes=(None, 0), out_axes=dfx.Mean(), lanes=1)


# How often the function is traced: once as a whole and once for each size of a nano-batch.
PLAN = {
    "branches": (lambda fn: dfx.schedule(fn, dfx.Branches()), 1),
    "nano_2": (lambda fn: split(fn, 2), 2),
    "nano_6": (lambda fn: split(fn, 6), 2),
    "nano_uneven": (lambda fn: split(fn, [3, 1, 2]), 4),
}


def once() -> int:
    """How often JAX runs the layer in one trace."""
    fn, args, traces = model(2)
    jax.jit(fn).trace(*args)
    return traces[0]


@pytest.mark.parametrize("name", PLAN)
def test_traces_of_a_plan(name: str) -> None:
    make, bound = PLAN[name]
    fn, args, traces = model(32)
    fast = make(fn)
    dfx.plan(fast, *args)
    assert traces[0] <= bound * once()
    before = traces[0]
    dfx.plan(fast, *args)
    dfx.explain(fast, *args)
    jax.jit(fast).trace(*args)
    assert traces[0] == before, "a planned signature is not traced again"


@pytest.mark.parametrize("name", PLAN)
def test_derivatives_trace_the_function_no_more(name: str) -> None:
    """Forward and backward pass come from the graphs that are there, not from the user's code."""
    make, bound = PLAN[name]
    fn, args, traces = model(32)
    fast = make(fn)
    jax.jit(jax.value_and_grad(fast)).trace(*args)
    assert traces[0] <= bound * once()


def test_layers_do_not_count() -> None:
    found = []
    for layers in (2, 64):
        fn, args, traces = model(layers)
        dfx.plan(split(fn, 2), *args)
        found.append(traces[0])
    assert found[0] == found[1]


def test_autos_candidates_share_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    real = programs.capture.capture

    def counted(closed: Any, *args: Any, **kwargs: Any) -> Any:
        captured.append(closed)
        return real(closed, *args, **kwargs)

    monkeypatch.setattr(programs.capture, "capture", counted)

    def f(xs: Any, y: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return jnp.sort(c) + x, jnp.cos(c).sum()

        return jax.lax.scan(step, y, xs), jnp.sort(y * 2)

    fast = dfx.schedule(f, strategy="auto", lanes=2)
    xs, y = jnp.ones((5, 4096)), jnp.arange(4096.0)[::-1]
    dfx.explain(fast, xs, y)
    for candidate in fast.candidates().values():
        made = fast.with_strategy(candidate)
        jax.tree.map(np.testing.assert_array_equal, made(xs, y), f(xs, y))
    assert captured and len(set(map(id, captured))) == len(captured)
