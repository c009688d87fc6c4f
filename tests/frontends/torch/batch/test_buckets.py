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


class Moving(torch.nn.Module):
    """Every call changes a buffer, an attribute and what the next call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.turns = 0

    def forward(self, x: Any, *, mask: Any = None) -> Any:
        self.calls.add_(1)
        self.turns += 1
        y = torch.tanh(x) * self.calls * self.turns
        return y if mask is None else y * mask


@pytest.mark.parametrize("strategy", ["sequential", dfx.NanoBatch(2)])
def test_the_check_leaves_no_trace(strategy: Any) -> None:
    model, twin = Moving(), Moving()
    buckets = dfx.bucketed(dfx.schedule(model, strategy, lanes=1, backend="torch"), [4], in_axes=0)
    x = torch.randn(3, 5)
    with torch.no_grad():
        for call in (1, 2):
            torch.testing.assert_close(buckets(x), twin(x))
            assert (model.calls.item(), model.turns) == (call, call)


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
def test_random_numbers_are_as_after_one_padded_call() -> None:
    fast = dfx.schedule(torch.nn.Dropout(0.5), "sequential", lanes=1, backend="torch")
    generator = torch.Generator().manual_seed(2)
    drawn = dfx.schedule(
        lambda x, g: x + torch.rand(2, 2, generator=g), "sequential", lanes=1, backend="torch"
    )
    with torch.no_grad():
        with pytest.raises(dfx.SeparabilityError, match="draws random numbers"):
            dfx.bucketed(fast, [4], in_axes=0)(torch.ones(3, 8))
        with pytest.raises(dfx.SeparabilityError, match="draws random numbers"):
            dfx.bucketed(drawn, [2], in_axes=(0, None))(torch.ones(1, 2), generator)
    twin = torch.Generator().manual_seed(2)
    torch.rand(2, 2, generator=twin)
    assert torch.equal(generator.get_state(), twin.get_state())


def writes(x: Any, y: Any) -> Any:
    y.add_(1)
    return x + y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("check", [True, False])
def test_an_argument_that_is_padded_and_written(mode: Any, check: bool) -> None:
    fast = dfx.schedule(writes, "sequential", lanes=1, backend="torch")
    buckets = dfx.bucketed(fast, [4], in_axes=0, check=check)
    x = torch.zeros(3, 2)
    with mode():
        with pytest.raises(dfx.UnsupportedError, match="'writes' writes into argument 1.*padded"):
            buckets(x, torch.zeros(3, 2))
        with pytest.raises(dfx.UnsupportedError, match="writes into keyword argument y.*Return"):
            buckets(x, y=torch.zeros(3, 2))
        y = torch.zeros(4, 2)
        buckets(torch.zeros(4, 2), y)
        assert y.sum() == 8
        y = torch.zeros(2)
        dfx.bucketed(fast, [4], in_axes={"x": 0}, check=check)(x, y)
        assert y.sum() == 2


@pytest.mark.parametrize(
    "in_axes",
    [0, (0,), {"x": 0, "mask": 0}, ((0,), {"mask": 0})],
    ids=["all", "by place", "by name", "pair"],
)
def test_arguments_by_keyword(in_axes: Any) -> None:
    fast = dfx.schedule(Moving(), "sequential", lanes=1, backend="torch")
    buckets = dfx.bucketed(fast, [4], in_axes=in_axes)
    x, mask, model = torch.randn(3, 5), torch.rand(3, 1), Moving()
    with torch.no_grad():
        torch.testing.assert_close(buckets(x, mask=mask), model(x, mask=mask))
        torch.testing.assert_close(buckets(x, mask=None), model(x))
        if in_axes != (0,) and not isinstance(in_axes, tuple):
            torch.testing.assert_close(buckets(x=x, mask=mask), model(x, mask=mask))


def test_containers_by_name() -> None:
    fast = dfx.schedule(lambda a, b: a[0] + a[1]["w"] + b, "sequential", lanes=1, backend="torch")
    buckets = dfx.bucketed(fast, [4], in_axes={"a": (0, {"x": None}), "b": 0})
    x, w = torch.randn(3, 2), torch.randn(2)
    with torch.no_grad():
        torch.testing.assert_close(buckets((x, {"w": w, "x": w}), b=x), x + w + x)
        with pytest.raises(dfx.PlanError, match="in_axes of argument 0 must be a prefix"):
            buckets(x, x)
        with pytest.raises(dfx.PlanError, match="in_axes names 'c'"):
            dfx.bucketed(fast, [4], in_axes={"c": 0})((x, {"w": w}), x)


class Cache:
    def __init__(self, rows: Any) -> None:
        self.rows = rows


def test_results_whose_rows_cannot_be_cut_or_that_count_rows() -> None:
    cached = dfx.schedule(lambda x: (x * 2, Cache(x)), "sequential", lanes=1, backend="torch")
    counted = dfx.schedule(lambda x: (x * 2, len(x)), "sequential", lanes=1, backend="torch")
    x = torch.randn(3, 2)
    with torch.no_grad():
        with pytest.raises(dfx.UnsupportedError, match="type Cache, whose added rows"):
            dfx.bucketed(cached, [4], in_axes=0)(x)
        got = dfx.bucketed(cached, [4], in_axes=0, out_axes=(0, None))(x)
        assert len(got[1].rows) == 4
        with pytest.raises(dfx.SeparabilityError, match="result 1 .*3 became 4"):
            dfx.bucketed(counted, [4], in_axes=0)(x)


def test_a_call_that_cannot_be_put_back_is_told() -> None:
    seen: list[int] = []

    def told(x: Any) -> Any:
        print("", end="")
        seen.append(1)
        return x * 2

    buckets = dfx.bucketed(
        dfx.schedule(told, "sequential", lanes=1, backend="torch"), [4], in_axes=0
    )
    with (
        torch.no_grad(),
        pytest.warns(dfx.FallbackWarning, match="cannot be put back.*check=False"),
    ):
        buckets(torch.ones(3, 2))


def test_lazy_modules_and_what_select_leaves_to_the_original() -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        lazy = torch.nn.LazyLinear(2)
        buckets = dfx.bucketed(
            dfx.schedule(lazy, "sequential", lanes=1, backend="torch"), [4], in_axes=0
        )
        for _ in range(2):
            torch.testing.assert_close(buckets(x), lazy(x))
        model, twin = Moving(), Moving()
        chosen = dfx.schedule(
            model, {"plan": "sequential", "none": "original"}, lanes=1, backend="torch",
            select=lambda call: "plan" if len(call.args[0]) > 4 else "none",
        )  # fmt: skip
        buckets = dfx.bucketed(chosen, [4, 8], in_axes=0)
        for batch in (3, 7):
            rows = torch.randn(batch, 4)
            torch.testing.assert_close(buckets(rows), twin(rows))
        assert (model.calls, model.turns) == (twin.calls, twin.turns)


def test_a_program_of_one_size() -> None:
    net = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    fast = dfx.schedule(torch.export.export(net, (x,)), strategy="branches")
    with torch.no_grad():
        with pytest.raises(
            dfx.UnsupportedError, match=r"exported as .*\[4, 5\].*open size.*check=False"
        ):
            dfx.bucketed(fast, [4], in_axes=0)(x[:3])
        unchecked = dfx.bucketed(fast, [4], in_axes=0, check=False)
        torch.testing.assert_close(unchecked(x[:3]), net(x[:3]))


def test_a_function_that_may_be_of_either_framework() -> None:
    def f(x: Any) -> Any:
        return x.sin() * 2

    x = torch.randn(5, 3)
    buckets = dfx.bucketed(dfx.schedule(f, "branches", lanes=1), [8], in_axes=0)
    torch.testing.assert_close(buckets(x), f(x))


def test_a_function_of_jax_has_no_buckets() -> None:
    jnp = pytest.importorskip("jax.numpy")
    fast = dfx.schedule(lambda x: jnp.sin(x), "branches", lanes=1)
    with pytest.raises(dfx.UnsupportedError, match="a function of JAX"):
        dfx.bucketed(fast, [8], in_axes=0)


def test_a_check_that_is_no_truth_value(fast: Counted) -> None:
    with pytest.raises(TypeError, match="check must be True or False; got 3"):
        dfx.bucketed(fast, [2], in_axes=0, check=3)  # type: ignore[arg-type]
