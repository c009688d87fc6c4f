"""``Auto`` for PyTorch: nano-batches among its candidates, training, and what is not measured."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from fastest import always

import dynaflow_xla as dfx
from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import EngineError, PlanError, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch.native import threads
from dynaflow_xla.frontends.torch.tuning import auto, one_thread
from dynaflow_xla.tuning import quiet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("timeless")

two_lanes = {"lanes": 2, "backend": "torch"}


def net() -> Any:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def scheduled(fn: Any, **options: Any) -> Any:
    return dfx.schedule(fn, dfx.Auto(min_cost_ns=0.0), **{**two_lanes, **options})


def test_many_small_operators_on_one_lane_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing overlaps there, but no Python runs between them."""

    def chain(x: Any) -> Any:
        for _ in range(20):
            x = torch.tanh(x) + 1
        return x.sum()

    seen = always(monkeypatch, "Branches(lanes=2)")
    x = torch.randn(8, 16)
    fast = scheduled(chain)
    with torch.no_grad():
        assert torch.equal(fast(x), chain(x)) and torch.equal(fast(x), chain(x))
        text = dfx.explain(fast, x)
    assert seen[0] >= {"original", "Branches(lanes=2)"} and "Sequential()" not in seen[0]
    assert "auto: Branches(lanes=2) runs" in text
    assert "Sequential(): not measured: the plan is that of Branches(lanes=2)" in text


def test_nano_batches_are_chosen_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "NanoBatch(2)")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        text = dfx.explain(fast, x)
    assert seen == [{"original", "NanoBatch(2)", "NanoBatch(4)"}]
    assert "auto: NanoBatch(2) runs" in text and "@1" in text
    assert "Branches(lanes=2): not measured: the plan has one lane" in text
    (file,) = Path(private_files.cache_folder()).glob("*.json")
    assert json.loads(file.read_text())["choice"] == "NanoBatch(2)"
    again = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))
        assert "NanoBatch(2) runs; cached" in dfx.explain(again, x)
    assert len(seen) == 1


def test_the_original_wins_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "original")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        assert "auto: the original runs" in dfx.explain(fast, x)


def test_training_is_measured_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    model, x = net(), torch.randn(8, 16, requires_grad=True)
    state = torch.get_rng_state()
    fast = scheduled(model, in_axes=0)
    out = fast(x)
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    out.square().mean().backward()
    got = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).square().mean().backward()
    for g, w in zip(got, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(g, w)
    assert "(forward and backward)" in dfx.explain(fast, x)


def test_what_mixes_rows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    x = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fast = scheduled(model)
    want_model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    want_model.load_state_dict(before)
    assert torch.equal(fast(x), want_model(x))
    for k, v in want_model.state_dict().items():
        assert torch.equal(model.state_dict()[k], v), k  # measuring has not moved the statistics
    text = dfx.explain(fast, x)
    assert "NanoBatch(2): not measured" in text and "native_batch_norm" in text
    # In eval mode the same signature can be split.
    model.eval()
    want_model.eval()
    torch.testing.assert_close(fast(x), want_model(x))
    assert "auto: NanoBatch(2) runs" in dfx.explain(fast, x)
    # A module inside that goes back to training mode does not surprise the caller.
    model[1].train()
    want_model[1].train()
    assert torch.equal(fast(x), want_model(x))
    assert "NanoBatch(2) is left" in dfx.explain(fast, x)


def test_joins_are_measured_where_they_are_expected_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "NanoBatch(2) with joins")
    wide = [nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256)]
    model = nn.Sequential(*wide, nn.BatchNorm1d(256))
    other = nn.Sequential(*wide, nn.BatchNorm1d(256))
    x = torch.randn(64, 256)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-4)
        assert "NanoBatch(2) with joins" in seen[0] and "NanoBatch(2)" not in seen[0]
        assert "auto: NanoBatch(2) with joins runs" in dfx.explain(fast, x)
        torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-4)
        little = scheduled(lambda x: torch.softmax(x, 0).cumsum(0))
        little(x)
        text = dfx.explain(little, x)
    assert len(seen) == 1 and "with joins: not measured: 1 regions are joined" in text, text


@pytest.mark.usefixtures("distances_unknown")
def test_unproven_rows_are_not_split_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "NanoBatch(2)")
    fast = scheduled(lambda x: torch.cdist(x[:, None], x[:, None]) + 1, in_axes=0)
    x = torch.randn(4, 5)
    torch.testing.assert_close(fast(x), fast.original(x))
    assert not any("NanoBatch" in name for runs in seen for name in runs)
    assert "NanoBatch(2): not measured" in dfx.explain(fast, x)


def test_axes_that_do_not_fit_are_an_error() -> None:
    fast = scheduled(lambda x, y: x + y, in_axes=0)
    with pytest.raises(PlanError, match="rows"):
        fast(torch.ones(4, 2), torch.ones(2, 2))


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_without_rows_to_split(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "NanoBatch(2)")
    model = net()
    fast = scheduled(model)
    x = torch.randn(rows, 16)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert not any("NanoBatch" in name for runs in seen for name in runs)


def test_hooks_are_not_called_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    model, x = net(), torch.randn(8, 16)
    calls: list[Any] = []
    handle = model[1].register_forward_hook(lambda *a: calls.append(1))
    fast = scheduled(model)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        assert len(calls) == 2
        assert "has hooks" in dfx.explain(fast, x)
    handle.remove()


def test_gradients_of_what_is_closed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    w = torch.randn(16, 16, requires_grad=True)
    fast = scheduled(lambda x: torch.tanh(x @ w))
    x = torch.randn(8, 16)
    fast(x).sum().backward()
    got, w.grad = w.grad, None
    fast.original(x).sum().backward()
    torch.testing.assert_close(got, w.grad)


def test_several_graphs_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "NanoBatch(2)")

    def f(x: Any) -> Any:
        y = torch.tanh(x)
        torch._dynamo.graph_break()
        return torch.sort(y).values + torch.sort(-y).values

    fast = scheduled(f)
    x = torch.randn(8, 64)
    with pytest.warns(dfx.FallbackWarning, match="several graphs"), torch.no_grad():
        assert torch.equal(fast(x), f(x))
    assert not any("NanoBatch" in name for runs in seen for name in runs)


def test_real_measurement_keeps_values() -> None:
    model, x = net(), torch.randn(32, 16)
    fast = dfx.schedule(model, dfx.Auto(budget_s=20.0, min_cost_ns=0.0), lanes=2)
    torch.testing.assert_close(fast(x), model(x))
    with quiet.turn() as watch:
        choice = auto.choose(fast._dfx_core, (x,), {}, watch)
    assert choice.reason.startswith("cached") and "original" in choice.medians_ms


def test_a_generator_among_the_arguments_is_as_after_one_call() -> None:
    def f(x: Any, generator: Any) -> Any:
        left = torch.sort(x + torch.rand(4, 512, generator=generator)).values
        return left + torch.sort(-x).values

    fast = scheduled(f)
    x = torch.randn(4, 512)
    mine, other = (torch.Generator().manual_seed(1) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", dfx.FallbackWarning
        )  # PyTorch breaks the graph at the generator
        got = fast(x, mine)
    assert torch.equal(got, f(x, other))
    assert torch.equal(mine.get_state(), other.get_state())


def test_nothing_is_measured_where_autograd_watches() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = net(), torch.randn(8, 16, requires_grad=True)
    fast = dfx.schedule(model, dfx.Auto(budget_s=0.3, min_cost_ns=0.0), **two_lanes)
    checkpoint(fast, x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    f = scheduled(lambda x: torch.sin(x).sum(-1))
    rows = torch.randn(4, 3)
    with pytest.warns(dfx.FallbackWarning, match=r"under torch\.func\.grad"):
        got = torch.func.jacrev(f)(rows)
    torch.testing.assert_close(got, torch.func.jacrev(f.original)(rows))
    assert not fast._dfx_core.decisions and not f._dfx_core.decisions


def test_exported_programs_are_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        return torch.sort(x).values + torch.sort(-x).values

    class Sorts(nn.Module):
        def forward(self, x: Any) -> Any:
            return f(x)

    seen = always(monkeypatch, "Branches(lanes=2)")
    x = torch.randn(8, 512)
    program = torch.export.export(Sorts(), (x,))
    fast = scheduled(program)
    assert torch.equal(fast(x), f(x))
    assert seen == [{"original", "Branches(lanes=2)", "Sequential()"}]
    with pytest.raises(UnsupportedError, match="schedule the module"):
        dfx.schedule(program, dfx.NanoBatch(2), in_axes=0)


@pytest.mark.parametrize("wanted", ["original", "Branches(lanes=2)", "NanoBatch(2)"])
def test_sizes_that_come_once_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """As with a cache that grows: a decision for each length would cost more than it can gain."""

    def f(x: Any) -> Any:
        with dfx.mark("left"):
            a = torch.sort(x).values
        with dfx.mark("right"):
            b = torch.sort(-x).values
        return a + b

    seen = always(monkeypatch, wanted)
    fast = scheduled(f)
    with torch.no_grad():
        for length in (16, 17, 18, 19):
            x = torch.randn(8, length)
            assert torch.equal(fast(x), f(x))
        assert len(seen) == 1
        runs = "the original" if wanted != "Branches(lanes=2)" else wanted
        assert f"sizes came once: {runs} runs, after " in dfx.explain(fast, x)
        for file in Path(private_files.cache_folder()).glob("*.json"):
            file.unlink()
        for _ in range(2):
            assert torch.equal(fast(x), f(x))
        assert len(seen) == 2 and "sizes came once" not in dfx.explain(fast, x)
        assert torch.equal(fast(x.double()), f(x.double())) and len(seen) == 3


class Cache:
    """Keys of earlier calls, as a model of transformers keeps them."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, x: Any) -> Any:
        self.rows.append(x)
        return torch.cat(self.rows, -1)


def sorts_with(cache: Any, x: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values
    with dfx.mark("right"):
        b = torch.sort(-x).values
    return cache.add(a + b)


@pytest.mark.parametrize("wanted", ["original", "Branches(lanes=2)"])
def test_objects_among_the_arguments_are_changed_by_the_call_alone(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    seen = always(monkeypatch, wanted)
    fast, cache, other = scheduled(sorts_with), Cache(), Cache()
    with torch.no_grad():
        for turn in range(3):
            x = torch.randn(8, 16)
            assert torch.equal(fast(cache, x), sorts_with(other, x))
            assert len(cache.rows) == turn + 1
        for look in (dfx.explain, dfx.verify, dfx.profile):
            look(fast, cache, x)
            assert len(cache.rows) == 3
        assert "argument 'cache'.['rows'][3]: float32[8, 16]" in str(dfx.verify(fast, cache, x))
        assert torch.equal(fast(Cache(), x), sorts_with(Cache(), x))
    assert len(seen) == 1  # whatever is in the object, and for another object of its type


def test_an_object_that_cannot_be_copied_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(Cache):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    seen = always(monkeypatch, "Branches(lanes=2)")
    fast, cache, x = scheduled(sorts_with), Fixed(), torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(fast(cache, x), sorts_with(Fixed(), x))
        text = dfx.explain(fast, cache, x)
        assert "Fixed cannot be copied (one of a kind)" in text and len(cache.rows) == 1
        with pytest.raises(UnsupportedError, match="Fixed cannot be copied"):
            dfx.verify(fast, cache, x)
    assert not seen


@torch._dynamo.disable
def note(model: Any) -> None:
    model.count += 1


class Noting(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.count = where, 0

    def forward(self, x: Any) -> Any:
        if self.where == "before":
            note(self)
        with dfx.mark("left"):
            a = torch.sort(x).values
        if self.where == "between graphs":
            note(self)
        with dfx.mark("right"):
            b = torch.sort(-x).values
        return a + b


@pytest.mark.filterwarnings("ignore:.*captured in several graphs")
@pytest.mark.parametrize("where", ["between graphs", "before"])
def test_what_code_outside_of_graphs_does_cannot_be_put_back(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    seen = always(monkeypatch, "Branches(lanes=2)")
    model, x = Noting(where), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        for turn in range(1, 3):
            assert torch.equal(fast(x), torch.sort(x).values + torch.sort(-x).values)
            assert turn == model.count
        text = dfx.explain(fast, x)
        assert "changes what can neither be copied nor put back" in text
        assert model.count == 2
    assert not seen


def test_a_candidate_that_fails_while_it_is_measured_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = always(monkeypatch, "Sequential()")
    call = auto._caller
    calls: list[Any] = []

    def failing(child: Any) -> Any:
        if "Branches" not in repr(child.options.strategy):
            return call(child)

        def run(*a: Any, **k: Any) -> Any:
            calls.append(a)
            if len(calls) <= 2:  # before it is measured
                return call(child)(*a, **k)
            raise SeparabilityError("captured anew, and refused")

        return run

    monkeypatch.setattr(auto, "_caller", failing)
    fast, x = scheduled(lambda x: sorts_with(Cache(), x)), torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(fast(x), sorts_with(Cache(), x))
        assert "not measured: captured anew" in dfx.explain(fast, x)
    assert len(seen) == 2 and "Branches(lanes=2)" in seen[0] - seen[1]


@pytest.mark.filterwarnings("ignore:.*captured in several graphs")
@pytest.mark.parametrize("strategy", ["branches", "auto"])
def test_a_training_step_as_a_function(strategy: str) -> None:
    """With ``backward`` and the optimizer inside: each call is one step, and looking at it is none.

    Dynamo is in the interpreter while the backward is compiled; our hooks there once made it wait forever.
    """
    torch.manual_seed(3)
    nets = [net() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    steps = []
    for model in nets:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append(step)
    fast = dfx.schedule(steps[1], strategy, **two_lanes)
    for turn in range(4):
        x = torch.randn(8, 16)
        torch.testing.assert_close(fast(x), steps[0](x))
        if turn == 2:
            dfx.explain(fast, x)
        torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


def shared_out(x: Any) -> Any:
    """Loops long enough for several threads, and not by much."""
    return (x.sin() * x.cos() + x.tanh()).relu()


def test_the_original_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain setting like any other: measured, explained, kept on disk, and undone after each call."""
    if not threads.are_own():
        pytest.skip("this build of PyTorch has no OpenMP")
    told: list[int] = []
    failing: list[bool] = []

    class Tells(nn.Module):
        def forward(self, x: Any) -> Any:
            if not torch.compiler.is_compiling():
                told.append(torch.get_num_threads())
                if failing:
                    raise KeyError("as written")
            return shared_out(x)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = always(monkeypatch, one_thread.NAME)
        monkeypatch.setattr(
            one_thread, "_NEAR", 2.0
        )  # half of these loops is predicted to be gained
        model, x = Tells(), torch.randn(300, 300)
        fast = scheduled(model)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), shared_out(x))
            assert one_thread.NAME in seen[0] and {1, 2} <= set(told)
            del told[:]
            for _ in range(3):
                torch.testing.assert_close(fast(x), shared_out(x))
            assert told == [1, 1, 1] and torch.get_num_threads() == 2
            text = dfx.explain(fast, x)
            assert f"auto: the {one_thread.NAME} runs" in text and "which does not run" in text
            again = scheduled(Tells())
            torch.testing.assert_close(again(x), shared_out(x))
            assert f"the {one_thread.NAME} runs; cached" in dfx.explain(again, x) and len(seen) == 1
            failing.append(True)
            with pytest.raises(KeyError, match="as written"):
                fast(x)
            failing.clear()
            assert torch.get_num_threads() == 2
        y = x.clone().requires_grad_()
        fast(y).sum().backward()
        (want,) = torch.autograd.grad(shared_out(z := x.clone().requires_grad_()).sum(), z)
        torch.testing.assert_close(y.grad, want)
        torch.set_num_threads(1)
        with torch.no_grad():
            scheduled(Tells())(x)
        assert one_thread.NAME not in seen[-1], "there is one thread anyway"
    finally:
        torch.set_num_threads(before)


def test_where_one_thread_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    if not threads.are_own():
        pytest.skip("this build of PyTorch has no OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = always(monkeypatch, "original")
        large = nn.Linear(1024, 1024)
        with torch.no_grad():
            fast = dfx.schedule(large, strategy="sequential")
            fast(torch.randn(1024, 1024))
            scheduled(net())(torch.randn(8, 16))  # too short to be shared out
        assert seen and all(one_thread.NAME not in names for names in seen)
        entries = fast._dfx_core.entries
        one = sum(region.cost_at(1) for e in entries for region in e.pg.regions)
        # Two threads take half of the time, or should, and do not.
        assert not one_thread.may_help(entries, 0.9 * one / 1e9)
        assert one_thread.may_help(entries, 1.1 * one / 1e9)
    finally:
        torch.set_num_threads(before)


def test_one_thread_needs_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process that inherited no lanes can call it, as it can call the original."""
    if not threads.are_own():
        pytest.skip("this build of PyTorch has no OpenMP")

    def fails() -> None:
        raise EngineError("in another process")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        always(monkeypatch, one_thread.NAME)
        monkeypatch.setattr(one_thread, "_NEAR", 2.0)
        x = torch.randn(300, 300)
        fast = scheduled(shared_out)
        with torch.no_grad():
            fast(x)
            monkeypatch.setattr("dynaflow_xla.frontends.torch.native.native.check_process", fails)
            torch.testing.assert_close(fast(x), shared_out(x))
    finally:
        torch.set_num_threads(before)


def test_an_error_of_ours_in_the_trial_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something scheduled inside of the original may not be planned for one thread."""
    if not threads.are_own():
        pytest.skip("this build of PyTorch has no OpenMP")

    class Inside(nn.Module):
        def forward(self, x: Any) -> Any:
            if not torch.compiler.is_compiling() and torch.get_num_threads() == 1:
                raise PlanError("no plan for one thread")
            return shared_out(x)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = always(monkeypatch, "original")
        monkeypatch.setattr(one_thread, "_NEAR", 2.0)
        fast, x = scheduled(Inside()), torch.randn(300, 300)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), shared_out(x))
            text = dfx.explain(fast, x)
        assert f"{one_thread.NAME}: not measured: no plan for one thread" in text
        assert one_thread.NAME not in seen[0] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_thread_is_not_taken_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not threads.are_own():
        pytest.skip("this build of PyTorch has no OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        always(monkeypatch, one_thread.NAME)
        monkeypatch.setattr(one_thread, "_NEAR", 2.0)
        fast = scheduled(shared_out)
        with torch.no_grad():
            fast(torch.randn(300, 300))
            other = torch.randn(900, 300)
            torch.testing.assert_close(fast(other), shared_out(other))
            assert "these sizes came once: the original runs" in dfx.explain(fast, other)
    finally:
        torch.set_num_threads(before)
