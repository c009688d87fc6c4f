"""One model in PyTorch and in JAX; torch models inside JAX programs."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
if importlib.util.find_spec("torchax") is None:  # importing it would change settings of PyTorch
    pytest.skip("torchax is not installed", allow_module_level=True)
nn, F, jnp = torch.nn, torch.nn.functional, jax.numpy

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def torch_block() -> Any:
    def block(x: Any, wq: Any, wk: Any, w1: Any, w2: Any) -> Any:
        with dfx.mark("attention", resource="compute"):
            a = torch.softmax((x @ wq) @ (x @ wk).transpose(-1, -2), -1) @ x
        with dfx.mark("mlp", tags={"ffn"}, resource="compute"):
            h = F.gelu(x @ w1, approximate="tanh") @ w2
        with dfx.mark("order", resource="memory"):
            return torch.sort(a + h, -1).values

    return block


def jax_block() -> Any:
    def block(x: Any, wq: Any, wk: Any, w1: Any, w2: Any) -> Any:
        with dfx.mark("attention", resource="compute"):
            a = jax.nn.softmax((x @ wq) @ (x @ wk).swapaxes(-1, -2), -1) @ x
        with dfx.mark("mlp", tags={"ffn"}, resource="compute"):
            h = jax.nn.gelu(x @ w1) @ w2
        with dfx.mark("order", resource="memory"):
            return jnp.sort(a + h, -1)

    return block


class Aside(dfx.Strategy):
    """By tags only, so that it means the same everywhere."""

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=s.lanes - 1 if "ffn" in op.tags else 0)


@pytest.mark.parametrize("strategy", [dfx.Sequential(), dfx.Branches(), Aside()], ids=repr)
@pytest.mark.parametrize("backend", ["ffi", "torch"])
def test_same_regions_and_plan(strategy: Any, backend: str) -> None:
    shapes = [(64, 32), (32, 32), (32, 32), (32, 512), (512, 32)]
    tensors = [torch.randn(s) / 5 for s in shapes]
    arrays = [jnp.asarray(t.numpy()) for t in tensors]
    one = dfx.schedule(torch_block(), strategy=strategy, backend=backend)
    other = dfx.schedule(jax_block(), strategy=strategy)
    regions = [
        [(r.name, r.resource, r.tags, len(r.inputs), len(r.outputs)) for r in g.regions]
        for g in (dfx.graph(one, *tensors), dfx.graph(other, *arrays))
    ]
    assert regions[0] == regions[1]
    assert dfx.plan(one, *tensors).outline() == dfx.plan(other, *arrays).outline()
    np.testing.assert_allclose(one(*tensors).numpy(), np.asarray(other(*arrays)), **NEAR)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("order", torch.arange(4))

    def forward(self, x: Any) -> Any:
        with dfx.mark("tower", tags={"torch"}):
            h = self.left(x)
        return {"y": self.norm(h)[:, self.order.flip(0)], "best": h.argmax(-1)}


def _want(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model(torch.from_numpy(np.array(x)))


@pytest.fixture
def model() -> Any:
    return Model().eval()


@pytest.fixture
def fast(model: Any) -> Any:
    return dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")


X = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


def test_called_with_jax_arrays(model: Any, fast: Any) -> None:
    got, want = fast(jnp.asarray(X)), _want(model, X)
    assert isinstance(got["y"], jax.Array) and got["best"].dtype == jnp.int64
    np.testing.assert_allclose(got["y"], want["y"], **NEAR)
    np.testing.assert_array_equal(got["best"], want["best"])
    with torch.no_grad():
        model.left[0].weight.mul_(-1)  # parameters are read at each call
    np.testing.assert_allclose(fast(jnp.asarray(X))["y"], _want(model, X)["y"], **NEAR)


def test_one_plan_holds_jax_and_torch_regions(model: Any, fast: Any) -> None:
    @jax.jit
    def program(x: Any) -> Any:
        with dfx.mark("before", tags={"jax"}):
            x = jnp.sort(x, -1)
        with dfx.mark("beside", tags={"jax"}):
            other = jnp.cumsum(jnp.sort(x[:, ::-1], 0), 0)
        return fast(x)["y"] @ jnp.ones((4, 2)) + other[:, :2]

    scheduled = dfx.schedule(program, strategy=dfx.Branches())
    names = {r.name: r.tags for r in dfx.graph(scheduled, X).regions}
    assert "torch" in names["tower"] and "jax" in names["before"] and "jax" in names["beside"]
    assert not any(r.outer for r in dfx.graph(scheduled, X).regions)
    s = np.sort(X, -1)
    want = (
        _want(model, s)["y"].numpy() @ np.ones((4, 2)) + np.cumsum(np.sort(s[:, ::-1], 0), 0)[:, :2]
    )
    np.testing.assert_allclose(scheduled(X), want, **NEAR)
    cut = dfx.schedule(program, strategy=dfx.Branches(), rules=[dfx.Scope("norm")])
    assert any(r.name == "norm" for r in dfx.graph(cut, X).regions)


def test_many_calls_in_flight_end(fast: Any) -> None:
    step = dfx.schedule(lambda x: jnp.tanh(x + fast(x)["y"].sum()), strategy=dfx.Branches())
    plain = jax.jit(lambda x: x + fast(x)["y"].mean())
    x = jnp.asarray(X)
    for _ in range(100):
        x = plain(step(x))
    assert np.isfinite(np.asarray(x)).all()


def test_transformations(model: Any, fast: Any) -> None:
    def loss(x: Any) -> Any:
        return (fast(x)["y"] ** 2).sum()

    t = torch.from_numpy(X.copy()).requires_grad_()
    (model(t)["y"] ** 2).sum().backward()
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(X)), t.grad.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), t.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_refusals(model: Any, fast: Any) -> None:
    with pytest.raises(dfx.UnsupportedError, match="torch tensors and JAX arrays"):
        dfx.schedule(nn.Bilinear(6, 6, 2), strategy=dfx.Branches(), backend="ffi")(
            jnp.asarray(X), torch.from_numpy(X.copy())
        )
    with pytest.raises(dfx.UnsupportedError, match="backend='ffi' to call it from JAX"):
        dfx.schedule(model, strategy=dfx.Branches())(jnp.asarray(X))
    noisy = dfx.schedule(nn.Dropout(0.5).train(), strategy=dfx.Branches(), backend="ffi")
    with pytest.raises(dfx.UnsupportedError, match="random numbers.*eval mode"):
        noisy(jnp.asarray(X))
    batch_norm = dfx.schedule(nn.BatchNorm1d(6).train(), strategy=dfx.Branches(), backend="ffi")
    with pytest.raises(dfx.UnsupportedError, match="running_mean.*eval mode"):
        batch_norm(jnp.asarray(X))
