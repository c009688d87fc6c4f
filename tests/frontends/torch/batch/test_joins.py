"""What mixes rows runs once, on the rows put together again, and what follows is split again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
nn, F, st = torch.nn, torch.nn.functional, hypothesis.strategies

SIZES = [2, [5, 4, 3]]
B = 12


def test_sizes_that_divide_by_zero_for_a_part() -> None:
    """A size that only the whole batch has is no error of arithmetics."""
    for function in (lambda x: x / (1 + x.var(0)), lambda x: x - x.std(0, keepdim=True)):
        for rows, sizes in ((2, 2), (6, [3, 2, 1])):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(dfx.schedule(function, dfx.NanoBatch(sizes))(x), function(x))
    fast = dfx.schedule(lambda x: x.view(-1, 2, 8).sum(1), dfx.NanoBatch(2))
    with pytest.raises(
        dfx.SeparabilityError, match=r"nano-batch of 1 row: a size in it.*divides by zero"
    ):
        fast(torch.randn(2, 8))


class Residual(nn.Module):
    """Two blocks of a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norms[0](self.first(x)))
        x = torch.relu(x + self.norms[1](self.second(x)))
        return self.head(x.mean((2, 3)))


class Contrastive(nn.Module):
    """Two towers, each row against every other, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
        self.right = nn.Linear(5, 6)

    def forward(self, a: Any, b: Any) -> Any:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = left @ right.t() / 0.1
        each = torch.arange(a.shape[0])
        loss = (F.cross_entropy(logits, each) + F.cross_entropy(logits.t(), each)) / 2
        return loss, logits, left


CASES: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]], Any, str]] = {
    "residual": (Residual, lambda: (torch.randn(B, 3, 8, 8),), 0, "native_batch_norm"),
    "contrastive": (
        Contrastive, lambda: (torch.randn(B, 8), torch.randn(B, 5)), (None, 0, 0), "mm at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, sizes: Any) -> None:
    make, draw, out_axes, reason = CASES[name]
    model = make().train()
    other, args = copy.deepcopy(model), draw()
    fast = dfx.schedule(other, dfx.NanoBatch(sizes), in_axes=0, out_axes=out_axes)
    for _ in range(2):
        for module, run in ((model, model), (other, fast)):
            module.zero_grad()
            found = run(*args)
            leaves = found if isinstance(found, tuple) else (found,)
            sum(x.square().sum() for x in leaves).backward()
            module.found = [x.detach() for x in leaves]
        torch.testing.assert_close(other.found, model.found, rtol=1e-4, atol=1e-5)
        for (key, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=key)
        for p, q in zip(other.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(p, q)
    text = dfx.explain(fast, *args)
    assert "joined: " in text and reason in text and f"{__file__}:" in text
    refused = dfx.schedule(make(), dfx.NanoBatch(sizes, joins=False), in_axes=0, out_axes=out_axes)
    with pytest.raises(dfx.SeparabilityError):
        refused(*args)


def test_only_some_regions_are_split() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(B, 8)
    strategy = dfx.NanoBatch(2, only=dfx.Scope("**/2"))
    fast = dfx.schedule(model, strategy, in_axes=0)
    torch.testing.assert_close(fast(x), model(x))
    graph = dfx.graph(fast, x)
    products = {r.name for r in graph.regions if r.name.startswith("addmm")}
    assert products == {"addmm@0", "addmm@1"}, products
    assert any("joined" in r.tags for r in graph.regions)
    assert "only that is split" in dfx.explain(fast, x)


def test_dropout_between_rows() -> None:
    def f(x: Any) -> Any:
        return F.dropout(torch.softmax(x @ x.t(), -1), 0.5) @ x

    x, fast = torch.randn(B, 8), dfx.schedule(f, dfx.NanoBatch([5, 4, 3]), in_axes=0)
    torch.manual_seed(3)
    want = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(fast(x), want)


def test_numbers_drawn_from_data_between_rows_are_refused() -> None:
    def f(x: Any) -> Any:
        return torch.bernoulli(torch.softmax(x, 0)) * x

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    with pytest.raises(dfx.SeparabilityError, match=r"bernoulli at .*draws random numbers"):
        fast(torch.rand(B, 4))


def test_a_loop_whose_body_mixes_rows_is_refused() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, h - h.mean(0)

        return while_loop(lambda i, h: i < 3, body, (torch.tensor(0), x))[1]

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    with (
        torch.no_grad(),
        pytest.raises(
            dfx.SeparabilityError,
            match=r"while_loop at .*test_joins\.py.*mean at .*test_joins\.py.*once a round",
        ),
    ):
        dfx.plan(fast, torch.randn(B, 4))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loops_over_rows_are_proved(sizes: Any) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: Any, w: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, torch.tanh(h @ w) / (h.norm(dim=1, keepdim=True) + i + 1)

        return while_loop(lambda i, h: i < 3, body, (torch.tensor(0), x))[1]

    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=(0, None))
    x, w = torch.randn(B, 4), torch.randn(4, 4)
    with torch.no_grad():  # that it is not proved would be a warning, an error here
        torch.testing.assert_close(fast(x, w), f(x, w))


def test_a_loop_that_ends_when_its_rows_say_is_refused() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: Any) -> Any:
        return while_loop(lambda h: h.sum() > 0, lambda h: (h - 1,), (x,))[0]

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    with torch.no_grad(), pytest.raises(dfx.SeparabilityError, match="as long as its rows say"):
        dfx.plan(fast, torch.randn(B, 4))


W = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

# Steps from [B, 4] to [B, 4].
STEPS: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh,
    "product": lambda x: x @ W,
    "row softmax": lambda x: torch.softmax(x, -1),
    "runs": lambda x: sum(torch.cat([x, x + 1]).cos().chunk(2)),
    "own": lambda x: x + x[torch.arange(x.shape[0]), x.argmax(1)][:, None],
    "mean": lambda x: x - x.mean(0),
    "spread": lambda x: x / (1 + x.std(0)),
    "softmax": lambda x: torch.softmax(x, 0),
    "size": lambda x: x * x.shape[0] / 5,
    "sum": lambda x: x + (x * 0.1).sum(),
    "neighbours": lambda x: x + x.roll(1, 0),
    "gram": lambda x: torch.softmax(x @ x.t(), -1) @ x,
    "number": lambda x: x + torch.arange(x.shape[0])[:, None] / 9,
    "first": lambda x: x + x[:1],
    "cumsum": lambda x: x.cumsum(0) / 3,
    "picked": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "sorted": lambda x: x.t().sort(-1).values.t(),
    "maximum": lambda x: x / x.abs().amax(),
}


def _equal(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    def f(x: Any) -> Any:
        for name in names:
            x = STEPS[name](x)
        return x

    torch._dynamo.reset()
    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=0, backend="torch", check=False)
    rows = sum(sizes)
    x, y = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=grad) for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    want, got = f(x), fast(y)
    torch.testing.assert_close(got, want, check_stride=False)
    if grad:
        weight = torch.randn_like(want)
        (want * weight).sum().backward()
        (got * weight).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    sizes=st.sampled_from([(3, 2), (2, 4), (2, 3, 2)]),
    grad=st.booleans(),
)
def test_random_programs(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    _equal(names, sizes, grad)


@pytest.mark.slow
@hypothesis.settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    sizes=st.sampled_from([(3, 2), (2, 4), (2, 3, 2), (5, 4, 3)]),
    grad=st.booleans(),
)
def test_many_random_programs(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    _equal(names, sizes, grad)


class Pooled(nn.Module):
    """Tokens pooled to one, as Swin does, and masked tokens set to zero, as Wav2Vec2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Any, mask: Any) -> Any:
        h = self.first(x)
        h[~mask.unsqueeze(-1).repeat(1, 1, 8)] = 0
        h[:, :1][mask[:, :1]] = 1.5
        return self.head(self.pool(h.transpose(1, 2)).flatten(1))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reshapes_by_strides_and_masks_are_no_joins(sizes: Any) -> None:
    model = Pooled()
    other = copy.deepcopy(model)
    fast = dfx.schedule(other, dfx.NanoBatch(sizes, joins=False), in_axes=0, backend="torch")
    for _ in range(2):
        x, mask = torch.randn(B, 5, 4), torch.rand(B, 5) < 0.6
        grads = []
        for module, run in ((model, model), (other, fast)):
            module.zero_grad()
            mine = x.clone().requires_grad_()
            found = run(mine, mask)
            found.square().sum().backward()
            grads.append(
                [found.detach(), mine.grad, *(p.grad.clone() for p in module.parameters())]
            )
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def _covariance(w: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(0)).T @ (h - h.mean(0)) / (len(x) - 1)


OF_TOTALS = {
    "no diagonal": lambda c: c.fill_diagonal_(0).square(),
    "diagonal of ones": lambda c: c.fill_diagonal_(1).square(),
    "replaced": lambda c: c.as_strided_scatter(c[:2, :3] * 2, (2, 3), (6, 2)).square(),
    "beside the diagonal": lambda c: c.flatten()[:-1].view(5, 7)[:, 1:].square(),
    "strided": lambda c: c.as_strided((2, 3), (6, 2)) * c.sum(),
    "no rule": torch.matrix_exp,
    "eigenvalues": torch.linalg.eigvalsh,
    "rotated": lambda c: c.roll(1, 0) * c,
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", OF_TOTALS)
def test_whatever_is_done_to_totals(name: str, sizes: Any) -> None:
    """Operators without a rule wait for the totals, in the backward as in the forward."""

    def loss(w: Any, x: Any) -> Any:
        return OF_TOTALS[name](_covariance(w, x)).sum()

    fast = dfx.schedule(loss, dfx.NanoBatch(sizes), in_axes=(None, 0), out_axes=None)
    x = torch.randn(12, 6)
    given = torch.randn(6, 6)
    mine, theirs = (given.clone().requires_grad_() for _ in range(2))
    got, want = fast(mine, x), loss(theirs, x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    got.backward()
    want.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
