"""Every strategy and backend on a GPU against the original, with delays in the lanes, again and again."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla.errors import UnsupportedError

# Libraries may choose another algorithm on another stream; what races leaves is far from that.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
LANES = dfx.Lanes(3)  # streams: as many on a machine of few cores, where a plain number is refused
DEEP = 20 if os.environ.get("DYNAFLOW_XLA_STANDIN") else 200  # calls
STRATEGIES = [dfx.Sequential(), dfx.Branches(), RoundRobin()]


def _jax_cases(jax: Any) -> dict[str, Any]:
    jnp = jax.numpy

    def branches(x: Any, w: Any) -> Any:
        parts = [jnp.tanh(x @ w * (i + 1)) @ w for i in range(4)]
        return sum(parts), parts[0] * 2

    def experts(x: Any, w: Any) -> Any:
        gate = jax.nn.softmax(x @ w[:, :4])
        return sum(gate[:, i : i + 1] * (jax.nn.silu(x @ w * (i + 1)) @ w) for i in range(4))

    def reductions(x: Any, w: Any) -> Any:
        return jnp.sort(x, -1)[:, -8:], jnp.argmax(x @ w, -1), jnp.cumsum(w, 0), x.mean()

    return {"branches": branches, "experts": experts, "reductions": reductions}


@pytest.mark.values
@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sequential", "branches", "round_robin"])
@pytest.mark.parametrize("name", ["branches", "experts", "reductions"])
def test_jax(jax: Any, name: str, strategy: Any, backend: str) -> None:
    fn = _jax_cases(jax)[name]
    try:
        fast = dfx.schedule(fn, strategy=strategy, backend=backend, lanes=LANES)
    except dfx.UnsupportedError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    original = jax.jit(fn)
    for _ in range(5):
        args = [jax.numpy.asarray(rng.standard_normal((128, 128)), "float32") for _ in range(2)]
        want = jax.tree_util.tree_leaves(original(*args))
        got = jax.tree_util.tree_leaves(fast(*args))
        for w, g in zip(want, got, strict=True):
            np.testing.assert_allclose(np.asarray(w), np.asarray(g), rtol=2e-3, atol=2e-3)
    outs = [fast(*args) for _ in range(DEEP)]  # without a pause
    for w, g in zip(want, jax.tree_util.tree_leaves(outs[-1]), strict=True):
        np.testing.assert_allclose(np.asarray(w), np.asarray(g), rtol=2e-3, atol=2e-3)


def _jax_given(jax: Any, seed: int = 0, rows: int = 128) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = ((rows, 128), (128, 128))
    return [jax.device_put(rng.standard_normal(s).astype(np.float32) / 8) for s in shapes]


def _jax_same(jax: Any, want: Any, got: Any) -> None:
    for w, g in zip(*map(jax.tree_util.tree_leaves, (want, got)), strict=True):
        np.testing.assert_allclose(np.asarray(w), np.asarray(g), **CLOSE)


@pytest.mark.values
def test_jax_default_is_one_program(jax: Any) -> None:
    fn = _jax_cases(jax)["branches"]
    fast = dfx.schedule(fn, dfx.Branches(), lanes=LANES)
    x, w = _jax_given(jax)
    text = dfx.explain(fast, x, w)
    assert "backend xla (gpu)" in text and "backend='auto' is 'xla' here" in text
    for rows in (128, 64, 128):  # settled, another signature, known ones
        for seed in range(3):
            x, w = _jax_given(jax, seed, rows)
            _jax_same(jax, jax.jit(fn)(x, w), fast(x, w))
    assert fast.by_options.settled is not None
    _jax_same(jax, *(jax.jit(lambda x, f=f: f(x, w)[0] * 2)(x) for f in (fn, fast)))
    _jax_same(jax, *(jax.grad(lambda x, f=f: f(x, w)[0].sum())(x) for f in (fn, fast)))
    _jax_same(jax, *(jax.vmap(f, (0, None))(x[None], w) for f in (fn, fast)))


@pytest.mark.values
@pytest.mark.parametrize("name", ["branches", "experts"])
@pytest.mark.parametrize("donates", [False, True])
def test_jax_auto(jax: Any, name: str, donates: bool) -> None:
    """Values, whatever is chosen."""
    fn = _jax_cases(jax)[name]
    jitted = jax.jit(fn, donate_argnums=0) if donates else jax.jit(fn)
    fast = dfx.schedule(jitted, dfx.Auto(budget_s=20.0), lanes=LANES)
    for seed in range(6):
        x, w = _jax_given(jax, seed)
        _jax_same(jax, jax.jit(fn)(x, w), fast(x + 0, w))
    choice = fast.decision((x, w), {})
    assert choice is not None and "original" in choice.medians_ms, choice
    print(choice.lines())
    assert "original, concurrent graph" in {*choice.medians_ms, *choice.left_out}
    _jax_same(jax, *(jax.jit(lambda x, f=f: f(x, w))(x) for f in (fn, fast)))


@pytest.mark.values
@pytest.mark.parametrize("kind", ["original", "graph", "lanes"])
def test_jax_auto_runs_what_it_chose(jax: Any, kind: str) -> None:
    from dynaflow_xla.frontends.jax.tuning import auto, originals

    fn = _jax_cases(jax)["branches"]
    fast = dfx.schedule(fn, dfx.Auto(), lanes=LANES)
    name, strategy = next(iter(fast.candidates().items()))
    child = fast.with_strategy(strategy) if kind == "lanes" else None
    candidate = name if kind == "lanes" else originals.NAMES.get(kind, "original")
    for rows in (128, 64):
        signature = fast._signature(tuple(_jax_given(jax, 0, rows)), {})
        fast.decide(signature, auto.Choice(child, "told", candidate=candidate))
    for rows in (128, 64, 128, 64):
        for seed in range(3):
            x, w = _jax_given(jax, seed, rows)
            _jax_same(jax, jax.jit(fn)(x, w), fast(x, w))
    assert fast.decision((x, w), {}).kind == kind


def test_jax_outputs_are_in_place(jax: Any) -> None:
    fast = dfx.schedule(
        _jax_cases(jax)["branches"], strategy=RoundRobin(), backend="ffi", lanes=LANES
    )
    x = jax.numpy.ones((128, 128))
    jax.block_until_ready(fast(x, x))
    text = dfx.explain(fast, x, x)
    assert "PJRT C API" in text, text
    counters = [
        c for s, _ in fast.planned((x, x), {}).compiled if s is not None for c in s.counters
    ]
    assert sum(c.copied_outputs for c in counters) == 0, "donated views were not written in place"


def test_jax_refuses_arrays_of_a_second_device(jax: Any) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one device only")
    fast = dfx.schedule(
        _jax_cases(jax)["branches"], strategy=RoundRobin(), backend="ffi", lanes=LANES
    )
    x = jax.device_put(np.ones((64, 64), np.float32), jax.devices()[1])
    # XLA may run the call in the background, and tells of it where the result is awaited.
    with pytest.raises(
        (dfx.EngineError, jax.errors.JaxRuntimeError), match="arrays are on device 1"
    ):
        jax.block_until_ready(fast(x, x))


def _torch_cases(torch: Any) -> dict[str, Any]:
    def branches(x: Any, w: Any) -> Any:
        parts = [torch.tanh(x @ w * (i + 1)) @ w for i in range(4)]
        return sum(parts), parts[0] * 2

    def experts(x: Any, w: Any) -> Any:
        gate = torch.softmax(x @ w[:, :4], -1)
        mix = [gate[:, i : i + 1] * (torch.relu(x @ w * (i + 1)) @ w) for i in range(4)]
        return sum(mix)

    return {"branches": branches, "experts": experts}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sequential", "branches", "round_robin"])
@pytest.mark.parametrize("name", ["branches", "experts"])
def test_torch(torch: Any, name: str, strategy: Any) -> None:
    fn = _torch_cases(torch)[name]
    fast = dfx.schedule(fn, strategy=strategy, backend="torch", lanes=LANES)
    w = torch.randn(128, 128, device="cuda") / 11
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(128, 128, device="cuda")
            want, got = fn(x, w), fast(x, w)
            for a, b in zip(
                *[v if isinstance(v, tuple) else (v,) for v in (want, got)], strict=True
            ):
                torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_torch_race_hunt(torch: Any, seed: int) -> None:
    """Random delays in front of every step, freed memory poisoned by new tensors of NaN."""
    from dataclasses import replace

    from dynaflow_xla.frontends.torch.native.cuda import streams

    chance = random.Random(seed)
    fn = _torch_cases(torch)["branches"]
    w = torch.randn(128, 128, device="cuda") / 11
    with torch.no_grad():
        fast = dfx.schedule(fn, strategy=RoundRobin(), backend="torch", lanes=LANES)
        fast(torch.randn(128, 128, device="cuda"), w)
        plain = fast._dfx_core.planned((torch.randn(128, 128, device="cuda"), w), {}).native
        runner = streams.StreamRunner(plain, streams.CudaStreams(torch.device("cuda", 0), 3))
        for steps, _ in runner._stages:
            for step in steps:
                if step.stretch is not None:

                    def late(env: Any, run: Any = step.stretch.run) -> None:
                        torch.cuda._sleep(chance.randrange(200_000))
                        run(env)

                    step.stretch = replace(step.stretch, run=late)
        for _ in range(40):
            x = torch.randn(128, 128, device="cuda")
            got = runner([x, w] if _takes_x_first(plain, x, w) else [w, x])
            poison = [torch.full((128, 128), float("nan"), device="cuda") for _ in range(4)]
            for a, b in zip(fn(x, w), got, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)
            del poison


def _takes_x_first(plain: Any, x: Any, w: Any) -> bool:
    """``x @ w`` is the first product: which of the plan's inputs is its left side."""
    graph = plain.captured.graph
    first = next(op for op in graph.ops if "mm" in op.kind)
    return bool(first.inputs[0] == graph.inputs[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_torch_checkpointed_attention(torch: Any, dropout: float) -> None:
    """AOTAutograd gives the graph a generator; attention without dropout has no use for it."""
    from torch.utils.checkpoint import checkpoint

    def attend(x: Any) -> Any:
        h = torch.tanh(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=dropout)[:, 0]

    def f(x: Any) -> Any:
        return checkpoint(attend, checkpoint(attend, x, use_reentrant=False), use_reentrant=False)

    fast = dfx.schedule(f, dfx.Branches(), lanes=2, backend="torch")
    x = torch.randn(2, 64, 32, device="cuda", requires_grad=True)
    y = x.detach().clone().requires_grad_()
    if dropout:
        with pytest.raises(UnsupportedError, match="torch.utils.checkpoint"):
            fast(x)
        return
    fast(x).square().sum().backward()
    f(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **CLOSE)


@pytest.mark.parametrize("name", ["branches", "experts"])
def test_torch_with_regions_of_inductor(torch: Any, name: str) -> None:
    fn = _torch_cases(torch)[name]
    fast = dfx.schedule(
        fn, strategy=dfx.Branches(), backend="torch", lanes=LANES, compiler="inductor"
    )
    w = torch.randn(128, 128, device="cuda") / 11
    with torch.no_grad():
        for _ in range(6):  # directly, captured, replayed
            x = torch.randn(128, 128, device="cuda")
            want, got = fn(x, w), fast(x, w)
            for a, b in zip(
                *[v if isinstance(v, tuple) else (v,) for v in (want, got)], strict=True
            ):
                torch.testing.assert_close(a, b, **CLOSE)


def test_torch_in_buckets(torch: Any) -> None:
    fast = dfx.schedule(_torch_cases(torch)["branches"], RoundRobin(), backend="torch", lanes=LANES)
    buckets = dfx.bucketed(fast, [16, 64], in_axes=(0, None), out_axes=(0, 0))
    w = torch.randn(128, 128, device="cuda") / 11
    with torch.no_grad():
        for call in range(60):
            x = torch.randn(1 + call, 128, device="cuda")
            for a, b in zip(fast.original(x, w), buckets(x, w), strict=True):
                torch.testing.assert_close(a, b, **CLOSE)


def test_torch_lanes_with_multiprocessors_of_their_own(torch: Any) -> None:
    fn = _torch_cases(torch)["branches"]
    lanes = dfx.Lanes(3, priorities=(0, -1, 0), sms=(0, 32, 16))
    fast = dfx.schedule(fn, strategy=RoundRobin(), backend="torch", lanes=lanes)
    w = torch.randn(128, 128, device="cuda") / 11
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(128, 128, device="cuda")
            try:
                got = fast(x, w)
            except dfx.EngineError as error:
                if "no green contexts" not in str(error):
                    raise
                pytest.skip(str(error))
            for a, b in zip(fn(x, w), got, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)


def test_torch_ten_thousand_replays(torch: Any) -> None:
    fn = _torch_cases(torch)["experts"]
    fast = dfx.schedule(fn, strategy=dfx.Branches(), backend="torch", lanes=LANES)
    w = torch.randn(128, 128, device="cuda") / 11
    xs = [torch.randn(128, 128, device="cuda") for _ in range(8)]
    with torch.no_grad():
        want = [fn(x, w) for x in xs]
        for call in range(10_000):
            got = fast(xs[call % 8], w)
            if call % 500 == call % 8:
                torch.testing.assert_close(want[call % 8], got, **CLOSE)
    torch.cuda.synchronize()
