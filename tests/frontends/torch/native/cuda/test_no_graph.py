"""Plans and calls that no graph holds, and graphs for which there is no memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stream_books import (  # noqa: E402
    Books,
    Caller,
    NoRoom,
    ReplayedOnCpu,
    model,
    native_of,
    runner_of,
)

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.torch.native.cuda import (  # noqa: E402
    graphs as cuda_graphs,
    holdable,
    streams,
)

GPU = torch.device("cuda", 0)


def test_what_cannot_be_captured_runs_on_streams_and_says_so(args: Any) -> None:
    class Fails(ReplayedOnCpu):
        def capture(self, run: Any) -> Any:
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Fails()
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    plan(list(args))
    with pytest.warns(dfx.FallbackWarning, match="cannot be captured.*not permitted.*on streams"):
        plan(list(args))
    for _ in range(3):
        assert torch.equal(plan(list(args))[0], model(*args)[0])
    assert graphs.captures == 1
    assert "not permitted" in plan.told()[0]


def test_a_number_of_the_cpu_is_not_captured(args: Any) -> None:
    """Its value would be a part of the kernel, whatever it is at later calls."""
    graphs = ReplayedOnCpu()
    runner = runner_of(args, Books())
    runner.plain.captured.device = torch.device("cuda", 0)  # so that these are the CPU's
    plan = cuda_graphs.GraphedPlan(runner, graphs)
    plan(list(args))
    with pytest.warns(dfx.FallbackWarning, match="tensor of the CPU"):
        plan(list(args))
    assert not graphs.captures


def test_memory_that_was_given_back_is_taken_again(args: Any) -> None:
    graphs = ReplayedOnCpu()
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    for _ in range(3):
        plan(list(args))
    plan.release()
    assert not plan._made and plan._last is None and graphs.released == 1
    for _ in range(3):
        assert torch.equal(plan(list(args))[0], model(*args)[0])
    assert graphs.captures == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_capture_that_failed_keeps_no_graphs(args: Any, error: type[Exception]) -> None:
    """Nothing replays the earlier ones any more; memory alone may be there another time."""
    graphs, (x, w) = NoRoom(error), args
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    for _ in range(3):
        plan([x, w])
    graph = weakref.ref(plan._last)
    graphs.fails = True
    plan([x[:4], w])
    with pytest.warns(dfx.FallbackWarning, match="there is none"):
        plan([x[:4], w])
    gc.collect()
    assert graph() is None and not plan._made and graphs.released == 1
    plan.release()
    graphs.fails = False
    for _ in range(3):
        assert torch.equal(plan([x, w])[0], model(x, w)[0])
    assert graphs.captures == (2 if error is torch.OutOfMemoryError else 1)


def test_a_number_drawn_on_the_cpu_is_not_captured(args: Any) -> None:
    """A kernel of the graph would keep the first one."""
    captured = native_of(lambda x: x * torch.rand(()), args[0]).captured
    assert "random number" in holdable.why_not(replace(captured, device=GPU))
    assert not holdable.why_not(captured)
    assert not holdable.why_not(replace(native_of(model, *args).captured, device=GPU))


def test_a_copy_to_the_cpu_is_not_captured(args: Any) -> None:
    """One that nobody waits for can be captured; a call would have the number of the one before it."""
    captured = native_of(lambda x: (x.sum() * 2, x + 1), args[0]).captured
    total = next(op for op in captured.graph.ops if op.kind == "mul")

    class Made(dict[int, Any]):
        """As those of nano-batches, which are made when asked for."""

        def __missing__(self, value: int) -> Any:
            with torch._subclasses.FakeTensorMode():
                return torch.empty((), device=GPU)

    examples = Made()
    there = replace(captured, device=GPU, examples=examples)
    assert not holdable.why_not(there)
    examples[total.outputs[0]] = torch.empty(())
    assert "copies a number to the CPU" in holdable.why_not(there)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="an older PyTorch")
def test_what_its_author_calls_unsafe_is_not_captured(args: Any) -> None:
    with torch.library._scoped_library("dfx_test_unsafe", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        native = native_of(lambda x: torch.ops.dfx_test_unsafe.twice(x) + torch.cos(x), args[0])
        graphs = ReplayedOnCpu()
        with pytest.warns(dfx.FallbackWarning, match="twice.* is marked as unsafe in CUDA graphs"):
            plan = cuda_graphs.GraphedPlan(streams.StreamRunner(native, Books()), graphs)
        for _ in range(3):
            want = args[0] * 2 + torch.cos(args[0])
            assert torch.equal(plan([args[0]])[0], want)
        assert not graphs.captures


def test_python_code_of_the_users_is_not_captured(args: Any) -> None:
    """A replay runs kernels alone: experts that the first call chose would be those of every call."""

    def chosen(x: Any, which: Any) -> Any:
        hit = (which == 0).nonzero()[:, 0]
        return x if hit.numel() == 0 else x.index_add(0, hit, torch.tanh(x[hit]))

    def routed(x: Any) -> Any:
        return torch.sin(chosen(torch.cos(x), x.argmax(-1) % 2))

    fast = dfx.schedule(routed, dfx.NanoBatch(2), lanes=2, in_axes=0, backend="torch")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", dfx.FallbackWarning)
        for _ in range(2):
            assert torch.allclose(fast(args[0]), routed(args[0]))
        native = fast._dfx_core.planned(args[:1], {}).native
    assert any(op.kind == "dynaflow_xla.opaque" for op in native.captured.graph.ops)
    with pytest.warns(dfx.FallbackWarning, match="Python code, which a replay would leave out"):
        cuda_graphs.GraphedPlan(streams.StreamRunner(native, Books()), ReplayedOnCpu())


@pytest.mark.parametrize("offset", [None, 5])
def test_what_is_read_by_strides_is_read_in_place(args: Any, offset: int | None) -> None:
    """A copy of an argument lacks the memory beside it, and lies elsewhere in its own."""

    def windows(x: Any) -> Any:
        rows = x.view(2, 4) if x.is_contiguous() else x
        return torch.sin(rows.as_strided((3, 3), (1, 1), offset)) + 1, torch.cos(x)

    for given in (lambda: torch.randn(16)[4:12], lambda: torch.randn(16)[::2]):
        native = native_of(windows, given())
        assert holdable.read_by_strides(native.captured) == {0}
        graphs, kept = ReplayedOnCpu(), [given() for _ in range(4)]
        plan = cuda_graphs.GraphedPlan(streams.StreamRunner(native, Books()), graphs)
        with pytest.warns(dfx.FallbackWarning, match="by strides"):
            for x in kept:
                for want, got in zip(windows(x), plan([x]), strict=True):
                    assert torch.equal(want, got)
        assert not graphs.captures
        there = cuda_graphs.GraphedPlan(streams.StreamRunner(native, Books()), graphs)
        for _ in range(4):  # an argument that stays where it is
            assert torch.equal(there([x])[0], windows(x)[0])
        assert graphs.captures == 1
    native = native_of(lambda x: torch.sin(x).as_strided((3, 3), (1, 1)) + x[0], args[0][0])
    assert not holdable.read_by_strides(native.captured)


def test_no_room_for_an_arguments_copy_is_no_error(
    args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original needs no such copy, nor does the plan on streams."""
    graphs, (x, w) = ReplayedOnCpu(), args
    plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
    plan([x, w])
    other = x.clone()

    def refuse(like: Any, **_: Any) -> Any:
        raise torch.OutOfMemoryError("there is none")

    with monkeypatch.context() as scarce:
        scarce.setattr(torch, "empty_like", refuse)
        with pytest.warns(dfx.FallbackWarning, match="there is none"):
            assert torch.equal(plan([other, w])[0], model(other, w)[0])
    plan.release()
    for _ in range(3):
        assert torch.equal(plan([x, w])[0], model(x, w)[0])
    assert graphs.captures == 1


def test_no_room_beside_graphs_is_no_error(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep memory that the original has: for copies of results, and for calls of another size."""
    (x, w), error = args, torch.OutOfMemoryError("there is none")
    for what in ("results", "another size"):
        graphs = ReplayedOnCpu()
        plan = cuda_graphs.GraphedPlan(runner_of(args, Books()), graphs)
        for _ in range(3):
            plan([x, w])
        own = plan.runner

        def scarce(*given: Any, plan: Any = plan, own: Any = own) -> Any:
            if plan._made:
                raise error
            return own(*given)

        if what == "results":
            monkeypatch.setattr(plan._last.results, "copies", scarce)
            with pytest.warns(dfx.FallbackWarning, match="no memory for copies of its results"):
                assert torch.equal(plan([x, w])[0], model(x, w)[0])
        else:
            monkeypatch.setattr(plan, "runner", scarce)
            scarce.streams = own.streams  # type: ignore[attr-defined]
            assert torch.equal(plan([x[:4], w])[0], model(x[:4], w)[0])
        assert graphs.released == 1 and not plan._made


@pytest.mark.parametrize("stream", [7, 8], ids=["lasting", "users"])
def test_a_replay_without_room_ends_its_turn(
    args: Any, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next plan has the turn, and waits for what that replay enqueued."""
    graphs, books = ReplayedOnCpu(), Books()
    books.stream = Caller(stream)

    def scarce(_: Any) -> Any:
        raise torch.OutOfMemoryError("there is none")

    plan = cuda_graphs.GraphedPlan(runner_of(args, books), graphs)
    plan(list(args))
    with monkeypatch.context() as first, pytest.warns(dfx.FallbackWarning, match="no memory"):
        first.setattr(cuda_graphs.Results, "copies", scarce)
        assert torch.equal(plan(list(args))[0], model(*args)[0])
    following = cuda_graphs.GraphedPlan(runner_of(args, books), graphs)
    for _ in range(3):
        assert torch.equal(following(list(args))[0], model(*args)[0])
    assert graphs.captures == 2


def test_a_call_that_draws_is_not_made_again(args: Any) -> None:
    captured = native_of(lambda x: torch.nn.functional.dropout(x) + torch.cos(x), args[0]).captured
    assert not holdable.repeatable(captured)
    assert holdable.repeatable(native_of(model, *args).captured)


def test_other_tensors_to_write_into_are_told_of() -> None:
    """They must be the caller's own, so a graph that copies its inputs does not serve."""

    def step(cache: Any, x: Any) -> Any:
        return cache * 2 + x

    cache, x = torch.zeros(8), torch.ones(8)
    graphs = ReplayedOnCpu()
    runner = streams.StreamRunner(native_of(step, cache, x), Books())
    plan = cuda_graphs.GraphedPlan(runner, graphs)
    plan._written = {runner.plain.captured.graph.inputs[0]}
    kept = [cache + n for n in range(4)]
    assert "write" not in " ".join(plan.told())
    for cache in kept:
        assert torch.equal(plan([cache, x])[0], step(cache, x))
    assert not graphs.captures and "write into other tensors" in plan.told()[1]
