"""Nano-batches of torch functions: axes, sizes, merges, strategies, and what is refused."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import (
    FallbackWarning,
    PlanError,
    SeparabilityError,
)
from dynaflow_xla.planning.instructions import Launch, Merge, Slice

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
F = torch.nn.functional


def split(fn: Any, sizes: Any = 2, *, in_axes: Any = 0, **options: Any) -> Any:
    made = sizes if isinstance(sizes, dfx.Strategy) else dfx.NanoBatch(sizes)
    return dfx.schedule(fn, made, in_axes=in_axes, backend="torch", **options)


def check(fast: Any, *args: Any, **kwargs: Any) -> None:
    torch.manual_seed(3)
    want = fast.original(*args, **kwargs)
    torch.manual_seed(3)
    got = fast(*args, **kwargs)
    assert torch.utils._pytree.tree_structure(want) == torch.utils._pytree.tree_structure(got)
    for w, g in zip(*map(torch.utils._pytree.tree_leaves, (want, got)), strict=True):
        if isinstance(w, torch.Tensor):
            assert w.stride() == g.stride()
        torch.testing.assert_close(g, w)


def launches(fast: Any, *args: Any, **kwargs: Any) -> list[str]:
    made = dfx.plan(fast, *args, **kwargs)
    return [i.name for i in made.instructions if isinstance(i, Launch)]


W = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [2, [5, 1], 6])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis(axis: int, sizes: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        rows = x.movedim(axis, 0)
        return torch.tanh(rows @ w).movedim(0, axis)

    x = torch.randn(6, 3, 5).movedim(0, axis).contiguous()
    fast = split(f, sizes, in_axes=(axis, None), out_axes=axis)
    check(fast, x, W)
    assert isinstance(next(iter(dfx.plan(fast, x, W).instructions)), Slice)


def test_inputs_are_views_and_results_are_written_in_place() -> None:
    fast = split(lambda x, w: (torch.tanh(x @ w), x.exp()), in_axes=(0, None))
    x = torch.randn(6, 5)
    check(fast, x, W)
    made = dfx.plan(fast, x, W)
    assert sum(isinstance(i, Slice) for i in made.instructions) == 2
    assert sum(isinstance(i, Merge) for i in made.instructions) == 2
    assert not any(i.name.startswith("merge") for i in made.instructions if isinstance(i, Launch))


def test_one_capture_serves_every_batch_size() -> None:
    fast = split(lambda x: torch.softmax(x @ W, -1))
    for rows in (6, 4, 7, 2, 9):
        check(fast, torch.randn(rows, 5))
    assert len(fast._dfx_core.entries) == 1
    assert {int(n[-1]) for n in launches(fast, torch.randn(7, 5))} == {0, 1}


def test_one_row_is_not_split() -> None:
    fast = split(lambda x: x @ W)
    check(fast, torch.randn(1, 5))
    assert launches(fast, torch.randn(1, 5)) == ["mm"]


def test_keywords_and_trees() -> None:
    def f(pair: Any, *, mask: Any, scale: Any) -> Any:
        return {"sum": pair[0] @ pair[1], "masked": pair[0] * mask, "scale": scale}

    x, mask = torch.randn(6, 5), torch.rand(6, 1)
    fast = split(f, in_axes=((0, None),), out_axes={"sum": 0, "masked": 0, "scale": 0})
    check(fast, (x, W), mask=mask, scale=2.0)
    named = split(lambda *, x, w: x @ w, in_axes={"x": 0})
    check(named, x=x, w=W)


def test_without_in_axes_the_batch_is_proved() -> None:
    fast = split(lambda x, w: torch.relu(x @ w), in_axes=None)
    check(fast, torch.randn(6, 5), W)
    # As many rows as the mask has: still the batch of the first argument alone.
    square = split(lambda x, mask: x @ mask, in_axes=None)
    check(square, torch.randn(5, 5), W)
    check(square, torch.randn(6, 5), W)
    assert any(n.endswith("@1") for n in launches(square, torch.randn(5, 5), W))


@pytest.mark.parametrize("sizes", [2, [4, 2]])
def test_totals(sizes: Any) -> None:
    x = torch.randn(6, 5)
    check(split(lambda x: (x * 2).sum(), sizes, out_axes=dfx.Sum()), x)
    check(split(lambda x: x.exp().mean(0), sizes, out_axes=dfx.Mean()), x)
    check(split(lambda x: x.exp().sum() / x.shape[0], sizes, out_axes=dfx.Mean()), x)
    check(split(lambda x: (x.mean(), x.exp()), sizes, out_axes=(dfx.Mean(), 0)), x)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    loss = split(lambda x, y: F.cross_entropy(x, y, reduction="sum"), sizes, out_axes=dfx.Sum())
    check(loss, x, labels)


def replaces(x: Any) -> Any:
    y = x.clone()
    y[:, 0] = 0
    y[..., 1:3] = y[..., 2:4] * 2
    z = torch.zeros_like(x)
    z[:, -1] = x.sum(1)
    z[:, ::2] = 1
    return y, z


def replaces_all(x: Any) -> Any:
    y = torch.zeros_like(x)
    y[:] = x * 2
    return y


FUNCTIONS = {
    "parts replaced": replaces,
    "all replaced": replaces_all,
    "own row": lambda x: x[torch.arange(x.shape[0]), x.argmax(1)],
    "two runs": lambda x: torch.cat([x, x * 2]).tanh(),
    "runs taken apart": lambda x: torch.cat([x, x * 2]).tanh().chunk(2),
    "aliases": lambda x: (x[:, 1:], x.view(-1), x),
    "aliases of a result": lambda x: (lambda h: (h[:, 1:], h.t(), h))(x * 2),
    "flattened": lambda x: x[:, :4].reshape(-1, 2).tanh().reshape(x.shape[0], 4),
    "outer product": lambda x: torch.einsum("bi,bj->bij", x, x),
    "matrices": lambda x: torch.linalg.eigh(torch.einsum("bi,bj->bij", x, x))[0],
    "sorted": lambda x: torch.sort(x, 1),
    "top": lambda x: x.topk(2, -1),
    "padded": lambda x: F.pad(x, (1, 2)),
    "hot": lambda x: F.one_hot(x.argmax(-1), 5),
    "weights alone": lambda x: (x @ W, W @ W),
    "dropout": lambda x: F.dropout(x, 0.4),
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(5),
    "noise of two kinds": lambda x: F.dropout(x @ W, 0.2) + torch.rand(x.shape[0], 5),
    "repeated": lambda x: x.repeat(1, 2),
    "cumulative": lambda x: x.cumsum(1),
    "gathered": lambda x: x.gather(1, x.argsort(1)),
    "conditional": lambda x: torch.where(x > 0, x, W[0]),
    "expanded": lambda x: ((x * 2)[:, None].expand(-1, 3, -1), x.sum(1)[:, None].expand(-1, 2)),
    "half": lambda x: (x.bfloat16() @ W.bfloat16()).float(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    x = torch.randn(6, 5)
    for sizes in (2, [1, 4, 1]):
        check(split(FUNCTIONS[name], sizes), x)


def replaces_first_row(x: Any) -> Any:
    y = x * 2
    y[0] = 1
    return y


def replaces_first_rows(x: Any) -> Any:
    y = x * 2
    y[:2] = 1
    return y


MIXING = {
    "a row replaced": (replaces_first_row, "select"),
    "rows replaced": (replaces_first_rows, "slice"),
    "softmax": (lambda x: torch.softmax(x, 0), "_softmax"),
    "mean": (lambda x: x - x.mean(0), "mean"),
    "products": (lambda x: x @ x.T, "mm"),
    "contraction": (lambda x: (x.T @ x).exp(), "mm"),
    "first row": (lambda x: x - x[0], "select"),
    "flip": (lambda x: x.flip(0), "flip"),
    "sort": (lambda x: x.sort(0).values, "sort"),
    "scan": (lambda x: x.cumsum(0), "cumsum"),
    "maximum": (lambda x: x / x.amax(), "amax"),
    "shuffled": (lambda x: x[torch.randperm(x.shape[0])], "index"),
    "numbered": (lambda x: x + torch.arange(x.shape[0])[:, None], "add"),
    "norm": (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "average loss": (
        lambda x: F.cross_entropy(x, torch.argmax(x, -1)), "nll_loss_forward"
    ),
    "random from data": (lambda x: torch.bernoulli(torch.sigmoid(x)), "bernoulli"),
    "halves": (lambda x: x[: x.shape[0] // 2].repeat(2, 1), "slice"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused_with_its_line(name: str) -> None:
    fn, op = MIXING[name]
    with pytest.raises(SeparabilityError) as caught:
        split(fn, dfx.NanoBatch(2, joins=False))(torch.randn(6, 5))
    text = str(caught.value)
    assert op in text and f"{__file__}:" in text and "Ways out" in text


def test_a_total_names_its_way_out() -> None:
    with pytest.raises(SeparabilityError, match=r"out_axes=dfx.Mean\(\)"):
        split(lambda x: x.mean())(torch.randn(6, 5))


def test_the_user_may_vouch() -> None:
    def f(x: Any) -> Any:
        return x - x.mean(0) * 0

    with pytest.raises(SeparabilityError):
        split(f, dfx.NanoBatch(2, joins=False))(torch.randn(6, 5))
    check(split(f, dfx.NanoBatch(2, assume_separable=True)), torch.randn(6, 5))


def pairs(x: Any) -> Any:
    return torch.cdist(x[:, None], x[:, None])


@pytest.mark.usefixtures("distances_unknown")
def test_what_is_not_proved_is_compared_once() -> None:
    fast, x = split(pairs), torch.randn(6, 5)
    with pytest.warns(FallbackWarning, match="not proved"):
        check(fast, x)
    check(fast, x)
    with pytest.raises(SeparabilityError, match="_cdist_forward"):
        split(pairs, check=False)(x)
    with pytest.raises(SeparabilityError, match="say where the batch is"):
        split(pairs, in_axes=None)(x)


@pytest.mark.usefixtures("distances_unknown")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_alike_vouch_for_nothing(dtype: Any) -> None:
    def mixes(x: Any) -> Any:
        return torch.cdist(x[None], x[None]).sum((0, 1))[:, None] + x

    fast = split(mixes)
    with pytest.warns(FallbackWarning, match="would say nothing: all rows"):
        for alike in (torch.zeros(6, 5, dtype=dtype), torch.ones(6, 5, dtype=dtype)):
            assert torch.equal(fast(alike), mixes(alike))
    with pytest.raises(SeparabilityError, match="compared with the whole batch"):
        fast(torch.randn(6, 5, dtype=dtype))
    fast = split(pairs)
    x = torch.randn(6, 5, dtype=dtype)
    with pytest.warns(FallbackWarning, match="not proved"):
        for given in (torch.zeros_like(x), x, torch.zeros_like(x)):
            check(fast, given)
    assert "nano-batches" in dfx.explain(fast, x)


@pytest.mark.usefixtures("distances_unknown")
def test_what_is_not_proved_and_differs_is_refused() -> None:
    with pytest.raises(SeparabilityError, match="compared with the whole batch"):
        split(lambda x: torch.cdist(x[None], x[None]).sum((0, 1))[:, None] + x)(torch.randn(6, 5))


def test_bad_requests() -> None:
    x = torch.randn(6, 5)
    with pytest.raises(PlanError, match="an entry for each of 2"):
        split(lambda x, y: x * y, in_axes=(0,))(x, x)
    with pytest.raises(PlanError, match="same number of rows"):
        split(lambda x, y: (x * 2, y * 2))(x, x[:3])
    with pytest.raises(PlanError, match="must be an axis"):
        split(lambda x: x * 2, in_axes=2)(x)
    with pytest.raises(PlanError, match="no argument with a batch"):
        split(lambda x: x * 2, in_axes=(None,))(x)
    with pytest.raises(PlanError, match="must make up the batch"):
        split(lambda x: x * 2, [3, 4])(x)
    with pytest.raises(PlanError, match="batch_size=4"):
        split(lambda x: x * 2, batch_size=4)(x)
    with pytest.raises(SeparabilityError, match="fixes it to 6"):
        split(lambda x: x + torch.ones(6, 1))(x)
    with pytest.raises(SeparabilityError, match="cannot be merged by out_axes=1"):
        split(lambda x: x * 2, out_axes=1)(x)
    assert "_dynamo_weak_dynamic_indices" not in vars(x)


class Together(dfx.Strategy):
    """Three nano-batches; the first two of each region run as one batch."""

    def split(self, ctx: Any) -> Any:
        return dfx.Split.even(3)

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            same = [h for h in ready if h.name == ready[0].name and h.nano < 2]
            s.execute(tuple(same) if len(same) == 2 else ready[0], lane=0)


def test_several_nano_batches_run_as_one_region() -> None:
    fast = split(lambda x, w: torch.softmax(torch.tanh(x @ w), -1), Together(), in_axes=(0, None))
    x = torch.randn(8, 5)
    check(fast, x, W)
    assert any("@0+1" in name for name in launches(fast, x, W))


def test_groups_need_a_proof() -> None:
    class Vouched(Together):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.even(3, assume_separable=True)

    with pytest.raises(PlanError, match="must be proved"):
        split(lambda x: (x - x.mean(0)).tanh(), Vouched())(torch.randn(6, 5))


def test_weights_from_the_context() -> None:
    fast = split(
        lambda x: x * 2, dfx.NanoBatch(2, weights="tokens"), context={"tokens": [1, 1, 1, 1, 1, 5]}
    )
    x = torch.randn(6, 5)
    check(fast, x)
    assert "nano-batches of [5, 1]" in dfx.explain(fast, x)


def test_dual_batch_and_a_replacement() -> None:
    check(split(lambda x: torch.tanh(x @ W), dfx.DualBatch()), torch.randn(6, 5))

    class Replaced(dfx.NanoBatch):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for h in ready:
                    fn = (lambda a: a * 2 + 1) if h.nano == 1 else None
                    s.execute(h, lane=h.nano % s.lanes, replace=fn)

    fast = split(lambda x: x.exp(), Replaced(2))
    x = torch.randn(6, 5)
    torch.testing.assert_close(fast(x), torch.cat([x[:3].exp(), x[3:] * 2 + 1]))


def test_buffers_with_a_batch_are_written() -> None:
    def f(cache: Any, x: Any) -> Any:
        cache.copy_(cache * 0.5 + x)
        return cache.sum(1)

    fast, x = split(f), torch.randn(6, 5)
    caches = [torch.ones(6, 5) for _ in range(2)]
    torch.testing.assert_close(fast(caches[0], x), f(caches[1], x))
    assert torch.equal(caches[0], caches[1])


def test_profile_verify_and_copies() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    fast = split(model)
    x = torch.randn(6, 5)
    with torch.no_grad():
        assert dfx.verify(fast, x).max_abs < 1e-6
        assert len(dfx.profile(fast, x).spans) >= 2
        assert dfx.simulate(fast, x).total_ns > 0
        check(copy.deepcopy(fast), x)


def test_a_graph_break_leaves_the_rest_whole() -> None:
    def f(x: Any) -> Any:
        y = torch.tanh(x @ W)
        torch._dynamo.graph_break()
        return y * 2

    with pytest.warns(FallbackWarning):
        fast = split(f)
        check(fast, torch.randn(6, 5))


def test_equal_nano_batches_compile_once() -> None:
    """One program a lane for its own size, with weights as inputs."""
    nn = torch.nn
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    fast = split(model, 2, compiler="inductor")
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    (graph,) = fast._dfx_core.entries
    (made,) = graph._plans.values()
    entry = made.entry
    assert len(entry.pg.regions) == 2
    programs = [s.programs for s in entry.native.stretches() if s.programs]
    assert [len(of_lane) for of_lane in programs] == [1, 1]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("in_axes", [None, 0])
def test_totals_in_front_of_a_graph_break(in_axes: Any) -> None:
    """What code behind the break gets is the whole batch's; the user cannot name it in out_axes."""
    layer = torch.nn.Linear(5, 5)

    def f(x: Any, ids: Any) -> Any:
        count = (ids == 1).sum()
        fits, mean = count * 2 == count + count, layer(x).mean(0)
        norm = mean.square().sum().sqrt()
        torch._dynamo.graph_break()
        assert bool(fits)
        return torch.where(ids[:, :1] == 1, x * 2, x) + count + mean * norm

    fast = dfx.schedule(f, dfx.NanoBatch(2, joins=False), in_axes=in_axes)
    x, ids = torch.randn(6, 5), torch.randint(0, 3, (6, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph breaks
        with torch.no_grad():
            torch.testing.assert_close(fast(x, ids), f(x, ids))
        x.requires_grad_()
        grads = [torch.autograd.grad(g(x, ids).sin().sum(), x)[0] for g in (f, fast)]
        torch.testing.assert_close(grads[1], grads[0])


def test_an_argument_that_is_a_parameter() -> None:
    """Dynamo fixes the sizes of parameters, as a rule."""
    layer = torch.nn.Linear(5, 5)
    fast = dfx.schedule(layer, dfx.NanoBatch(2), in_axes=0)
    for rows in (4, 6, 7):
        x = torch.nn.Parameter(torch.randn(rows, 5))
        torch.testing.assert_close(fast(x), layer(x))
        grads = [torch.autograd.grad(g(x).sin().sum(), x)[0] for g in (layer, fast)]
        torch.testing.assert_close(grads[1], grads[0])
    assert f"the batch of {rows} rows is split" in dfx.explain(fast, x)


class _One(dfx.Strategy):
    """Asks for one nano-batch, as a strategy may for small batches."""

    def split(self, context: Any) -> Any:
        return dfx.Split.even(1)

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0])


@pytest.mark.parametrize("strategy", [_One(), dfx.NanoBatch(1), dfx.published.NanoFlow(1)])
def test_one_nano_batch_needs_no_batch(strategy: Any) -> None:
    def f(w: Any, y: Any) -> Any:
        return y @ w.T + torch.eye(3)[0]

    w, y = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    fast = split(f, strategy, in_axes=None)
    check(fast, w, y)
    (got,), (want,) = (torch.autograd.grad(fn(w, y).square().sum(), w) for fn in (fast, f))
    torch.testing.assert_close(got, want)
    with pytest.raises(SeparabilityError, match="fixes it to 3"):
        split(f, 2, in_axes=None)(w, y)


class _NormedImages(torch.nn.Module):
    """As attention over an image ends: rows of one have strides that suggest another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = torch.nn.Linear(16, 16), torch.nn.GroupNorm(8, 16)

    def forward(self, x: Any) -> Any:
        b, c, h, w = x.shape
        rows = self.out(x.view(b, c, h * w).transpose(1, 2))
        return self.norm(rows.transpose(-1, -2).reshape(b, c, h, w))


@pytest.mark.parametrize("batch", [4, 3, 2])
def test_group_norm_of_one_row(batch: int) -> None:
    model = _NormedImages()
    fast = split(model)
    x = torch.randn(batch, 16, 4, 4, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    given = [x, *model.parameters()]
    got, want = (torch.autograd.grad(fn(x).square().sum(), given) for fn in (fast, model))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["sequential", dfx.Branches(wide=False)])
def test_group_norm_of_one_row_in_channels_last_stays_so(strategy: Any) -> None:
    def f(x: Any) -> Any:
        return F.group_norm(x, 4), x.sin().sort()[0]

    fast = dfx.schedule(f, strategy, lanes=2, backend="torch")
    for rows in (1, 2):
        x = torch.randn(rows, 16, 8, 8).to(memory_format=torch.channels_last)
        check(fast, x)


@pytest.mark.parametrize("sizes", [2, [2, 1]])
def test_batch_norm_whose_nano_batch_has_one_value_a_channel(sizes: Any) -> None:
    made = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )
    models = made, copy.deepcopy(made)
    x = torch.randn(3 if sizes != 2 else 2, 6)
    results = [fn(x) for fn in (split(models[0], sizes), models[1])]
    torch.testing.assert_close(*results)
    for result in results:
        result.square().sum().backward()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(*(m[1].running_var for m in models))


class _Named(dict):  # type: ignore[type-arg]
    """A result as libraries have them: a pytree that does not say what its keys are."""


torch.utils._pytree.register_pytree_node(
    _Named, lambda x: (list(x.values()), list(x)), lambda v, c: _Named(zip(c, v, strict=True))
)


@pytest.mark.parametrize("in_axes", [None, 0])
def test_pytrees_without_keys(in_axes: Any) -> None:
    layer = torch.nn.Linear(8, 8)

    def f(given: Any) -> Any:
        return _Named(y=layer(given["y"]).tanh())

    given = _Named(y=torch.randn(4, 8))
    fast = split(f, in_axes=in_axes)
    check(fast, given)
    dfx.verify(fast, given)
    dfx.verify(dfx.schedule(f, "branches", backend="torch"), given)


class BehindABreak(torch.nn.Module):
    """The second graph takes the argument, and what comes from the code between: 6 rows, no open size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8, momentum=None)  # the cumulative average reads a counter

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x)) + x


@pytest.mark.parametrize("in_axes", [None, 0])
def test_a_graph_behind_a_break_that_fixes_the_batch_is_not_split(in_axes: Any) -> None:
    model, original = BehindABreak(), BehindABreak()
    original.load_state_dict(model.state_dict())
    axes = {} if in_axes is None else {"in_axes": in_axes}
    fast = dfx.schedule(model, dfx.NanoBatch(2), **axes)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = [fast(x) for _ in range(3)]
    said = [str(w.message) for w in told if issubclass(w.category, dfx.FallbackWarning)]
    assert len(said) == 2
    assert re.search(r"behind the break at .*test_nano\.py:\d+ is not split.*fixed size 6", said[1])
    for got in results:
        torch.testing.assert_close(got, original(x))
    assert model.norm.num_batches_tracked == 3
    torch.testing.assert_close(model.norm.running_var, original.norm.running_var)


class FixedInFront(torch.nn.Module):
    """The first graph fixes the batch itself; a break comes behind it, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(6, 8)

    def forward(self, x: Any, breaks: bool = True) -> Any:
        y = x.sin() + self.table
        if breaks:
            torch._dynamo.graph_break()
        return torch.relu(y)


def test_a_graph_in_front_of_a_break_that_fixes_the_batch_is_refused() -> None:
    x = torch.randn(6, 8)
    for order in ((True,), (False,), (True, False)):
        torch._dynamo.reset()
        fast = dfx.schedule(FixedInFront(), dfx.NanoBatch(2), in_axes=(0, None))
        for breaks in order:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dfx.FallbackWarning)
                with pytest.raises(dfx.SeparabilityError, match="the function fixes it to 6"):
                    fast(x, breaks)
