"""Batches padded to buckets."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402


def rows(x: Any, y: Any, w: Any) -> Any:
    return torch.tanh(x @ w), {"y": (y @ w).sin()}


class Counted:
    """A scheduled function that notes the sizes it is called at."""

    def __init__(self, fast: Any) -> None:
        self.fast, self.original, self._dfx_core = fast, fast.original, fast._dfx_core
        self.sizes: list[int] = []

    def __call__(self, *args: Any) -> Any:
        self.sizes.append(args[0].shape[0])
        return self.fast(*args)


@pytest.fixture
def fast() -> Counted:
    return Counted(dfx.schedule(rows, strategy="branches", lanes=1, backend="torch"))


def test_every_size_has_the_originals_values_at_few_sizes(fast: Counted) -> None:
    buckets = dfx.bucketed(fast, [8, 2, 4], in_axes=(0, 0, None), out_axes=(0, 0))
    assert buckets.sizes == (2, 4, 8)
    w = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for batch in (1, 2, 3, 4, 5, 6, 7, 8):
            x, y = torch.randn(2, batch, 5, generator=torch.Generator().manual_seed(batch))
            (want, named), (got, named_got) = rows(x, y, w), buckets(x, y, w)
            torch.testing.assert_close(want, got)
            torch.testing.assert_close(named["y"], named_got["y"])
    assert fast.sizes == [2, 2, 4, 4, 8, 8, 8, 8]


def test_other_axes_one_axis_for_all_and_modules() -> None:
    model = torch.nn.Linear(3, 3)
    fast = dfx.schedule(model, strategy="sequential", lanes=1, backend="torch")
    buckets = dfx.bucketed(fast, [4], in_axes=1, out_axes=1)
    with torch.no_grad():
        x = torch.randn(2, 3, 3)
        torch.testing.assert_close(model(x), buckets(x))


def test_rows_that_depend_on_each_other_are_noticed() -> None:
    fast = dfx.schedule(lambda x: x - x.mean(0), strategy="sequential", lanes=1, backend="torch")
    x = torch.arange(6.0).reshape(3, 2)
    with (
        torch.no_grad(),
        pytest.raises(dfx.SeparabilityError, match="result 0 of a batch of 3.*rows"),
    ):
        dfx.bucketed(fast, [4], in_axes=0)(x)
    with torch.no_grad():  # unchecked, by the user's word
        assert dfx.bucketed(fast, [4], in_axes=0, check=False)(x).shape == x.shape


def test_a_result_without_a_batch(fast: Counted) -> None:
    whole = dfx.schedule(
        lambda x, w: (x @ w, w * 2), strategy="sequential", lanes=1, backend="torch"
    )
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with torch.no_grad():
        got = dfx.bucketed(whole, [4], in_axes=(0, None), out_axes=(0, None))(x, w)
    torch.testing.assert_close(got[1], w * 2)


@pytest.mark.parametrize(
    ("sizes", "in_axes", "words"),
    [
        ([], 0, "sizes must be positive integers"),
        ([0], 0, "sizes must be positive integers"),
        ([2], (0, 0, None), "a batch of 3 is larger than every bucket of \\[2\\]: add a bucket"),
        ([4], (0, 0), "in_axes has 2 entries for 3 values"),
        ([4], (0, 0, 0), "the batch must have one size.*\\[3, 5\\]"),
        ([4], (None, None, None), "the batch must have one size"),
        ([4], (0, 7, None), "in_axes gives axis 7 to a tensor of shape \\[3, 5\\]"),
        ([4], "x", "in_axes must be an axis"),
    ],
)
def test_bad_input(fast: Counted, sizes: Any, in_axes: Any, words: str) -> None:
    x, w = torch.randn(3, 5), torch.randn(5, 5)
    with pytest.raises(dfx.PlanError, match=words), torch.no_grad():
        dfx.bucketed(fast, sizes, in_axes=in_axes)(x, x, w)


def test_out_axes_that_are_not_the_batch(fast: Counted) -> None:
    x, w = torch.randn(3, 5), torch.randn(5, 5)
    with torch.no_grad(), pytest.raises(dfx.PlanError, match="axis 1 of a tensor of shape"):
        dfx.bucketed(fast, [4], in_axes=(0, 0, None), out_axes=(1, 0))(x, x, w)


def test_only_what_is_scheduled_for_pytorch() -> None:
    with pytest.raises(
        dfx.UnsupportedError, match="what schedule returned for PyTorch; got function"
    ):
        dfx.bucketed(rows, [4], in_axes=0)
