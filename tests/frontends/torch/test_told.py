"""What a user is told: by the names and in the words of the program that was scheduled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dynaflow_xla as dfx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        hidden = torch.tanh(self.first(tokens))
        return {"logits": self.second(hidden if mask is None else hidden * mask)}


def test_double_backward_names_the_way_out() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    fast = dfx.schedule(model, "branches")
    (g,) = torch.autograd.grad(fast(x)["logits"].square().sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(model(x)["logits"].square().sum(), x)
    torch.testing.assert_close(g, want)
    with pytest.raises(dfx.UnsupportedError, match=r"double backward.*'Net'.*fast\.original"):
        g.square().sum().backward()
    fast(x)["logits"].sum().backward()  # first derivatives as before


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
@pytest.mark.parametrize("views", [False, True], ids=["", "views"])
def test_double_backward_is_refused_for_whatever_it_is_asked(
    strategy: dfx.Strategy, views: bool
) -> None:
    """Autograd leaves out what it does not need: a part of the gradient was missing, without a word.

    What autograd gives (the gradient of a sum) leads back to nothing: only the graph's node does.
    """

    class Viewed(Net):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            both = super().forward(tokens, mask)["logits"]
            return {"logits": both[:, :1], "other": both[:, 1:]} if views else {"logits": both}

    model = Viewed()
    fast, x = dfx.schedule(model, strategy, in_axes=0), torch.randn(6, 4)
    weights = list(model.parameters())
    for shift in (x.clone().requires_grad_(), x.clone().requires_grad_() * 2):
        for wanted in weights:
            given = [shift, *weights] if shift.is_leaf else weights
            loss = fast(x * shift)["logits"].sum()
            recorded = torch.autograd.grad(loss, given, create_graph=True)
            for ours, theirs in zip(
                recorded,
                torch.autograd.grad(model(x * shift)["logits"].sum(), given),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs)
            penalty = sum(g.square().sum() for g in recorded)
            with pytest.raises(dfx.UnsupportedError, match=r"double backward.*'Viewed'"):
                torch.autograd.grad(penalty, [wanted], allow_unused=True)
            with pytest.raises(dfx.UnsupportedError, match=r"double backward.*'Viewed'"):
                penalty = torch.autograd.grad(
                    fast(x * shift)["logits"].sum(), given, create_graph=True
                )[0]
                penalty.square().sum().backward(inputs=[wanted])


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
def test_double_backward_is_refused_for_what_is_no_leaf(strategy: dfx.Strategy) -> None:
    """The graph keeps its ``tanh``, not this input: the way from the gradient led around it, to its leaf."""

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 1) @ weight

    fast = dfx.schedule(fn, strategy, in_axes=(0, None), backend="torch")
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for _ in range(2):
        for inputs in (False, True):
            given = x * 2
            (g,) = torch.autograd.grad(fast(given, weight).sum(), weight, create_graph=True)
            (want,) = torch.autograd.grad(fn(x * 2, weight).sum(), weight)
            torch.testing.assert_close(g, want)
            with pytest.raises(dfx.UnsupportedError, match=r"double backward.*'fn'"):
                if inputs:
                    g.square().sum().backward(inputs=[given])
                else:
                    torch.autograd.grad(g.square().sum(), [given], allow_unused=True)
    given = weakref.ref(kept := x * 2)
    result = fast(kept, weight)
    del kept
    assert given() is None, "a call keeps an argument that its backward does not need"
    result.sum().backward()


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
def test_results_share_one_backward(strategy: dfx.Strategy) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(layers[0](x)), torch.sigmoid(layers[1](x))

    fast, x = dfx.schedule(two, strategy, backend="torch"), torch.randn(4, 4)
    first, second = fast(x)
    first.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"a second time[^$]*'two' share one backward.*retain_graph"
    ):
        second.sum().backward()
    layers.zero_grad()
    first, second = fast(x)
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    got = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    sum(y.sum() for y in two(x)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(got, [p.grad for p in layers.parameters()])

    def viewed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = two(x)[0]
        return y, y.T

    views = dfx.schedule(viewed, strategy, backend="torch")
    sum(y.sum() for y in views(x)).backward()  # type: ignore[union-attr]
    freed = weakref.ref(fast(x)[0].grad_fn)
    assert freed() is None  # nothing of ours keeps a call


@pytest.mark.parametrize("given", [{}, {"backend": "ffi"}, {"strategy": dfx.NanoBatch(2)}])
def test_a_wrong_shape_is_the_originals_error(given: dict[str, Any]) -> None:
    if "backend" in given:
        pytest.importorskip("jax")
    model, x = Net(), torch.randn(4, 5)
    with pytest.raises(RuntimeError) as wanted:
        model(x)
    fast = dfx.schedule(model, **{"strategy": "branches", **given})
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            fast(x)
        assert str(caught.value) == str(wanted.value)
        fast(torch.randn(4, 4))  # and what fits runs


WRONG_CALLS: dict[str, Any] = {
    "joins numbers": lambda x: torch.cat([x[0, 0], x[0, 1]]),
    "a dimension that is not there": lambda x: torch.narrow_copy(x, 2, 0, 1),
    "a sum along none": lambda x: torch.sum(x, 5),
    "an argument that is none": lambda x: torch.softmax(x, "rows"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_the_originals_error(name: str, strategy: dfx.Strategy) -> None:
    """Whatever class the error has, and whatever PyTorch makes of it while it is captured."""
    x = torch.randn(4, 5)
    with pytest.raises(Exception) as wanted:  # noqa: PT011  (the original's, whatever it is)
        WRONG_CALLS[name](x)
    fast = dfx.schedule(WRONG_CALLS[name], strategy, backend="torch")
    for _ in range(2):
        with pytest.raises(wanted.type) as caught:
            fast(x)
        assert type(caught.value) is wanted.type
        assert str(caught.value) == str(wanted.value)


def _fails(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) @ torch.ones(3, 3)


def _asks_for_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sin(x).sum().item()


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
@pytest.mark.parametrize("fn", [_fails, _asks_for_a_value], ids=["error", "break"])
@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
def test_pytorch_logs_nothing_that_the_original_does_not(fn: Any, strategy: dfx.Strategy) -> None:
    from torch._dynamo.variables import tensor

    # Said once a process.
    tensor.TensorVariable._warn_capture_scalar_outputs.cache_clear()
    records: list[logging.LogRecord] = []
    names = ("torch._subclasses.fake_tensor", "torch._dynamo.variables.tensor")
    loggers = [logging.getLogger(name) for name in names]
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        try:
            dfx.schedule(fn, strategy, backend="torch")(torch.ones(4, 4))
        except RuntimeError as error:
            assert "mat1 and mat2 shapes cannot be multiplied" in str(error)
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            assert last is not None and last.tb_frame.f_code is fn.__code__
        assert not records
        # What others do is logged as ever.
        compiled = torch.compile(_fails, backend="eager")
        with pytest.raises(Exception, match="same reduction dim|cannot be multiplied"):
            compiled(torch.ones(4, 4))
        assert records
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@pytest.mark.parametrize("in_axes", [None, {"x": 0}], ids=str)
def test_a_graph_without_a_batch_says_what_it_takes(in_axes: Any) -> None:
    x, y = torch.randn(8, 4), {"of": torch.randn(3, 3)}
    fn: Any = lambda x, y: torch.sin(y["of"]) * 2  # noqa: E731
    fast = dfx.schedule(fn, dfx.NanoBatch(2), in_axes=in_axes, backend="torch")
    told = r"it takes y\['of'\] \[3, 3\], and the batch is expected in x \[8, 4\] along axis 0.*in_axes"
    with pytest.warns(dfx.FallbackWarning, match=told):
        torch.testing.assert_close(fast(x, y), fn(x, y), rtol=0, atol=0)


def test_tensors_in_dictionaries_are_named() -> None:
    ids, mask = torch.randn(8, 4), torch.ones(6, 4)

    def f(batch: dict[str, torch.Tensor], *, more: Any = None) -> torch.Tensor:
        rest = 0 if more is None else more[0] if len(more[0]) == 8 else more[0].sum(0)
        return batch["ids"] * 2 + rest

    def called(in_axes: Any, *args: Any, **kwargs: Any) -> str:
        fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=in_axes, backend="torch")
        with pytest.raises(dfx.DynaflowError) as caught:
            fast(*args, **kwargs)
        return str(caught.value)

    told = called(0, {"ids": ids, "mask": mask})
    assert "argument 0['ids'] [8, 4]" in told and "argument 0['mask'] [6, 4]" in told, told
    told = called(0, {"ids": ids}, more=[mask])
    assert "keyword argument more[0] [6, 4]" in told, told
    told = called({"batch": 0}, {"ids": ids}, more=[torch.ones(8, 4)])
    assert "the batch of batch['ids'] [8, 4] along axis 0 must be" in told, told
    assert "if more[0] [8, 4] have rows of the batch as well, name them" in told, told


def _each(x: torch.Tensor) -> Iterator[torch.Tensor]:
    BEGUN.append(1)
    yield x * 2
    yield torch.sort(x).values


async def _later(x: torch.Tensor) -> torch.Tensor:
    BEGUN.append(1)
    return x * 2


async def _each_later(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    BEGUN.append(1)
    yield x * 2


class Each(nn.Module):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from _each(x)


BEGUN: list[int] = []


@pytest.mark.parametrize("strategy", ["sequential", "branches", "auto", dfx.NanoBatch(2)], ids=str)
@pytest.mark.parametrize(
    "fn", [_each, _later, _each_later, Each()], ids=["yield", "async", "both", "module"]
)
def test_what_runs_later_is_the_originals(fn: Any, strategy: Any) -> None:
    fast, x = dfx.schedule(fn, strategy, backend="torch"), torch.randn(4, 4)
    BEGUN.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got, want = fast(x), fn(x)
        fast(x).close() if hasattr(got, "close") else None
    assert type(got) is type(want) and not BEGUN
    (one,) = [w for w in told if w.category is dfx.FallbackWarning]
    assert "so the original runs" in str(one.message)
    assert dfx.explain(fast, x).endswith(str(one.message))

    async def all_of(made: Any) -> list[torch.Tensor]:
        return [y async for y in made]

    if isinstance(got, types.GeneratorType):
        torch.testing.assert_close(list(got), list(want), rtol=0, atol=0)
    elif isinstance(got, types.CoroutineType):
        torch.testing.assert_close(asyncio.run(got), asyncio.run(want), rtol=0, atol=0)
    else:
        torch.testing.assert_close(
            asyncio.run(all_of(got)), asyncio.run(all_of(want)), rtol=0, atol=0
        )


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_named(name: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * x.sum()

    fast, x = dfx.schedule(f, "branches"), torch.randn(3, 4)
    with pytest.warns(dfx.FallbackWarning, match=rf"under torch\.func\.{name}.*the original runs"):
        got = TRANSFORMS[name](fast, x)
    torch.testing.assert_close(got, TRANSFORMS[name](f, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dfx.FallbackWarning)
        torch.testing.assert_close(fast(x), f(x))


@pytest.mark.parametrize("backend", ["torch", "ffi"])
def test_dual_tensors_keep_their_tangents(backend: str) -> None:
    if backend == "ffi":
        pytest.importorskip("jax")

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) @ torch.cos(x).T

    f.note = "of the function"  # type: ignore[attr-defined]
    x, tangent = torch.randn(2, 3, 4)
    fast = dfx.schedule(f, "branches", backend=backend)
    assert fast.note == "of the function"
    fast(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        with pytest.warns(dfx.FallbackWarning, match="forward_ad.dual_level.*the original runs"):
            got = torch.autograd.forward_ad.unpack_dual(fast(dual))
        want = torch.autograd.forward_ad.unpack_dual(f(dual))
    torch.testing.assert_close((got.primal, got.tangent), (want.primal, want.tangent))


class Weights(torch.Tensor):
    """A class of tensors that PyTorch's compiler knows nothing of."""


@pytest.mark.parametrize(
    "given", [{}, {"strategy": dfx.NanoBatch(2)}, {"backend": "ffi"}], ids=["whole", "nano", "ffi"]
)
def test_a_class_of_tensors_computes_or_is_named(given: dict[str, Any]) -> None:
    if "backend" in given:
        pytest.importorskip("jax")

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * y + torch.cos(y) * x

    x = torch.randn(3, 3)
    fast = dfx.schedule(f, **{"strategy": "branches", "lanes": 2, "backend": "torch", **given})
    for _ in range(2):
        try:
            got = fast(x.as_subclass(Weights), x)
        except dfx.UnsupportedError as error:  # torch.compile fails on it, too
            assert "of a class (Weights)" in str(error)
        else:
            torch.testing.assert_close(got.as_subclass(torch.Tensor), f(x, x))
    torch.testing.assert_close(fast(x, x), f(x, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_of_the_original() -> None:
    model, x = Net(), torch.randn(3, 4)
    fast = dfx.schedule(model, "branches")
    with pytest.warns(dfx.FallbackWarning, match=r"under torch\.jit\.trace.*the original runs"):
        traced = torch.jit.trace(fast, (x,), strict=False)
    other = torch.randn(3, 4)
    torch.testing.assert_close(traced(other), model(other))


def test_a_graph_by_make_fx_is_of_the_original() -> None:
    model, x = Net(), torch.randn(3, 4)
    fast = dfx.schedule(model, "branches")
    with pytest.warns(dfx.FallbackWarning, match=r"under make_fx.*the original runs"):
        made = make_fx(lambda x: fast(x)["logits"])(x)
    other = torch.randn(3, 4)
    torch.testing.assert_close(made(other), model(other)["logits"])


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.Auto()])
def test_nested_tensors_run_as_the_original(strategy: dfx.Strategy) -> None:
    layer = nn.Linear(8, 8)
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=torch.jagged)
    fast = dfx.schedule(layer, strategy, backend="torch")
    with pytest.warns(dfx.FallbackWarning, match="nested tensor.*so the original runs"):
        got = fast(x)
    assert torch.equal(got.values(), layer(x).values())


def test_names_are_the_users() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    fast = dfx.schedule(model, "branches")
    said = str(dfx.verify(fast, x, mask=torch.ones(8)))
    assert "argument 'tokens': float32[3, 4]" in said
    assert "argument 'mask': float32[8]" in said
    told = dfx.explain(fast, x)
    assert "returned as they are, or kept for a backward: inputs tokens" in told
    assert "primals" not in told


ONE = torch.tensor(1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: torch.nonzero(x), "nonzero.*shape depends on input Tensor data"),
        (lambda x: torch.equal(x, x), "aten.equal"),
        (lambda x, at=ONE: x.narrow(0, at, 1), "_local_scalar_dense.* needs the data"),
        (lambda x: x, "nothing in it that computes"),
        (lambda x: x.dim(), "nothing in it that computes"),
    ],
    ids=["tolist", "nonzero", "equal", "tensor number", "identity", "sizes"],
)
def test_why_there_is_no_graph(function: Any, why: str) -> None:
    """A function that is one operator that cannot be captured, or none, is told so."""
    fast, x = dfx.schedule(function, dfx.Sequential(), backend="torch"), torch.randn(3, 4)
    with pytest.warns(dfx.FallbackWarning, match=f"so the original runs .*{why}"):
        assert torch.equal(torch.as_tensor(fast(x)), torch.as_tensor(function(x)))


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
def test_the_reason_is_the_functions_own() -> None:
    """Not that of what was captured before on the same thread; asked for again, it is the same."""
    x = torch.ones(2)
    nothing = "nothing in it that computes"
    at_item = dfx.schedule(lambda t: t if t.sum().item() > 0 else -t, "branches", backend="torch")
    assert "item" in dfx.explain(at_item, x)
    assert nothing in dfx.explain(dfx.schedule(nn.Identity(), "branches", backend="torch"), x)
    assert "item" in dfx.explain(at_item, x)
    without = dfx.schedule(lambda t: t.tolist(), "branches", backend="torch")
    without(x)
    assert "tolist" in dfx.explain(without, x)
    fast = dfx.schedule(nn.Identity(), "branches", backend="torch")
    fast(x)
    assert nothing in dfx.explain(fast, x)
    assert "tolist" in dfx.explain(without, x)


@pytest.fixture
def fails_from(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets AOTAutograd fail from its n-th graph on, as it does for some operators (``polygamma_``)."""
    from dynaflow_xla.frontends.torch._compat import aot

    whole, made = aot.aot_backend, []

    def fail(first: int) -> list[Any]:
        def backend(*compilers: Any) -> Any:
            def run(gm: Any, examples: Any) -> Any:
                made.append(gm)
                if len(made) > first:
                    raise RuntimeError("functionalizes no operator of this kind")
                return whole(*compilers)(gm, examples)

            return run

        monkeypatch.setattr(aot, "aot_backend", backend)
        return made

    return fail


def test_what_pytorch_makes_no_graph_of_runs_as_the_original(fails_from: Any) -> None:
    fails_from(0)
    fast = dfx.schedule(lambda x: x.mul_(2), dfx.Sequential(), backend="torch")
    x = torch.rand(3, 4)
    got = x.clone()
    with pytest.warns(
        dfx.FallbackWarning, match="cannot be captured.*so the original runs"
    ) as told:
        result = fast(got)
    assert len(told) == 1
    assert result is got
    assert torch.equal(got, x * 2)


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=str)
def test_what_pytorch_makes_no_graph_of_is_not_captured_for_ever(
    fails_from: Any, strategy: Any
) -> None:
    """Captures that fail take longer than many calls of the original."""
    made = fails_from(0)
    axes = {"in_axes": 0} if isinstance(strategy, dfx.NanoBatch) else {}
    fast = dfx.schedule(lambda x: x.sin() * 2, strategy, backend="torch", **axes)

    def captures_of_calls(x: Any) -> int:
        before = len(made)
        for _ in range(8):
            assert torch.equal(fast(x), x.sin() * 2)
        return len(made) - before

    x = torch.rand(4, 4)
    assert 1 <= captures_of_calls(x) <= 3
    assert captures_of_calls(x) == 0
    assert 1 <= captures_of_calls(torch.rand(4, 4, 2)) <= 3  # others may be captured
    assert "functionalizes no operator of this kind" in dfx.explain(fast, x)


def test_what_pytorch_makes_no_graph_of_behind_a_break_is_unsupported(fails_from: Any) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    fails_from(1)
    fast = dfx.schedule(broken, dfx.Sequential(), backend="torch")
    with (
        pytest.warns(dfx.FallbackWarning, match="several graphs"),
        pytest.raises(dfx.UnsupportedError, match="no graph of a part of 'broken'.*original"),
    ):
        fast(torch.rand(3, 4))


class Between(nn.Module):
    """An encoder of PyTorch's between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.encoder = nn.Linear(8, 8), nn.Linear(8, 8), encoder()

    def forward(self, x: Any, mask: Any, is_causal: bool | None = None) -> Any:
        return self.last(self.encoder(self.first(x), mask, is_causal=is_causal))


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


@pytest.mark.parametrize("make", [encoder, Between])
@pytest.mark.parametrize("causal", [False, True], ids=["any mask", "causal"])
def test_encoders_that_look_at_their_masks_are_told_what_these_are(
    make: Callable[[], Any], causal: bool
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    if not causal:
        mask[0, 2] = 0.0
    want = model(x, mask)
    fast = dfx.schedule(model, "branches", lanes=2)
    with pytest.warns(dfx.FallbackWarning, match=r"pass is_causal=True or False"):
        assert torch.equal(fast(x, mask), want)
    torch._dynamo.reset()
    told = dfx.schedule(model, "branches", lanes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dfx.FallbackWarning)
        assert torch.equal(told(x, mask, is_causal=causal), want)


def test_only_models_with_experts_are_told_of_loops_over_them() -> None:
    class Experts(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * (2 if torch.nonzero(x > 0).shape[0] > 3 else 1)

    class Dense(Experts):
        pass

    def model(part: nn.Module) -> Any:
        made: Any = nn.Sequential(nn.Linear(4, 4), part)
        made.set_experts_implementation = lambda name: None
        made.config = types.SimpleNamespace(_experts_implementation="eager")
        return made

    x = torch.randn(3, 4)
    for part, hinted in ((Experts(4, 4), True), (Dense(4, 4), False)):
        original = model(part)
        with pytest.warns(dfx.FallbackWarning, match=r"captured in several graphs") as told:
            assert torch.equal(dfx.schedule(original, "branches")(x), original(x))
        assert hinted == any("a loop over experts?" in str(w.message) for w in told)


@pytest.mark.parametrize("called", [dfx.stats, lambda: dfx.schedule(torch.sin, dfx.NanoBatch(2))])
def test_a_break_that_this_package_makes_is_told_at_the_users_line(called: Any) -> None:
    """Also one in a dataclass's __init__, which is in no file."""

    def fn(x: Any) -> Any:
        called()
        return torch.sort(x)[0]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dfx.schedule(fn, "branches")(torch.randn(64))
    said = [str(w.message) for w in told if "graph break at" in str(w.message)]
    line = fn.__code__.co_firstlineno + 1
    for text in said:
        assert f"test_told.py:{line}: dynaflow_xla is called there, which no graph holds" in text, (
            said
        )


def test_a_break_inside_of_a_nested_schedule_is_told_at_its_own_line() -> None:
    def inner(x: Any) -> Any:
        y = torch.sort(x)[0]
        torch._dynamo.graph_break()
        return y + 1

    nested = dfx.schedule(inner, "branches")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dfx.schedule(lambda x: nested(x * 2) + 1, "branches")(torch.randn(64))
    said = [str(w.message) for w in told if "graph break at" in str(w.message)]
    line = inner.__code__.co_firstlineno + 2
    assert said and all(f"test_told.py:{line}: " in text for text in said), said


INTERACTIVE = """
def fn(x):
    y = torch.sort(x)[0]
    torch._dynamo.graph_break()
    return y + 1
"""


@pytest.mark.parametrize("file", ["<stdin>", "<string>"])
def test_a_break_in_code_without_a_file_is_not_taken_for_this_packages(file: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(INTERACTIVE, file, "exec"), names)

    class Calls(nn.Module):
        def forward(self, x: Any) -> Any:
            return names["fn"](x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dfx.schedule(nn.Sequential(Calls()), "branches")(torch.randn(64))
    said = [str(w.message) for w in told if "graph break at" in str(w.message)]
    assert said and all(f"graph break at {file}:4: " in text for text in said), said
    assert not any("dynaflow_xla is called" in text for text in said)


@pytest.mark.parametrize("first", ["call", "plan", "explain", "debug"])
def test_why_there_is_no_graph_is_said_by_whoever_is_asked(first: str) -> None:
    fast, x = dfx.schedule(lambda x: x + x, "branches"), torch.randn(4, 4).to_sparse()
    why = "does not support sparse Tensors"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if first == "explain":
            assert why in dfx.explain(fast, x)
        elif first != "call":
            with pytest.raises(dfx.UnsupportedError, match=why):
                getattr(dfx, first)(fast, x)
        fast(x)
    assert [why in str(w.message) for w in told if w.category is dfx.FallbackWarning] == [True]
    assert why in dfx.explain(fast, x)
    with pytest.raises(dfx.UnsupportedError, match=f"there is no plan: .*{why}"):
        dfx.plan(fast, x)
    with pytest.raises(dfx.UnsupportedError, match=f"check_determinism .* there is none: .*{why}"):
        dfx.check_determinism(fast, x)


@pytest.mark.filterwarnings("ignore:.*meta device")
def test_tensors_without_values_cannot_be_verified() -> None:
    fast = dfx.schedule(lambda x: x + 1, "branches")
    with pytest.raises(
        dfx.UnsupportedError, match=r"result \(float32\[3\]\) is on the meta device"
    ):
        dfx.verify(fast, torch.ones(3, device="meta"))


@pytest.mark.filterwarnings("ignore:no graph of:dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("look", [dfx.plan, lambda fast, *args: fast(*args)], ids=["plan", "call"])
@pytest.mark.parametrize("first", ["nothing", "sparse", "meta"])
def test_a_reason_is_that_of_its_own_kind_of_call(look: Any, first: str) -> None:
    def fn(x: Any, plain: bool = False) -> Any:
        return x if plain else x + x

    dense = torch.randn(4, 4)
    given = {
        "nothing": ((dense, True), "finds nothing in it"),
        "sparse": ((dense.to_sparse(),), "does not support sparse Tensors"),
        "meta": ((dense.to("meta"),), "on the meta device"),
    }
    fast = dfx.schedule(fn, "branches")
    for name in (first, *given, first):
        args, why = given[name]
        with contextlib.suppress(dfx.UnsupportedError):
            look(fast, *args)
        with pytest.raises(dfx.UnsupportedError, match=why):
            dfx.plan(fast, *args)
    assert dfx.plan(fast, dense).graph  # a call of which there is no graph ends no captures


def test_a_first_call_without_operators_ends_no_captures() -> None:
    fast, x = (
        dfx.schedule(lambda x, plain: x if plain else x.sort(0)[0], "branches"),
        torch.randn(9),
    )
    with pytest.warns(dfx.FallbackWarning, match="finds nothing"):
        fast(x, True)
    fast(x, True)
    for _ in range(2):
        torch.testing.assert_close(fast(x, False), x.sort(0)[0], rtol=0, atol=0)
    assert dfx.plan(fast, x, False).graph
    assert fast(x, True) is x


def test_calls_without_a_graph_in_a_row_read_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.tuning import call_signature

    fast, x = dfx.schedule(lambda x: x, "branches"), torch.randn(9)
    with pytest.warns(dfx.FallbackWarning, match="finds nothing"):
        fast(x)
    read = []
    of = call_signature.of
    monkeypatch.setattr(call_signature, "of", lambda *call: read.append(call) or of(*call))
    for _ in range(3):
        assert fast(x) is x
    assert not read
