"""Nano-batches of PyTorch models on XLA: values, gradients, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.errors import FallbackWarning, SeparabilityError, UnsupportedError
from dynaflow_xla.planning.instructions import Launch, Merge, Slice

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
nn, F = torch.nn, torch.nn.functional

slow = pytest.mark.slow
pytestmark = pytest.mark.parametrize("backend", ["ffi", "xla"])

W = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))


def split(fn: Any, backend: str, sizes: Any = 2, *, in_axes: Any = 0, **options: Any) -> Any:
    made = sizes if isinstance(sizes, dfx.Strategy) else dfx.NanoBatch(sizes)
    return dfx.schedule(fn, made, in_axes=in_axes, backend=backend, **options)


def check(fast: Any, *args: Any) -> None:
    torch.manual_seed(3)
    want = torch.utils._pytree.tree_leaves(fast.original(*args))
    torch.manual_seed(3)
    got = torch.utils._pytree.tree_leaves(fast(*args))
    for w, g in zip(want, got, strict=True):
        assert w.stride() == g.stride()
        torch.testing.assert_close(g, w)


def nanos(fast: Any, *args: Any) -> set[str]:
    made = dfx.plan(fast, *args).instructions
    return {i.name.rpartition("@")[2] for i in made if isinstance(i, Launch) and "@" in i.name}


@pytest.mark.parametrize(
    "sizes", [2, pytest.param([4, 2], marks=slow), pytest.param(6, marks=slow)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_values(backend: str, axis: int, sizes: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        rows = x.movedim(axis, 0)
        return torch.tanh(rows @ w).movedim(0, axis), x.sum(), rows.exp().mean(0)

    axes = (axis, dfx.Sum(), dfx.Mean())
    fast = split(f, backend, sizes, in_axes=(axis, None), out_axes=axes)
    for rows in (6, 6) if isinstance(sizes, list) else (6, 7):
        x = torch.randn(rows, 3, 5).movedim(0, axis)  # not contiguous for axis 1
        check(fast, x, W)
    assert len(nanos(fast, x, W)) == (6 if sizes == 6 else 2)
    assert any(isinstance(i, Slice | Merge) for i in dfx.plan(fast, x, W).instructions)


def test_one_row_is_not_split(backend: str) -> None:
    fast = split(lambda x: torch.tanh(x @ W), backend)
    for rows in (1, 4, 1, 2):
        check(fast, torch.randn(rows, 5))
    assert not nanos(fast, torch.randn(1, 5))


def test_constants_that_depend_on_the_size(backend: str) -> None:
    def f(x: Any) -> Any:
        return x + torch.ones(x.shape[0], 1, dtype=x.dtype), x @ torch.eye(5)

    check(split(f, backend), torch.randn(6, 5))


def grads(model: Any, call: Any, x: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    call(x).square().mean().backward()
    found = [x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad()
    return found


@pytest.mark.parametrize("sizes", [[5, 1], pytest.param(2, marks=slow)])
def test_training(backend: str, sizes: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(16))
    fast = split(model, backend, sizes)
    x = torch.randn(6, 5)
    for w, g in zip(grads(model, model, x), grads(model, fast, x), strict=True):
        torch.testing.assert_close(g, w)
    text = dfx.explain(fast, x)
    assert "backward" in text and "@1" in text


@pytest.mark.parametrize(
    "last", [nn.Tanh, pytest.param(nn.ReLU, marks=slow), pytest.param(nn.Softmax, marks=slow)]
)
@pytest.mark.parametrize(
    "sizes", [2, pytest.param([4, 2], marks=slow), pytest.param(dfx.DualBatch(), marks=slow)]
)
def test_a_result_that_the_backward_reads_too(backend: str, sizes: Any, last: Any) -> None:
    """Its rows are put together for the caller and for the backward."""
    model = nn.Sequential(nn.Linear(5, 16), last(*([-1] if last is nn.Softmax else [])))
    fast = split(model, backend, sizes)
    for rows in (6, 6, 12) if not isinstance(sizes, list) else (6, 6):
        x = torch.randn(rows, 5)
        check(fast, x)
        for w, g in zip(grads(model, model, x), grads(model, fast, x), strict=True):
            torch.testing.assert_close(g, w)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@slow
def test_attention_and_convolution(backend: str) -> None:
    model = Attention()
    x = torch.randn(4, 6, 16)
    fast = split(model, backend)
    for w, g in zip(grads(model, model, x), grads(model, fast, x), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        check(split(net, backend), images)


def test_refusals(backend: str) -> None:
    with pytest.raises(SeparabilityError, match="cannot be split"):
        split(lambda x: x - x.mean(0), backend)(torch.randn(4, 5))
    norm = nn.BatchNorm1d(5)
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(SeparabilityError):
        split(norm, backend)(torch.randn(4, 5))
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True)
    )
    several = split(lambda x: torch.cat([x, x * 2]), backend)
    with pytest.raises(UnsupportedError, match="2 times over"):
        several(torch.randn(4, 5))


@pytest.mark.usefixtures("distances_unknown")
def test_what_is_not_proved_is_compared(backend: str) -> None:
    fast = split(lambda x: torch.cdist(x[:, None], x[:, None]) + 1, backend)
    with pytest.warns(FallbackWarning, match="not proved"):
        check(fast, torch.randn(4, 5))
    refused = split(fast.original, backend, check=False)
    with pytest.raises(SeparabilityError):
        refused(torch.randn(4, 5))


def test_jax_arrays_are_not_split(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="JAX function"):
        split(nn.Tanh(), backend)(jax.numpy.ones((4, 5)))


def test_auto_offers_nano_batches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    fast = dfx.schedule(model, dfx.Auto(budget_s=1.0), in_axes=0, backend=backend)
    x = torch.randn(64, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert "NanoBatch(" in dfx.explain(fast, x)


def test_a_graph_without_a_batch(backend: str) -> None:
    fast = split(lambda x, w: torch.tanh(w) * 2, backend, in_axes=(0, None))
    with pytest.warns(FallbackWarning, match="takes no argument with a batch"):
        torch.testing.assert_close(fast(torch.ones(4, 1), W), torch.tanh(W) * 2)
