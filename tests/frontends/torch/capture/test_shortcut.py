"""Calls that go past Dynamo's wrapper: only where its guards hold and one whole graph was compiled."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla.errors import FallbackWarning

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.scale = 2.0

    def forward(self, x: Any, flag: bool = False) -> Any:
        y = self.norm(self.first(x)) * self.scale
        return y.relu() if flag else y


class Watched:
    """A schedule, and whether its calls went past the wrapper."""

    def __init__(self, fn: Any, strategy: Any = None, **options: Any) -> None:
        options = {"backend": "torch", **options}
        self.fast = dfx.schedule(fn, strategy or dfx.Branches(), **options)
        shortcut = self.fast._dfx_core._shortcut
        self.hits: list[bool] = []
        find = shortcut.find

        def watched(args: Any, kwargs: Any) -> Any:
            made = find(args, kwargs)
            self.hits.append(made is not None)
            return made

        shortcut.find = watched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fast(*args, **kwargs)


X = torch.randn(5, 6)


@pytest.fixture
def model() -> Any:
    return Net().eval()


def check(watched: Watched, hit: bool, *args: Any, **kwargs: Any) -> None:
    """Compares one call with the original's, and asks which way it went."""
    want = watched.fast.original(*args, **kwargs)
    torch.testing.assert_close(watched(*args, **kwargs), want)  # of a split, rounding may differ
    assert watched.hits[-1] is hit


def test_what_guards_see_is_compiled_anew(model: Any) -> None:
    watched = Watched(model)

    def twice(*args: Any, **kwargs: Any) -> None:
        check(watched, False, *args, **kwargs)
        check(watched, True, *args, **kwargs)

    twice(X)
    twice(X, flag=True)
    twice(X, True)
    model.scale = 3.0
    twice(X)
    model.first = nn.Linear(6, 8)
    check(watched, True, X)  # weights are inputs of the graph
    with torch.no_grad():
        twice(X)
        model.first.weight.mul_(2)
        check(watched, True, X)
    model.double()
    twice(X.double())


def test_training_moves_buffers_and_makes_gradients(model: Any) -> None:
    model.train()
    watched = Watched(model)
    for hit in (False, True, True):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        watched(X).square().sum().backward()
        grads, after = model.first.weight.grad.clone(), model.norm.running_mean.clone()
        model.zero_grad()
        model.load_state_dict(before)
        model(X).square().sum().backward()
        assert torch.equal(grads, model.first.weight.grad)
        assert torch.equal(after, model.norm.running_mean)
        model.zero_grad()
        assert watched.hits[-1] is hit


def test_sizes_and_hooks(model: Any) -> None:
    watched = Watched(model)
    check(watched, False, X)
    check(watched, False, X[:3])  # now for all sizes
    check(watched, True, X[:4])
    model.first.register_forward_hook(lambda module, args, out: out + 1)
    check(watched, False, X)
    check(watched, True, X)


def test_several_graphs_stay_with_dynamo() -> None:
    def broken(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def empty_first(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x.cos()

    for fn in (broken, empty_first):
        watched = Watched(fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            for _ in range(3):
                assert torch.equal(watched(X), fn(X))
        assert not any(watched.hits)


def test_dynamos_switches_keep_their_meaning(model: Any) -> None:
    watched = Watched(model)
    check(watched, False, X)
    check(watched, True, X)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FallbackWarning, match="no graph"):
        check(watched, False, X)
    torch._dynamo.reset()
    check(watched, False, X)
    check(watched, True, X)


def test_below_somebodys_compiled_function(model: Any) -> None:
    watched = Watched(model)
    check(watched, False, X)

    @torch.compile(backend="eager")
    def outer(x: Any) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        return watched(y) * 2

    for _ in range(2):
        assert torch.equal(outer(X), model(X + 1) * 2)


def test_without_the_private_names(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")
    watched = Watched(model)
    for _ in range(2):
        check(watched, False, X)


def test_splits_of_any_size(model: Any) -> None:
    watched = Watched(model, dfx.NanoBatch(2), in_axes=0)
    with torch.no_grad():
        check(watched, False, X)
        for rows in (5, 4, 12):
            check(watched, True, torch.randn(rows, 6))  # a plan of its own, the same capture
        model.scale = 3.0
        check(watched, False, X)
        model.first.register_forward_hook(lambda module, args, out: out + 1)
        check(watched, False, X)
        check(watched, True, X)


def test_splits_that_are_trained(model: Any) -> None:
    watched = Watched(model, dfx.NanoBatch(2), in_axes=0)
    for hit in (False, True, True):
        watched(X).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(X).square().sum().backward()
        for ours, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(ours, p.grad)
        model.zero_grad()
        assert watched.hits[-1] is hit


def test_names_of_results_are_looked_at_on_both_ways() -> None:
    def named(x: Any) -> Any:
        return {"y": x * 2}

    watched = Watched(named, dfx.NanoBatch(2), in_axes=0, out_axes={"y": 0})
    for hit in (False, True):
        assert torch.equal(watched(X)["y"], X * 2) and watched.hits[-1] is hit
    wrong = Watched(named, dfx.NanoBatch(2), in_axes=0, out_axes={"z": 0})
    for _ in range(2):
        with pytest.raises(dfx.errors.PlanError, match="z"):
            wrong(X)


def test_what_depends_on_values_inside_of_a_split() -> None:
    def peek(x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x * 3

    def f(x: Any) -> Any:
        return peek(x.sin()).cos()

    watched = Watched(f, dfx.NanoBatch(2), in_axes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for sign in (1, -1, 1, -1):
            x = sign * (X.abs() % 3)
            torch.testing.assert_close(watched(x), f(x))
    assert watched.hits[-1]


def test_compiled_regions(model: Any) -> None:
    watched = Watched(model, compiler="inductor")
    with torch.no_grad():
        for hit in (False, True):
            torch.testing.assert_close(watched(X), model(X))
            assert watched.hits[-1] is hit


@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.NanoBatch(2), "sequential"])
def test_another_forward_of_the_modules_class(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    module, own = Twice(), Twice.forward
    fast = dfx.schedule(module, strategy, in_axes=0)
    for forward in (own, lambda self, x: x * 7, lambda self, x: x + 1, own):
        monkeypatch.setattr(Twice, "forward", forward)
        for _ in range(3):
            assert torch.equal(fast(X), forward(module, X))


def _shifted(self: Any, x: Any, by: int) -> Any:
    return x + by


@pytest.mark.parametrize("forward", [
    functools.partialmethod(_shifted, by=3),
    classmethod(lambda cls, x: x * 2),
    staticmethod(lambda x: x * 3),
    functools.singledispatchmethod(lambda self, x: x * 5),
])  # fmt: skip
def test_forwards_that_are_made_anew_at_each_look(forward: Any) -> None:
    module = type("Odd", (nn.Module,), {"forward": forward})()
    fast = dfx.schedule(module, RoundRobin())
    for _ in range(3):
        assert torch.equal(fast(X), module(X))


def test_a_class_that_is_patched_again_and_again() -> None:
    class Patched(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    module = Patched()
    fast = dfx.schedule(module, RoundRobin())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(20):
            Patched.forward = lambda self, x, n=n: x + n  # type: ignore[method-assign]
            assert torch.equal(fast(X), X + n) and torch.equal(fast(X), X + n)
    assert sum("other functions for its forward" in str(w.message) for w in told) == 1


def test_names_of_results_concern_splits_only() -> None:
    watched = Watched(lambda x: {"y": x * 2}, in_axes=0, out_axes={"z": 0})
    for _ in range(3):
        assert torch.equal(watched(X)["y"], X * 2)


def test_what_is_asked_about_a_patched_class() -> None:
    class Patched(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    module = Patched()
    fast = dfx.schedule(module, dfx.Auto(min_cost_ns=0.0))
    fast(X)
    Patched.forward = lambda self, x: x.sort().values + x.sin()  # type: ignore[method-assign]
    assert torch.equal(fast(X), module(X))
    current = fast._dfx_core.current()
    decided = current.decision((X,), {})
    assert current is not fast._dfx_core and decided.reason in dfx.explain(fast, X)
    dfx.tune(fast, X, budget_s=60.0)
    tuned = current.decision((X,), {})
    assert tuned is not decided and tuned.reason in dfx.explain(fast, X)
    dfx.verify(fast, X)
    assert torch.equal(fast(X), module(X))


def test_an_exported_program_whose_module_is_compiled_anew() -> None:
    """``recompile`` of its module writes a ``forward`` into that class; the program is what it was."""
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    fast = dfx.schedule(torch.export.export(module, (X,)), "branches")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(X), module(X))
            fast.original.recompile()
