"""What is computed from totals over the batch: losses whose weights depend on labels, norms, penalties."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import SeparabilityError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn
F = nn.functional

CLASSES = 7


def labels(*shape: int) -> Any:
    """Labels of which some rows have none that counts, others some."""
    made = torch.randint(0, CLASSES, shape)
    made[0] = -100
    made[-1].view(-1)[:1] = -100
    return made


class Loss(nn.Module):
    """A layer and a loss of what it makes."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, CLASSES), loss

    def forward(self, x: Any, y: Any) -> Any:
        return self.loss(self.layer(x), y, self.layer.weight)


WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(4))
LOSSES = {
    "mean": lambda h, y, w: F.cross_entropy(h.flatten(0, 1), y.flatten()),
    "images": lambda h, y, w: F.cross_entropy(h.transpose(1, 2), y),
    "planes": lambda h, y, w: F.nll_loss(h.movedim(-1, 1)[..., None].log_softmax(1), y[..., None]),
    "weighted": lambda h, y, w: F.cross_entropy(h.flatten(0, 1), y.flatten(), WEIGHTS),
    "smoothed": lambda h, y, w: F.cross_entropy(
        h.flatten(0, 1), y.flatten(), WEIGHTS, label_smoothing=0.1
    ),
    "two": lambda h, y, w: (
        F.cross_entropy(h[:, 0], y[:, 0]) + F.cross_entropy(h[:, 1], y[:, 1].clamp(0), ignore_index=0)
    ) / 2,
    "with a penalty": lambda h, y, w: (
        F.cross_entropy(h.flatten(0, 1), y.flatten()) * 2 + 0.1 * w.square().sum()
    ),
    "masked": lambda h, y, w: (h.square().mean(-1) * (y >= 0)).sum() / (y >= 0).sum(),
    "norm": lambda h, y, w: h.square().sum().sqrt(),
    "norm of a mean": lambda h, y, w: (h.square().mean() + 1).sqrt(),
    "log of a mean": lambda h, y, w: h.exp().mean((0, 1)).log().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_training(name: str) -> None:
    torch.manual_seed(0)
    model = Loss(LOSSES[name])
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch([4, 2]), in_axes=0, out_axes=dfx.Mean())
    x, y = torch.randn(6, 3, 5), labels(6, 3)
    found = []
    for m in (model, fast):
        given = x.clone().requires_grad_()
        loss = m(given, y)
        (loss * 1.5).backward()
        found.append([loss.detach(), given.grad, *(p.grad for p in m.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_without_gradients_and_without_any_label() -> None:
    fast = dfx.schedule(Loss(LOSSES["mean"]), dfx.NanoBatch(2), in_axes=0, out_axes=dfx.Mean())
    x, y = torch.randn(6, 3, 5), labels(6, 3)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, y), fast.original(x, y))
        nothing = torch.full_like(y, -100)
        assert fast(x, nothing).isnan() and fast.original(x, nothing).isnan()
        assert dfx.verify(fast, x, y).max_abs < 1e-6
        assert dfx.profile(fast, x, y).spans
        assert "run behind the nano-batches" in dfx.explain(fast, x, y)


def test_beside_rows() -> None:
    """A total that rows need cannot wait until all rows are done."""
    fast = dfx.schedule(
        lambda h, y: h / F.cross_entropy(h, y),
        dfx.NanoBatch(2, joins=False),
        in_axes=0,
        out_axes=0,
    )
    with pytest.raises(SeparabilityError, match="before it is complete") as caught:
        fast(torch.randn(6, 5), torch.randint(0, 5, (6,)))
    assert f"{__file__}:" in str(caught.value)


def test_it_is_asked_for() -> None:
    """A total is no row of the batch, so out_axes has to say that it is wanted."""
    fast = dfx.schedule(Loss(LOSSES["mean"]), dfx.NanoBatch(2), in_axes=0)
    with pytest.raises(SeparabilityError, match=r"out_axes=dfx.Mean\(\)"):
        fast(torch.randn(6, 3, 5), labels(6, 3))


def test_a_buffer_that_keeps_a_mean() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(5))

        def forward(self, x: Any) -> Any:
            self.kept.mul_(0.9).add_(x.mean(0))
            return x.sin()

    model = Kept()
    fast = dfx.schedule(copy.deepcopy(model), dfx.NanoBatch([4, 2]), in_axes=0)
    x = torch.randn(6, 5)
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast.kept, model.kept)


@pytest.mark.parametrize("name", ["llama", "bert tokens", "bert rows", "bert spans"])
def test_labels_of_transformers(name: str) -> None:
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (4, 6))
    wanted = ids.clone()
    wanted[0, :4], wanted[3] = -100, -100
    options: dict[str, Any] = {"input_ids": ids, "labels": wanted}
    if name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**small, num_key_value_heads=2))
    elif name == "bert tokens":
        model = tf.BertForMaskedLM(tf.BertConfig(**small))
    elif name == "bert rows":
        model = tf.BertForSequenceClassification(tf.BertConfig(**small, num_labels=3))
        options["labels"] = torch.tensor([0, 2, 1, 1])
    else:
        model = tf.BertForQuestionAnswering(tf.BertConfig(**small))
        options = {
            "input_ids": ids,
            "start_positions": ids[:, 0] % 8,
            "end_positions": ids[:, 1] % 8,
        }
    model.train()
    fast = dfx.schedule(
        copy.deepcopy(model), dfx.NanoBatch([3, 1]), in_axes=dict.fromkeys(options, 0),
        out_axes=dfx.Mean(),
    )  # fmt: skip
    if "bert" not in name:
        options["use_cache"] = False
    found = []
    for m in (model, fast):
        torch.manual_seed(1)
        out = m(**options)
        out.loss.backward()
        found.append((out.loss.detach(), {n: p.grad for n, p in m.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0])
    for key, want in found[0][1].items():
        got = found[1][1][key]
        if want is None:
            assert got is None or not got.any(), key
        else:
            scale = max(1e-3, float(want.abs().max()))
            assert float((got - want).abs().max()) <= 4e-6 * scale + 3e-8, key


def test_a_check_of_a_total_that_nothing_else_reads() -> None:
    def fn(x: Any) -> Any:
        torch._assert_async(x.sum() > 0, "rows must add up to more than 0")
        return x + 1

    fast = dfx.schedule(fn, dfx.NanoBatch(2), lanes=2, in_axes=0)
    x = torch.rand(4, 3)
    x[2:] -= 0.1  # one half alone may be below 0, the whole is not
    for given in (x, torch.cat([-x[:2], 3 * x[:2]])):
        assert torch.equal(fast(given), fn(given))
    with pytest.raises(RuntimeError, match="more than 0"):
        fast(-x)
    assert torch.equal(fast(x), fn(x))
    assert "run behind the nano-batches" in dfx.explain(fast, x)
