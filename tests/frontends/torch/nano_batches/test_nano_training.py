"""Nano-batches of modules, forward and backward: values and gradients are the whole batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import SeparabilityError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn
F = nn.functional


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.group, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = self.group(self.pool(F.relu(self.norm(self.conv(x)))))
        return self.head(F.avg_pool2d(h, 2).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0])


class Cells(nn.Module):
    """A GRU and an LSTM as loops over cells."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(6, 8), nn.LSTMCell(8, 4)

    def forward(self, x: Any) -> Any:
        h, state = x.new_zeros(x.shape[0], 8), None
        for t in range(3):
            h = self.gru(x[:, t], h)
            state = self.lstm(h, state)
        return torch.cat([h, *state], -1)


class Experts(nn.Module):
    """A mixture of experts: every expert on every token, weighted by the router's two best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.weights = nn.Parameter(torch.randn(3, 8, 8) / 3)

    def forward(self, x: Any) -> Any:
        best, index = torch.softmax(self.router(x), -1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 3).scatter(-1, index, best)
        each = torch.einsum("btd,edf->btef", x, self.weights)
        return (each * gates[..., None]).sum(-2)


def encoder(dropout: float = 0.0) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=dropout)
    return nn.TransformerEncoder(layer, 2)


def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Dropout(0.3), nn.Linear(9, 2),
        nn.LogSoftmax(-1),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, (6, 5), 0),
    "conv": (Conv, (4, 3, 8, 8), 0),
    "lstm": (Recurrent, (4, 5, 6), 0),
    "lstm, time first": (lambda: Recurrent(False), (5, 4, 6), 1),
    "cells": (Cells, (4, 3, 6), 0),
    "experts": (Experts, (4, 2, 8), 0),
    "encoder": (encoder, (4, 3, 8), 0),
    "encoder with dropout": (lambda: encoder(0.2), (4, 3, 8), 0),
}


def step(model: Any, x: Any, weights: Any) -> tuple[Any, Any]:
    """Result, and the gradients of the input and of all parameters."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    out = model(x)
    (out * weights).mean().backward()
    grads = {"input": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return out.detach(), grads


def agree(fast: Any, model: Any, x: Any, tolerance: float = 2e-6) -> None:
    with torch.no_grad():
        weights = torch.randn_like(model(x))
    (want, want_grads), (got, got_grads) = step(model, x, weights), step(fast, x, weights)
    torch.testing.assert_close(got, want)
    for name, grad in want_grads.items():
        scale = max(1e-3, float(grad.abs().max()))
        assert float((got_grads[name] - grad).abs().max()) <= tolerance * scale, name
        assert got_grads[name].dtype == grad.dtype


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    make, shape, axis = MODELS[name]
    model = make().eval()
    fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=axis, out_axes=axis)
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("sizes", [2, "uneven"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, sizes: Any) -> None:
    make, shape, axis = MODELS[name]
    model = make().train(name != "conv")  # batch norm with its running statistics
    rows = [3, shape[axis] - 3] if sizes == "uneven" else sizes
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch(rows), in_axes=axis, out_axes=axis)
    agree(fast, model, torch.randn(shape))
    text = dfx.explain(fast, torch.randn(shape).requires_grad_())  # the graph that ran
    assert "(backward)" in text and "@1" in text.split("(backward)")[1]


def test_batch_norm_in_training_is_refused_with_the_ways_out() -> None:
    with pytest.raises(SeparabilityError, match=r"eval\(\)") as caught:
        dfx.schedule(Conv().train(), dfx.NanoBatch(2, joins=False), in_axes=0)(
            torch.randn(4, 3, 8, 8)
        )
    assert "GroupNorm" in str(caught.value) and f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("sizes", [2, [5, 1]])
def test_a_loss_inside(sizes: Any) -> None:
    """The loss is a mean of nano-batches' means; a penalty on the weights counts once."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Any, y: Any) -> Any:
            rows = (self.layer(x) - y).square()
            return rows.mean() + 0.1 * self.layer.weight.square().sum(), rows.sum(), rows

    model = Loss()
    fast = dfx.schedule(
        copy.deepcopy(model), dfx.NanoBatch(sizes), in_axes=0, out_axes=(dfx.Mean(), dfx.Sum(), 0)
    )
    x, y = torch.randn(6, 5), torch.randn(6, 3)
    for use in (lambda o: o[0], lambda o: o[1], lambda o: o[0] * 2 + o[1] + o[2].std()):
        for m in (model, fast):
            m.zero_grad()
            use(m(x, y)).backward()
        for want, got in zip(model.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)


def test_training_loop_with_accumulation_and_autocast() -> None:
    model = mlp().train()
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch(2), in_axes=0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, fast)]
    for seed in range(3):
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            for _ in range(2):  # gradients add up over two batches
                with torch.autocast("cpu", torch.bfloat16):
                    loss = m(torch.randn(6, 5)).float().square().mean()
                loss.backward()
            optimizer.step()
    for want, got in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


SQUARES: dict[str, Any] = {
    "det": lambda a, b: torch.linalg.det(a),
    "slogdet": lambda a, b: torch.linalg.slogdet(a)[1],
    "solve": torch.linalg.solve,
}


@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.parametrize("sizes", [[1, 1], [5, 1]])
def test_matrices_of_one_row(name: str, sizes: list[int]) -> None:
    """Of one row a tensor counts as contiguous, whatever its strides; PyTorch factorizes it transposed."""

    def f(x: Any) -> Any:
        return SQUARES[name](x[:, :4].view(-1, 2, 2), x[:, 4:].view(-1, 2, 2))

    x = torch.randn(sum(sizes), 8, requires_grad=True)
    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=0)
    want, got = f(x), fast(x)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (want, got)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


OTHER = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))
BACKWARDS: dict[str, Any] = {
    "unfold": lambda x: x.unfold(1, 4, 2).sin(),
    "stft": lambda x: torch.stft(x, 4, 2, window=torch.ones(4), return_complex=True).abs(),
    "diagonal": lambda x: torch.diag_embed(x).diagonal(dim1=1, dim2=2) * x,
    "distances": lambda x: torch.cdist(x, OTHER),
    "searched": lambda x: x * torch.searchsorted(x.sort(dim=-1)[0], x),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_rows_that_are_placed(name: str) -> None:
    f = BACKWARDS[name]
    x = torch.randn(5, 8, requires_grad=True)
    fast = dfx.schedule(f, dfx.NanoBatch([2, 3], joins=False), in_axes=0)
    want, got = f(x), fast(x)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (want, got)]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("in_axes", [None, (0, None)])
def test_a_gradient_without_the_batch(in_axes: Any) -> None:
    """The backward has no rows, so it runs whole."""
    layer = nn.Linear(3, 2)

    def f(ids: Any, x: Any) -> Any:
        return ids * 2, layer(x)

    out_axes = 0 if in_axes is None else (0, None)
    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=in_axes, out_axes=out_axes if in_axes else 0)
    ids, x = torch.randint(0, 9, (4, 5)), torch.randn(6, 3, requires_grad=True)
    want, got = f(ids, x), fast(ids, x)
    assert torch.equal(got[0], want[0])
    grads = [torch.autograd.grad(y[1].sin().sum(), x)[0] for y in (want, got)]
    torch.testing.assert_close(grads[1], grads[0])


DRAWN: dict[str, Any] = {
    "bernoulli": lambda x: torch.bernoulli(torch.full((x.shape[0], 1), 0.7)),
    "repeated": lambda x: torch.bernoulli(torch.full((x.shape[0], 1), 0.3).expand(-1, 8)),
    "in place": lambda x: x.new_empty(x.shape[0], 1).bernoulli_(0.7),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 3.0)),
    "multinomial": lambda x: torch.multinomial(torch.ones(x.shape[0], 8), 1),
    "normal of numbers": lambda x: torch.normal(0.5, 2.0, x.shape),
    "normal without rows": lambda x: torch.normal(0.0, 1.0, (1, 8)),
    "a distribution": lambda x: torch.distributions.Normal(0.5, 2.0).sample(x.shape),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_by_known_numbers(name: str) -> None:
    """They are drawn for the whole batch, as if they depended on no data."""

    def f(x: Any) -> Any:
        return x * DRAWN[name](x) + torch.rand_like(x)

    x = torch.randn(6, 8, requires_grad=True)
    fast = dfx.schedule(f, dfx.NanoBatch([3, 2, 1], joins=False), in_axes=0)
    results = []
    for g in (f, fast, fast):
        torch.manual_seed(3)
        y = g(x)
        results.append((y.detach(), torch.autograd.grad(y.sum(), x)[0], torch.rand(1)))
    for got in results[1:]:
        for one, want in zip(got, results[0], strict=True):
            torch.testing.assert_close(one, want, rtol=0, atol=0)


def test_random_numbers_move_as_in_the_original() -> None:
    model = encoder(0.3).train()
    fast = dfx.schedule(model, dfx.NanoBatch([1, 3]), in_axes=0)
    x = torch.randn(4, 3, 8)
    results = []
    for m in (model, fast):
        torch.manual_seed(0)
        results.append((m(x).detach(), torch.rand(1)))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# -- transformers ----------------------------------------------------------------------------------


def transformer(name: str) -> Any:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "gpt2":
        config = tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
        return tf.GPT2LMHeadModel(config)
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**small, num_key_value_heads=2))
    return tf.BertModel(tf.BertConfig(**small))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers(name: str) -> None:
    model = transformer(name).train()
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch(2), in_axes={"input_ids": 0})
    ids = torch.randint(3, 64, (4, 7))
    options = {"input_ids": ids} | ({} if name == "bert" else {"use_cache": False})
    results = []
    for m in (model, fast):
        torch.manual_seed(1)
        out = m(**options)[0]
        out.square().mean().backward()
        results.append((out.detach(), {n: p.grad for n, p in m.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0])
    for key, want in results[0][1].items():
        got = results[1][1][key]
        if want is None:  # of a result that nobody used
            assert got is None or not got.any(), key
        else:
            scale = max(1e-3, float(want.abs().max()))
            assert float((got - want).abs().max()) <= 2e-6 * scale, key
    model.eval(), fast.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(**options)[0], model(**options)[0])
