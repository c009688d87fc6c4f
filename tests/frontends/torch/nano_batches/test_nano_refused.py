"""What cannot be split is refused when it is planned: the operator, its line, ways out that help."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import SeparabilityError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
library, nn = vars(torch)["library"], torch.nn
F = nn.functional

B = 6
IDS = torch.tensor([2, 0])
EACH = torch.randn(B, 5, generator=torch.Generator().manual_seed(2))
MASK = torch.arange(B) % 2 == 0
FUSED = torch.__version__.split(".")[:2] > ["2", "12"]
"""Whether nano-batches run a whole layer of a transformer as one operator."""


def split(fn: Any, sizes: Any = 2, *, in_axes: Any = 0, **options: Any) -> Any:
    made = sizes if isinstance(sizes, dfx.Strategy) else dfx.NanoBatch(sizes)
    return dfx.schedule(fn, made, in_axes=in_axes, backend="torch", **options)


def refused(fn: Any, *args: Any, sizes: Any = 2, in_axes: Any = 0, **kwargs: Any) -> str:
    strategy = sizes if isinstance(sizes, dfx.Strategy) else dfx.NanoBatch(sizes, joins=False)
    fast = split(fn, strategy, in_axes=in_axes)
    with pytest.raises(SeparabilityError) as caught:
        fast(*args, **kwargs)
    return str(caught.value)


# Each holds something of the whole batch that no nano-batch has; the operator that meets it.
UNFIT = {
    "index_add": (lambda x: x.index_add(1, IDS, EACH[:, :2]), "index_add"),
    "select_scatter": (lambda x: x.select_scatter(EACH[:, 0], 1, 2), "select_scatter"),
    "slice_scatter": (lambda x: x.slice_scatter(EACH[:, :2], 1, 0, 2), "slice_scatter"),
    "diagonal_scatter": (lambda x: x.diagonal_scatter(EACH[:5, 0]), "diagonal_scatter"),
    "index_put": (lambda x: x.index_put((MASK,), torch.zeros(3, 5)), "index_put"),
    "put": (lambda x: x.put(torch.tensor([B * 5 - 1]), torch.ones(1)), "put"),
    "index_reduce": (lambda x: x.index_reduce(1, IDS, EACH[:, :2], "mean"), "index_reduce"),
    "index_copy": (lambda x: x.index_copy(1, IDS, EACH[:, :2]), "index_copy"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_operator_that_holds_the_whole_batch(name: str) -> None:
    fn, op = UNFIT[name]
    text = refused(fn, torch.randn(B, 5))
    assert op in text and f"{__file__}:" in text, text


@pytest.mark.skipif(
    not FUSED, reason="this PyTorch fixes the batch of the layer, so it is not split"
)
def test_a_padding_mask_that_is_not_named() -> None:
    """The fused layer takes a row of it for each row of its source; where joins may be, it runs once."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, padding = torch.randn(3, 4, 16), torch.arange(4) >= torch.tensor([[3], [2], [4]])
    with torch.no_grad():
        want = layer(x, src_key_padding_mask=padding)
        for in_axes in (None, {"src": 0}):
            text = refused(layer, x, in_axes=in_axes, src_key_padding_mask=padding)
            assert "padding mask" in text and "in_axes" in text, text
            got = split(layer, in_axes=in_axes)(x, src_key_padding_mask=padding)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        both = split(layer, in_axes={"src": 0, "src_key_padding_mask": 0})
        got = both(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_outputs_are_counted_as_the_user_counts() -> None:
    """Without what is written to buffers, which the graph returns before."""

    class Tracked(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.layer = first, nn.Linear(5, 5)
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x: Any) -> Any:
            new = x.detach()[0] if self.first else x.detach().mean(0)
            self.seen.mul_(0.9).add_(new)
            return {"y": self.layer(x), "n": self.seen.sum()}

    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            text = refused(Tracked(False), torch.randn(B, 5))
            assert "(output 1)" in text and "for output 1: out_axes=dfx.Mean()" in text, text
            text = refused(Tracked(True), torch.randn(B, 5))
            assert "(output 1; what is written to 'seen')" in text, text


@pytest.mark.parametrize("kind", ["scatter", "scatter_add"])
def test_rows_beside_a_longer_tensor(kind: str) -> None:
    """Each nano-batch would take the first rows of it."""
    index = torch.randint(0, 5, (B, 3))
    text = refused(
        lambda x, i: getattr(x, kind)(1, i, EACH), torch.randn(B, 5), index, in_axes=(0, 0)
    )
    assert f"{kind} at {__file__}:" in text, text


def test_operators_that_cannot_run_are_found_without_running() -> None:
    """Also where the user vouches for the rows: no call ends in a kernel's error."""
    fn = lambda x: x.view(2, 3, 5).transpose(0, 1).reshape(B, 5)  # noqa: E731
    for given in (dfx.NanoBatch(2, assume_separable=True), dfx.NanoBatch([5, 1])):
        with pytest.raises(SeparabilityError) as caught:
            split(fn, given)(torch.randn(B, 5))
        assert f"{__file__}:" in str(caught.value)
    vouched = dfx.NanoBatch([3, 3], assume_separable=True)
    text = refused(lambda x: _twice(x), torch.randn(B, 5), sizes=vouched)
    assert "pairs_of_rows" in text and "cannot run on a nano-batch" in text, text
    assert "assume_separable" not in text  # vouching is no way out here


@library.custom_op("made_here::pairs_of_rows", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_twice.register_fake
def _(x: Any) -> Any:
    torch._check(x.shape[0] % 2 == 0, lambda: "takes pairs of rows")
    return torch.empty_like(x)


def test_repeated_not_at_all() -> None:
    x = torch.randn(B, 5)
    assert split(lambda x: x.repeat(0, 1) + 1)(x).shape == (0, 5)


def test_a_shape_that_says_nothing_names_the_operator() -> None:
    text = refused(lambda x: torch.block_diag(x, x), torch.randn(B, 5))
    assert f"block_diag at {__file__}:" in text, text


# -- ways out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "total"),
    [
        (lambda x: x.sort(0).values, False),
        (lambda x: F.batch_norm(x, None, None, training=True), False),
        (lambda x: torch.softmax(x, 0), False),
        (lambda x: x.flip(0), False),
        (lambda x: x - x.mean(0), True),
        (lambda x: x.mean(), True),
    ],
    ids=["sort", "batch norm", "softmax", "flip", "mean within", "mean"],
)
def test_a_total_is_suggested_where_there_is_one(fn: Any, total: bool) -> None:
    text = refused(fn, torch.randn(B, 5))
    assert ("dfx.Mean()" in text) == total, text
    assert "dfx.NanoBatch(2, assume_separable=True)" in text  # as it has to be written


def test_an_argument_with_the_batch_that_is_not_named() -> None:
    """What has as many rows as the batch is named, with the in_axes that would do."""

    def f(*, ids: Any, mask: Any, scale: Any) -> Any:
        return ids * mask * scale

    options = {"ids": torch.randn(B, 5), "mask": torch.rand(B, 1), "scale": torch.rand(5)}
    text = refused(f, in_axes={"ids": 0}, **options)
    assert "mask [6, 1]" in text and "'mask': 0" in text and "'scale'" not in text, text
    text = refused(lambda x, y: x * y, torch.randn(B, 5), torch.randn(B, 5), in_axes=(0, None))
    assert "argument 1" in text and "(0, 0)" in text, text


# -- a split that the user vouches for, in training ------------------------------------------------


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.users, self.items = (nn.EmbeddingBag(n, 8, mode=mode) for n in (50, 40))
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Any, y: Any) -> Any:
        return (self.left(self.users(x)) * self.right(self.items(y))).sum(-1)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("vouched", [True, False])
def test_two_towers_of_bags(mode: str, vouched: bool) -> None:
    model = Bags(mode)
    strategy = dfx.NanoBatch([4, 2], assume_separable=vouched)
    trains_like_the_original(
        model, strategy, torch.randint(0, 50, (B, 3)), torch.randint(0, 40, (B, 5))
    )


def test_what_is_only_compared_reaches_the_backward_cut() -> None:
    """Nothing is proved of what the forward hands over, and it is still each nano-batch's own."""

    class Unproved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            h = _Cube.apply(self.layer(x))
            return h.sin()

    with pytest.warns(dfx.FallbackWarning, match="not proved"):
        trains_like_the_original(Unproved(), dfx.NanoBatch(2), torch.randn(B, 5))


@library.custom_op("made_here::cube", mutates_args=())
def _cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@_cube.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return _cube(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 3 * ctx.saved_tensors[0] ** 2


def trains_like_the_original(model: Any, strategy: Any, *args: Any, **options: Any) -> None:
    fast = split(model, strategy, **options)
    found = []
    for m in (model, fast):
        model.zero_grad()
        out = m(*args)
        out.square().mean().backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_refusal_behind_a_call_that_is_watched_is_announced() -> None:
    """The first call runs the original, to learn from it: it says so, and what explain says is an error."""

    class Loop(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 1e9 else x * 2

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loop()

        def forward(self, x: Any) -> Any:
            return self.inner(torch.sin(x)) + EACH

    model, x = Fixed(), torch.randn(B, 5)
    fast = split(model)
    with pytest.warns(dfx.FallbackWarning, match="the original ran once.*or an error says why"):
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    with pytest.raises(SeparabilityError, match="fixes it to 6"):
        fast(x)
    with pytest.warns(dfx.FallbackWarning, match="the original ran once"):
        with pytest.raises(SeparabilityError, match="fixes it to 6"):
            dfx.explain(split(model), x)


def test_positions_that_the_original_does_not_take() -> None:
    """``gather``, of which ``take_along_dim`` is made for open sizes, takes narrower ones as well."""

    def take(x: Any, at: Any) -> Any:
        return torch.take_along_dim(x, at, 1)

    x, at = torch.randn(B, 5), torch.zeros(B, 2, dtype=torch.int32)
    for call in (take, split(take)):
        with pytest.raises(RuntimeError, match="dtype of indices should be Long but got Int"):
            call(x, at)


def test_a_refused_total_names_what_was_given_for_it() -> None:
    fast = dfx.schedule(
        lambda x: (x * 2, x.mean(0)), dfx.NanoBatch(2), in_axes=0, out_axes=(0, None)
    )
    with pytest.raises(SeparabilityError, match=r"cannot be merged by out_axes=None \(output 1\)"):
        fast(torch.randn(B, 5))


def test_a_buffer_that_holds_rows_is_named() -> None:
    """PyTorch's compiler fixes the sizes of registered buffers (cells with a state, as snnTorch has them)."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(0), persistent=False)

        def forward(self, x: Any) -> Any:
            if self.state.shape != x.shape:
                self.state = torch.zeros_like(x)
            self.state = self.state * 0.9 + x.sin()
            return self.state * 2

    fast = split(Cell())
    x = torch.randn(B, 5)
    with torch.no_grad():
        fast(x)
        with pytest.raises(SeparabilityError, match=r"registered buffer state \[6, 5\] holds rows"):
            fast(x)


def test_what_draws_with_a_generator_of_none_is_told() -> None:
    fast = split(lambda x: x + torch.randn(x.shape, generator=None))
    x = torch.randn(B, 5)
    with pytest.warns(dfx.FallbackWarning, match=r"beside generator= or layout="):
        assert fast(x).shape == x.shape
