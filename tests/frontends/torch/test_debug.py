"""``debug`` and ``check_determinism`` find what is broken in a PyTorch plan or beside it, and name it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edited_plans import without_waits  # noqa: E402
from round_robin import RoundRobin  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.torch.native import entry  # noqa: E402

X, Y = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))


class Placed(dfx.Strategy):
    """Region "right" on lane 1, all others on lane 0; "left" runs as given here."""

    def __init__(self, replace: Any = None):
        self.replace = replace

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                other = {"replace": self.replace} if self.replace and op.name == "left" else {}
                s.execute(op, lane=int(op.name == "right"), **other)


def marked(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sin(x) @ y
    with dfx.mark("right"):
        b = torch.cos(y) @ x
    with dfx.mark("both"):
        d = a @ y - torch.tanh(b)
    return a, d


def left(x: Any, y: Any) -> Any:
    return torch.sin(x) @ y


def scheduled(replace: Any = None, **options: Any) -> Any:
    return dfx.schedule(marked, Placed(replace), lanes=2, backend="torch", **options)


def found_in(fast: Any, **options: Any) -> Any:
    """What ``debug`` finds."""
    with pytest.raises(dfx.VerificationError) as found:
        dfx.debug(fast, X, Y, **options)
    return found.value.report.finding  # type: ignore[attr-defined]


def test_a_sound_plan_passes_and_nothing_of_the_arguments_changes() -> None:
    fast, before = scheduled(), X.clone()
    report = dfx.debug(fast, X, Y, rounds=6)
    assert report.ok and report.regions == 3 and len(report.rounds) == 3
    assert dfx.check_determinism(fast, X, Y, runs=3).ok
    assert torch.equal(X, before)


def test_a_wait_that_was_dropped_behind_the_proof_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_waits(monkeypatch, entry)
    finding = found_in(scheduled())
    assert finding.kind == "unwritten" and finding.place.region == "both"
    assert finding.place.lane == 0 and "test_debug.py" in finding.place.source
    assert "'right' on lane 1" in finding.detail


def test_a_replacement_that_gives_other_values_each_time_is_found_and_named() -> None:
    calls: list[int] = []

    def drifting(x: Any, y: Any) -> Any:
        calls.append(1)
        return left(x, y) + len(calls)

    finding = found_in(scheduled(drifting))
    assert finding.kind == "changed" and finding.place.region == "left"
    with pytest.raises(dfx.VerificationError, match="first differs region 'left' on lane 0"):
        dfx.check_determinism(scheduled(drifting), X, Y)


def test_a_replacement_that_writes_late_is_found_and_named() -> None:
    pending: list[Any] = []

    def late(x: Any, y: Any) -> Any:
        made = left(x, y)
        pending.append(made)
        if len(pending) > 1:
            pending.pop(0).add_(1)
        return made

    finding = found_in(scheduled(late))
    assert finding.kind == "late write" and finding.place.region == "left"


def test_a_replacement_that_leaves_memory_unwritten_is_found_and_named() -> None:
    def careless(x: Any, y: Any) -> Any:
        made = torch.empty_like(x)
        made[1:] = left(x, y)[1:]
        return made

    finding = found_in(scheduled(careless))
    assert finding.kind == "changed" and finding.place.region == "left"


def test_a_replacement_that_fails_now_and_then_is_found_and_named() -> None:
    calls: list[int] = []

    def failing(x: Any, y: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the fourth time")
        return left(x, y)

    finding = found_in(scheduled(failing))
    assert finding.kind == "failed" and "the fourth time" in finding.detail
    assert finding.place.region == "left"


def test_random_numbers_buffers_and_training_are_as_in_one_call() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(6), torch.nn.GELU()
    )
    fast = dfx.schedule(model, "branches", lanes=2, backend="torch")
    state = torch.get_rng_state()
    mean = model[2].running_mean.clone()
    assert dfx.debug(fast, X, rounds=6).ok
    assert dfx.check_determinism(fast, X, runs=3).ok
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(model[2].running_mean, mean)


def trained(x: Any, w: Any) -> Any:
    return (torch.sin(x @ w) * torch.tanh(x)).sum()


def training(fn: Any = trained) -> tuple[Any, Any]:
    fast = dfx.schedule(fn, RoundRobin(), lanes=2, backend="torch")
    return fast, X.clone().requires_grad_()


def test_the_backward_is_looked_at() -> None:
    fast, x = training()
    report = dfx.debug(fast, x, Y, rounds=6)
    assert "1 of them of the backward" in str(report)
    with torch.no_grad():
        alone = dfx.debug(fast, x, Y, rounds=6)
    assert report.regions > 2 * alone.regions - 1 and "backward" not in str(alone)
    assert dfx.check_determinism(fast, x, Y, runs=3).outputs == 2  # the sum, and the gradient of x
    assert x.grad is None


def test_an_operator_of_the_backward_that_gives_other_values_each_time_is_found_and_named() -> None:
    calls: list[int] = []

    @torch.library.custom_op("dynaflow_xla_tests::sine", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    @torch.library.custom_op("dynaflow_xla_tests::drifting", mutates_args=())
    def drifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.cos(x) + len(calls)

    for op in (sine, drifting):
        op.register_fake(torch.empty_like)
    sine.register_autograd(
        lambda ctx, g: g * drifting(*ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def trained(x: Any, w: Any) -> Any:
        return (sine(x @ w) * torch.tanh(x)).sum()

    fast, x = training(trained)
    with pytest.raises(dfx.VerificationError, match="^the backward of trained: ") as found:
        dfx.debug(fast, x, Y, rounds=6)
    finding = found.value.report.finding  # type: ignore[attr-defined]
    assert finding.kind == "changed" and "drifting" in finding.place.region
    with pytest.raises(dfx.VerificationError, match=r"of argument\[0\] differs.*drifting"):
        dfx.check_determinism(fast, x, Y)


def test_a_wait_dropped_from_the_plan_of_a_backward_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, x = training()
    without_waits(monkeypatch, entry, ".backward")
    with pytest.raises(dfx.VerificationError, match="^the backward of trained: ") as found:
        dfx.debug(fast, x, Y, rounds=6)
    assert found.value.report.finding.kind == "unwritten"  # type: ignore[attr-defined]


def test_a_backward_that_fails_outside_of_its_graphs_is_told() -> None:
    model = torch.nn.Linear(6, 6)
    fast = dfx.schedule(model, "branches", lanes=2, backend="torch")

    def refuses(gradient: Any) -> None:
        raise RuntimeError("a hook that refuses")

    model.weight.register_hook(refuses)
    report = dfx.debug(fast, X, rounds=2)
    assert report.ok and "the backward is not looked at: a hook that refuses" in str(report)


def test_an_argument_that_was_computed_is_looked_at_as_another() -> None:
    x = X.clone().requires_grad_()
    computed = x * 2
    model = torch.nn.Linear(6, 6)
    fast = dfx.schedule(model, dfx.NanoBatch(2), lanes=2, in_axes=0, backend="torch")
    assert dfx.debug(fast, computed, rounds=2).ok
    computed.sum().backward()
    assert x.grad is not None


def test_the_caller_s_graph_stays_whole() -> None:
    w = Y.clone().requires_grad_()
    outer = torch.exp(w)

    def closes(x: Any) -> Any:
        return torch.sin(x @ outer) * torch.tanh(x)

    fast = dfx.schedule(closes, "branches", lanes=2, backend="torch")
    assert dfx.debug(fast, X, rounds=2).ok
    fast(X).sum().backward()
    assert w.grad is not None


def test_each_graph_of_a_call_that_breaks_is_looked_at() -> None:
    def broken(x: Any) -> Any:
        y = torch.sin(x) @ x
        torch._dynamo.graph_break()
        return torch.cos(y) @ x

    fast = dfx.schedule(broken, "branches", lanes=2, backend="torch")
    with pytest.warns(dfx.FallbackWarning, match="captured in several graphs"):
        assert "2 graphs" in str(dfx.debug(fast, X, rounds=2))


def test_a_function_that_changes_what_cannot_be_put_back_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def f(x: Any) -> Any:
        y = torch.sin(x) @ x
        print("once")
        return torch.cos(y) @ x

    fast = dfx.schedule(f, "branches", lanes=2, backend="torch")
    with pytest.warns(dfx.FallbackWarning, match="captured in several graphs"):
        for look in (dfx.debug, dfx.check_determinism):
            with pytest.raises(dfx.UnsupportedError, match=f"{look.__name__} runs a function many"):
                look(fast, X)
    assert not capsys.readouterr().out.count("once")


def test_plans_on_xla_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    fast = dfx.schedule(marked, Placed(), lanes=2, backend="ffi")
    report = dfx.debug(fast, X, Y, rounds=6)
    assert report.ok and len(report.rounds) == 4
    batched = dfx.schedule(
        torch.nn.Linear(6, 6), dfx.NanoBatch(2), lanes=2, in_axes=0, backend="ffi"
    )
    with torch.no_grad():
        assert dfx.debug(batched, X, rounds=4).ok
