"""Values that scale with the batch size, split for real: the proof and the lanes agree with the original."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.batch.states import BrokenRule
from dynaflow_xla.errors import SeparabilityError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

BATCH = 4
TABLE = torch.arange(40.0).reshape(4, 10)
INDEX = torch.tensor([[0, 2, 1], [1, 1, 0], [2, 0, 2], [1, 2, 0]])
LABELS = torch.tensor([1, 0, 2, 1])


def _own(x: Any) -> Any:
    return torch.arange(x.shape[0]), LABELS[: x.shape[0]]


# Of [4, 6] and [4, 3]; what is accepted must be right, whether or not it could be.
USES = {
    "scatter": lambda x, i: (x / x.shape[0]).scatter(1, i, 0.0),
    "scatter of ones": lambda x, i: (x / x.shape[0]).scatter(1, i, 1.0),
    "gather": lambda x, i: TABLE.gather(1, i.sum(0)[None].expand(4, -1) * 0 + x.shape[0] - 1),
    "gather rows": lambda x, i: x.repeat(1, 2).gather(1, i * x.shape[0]),
    "index_select": lambda x, i: (
        x / x.shape[0] + TABLE[:, :6].index_select(0, torch.zeros(x.shape[0], dtype=torch.int64))
    ) * x.shape[0],
    "index_select by the batch size": lambda x, i: x.index_select(
        1, torch.tensor([0, 1]) * x.shape[0] // 2
    ),
    "maximum": lambda x, i: torch.maximum(x / x.shape[0], TABLE[0, :6]) * x.shape[0],
    "select by the batch size": lambda x, i: x + TABLE.select(1, x.shape[0] - 1)[0],
    "narrowed by the batch size": lambda x, i: x + torch.linspace(0, x.shape[0], 6),
    "triangle": lambda x, i: torch.ones(x.shape[0], 6, 6).tril().sum((0, 1)) / x.shape[0] + x * 0,
    "index_put of a total": lambda x, i: x.index_put(
        _own(x), x.sum() / x.shape[0] * torch.ones(())
    ),
    "negative positions": lambda x, i: x[-torch.arange(x.shape[0]), i[:, 0]],
    "layer norm": lambda x, i: torch.nn.functional.layer_norm(
        x, (6,), TABLE[0, :6] * x.shape[0], None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_what_is_accepted_is_right(name: str) -> None:
    torch._dynamo.reset()
    f = USES[name]
    fast = dfx.schedule(f, dfx.NanoBatch([3, 1]), in_axes=(0, 0), backend="torch", check=False)
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(3)) + 2
    try:
        got = fast(x, INDEX)
    except SeparabilityError as error:
        assert "Ways out" in str(error)
        return
    torch.testing.assert_close(got, f(x, INDEX), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["scaled back", "rows of a table", "zeros", "mean"])
def test_what_could_be_split_still_is(name: str) -> None:
    torch._dynamo.reset()
    f = {
        "scaled back": lambda x, i: (x / x.shape[0]).scatter(1, i, 0.0) * x.shape[0],
        "rows of a table": lambda x, i: TABLE[0][i] + TABLE.sum(0).gather(0, i[:, 0])[:, None],
        "zeros": lambda x, i: torch.zeros(x.shape[0], 6).scatter(1, i, x[:, :3]),
        "mean": lambda x, i: torch.maximum(x / x.shape[0], torch.zeros(6)) * x.shape[0],
    }[name]
    fast = dfx.schedule(f, dfx.NanoBatch([3, 1]), in_axes=(0, 0), backend="torch", check=False)
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(fast(x, INDEX), f(x, INDEX), rtol=1e-5, atol=1e-5)


def test_a_rule_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.batch.walking.registry import RULES

    def broken(site: Any) -> Any:
        raise KeyError("dims")

    monkeypatch.setitem(RULES, "flip", broken)
    torch._dynamo.reset()
    x = torch.randn(BATCH, 6)
    split = dfx.NanoBatch([3, 1])
    fast = dfx.schedule(lambda x: x.flip(1), split, in_axes=0, backend="torch")
    with pytest.raises(BrokenRule, match=r"rule that says what flip .*KeyError.*please report"):
        fast(x)
    vouched = dfx.NanoBatch([3, 1], assume_separable=True)
    fast = dfx.schedule(lambda x: x.flip(1), vouched, in_axes=0, backend="torch")
    torch.testing.assert_close(fast(x), x.flip(1))


_ODD = {
    "least": lambda x: x * min(x.shape[0], 3),
    "most": lambda x: x * max(x.shape[0], 2),
    "parity": lambda x: x + x.shape[0] % 2,
    "power": lambda x: x * 2 ** min(x.shape[0], 2),
    "half": lambda x: x * (x.shape[0] // 2),
    "slice": lambda x: x.narrow(1, 0, min(x.shape[0], 3)).sum(1),
    "few": lambda x: torch.topk(x, min(x.shape[0], 3), 1).values.sum(1),
    "shape": lambda x: x[:, : min(x.shape[0], 3)] + x.new_zeros(x.shape[0], min(x.shape[0], 3)),
}


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
@pytest.mark.parametrize("name", sorted(_ODD))
def test_numbers_that_follow_the_batch_size_by_no_power(name: str, sizes: tuple[int, ...]) -> None:
    """They are the same for all large batches, or follow them in proportion, and not for these parts."""
    f, x = _ODD[name], torch.randn(4, 6, dtype=torch.float64)
    fast = dfx.schedule(f, dfx.NanoBatch(sizes, joins=False), in_axes=0)
    with pytest.raises(dfx.SeparabilityError, match="depends on the batch size"):
        fast(x)
    # Where every part is large enough, nothing depends on it.
    if name in ("least", "most", "power", "slice", "few", "shape"):
        large = torch.randn(9, 6, dtype=torch.float64)
        try:
            strategy = dfx.NanoBatch([4, 5], joins=False)
            made = dfx.schedule(f, strategy, in_axes=0)(large)
        except dfx.SeparabilityError:
            assert name == "most"  # it is the batch size itself then
        else:
            torch.testing.assert_close(made, f(large))
