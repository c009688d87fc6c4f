"""Replays of graphs, which on a CPU run the plan once more."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stream_books import Books, Caller, ReplayedOnCpu, model, native_of, runner_of  # noqa: E402

from dynaflow_xla.frontends.torch.native.cuda import (  # noqa: E402
    graphs as cuda_graphs,
    streams,
)
from dynaflow_xla.frontends.torch.native.cuda.results import Results  # noqa: E402


def test_graphs_replay_with_new_inputs_and_parameters_in_place(args: Any) -> None:
    graphs, (_, w) = ReplayedOnCpu(), args
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    kept = []
    for seed in range(20):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        kept.append(x)  # so that no address comes back
        w.add_(0.01)  # a parameter changes where it is
        outs = plan([x, w])
        for want, got in zip(model(x, w), outs, strict=True):
            assert torch.equal(want, got)
        kept += outs
    assert graphs.captures == 1
    made = next(iter(plan._made.values()))
    assert made.moved == [n for n, x in enumerate(made.inputs) if x is not w] != [0, 1]
    # A parameter that moves after all: right values, and one more graph that copies it.
    for _ in range(4):
        w = w.clone()
        kept.append(w)
        assert torch.equal(plan([kept[0], w])[0], model(kept[0], w)[0])
    assert graphs.captures == 2


def test_a_graph_a_size_and_the_oldest_goes(args: Any) -> None:
    graphs = ReplayedOnCpu()
    runner = runner_of(args, Books())
    plan = cuda_graphs.GraphedPlan(runner, graphs, keep=2)
    w = args[1]
    for rows in (8, 4, 2, 8):
        for seed in range(3):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(plan([x, w])[0], model(x, w)[0])
    assert len(plan._made) == 2


def test_a_call_inside_of_the_callers_capture_replays_nothing(args: Any) -> None:
    """A graph cannot be launched into another one that is captured: the lanes become its branches."""
    graphs, books = ReplayedOnCpu(), Books()
    plan = cuda_graphs.GraphedPlan(runner_of(args, books), graphs)
    for _ in range(3):
        plan(list(args))
    assert graphs.captures == 1
    books.captured = True
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    made = plan._last
    made.replay = None
    assert torch.equal(plan([x, args[1]])[0], model(x, args[1])[0])
    assert graphs.captures == 1 and plan._last is made


def test_what_moved_once_is_read_in_place_again(args: Any) -> None:
    """A decision is measured on copies, and then the user's own tensors come: nothing of them is copied."""
    graphs = ReplayedOnCpu()
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    for given in ([x.clone() for x in args], args):
        for _ in range(4):
            assert torch.equal(plan(list(given))[0], model(*given)[0])
        assert plan._last.moved == []
    assert graphs.captures == 2


def test_decisions_teach_nothing_of_which_inputs_move(args: Any) -> None:
    """Each is measured on copies of its own; what two of them showed made the user's own tensors copied."""
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), ReplayedOnCpu())
    for _ in range(3):
        copies = [x.clone() for x in args]
        for _ in range(4):
            plan(list(copies))
        assert plan._last.moved == []
        plan.release()
        for _ in range(4):
            assert torch.equal(plan(list(args))[0], model(*args)[0])
        assert plan._last.moved == []
        del copies


@pytest.mark.parametrize("lasts", [True, False])
def test_only_a_call_on_another_stream_waits_for_the_last_replay(args: Any, lasts: bool) -> None:
    """Whatever graph that was: they share memory. Behind a stream that may go an event stands for it."""
    graphs, books = ReplayedOnCpu(), Books()
    plan = cuda_graphs.GraphedPlan(runner_of(args, books), graphs)
    first, second = (Caller(7), Caller(9)) if lasts else (Caller(6), Caller(8))
    books.stream = first
    other = [torch.randn(4, 8), args[1]]
    for given in (args, other):
        for _ in range(3):
            plan(list(given))

    def waits(given: Any) -> int:
        before = books.waits
        plan(list(given))
        return books.waits - before

    inside = waits(args)
    assert waits(args) == inside == waits(other)
    books.stream = second
    assert waits(args) == inside + lasts  # another stream may have the handle of one that is gone
    assert waits(other) == inside
    assert first.records == lasts and second.records == 0


@pytest.mark.parametrize("change", ["other place", "turned", "part", "type"])
def test_an_input_that_lies_differently_is_no_replay(args: Any, change: str) -> None:
    """The same tensor object may get other memory, sizes or strides; its memory may be seen differently."""
    graphs = ReplayedOnCpu()
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    x, w = args
    for _ in range(3):
        plan([x, w])
    made = plan._last
    assert made.fits([x, w])
    if change == "other place":
        w.data = w.data.clone()
    elif change == "turned":
        w.data = w.data.t()
    elif change == "part":
        x.data = x.data[:4]
    else:
        w = w.view(torch.int32)
    assert not made.fits([x, w])
    if change == "other place":
        assert made.strayed([x, w]) == [1], "its memory, not the object, is what a graph reads"
    if change != "type":
        plan([x, w])
        assert plan._last is not made
        assert torch.equal(plan([x, w])[0], model(x, w)[0])


def test_results_share_memory_as_the_graphs_do() -> None:
    """Views of one another, gaps and repeated elements stay so; every call has memory of its own."""
    whole = torch.randn(6, 4)
    outputs = [
        whole, whole[2:4], whole.t(), torch.randn(1, 4).expand(5, 4), torch.randn(8, 4)[::2], 3,
        torch.randn(4, 4).t(), torch.randn(0, 4), whole,
    ]  # fmt: skip
    results = Results(outputs)
    first, second = results.copies(), results.copies()
    for want, got in zip(outputs, first, strict=True):
        assert type(got) is type(want)
        if isinstance(want, torch.Tensor):
            assert torch.equal(want, got) and want.stride() == got.stride()
    tensors = [x for x in first if isinstance(x, torch.Tensor) and x.numel()]
    places = [x.untyped_storage().data_ptr() for x in tensors]
    assert places[0] == places[1] == places[2] == places[-1] and len(set(places)) == 4
    assert first[3].untyped_storage().nbytes() == 4 * 4, "what is repeated is there once"
    others = {
        x.untyped_storage().data_ptr() for x in outputs + second if isinstance(x, torch.Tensor)
    }
    assert not others.intersection(places)
    first[0].zero_()
    assert not first[1].any() and second[1].any() and whole.any()
    many = Results([torch.ones(2), torch.zeros(3)])
    assert many._plain and [x.tolist() for x in many.copies()] == [[1, 1], [0, 0, 0]]


def test_more_signatures_than_graphs_do_not_capture_at_each_call(args: Any) -> None:
    graphs = ReplayedOnCpu()
    x, w = args
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs, keep=2)
    for _ in range(40):
        for rows in (2, 3, 4):
            assert torch.equal(plan([x[:rows], w])[0], model(x[:rows], w)[0])
    assert graphs.captures < 20
    before = graphs.captures
    for _ in range(200):  # one that stays has its graph
        plan([x[:2], w])
    assert graphs.captures <= before + 1 and plan._last is not None
    assert plan._last.fits([x[:2], w])


def test_an_input_with_gaps_is_replayed_like_any_other(args: Any) -> None:
    graphs = ReplayedOnCpu()
    x, w = args
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    wide = [torch.randn(8, 16) for _ in range(4)]
    for each in wide:
        assert torch.equal(plan([each[:, ::2], w])[0], model(each[:, ::2], w)[0])
    assert graphs.captures == 1 and plan._last is not None
    assert plan._last.moved == [0] and plan._last.fits([wide[0][:, ::2], w])


def test_how_results_lie_is_found_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.empty_like

    def nowhere(x: Any, **options: Any) -> Any:
        assert options["device"] == "meta"
        return own(x, **options)

    monkeypatch.setattr(torch, "empty_like", nowhere)
    assert not Results([torch.randn(8, 4)[::2]])._plain
    assert Results([torch.randn(8, 4).t()])._plain


def test_autograd_knows_what_a_replay_wrote() -> None:
    def step(cache: Any, x: Any) -> Any:
        cache.add_(x)
        return cache * 2

    cache, x = torch.zeros(8), torch.ones(8)
    graphs = ReplayedOnCpu()
    runner = streams.StreamRunner(native_of(step, cache.clone(), x), Books())
    plan = cuda_graphs.GraphedPlan(runner, graphs)
    plan._written = {runner.plain.captured.graph.inputs[0]}  # as where the graph itself writes it
    versions = []
    for _ in range(5):
        plan([cache, x])
        versions.append(cache._version)
    assert graphs.captures == 1 and versions == [0, 1, 2, 3, 4]
