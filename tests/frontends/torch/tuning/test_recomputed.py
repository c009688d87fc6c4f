"""Calls that a checkpoint makes again: both go the same way, whatever is learned or decided in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import FallbackWarning

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from torch.utils.checkpoint import checkpoint  # noqa: E402

from dynaflow_xla.errors import SeparabilityError  # noqa: E402
from dynaflow_xla.frontends.torch.dynamo.running import Runner  # noqa: E402
from dynaflow_xla.frontends.torch.tuning import call_signature  # noqa: E402
from dynaflow_xla.frontends.torch.tuning.auto import Choice  # noqa: E402

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def plans_run() -> None:
    """In the place of conftest's, which has plans run that are the original program: here that runs."""


class Net(nn.Module):
    """Saves tensors of one shape, which a checkpoint takes for each other if their order differs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).tanh() * x.sin())


def gradients(fn: Callable[..., Any], model: Any, x: Any, between: Any = None) -> list[Any]:
    """Of the argument and the parameters, through a checkpoint; ``between`` comes before the backward."""
    model.zero_grad()
    x.grad = None
    loss = checkpoint(fn, x, use_reentrant=False).square().sum()
    if between is not None:
        between()
    loss.backward()
    return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def check(fast: Any, model: Any, x: Any, between: Any = None) -> None:
    want = gradients(model, model, x)
    for ours, theirs in zip(gradients(fast, model, x, between), want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("warm", range(4))
@pytest.mark.parametrize("strategy", ["sequential", "branches", dfx.NanoBatch(2), dfx.Search()])
def test_a_plan_that_is_the_original_is_learned_in_between(strategy: Any, warm: int) -> None:
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, strategy, in_axes=0)
    for _ in range(warm):
        fast(x).sum().backward()
    for _ in range(3):
        check(fast, model, x)
        check(fast, model, x, between=lambda: torch.autograd.grad(fast(x).sum(), x))


def test_several_blocks_in_a_loop() -> None:
    blocks = nn.ModuleList([Net() for _ in range(3)])
    fast = [dfx.schedule(block, "branches") for block in blocks]
    x = torch.randn(8, 8, requires_grad=True)

    def run(made: Any, x: Any) -> Any:
        for block in made:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    for _ in range(3):
        grads = []
        for made in (blocks, fast):
            blocks.zero_grad()
            run(made, x).square().sum().backward()
            grads.append([p.grad.clone() for p in blocks.parameters()])
        for want, ours in zip(*grads, strict=True):
            torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("first", ["original", "lanes"])
def test_auto_decides_in_between(first: str) -> None:
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, "auto", in_axes=0)
    core = fast._dfx_core
    signature = call_signature.of(core.original, (x,), {})
    ways = {
        "original": Choice(None, "as a test says"),
        "lanes": Choice(core.with_strategy(dfx.NanoBatch(2)), "as a test says", candidate="lanes"),
    }
    other = "lanes" if first == "original" else "original"
    core.decide(signature, ways[first])
    check(fast, model, x, between=lambda: core.decide(signature, ways[other]))
    for _ in range(2):
        check(fast, model, x, between=lambda: core.decide(signature, ways[first]))
        check(fast, model, x, between=lambda: core.decide(signature, ways[other]))


def test_what_auto_never_decided_stays_the_original() -> None:
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, "auto")
    check(fast, model, x)
    check(fast, model, x, between=lambda: fast(x))  # that one may decide
    assert list(fast._dfx_core.under_hooks.values())[0].child is None


def test_tune_ends_what_calls_under_hooks_are_held_to() -> None:
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, dfx.Auto(min_cost_ns=0.0))
    check(fast, model, x)
    assert len(fast._dfx_core.under_hooks) == 1
    dfx.tune(fast, x, budget_s=60.0)
    assert not len(fast._dfx_core.under_hooks)
    check(fast, model, x)


def test_a_function_that_is_learned_by_watching_the_original() -> None:
    """The first call of such a split runs the original, the next ones a plan."""
    model = Net()

    def peek(x: Any) -> Any:
        return x * 2 if float(x.detach().sum()) > 0 else x * 3

    def f(x: Any) -> Any:
        return model(peek(x.sin()))

    x = torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(4):
            want = gradients(f, model, x)
            for ours, theirs in zip(gradients(fast, model, x), want, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_a_plan_runs_under_a_checkpoint_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = Runner.__call__

    def counted(runner: Any, inputs: Any) -> Any:
        ran.append(getattr(runner.graph, "kind", ""))
        return run(runner, inputs)

    monkeypatch.setattr(Runner, "__call__", counted)
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, "sequential")
    for _ in range(3):
        fast(x).sum().backward()  # learns that the plan is the original
    for _ in range(2):
        ran.clear()
        check(fast, model, x)
        assert ran.count("forward") == 2
    ran.clear()
    fast(x)
    assert not ran


def test_what_cannot_be_split_is_left_under_hooks_too() -> None:
    model, x = Net(), torch.randn(8, 8, requires_grad=True)
    fast = dfx.schedule(model, "auto", in_axes=0)
    core, tried = fast._dfx_core, []

    class Child:
        plans = splits = True

        def call(self, args: Any, kwargs: Any) -> Any:
            tried.append(args)
            raise SeparabilityError("not any more")

        def free_calls_under_hooks(self) -> None: ...

    signature = call_signature.of(core.original, (x,), {})
    core.decide(signature, Choice(Child(), "as a test says", candidate="lanes"))
    for _ in range(3):
        check(fast, model, x)
    assert len(tried) == 1


@pytest.mark.parametrize("strategy", ["branches", dfx.NanoBatch(2)], ids=["whole", "nano"])
def test_a_selective_checkpoint_keeps_what_ran_and_not_what_planned(strategy: Any) -> None:
    """It sees operators by their number; planning at the first call has some of its own, without values."""
    from torch.utils import checkpoint as made

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op is torch.ops.aten.addmm.default
        return made.CheckpointPolicy.MUST_SAVE if kept else made.CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return made.create_selective_checkpoint_contexts(policy)

    model = Net()
    fast = dfx.schedule(model, strategy, in_axes=0)
    for rows in (8, 6, 8):
        x, grads = torch.randn(rows, 8), []
        for fn in (model, fast):
            model.zero_grad()
            checkpoint(fn, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(grads[1], grads[0])
