"""Torch models as one XLA program (``backend="xla"``): values, gradients, plans, refusals."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
if importlib.util.find_spec("torchax") is None:  # importing it would change settings of PyTorch
    pytest.skip("torchax is not installed", allow_module_level=True)
nn, F, jnp = torch.nn, torch.nn.functional, jax.numpy

NEAR = {"rtol": 2e-4, "atol": 2e-5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.left = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
        self.right = nn.LSTM(16, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        with dfx.mark("left", resource="compute"):
            a = self.left(x)
        with dfx.mark("right", resource="compute"):
            b = self.right(x)[0]
        return {"y": self.norm((a * b).mean(1)), "best": (a + b).argmax(-1), "ids": ids}


IDS = torch.arange(24).reshape(4, 6) % 11


def test_inference(strategy: Any) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, strategy=strategy, backend="xla")
    with torch.no_grad():
        for _ in range(2):
            want, got = model(IDS), fast(IDS)
            torch.testing.assert_close(got["y"], want["y"], **NEAR)
            assert torch.equal(got["best"], want["best"]) and got["best"].dtype == torch.int64
            assert got["ids"] is IDS or torch.equal(got["ids"], IDS)
            got["y"].add_(1)  # results are the caller's
        assert dfx.verify(fast, IDS).max_abs < 1e-4
    assert "one XLA program" in dfx.explain(fast, IDS)


def test_training() -> None:
    """Dropout drops what it drops in the original: PyTorch draws, with the caller's generator."""
    model = Block().train()
    fast = dfx.schedule(copy.deepcopy(model), strategy=dfx.Branches(), backend="xla")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, fast)]
    for seed in range(2):
        losses = []
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            torch.manual_seed(seed)
            losses.append(m(IDS)["y"].square().sum() + m(IDS)["y"][0, 0])
            optimizer.zero_grad()
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], **NEAR)
        want = {name: p.grad for name, p in model.named_parameters()}
        for name, parameter in fast.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name], rtol=2e-3, atol=2e-4, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    state = model.state_dict()
    assert int(state["norm.num_batches_tracked"]) == 4
    for name, value in fast.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=5e-3, atol=5e-4, msg=name)


def test_tensors_at_any_address_and_of_any_layout() -> None:
    def f(x: Any, d: Any, i: Any) -> Any:
        return x.t() + 1, torch.cumsum(d, 0), i * 2**40, x

    x = torch.randn(300, 400)[:, 1:].t()
    d, i = torch.randn(70_001, dtype=torch.float64)[1:], torch.arange(5)
    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="xla")
    for want, got in zip(f(x, d, i), fast(x, d, i), strict=True):
        assert want.dtype == got.dtype
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def _pair() -> tuple[Any, Any]:
    def in_torch(x: Any, v: Any, w: Any) -> Any:
        with dfx.mark("left", resource="compute"):
            a = torch.tanh(x @ v)
        with dfx.mark("order", tags={"aside"}, resource="memory"):
            b = torch.sort(x @ w, -1).values
        with dfx.mark("join", resource="memory"):
            return a + b

    def in_jax(x: Any, v: Any, w: Any) -> Any:
        with dfx.mark("left", resource="compute"):
            a = jnp.tanh(x @ v)
        with dfx.mark("order", tags={"aside"}, resource="memory"):
            b = jnp.sort(x @ w, -1)
        with dfx.mark("join", resource="memory"):
            return a + b

    in_torch.__name__ = in_jax.__name__ = "model"
    return in_torch, in_jax


@pytest.mark.parametrize("target", [None, "nvidia-h200"])
@pytest.mark.parametrize("strategy", [dfx.Sequential(), dfx.Branches()], ids=repr)
def test_the_plan_is_that_of_the_jax_function(strategy: Any, target: str | None) -> None:
    in_torch, in_jax = _pair()
    tensors = [torch.randn(16, 16) for _ in range(3)]
    arrays = [jnp.asarray(t.numpy()) for t in tensors]
    options = {"strategy": strategy, "backend": "xla", "target": target}
    one, other = dfx.schedule(in_torch, **options), dfx.schedule(in_jax, **options)
    assert dfx.plan(one, *tensors).outline() == dfx.plan(other, *arrays).outline()
    np.testing.assert_allclose(one(*tensors).numpy(), other(*arrays), rtol=1e-5, atol=1e-5)
    options_of = dfx.compiler_options
    assert options_of(one, *tensors) == options_of(other, *arrays)


def test_one_function_serves_both_frameworks() -> None:
    fast = dfx.schedule(lambda x: x * 2 + 1, strategy=dfx.Branches(), backend="xla")
    assert torch.equal(fast(torch.ones(3)), torch.full((3,), 3.0))
    assert (fast(jnp.ones(3)) == 3).all() and (jax.jit(fast)(jnp.ones(3)) == 3).all()


def test_refusals() -> None:
    model = Block().eval()
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="xla")
    with pytest.raises(dfx.UnsupportedError, match="one XLA program has no lanes"):
        dfx.profile(fast, IDS)
    with pytest.raises(dfx.UnsupportedError, match="compiler='aoti'.*backend='xla'"):
        dfx.schedule(model, backend="xla", compiler="aoti")
    with pytest.raises(dfx.PlanError, match="target must be one of"):
        dfx.schedule(model, target="nvidia-h2000")
    with pytest.raises(dfx.UnsupportedError, match="compile is for backend='xla'.*backend='ffi'"):
        dfx.compile(dfx.schedule(model, strategy=dfx.Branches(), backend="ffi"), IDS)
    with pytest.raises(dfx.UnsupportedError, match="compiler_options is for backend='xla'"):
        dfx.compiler_options(dfx.schedule(model, strategy=dfx.Branches()), IDS)


def test_compiling_for_a_gpu() -> None:
    """Without the CUDA plugin an error says what to install; with it the plan is read back."""
    in_torch, _ = _pair()

    def indexed(x: Any, v: Any, w: Any, ids: Any) -> Any:
        return in_torch(x, v, w)[ids]

    tensors = [*(torch.randn(256, 256) for _ in range(3)), torch.arange(9)]
    fast = dfx.schedule(indexed, strategy=dfx.Branches(), target="nvidia-h200")
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(dfx.UnsupportedError, match="CUDA plugin"):
            dfx.compile(fast, *tensors)
        return
    report = dfx.compile(fast, *tensors)
    assert {("left", "join"), ("order", "join")} <= set(report.order.held)
    assert not report.order.broken
    assert "left" in dfx.explain(fast, *tensors, deep=True)


@pytest.mark.parametrize("backend", ["torch", "ffi", "xla"])
def test_arguments_on_several_devices(backend: str) -> None:
    fast = dfx.schedule(lambda x, y: (x + 1, y * 2), strategy=dfx.Branches(), backend=backend)
    with pytest.raises(dfx.UnsupportedError, match=r"one device.*test_xla_program\.py:\d+.*meta"):
        fast(torch.ones(3), torch.ones(3, device="meta"))


@pytest.mark.parametrize("backend", ["torch", "ffi", "xla"])
def test_tensors_and_arrays_in_one_call(backend: str) -> None:
    model = nn.Bilinear(3, 3, 2)
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend=backend)
    with pytest.raises(dfx.UnsupportedError, match="JAX array.*torch.from_dlpack"):
        fast(torch.ones(1, 3), jnp.ones((1, 3)))
    both = dfx.schedule(lambda x, y: x, strategy=dfx.Branches(), backend=backend)
    with pytest.raises(dfx.UnsupportedError, match="JAX array.*torch.from_dlpack"):
        both({"x": torch.ones(3)}, [jnp.ones(3)])


@pytest.mark.parametrize("backend", ["torch", "ffi", "xla"])
def test_results_that_are_no_tensors(backend: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1, 3, None, "text", x.shape[0], [x * 2, True]

    fast = dfx.schedule(Odd(), strategy=dfx.Branches(), backend=backend)
    for x in [torch.ones(2)] + [jnp.ones(2)] * (backend != "torch"):
        one, *rest, (two, flag) = fast(x)
        assert type(one) is type(two) and isinstance(one, type(x))
        assert rest == [3, None, "text", 2] and flag is True
        assert (np.asarray(one) == 2).all() and (np.asarray(two) == 2).all()
