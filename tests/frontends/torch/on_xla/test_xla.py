"""Torch models on XLA (``backend="ffi"``): values, gradients, random numbers, types, memory."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("jax", reason="JAX is not installed")
if importlib.util.find_spec("torchax") is None:  # importing it would change settings of PyTorch
    pytest.skip("torchax is not installed", allow_module_level=True)
from torch_models import Recurrent, Towers  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.skip = nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, stride=1, padding=1)
        return self.head(F.relu(self.conv(h) + self.skip(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Any) -> Any:
        ids = (x[..., 0].abs() * 3).long() % 11
        return F.cross_entropy(self.norm(self.table(ids)).flatten(0, 1), ids.flatten())


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "resnet": (ResNet, (2, 3, 8, 8)),
    "towers": (Towers, (5, 6)),
    "encoder": (encoder, (3, 5, 8)),
    "attention": (Attention, (3, 5, 8)),
    "embedded": (Embedded, (3, 5, 8)),
    "bilstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True), (3, 7, 6)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3), (7, 3, 6)),
    "birnn": (lambda: Recurrent(nn.RNN, bidirectional=True, num_layers=2), (7, 3, 6)),
}

NEAR = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, strategy: Any) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    fast = dfx.schedule(model, strategy=strategy, backend="ffi")
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want, got = model(x), fast(x)
        assert (want.dtype, want.stride()) == (got.dtype, got.stride())
        torch.testing.assert_close(got, want, **NEAR)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    make, shape = MODELS[name]
    model = make().train()
    fast = dfx.schedule(copy.deepcopy(model), strategy=dfx.Branches(), backend="ffi")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, fast)]
    for seed in range(2):
        results = []
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            torch.manual_seed(seed)
            x = torch.randn(shape, requires_grad=True)
            loss = m(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append((loss.detach(), x.grad, torch.rand(1)))
        torch.testing.assert_close(results[1][:2], results[0][:2], **NEAR)
        assert torch.equal(results[0][2], results[1][2]), "other random numbers were drawn"
    state = model.state_dict()
    for key, value in fast.state_dict().items():
        torch.testing.assert_close(value, state[key], **NEAR, msg=key)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()

    def forward(self, x: Any) -> Any:
        return self.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0]), x[:, [0, 2]], self.norm(x)


@pytest.mark.parametrize("training", [False, True])
def test_constants(training: bool) -> None:
    model = Constants()
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    for rows in (3, 5, 5):
        made = []
        values = torch.randn(rows, 4)
        for call in (model, fast):
            x = values.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                outs = call(x)
            if training:
                sum(out.square().sum() for out in outs).backward()
                outs = *outs, x.grad, model.linear.weight.grad, model.norm.weight.grad
                model.zero_grad()
            made.append(outs)
        torch.testing.assert_close(made[1], made[0], **NEAR)


def test_wide_types_are_not_narrowed(strategy: Any) -> None:
    def f(i: Any, d: Any) -> Any:
        return i * 3 + torch.arange(i.shape[0]), torch.cumsum(d, 0) / 3, (i % 7).to(d.dtype) * d

    fast = dfx.schedule(f, strategy=strategy, backend="ffi")
    i, d = torch.randint(-(2**60), 2**60, (50,)), torch.randn(50, dtype=torch.float64)
    for want, got in zip(f(i, d), fast(i, d), strict=True):
        assert want.dtype == got.dtype
        torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "complex64"]
)
def test_types(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.randint(0, 2, (6, 5)).to(kind)

    def f(v: Any) -> Any:
        return torch.cat([v, v.flip(0)]), v[:, 1:3].t(), torch.where(v == v, v, v)

    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    for want, got in zip(f(x), fast(x), strict=True):
        assert want.dtype == got.dtype and torch.equal(want, got)


def test_bfloat16_model_is_as_near_as_bfloat16_is() -> None:
    model = encoder().to(torch.bfloat16).eval()
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=4e-2, atol=4e-2)


def test_strided_arguments_and_results() -> None:
    def f(a: Any, b: Any) -> Any:
        return a.t() @ b.t(), a.sum(0, keepdim=True).expand(3, -1), b.transpose(0, 1) + 1

    a, b = torch.randn(8, 6)[:, ::2], torch.randn(8, 5).t().contiguous().t().t()
    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    for want, got in zip(f(a, b), fast(a, b), strict=True):
        torch.testing.assert_close(got, want, **NEAR)


def test_results_never_share_memory_with_arguments_or_each_other() -> None:
    def f(x: Any) -> Any:
        return x.clone(), x + 0, (x * 1).view(-1), torch.zeros(3)

    x = torch.ones(4, 4)
    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    for _ in range(2):
        outs = fast(x)
        for out in outs:
            out.add_(1)
        assert torch.equal(x, torch.ones(4, 4)) and all((o[:3] <= 2).all() for o in outs)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_tensors_at_any_address(offset: int, strategy: Any) -> None:
    """Weights of a mapped file lie anywhere; XLA takes memory in place at multiples of 64 bytes only."""

    def shifted(*shape: int) -> Any:
        x = torch.empty(math.prod(shape) + 32)
        first = -x.data_ptr() % 64 // 4 + offset
        return x[first : first + math.prod(shape)].view(shape).normal_()

    def f(x: Any, w: Any, b: Any) -> Any:
        return F.linear(x, w, b), torch.sort(w, -1).values

    x, w, b = torch.randn(4, 1536), shifted(1536, 1536), shifted(1536)
    fast = dfx.schedule(f, strategy=strategy, backend="ffi")
    for _ in range(3):
        got, want = fast(x, w, b), f(x, w, b)
        torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-3)
        assert torch.equal(got[1], want[1])
        w.normal_()  # same address, other content
    assert "do not begin at a multiple of 64 bytes" in dfx.explain(fast, x, w, b)


def test_parameters_changed_in_place_are_seen() -> None:
    model = nn.Linear(6, 4)
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    x = torch.randn(3, 6)
    with torch.no_grad():
        fast(x)
        model.weight.mul_(-2)
        torch.testing.assert_close(fast(x), model(x), **NEAR)
        model.weight.data = torch.randn(4, 6)
        torch.testing.assert_close(fast(x), model(x), **NEAR)


def test_arguments_written_in_place() -> None:
    def f(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x + y

    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    a, b, y = torch.ones(5), torch.ones(5), torch.randn(5)
    torch.testing.assert_close(fast(a, y), f(b, y))
    assert torch.equal(a, b)


def test_sizes_may_change() -> None:
    model = Towers().eval()
    fast = dfx.schedule(
        model, strategy=dfx.Branches(), backend="ffi", compiler_options={"dynamic": True}
    )
    with torch.no_grad():
        for n in (5, 3, 9, 3):
            x = torch.randn(n, 6)
            torch.testing.assert_close(fast(x), model(x), **NEAR)
    assert "sizes may change" in dfx.explain(fast, torch.randn(5, 6))


def test_rules_marks_and_classes_mean_the_same() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers, self.head = Towers(), nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            with dfx.mark("first", tags={"t"}):
                h = self.towers(x)
            with dfx.mark("last", resource="compute"):
                return self.head(h).relu()

    model, x = Marked().eval(), torch.randn(5, 6)
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        regions = {r.name: r for r in dfx.graph(fast, x).regions}
        assert {"first", "last"} <= set(regions) and "t" in regions["first"].tags
        for rule in (dfx.Module(Towers), dfx.Scope("**/left"), dfx.Module("towers/*")):
            ruled = dfx.schedule(model.towers, strategy=dfx.Branches(), rules=[dfx.Scope("left")],
                                 backend="ffi")  # fmt: skip
            assert any(r.name == "left" for r in dfx.graph(ruled, x).regions), rule
        source = regions["first"].source
    assert source is not None and source.file == inspect.getsourcefile(Towers)


def test_verify_profile_and_explain() -> None:
    model, x = Towers().eval(), torch.randn(5, 6)
    fast = dfx.schedule(model, strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        assert dfx.verify(fast, x).max_abs < 1e-5
        timeline = dfx.profile(fast, x)
        assert timeline.spans and timeline.total_ns > 0
        text = dfx.explain(fast, x)
    assert "backend ffi" in text and "results written into their tensors" in text


def test_auto() -> None:
    model, x = Towers().eval(), torch.randn(5, 6)
    fast = dfx.schedule(model, strategy="auto", backend="ffi")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), **NEAR)


def test_exported_program() -> None:
    model, x = Towers().eval(), torch.randn(5, 6)
    fast = dfx.schedule(torch.export.export(model, (x,)), strategy=dfx.Branches(), backend="ffi")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), **NEAR)


def test_what_has_no_lowering_is_an_error_with_the_line() -> None:
    def f(x: Any) -> Any:
        return torch.multinomial(x, 2)

    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    with pytest.raises(dfx.UnsupportedError, match=r"test_xla\.py:\d+.*backend='torch'"):
        fast(torch.rand(5))


def test_data_dependent_sizes_are_an_error() -> None:
    def f(x: Any) -> Any:
        return torch.linalg.matrix_exp(x) + 1

    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    with pytest.raises(dfx.UnsupportedError, match="linalg_matrix_exp.*no lowering"):
        fast(torch.rand(3, 3))


def test_replacements_are_jax_functions() -> None:
    import jax.numpy as jnp

    class Swap(dfx.Strategy):
        def rules(self, graph: Any) -> Any:
            return [dfx.Op("sort", tags={"sort"})]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    by = (lambda v, *_: jnp.sort(v)) if "sort" in op.tags else None
                    s.execute(op, replace=by if len(op.region.outputs) == 1 else None)

    def f(x: Any) -> Any:
        return torch.sort(x).values * 2

    fast, x = dfx.schedule(f, strategy=Swap(), backend="ffi"), torch.randn(50)
    assert torch.equal(fast(x), f(x))
