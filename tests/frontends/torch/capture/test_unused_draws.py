"""Random numbers that nobody reads: those that come later are the original's all the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils import checkpoint  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

lstm, gru = nn.LSTM(8, 8, 2, dropout=0.5), nn.GRU(8, 8, 2, dropout=0.5)
attention = nn.MultiheadAttention(8, 2, dropout=0.5)


def in_a_checkpoint(x: Any) -> Any:
    return checkpoint.checkpoint(lambda v: nn.functional.dropout(v, 0.5), x, use_reentrant=False)


def in_a_branch(x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda v: v + torch.rand_like(v), lambda v: v * 1, (x,))


DRAWS = {
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).sample(),
    "beta": lambda x: torch.distributions.Beta(x, x).sample(),
    "lstm": lambda x: lstm(x),
    "gru": lambda x: gru(x),
    "attention": lambda x: attention(x, x, x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "pool": lambda x: nn.functional.fractional_max_pool2d(x[None], 2, output_size=2),
    "low rank": lambda x: torch.svd_lowrank(x[0], 2),
    "checkpoint": in_a_checkpoint,
    "cond": in_a_branch,
}


# Without gradients PyTorch makes no graph of a checkpoint that draws: the original runs.
@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_unused(draw: Any) -> None:
    def f(x: Any) -> Any:
        draw(x)
        return x * 2

    fast, x, later = dfx.schedule(f, "branches"), torch.rand(4, 5, 8) + 0.1, []
    for call in (f, fast):
        torch.manual_seed(0)
        call(x)
        later.append(torch.rand(3))
    assert torch.equal(*later)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strategy", [dfx.Sequential(), dfx.Branches(), dfx.NanoBatch(2)], ids=repr)
def test_dropout_of_everything_draws_nothing(strategy: Any, grad: bool) -> None:
    layer = nn.Dropout(1.0)

    def drops(x: Any) -> Any:
        y = (
            layer(x.sin())
            + torch.dropout(x, 1.0, True)
            + nn.functional.dropout(x * 2, 1, inplace=True)
        )
        inside = checkpoint.checkpoint(lambda v: layer(v).exp(), x, use_reentrant=False)
        return y + inside + nn.functional.dropout(x, 0.5), layer(x)

    fast = dfx.schedule(drops, strategy, **({"in_axes": 0} if "Nano" in repr(strategy) else {}))
    for seed in range(2):
        one, two = (torch.linspace(0, 1, 24).reshape(6, 4).requires_grad_(grad) for _ in range(2))
        torch.manual_seed(seed)
        want, state = drops(one), torch.get_rng_state()
        torch.manual_seed(seed)
        got = fast(two)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        if grad:
            sum(want).sum().backward()
            sum(got).sum().backward()
            torch.testing.assert_close(two.grad, one.grad)
