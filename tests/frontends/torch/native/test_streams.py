"""Plans on streams, with streams and graphs that only keep books: order, allocator, replay."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from round_robin import RoundRobin

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import EngineError  # noqa: E402
from dynaflow_xla.frontends.torch.native.cuda import (  # noqa: E402
    capturing,
    graphs as cuda_graphs,
    streams,
)
from dynaflow_xla.frontends.torch.native.cuda.results import Results  # noqa: E402

LANES = 3


class Caller:
    """A stream of the caller's; ids of those that last are odd."""

    def __init__(self, number: int) -> None:
        self.stream_id = number
        self.records = 0

    def record_event(self) -> list[int]:
        self.records += 1
        return [0] * LANES


class Books:
    """Streams as vector clocks; a read that nothing orders behind its write is noted."""

    def __init__(self, ignore_waits: bool = False) -> None:
        self.clocks = [[0] * LANES for _ in range(LANES)]
        self.current = 0
        self.ignore_waits = ignore_waits
        self.stream, self.captured = Caller(7), False
        self.waits = 0
        self.told: list[tuple[int, int]] = []
        self.unordered: list[str] = []
        self.made: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def on(self, lane: int) -> Iterator[None]:
        before, self.current = self.current, lane
        try:
            yield
        finally:
            self.current = before

    def record(self, lane: int) -> list[int]:
        self.clocks[lane][lane] += 1
        return list(self.clocks[lane])

    def caller(self) -> int:
        return self.stream.stream_id

    def capturing(self) -> bool:
        return self.captured

    def lasting(self) -> Any:
        return self.stream if self.stream.stream_id & 1 else None

    def wait(self, lane: int, event: list[int]) -> None:
        self.waits += lane == 0
        if not self.ignore_waits:
            self.clocks[lane] = [max(a, b) for a, b in zip(self.clocks[lane], event, strict=True)]

    def used_by(self, lane: int, tensor: torch.Tensor) -> None:
        self.told.append((lane, tensor.untyped_storage().data_ptr()))

    def watch(self, runner: streams.StreamRunner) -> None:
        """Makes every stretch check what it reads and note what it makes."""
        for steps, _ in runner._stages:
            for step in steps:
                if step.stretch is not None:
                    step.stretch = replace(step.stretch, run=self._watched(step, step.stretch.run))

    def _watched(self, step: Any, run: Any) -> Any:
        def watched(env: Any) -> None:
            assert self.current == step.lane
            clock = self.clocks[step.lane]
            for value in step.reads:
                lane, time = self.made.get(value, (0, 0))
                if lane != step.lane and clock[lane] < time:
                    self.unordered.append(f"lane {step.lane} reads value {value} of lane {lane}")
                if lane != step.lane:
                    assert (step.lane, env[value].untyped_storage().data_ptr()) in self.told
            run(env)
            for value in step.makes:
                self.made[value] = (step.lane, clock[step.lane] + 1)

        return watched


def _native(fn: Any, *args: Any) -> Any:
    fast = dfx.schedule(fn, strategy=RoundRobin(), lanes=2, backend="torch")
    with torch.no_grad():
        fast(*args)
        entry = fast._dfx_core.planned(args, {})
    return entry.native


def model(x: Any, w: Any) -> Any:
    a = torch.sin(x) @ w
    b = torch.cos(x) * 2
    return torch.tanh(a) + b @ w, a - b


@pytest.fixture
def args() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _runner(args: Any, books: Books) -> streams.StreamRunner:
    runner = streams.StreamRunner(_native(model, *args), books)
    books.watch(runner)
    return runner


def test_reads_are_ordered_and_the_allocator_is_told(args: Any) -> None:
    books = Books()
    runner = _runner(args, books)
    outs = runner(list(args))
    for want, got in zip(model(*args), outs, strict=True):
        assert torch.equal(want, got)
    assert not books.unordered
    assert {lane for steps, _ in runner._stages for lane in (s.lane for s in steps)} == {0, 1}
    for out in outs:  # freed by the caller, in the order of its stream
        assert (0, out.untyped_storage().data_ptr()) in books.told
    # The caller's stream is behind everything that any lane was given.
    assert books.clocks[0][1] == books.clocks[1][1]


def test_the_check_notices_missing_waits(args: Any) -> None:
    books = Books(ignore_waits=True)
    _runner(args, books)(list(args))
    assert books.unordered


def test_a_failing_region_is_named_and_the_lanes_are_joined(args: Any) -> None:
    books = Books()
    runner = _runner(args, books)
    step = [s for steps, _ in runner._stages for s in steps if s.stretch is not None and s.lane][0]

    scope: dict[str, Any] = {}
    exec(
        "def broken(env): raise RuntimeError('a kernel failed')", scope
    )  # one line, like a stretch
    good, step.stretch = step.stretch, replace(step.stretch, run=scope["broken"])
    with pytest.raises(EngineError, match="region .* failed: RuntimeError: a kernel failed"):
        runner(list(args))
    assert books.clocks[0][1] == books.clocks[1][1]
    step.stretch = good
    assert torch.equal(runner(list(args))[0], model(*args)[0])


class ReplayedOnCpu:
    def __init__(self) -> None:
        self.captures = self.released = 0
        self.streams = None
        self.turn = capturing.Turn()

    def release(self) -> None:
        self.released += 1

    def capture(self, run: Any) -> Any:
        self.captures += 1
        outputs = run(self.streams)

        def replay() -> None:
            for kept, new in zip(outputs, run(self.streams), strict=True):
                kept.copy_(new)

        for out in outputs:
            out.fill_(float("nan"))  # a capture computes nothing
        return replay, outputs


def test_graphs_replay_with_new_inputs_and_parameters_in_place(args: Any) -> None:
    graphs, (_, w) = ReplayedOnCpu(), args
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
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
    runner = _runner(args, Books())
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
    plan = cuda_graphs.GraphedPlan(_runner(args, books), graphs)
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
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
    for given in ([x.clone() for x in args], args):
        for _ in range(4):
            assert torch.equal(plan(list(given))[0], model(*given)[0])
        assert plan._last.moved == []
    assert graphs.captures == 2


def test_decisions_teach_nothing_of_which_inputs_move(args: Any) -> None:
    """Each is measured on copies of its own; what two of them showed made the user's own tensors copied."""
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), ReplayedOnCpu())
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
    plan = cuda_graphs.GraphedPlan(_runner(args, books), graphs)
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
    assert waits(args) == inside + 1
    assert waits(other) == inside
    assert first.records == lasts and second.records == 0


def test_what_cannot_be_captured_runs_on_streams_and_says_so(args: Any) -> None:
    class Fails(ReplayedOnCpu):
        def capture(self, run: Any) -> Any:
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Fails()
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
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
    runner = _runner(args, Books())
    runner.plain.captured.device = torch.device("cuda", 0)  # so that these are the CPU's
    plan = cuda_graphs.GraphedPlan(runner, graphs)
    plan(list(args))
    with pytest.warns(dfx.FallbackWarning, match="tensor of the CPU"):
        plan(list(args))
    assert not graphs.captures


def test_memory_that_was_given_back_is_taken_again(args: Any) -> None:
    graphs = ReplayedOnCpu()
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
    for _ in range(3):
        plan(list(args))
    plan.release()
    assert not plan._made and plan._last is None and graphs.released == 1
    for _ in range(3):
        assert torch.equal(plan(list(args))[0], model(*args)[0])
    assert graphs.captures == 2


class NoRoom(ReplayedOnCpu):
    """Captures that lack memory, or something else, as long as they fail."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error, self.fails = error, False

    def capture(self, run: Any) -> Any:
        if self.fails:
            raise self.error("there is none")
        return super().capture(run)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_capture_that_failed_keeps_no_graphs(args: Any, error: type[Exception]) -> None:
    """Nothing replays the earlier ones any more; memory alone may be there another time."""
    graphs, (x, w) = NoRoom(error), args
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
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


@pytest.mark.parametrize("change", ["other place", "turned", "part", "type"])
def test_an_input_that_lies_differently_is_no_replay(args: Any, change: str) -> None:
    """The same tensor object may get other memory, sizes or strides; its memory may be seen differently."""
    graphs = ReplayedOnCpu()
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
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
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs, keep=2)
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
    plan = cuda_graphs.GraphedPlan(_runner(args, Books()), graphs)
    wide = [torch.randn(8, 16) for _ in range(4)]
    for each in wide:
        assert torch.equal(plan([each[:, ::2], w])[0], model(each[:, ::2], w)[0])
    assert graphs.captures == 1 and plan._last is not None
    assert plan._last.moved == [0] and plan._last.fits([wide[0][:, ::2], w])


def test_a_number_drawn_on_the_cpu_is_not_captured(args: Any) -> None:
    """A kernel of the graph would keep the first one."""
    native = _native(lambda x: x * torch.rand(()), args[0])
    elsewhere = replace(native.captured, device=torch.device("cuda", 0))
    assert cuda_graphs._draws_on_the_host(elsewhere)
    assert not cuda_graphs._draws_on_the_host(native.captured)
    calm = _native(model, *args).captured
    assert not cuda_graphs._draws_on_the_host(replace(calm, device=torch.device("cuda", 0)))


def test_autograd_knows_what_a_replay_wrote() -> None:
    def step(cache: Any, x: Any) -> Any:
        cache.add_(x)
        return cache * 2

    cache, x = torch.zeros(8), torch.ones(8)
    graphs = ReplayedOnCpu()
    runner = streams.StreamRunner(_native(step, cache.clone(), x), Books())
    plan = cuda_graphs.GraphedPlan(runner, graphs)
    plan._written = {runner.plain.captured.graph.inputs[0]}  # as where the graph itself writes it
    versions = []
    for _ in range(5):
        plan([cache, x])
        versions.append(cache._version)
    assert graphs.captures == 1 and versions == [0, 1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_the_reason_is_told() -> None:
    with pytest.raises(EngineError, match="no CUDA device"):
        streams.CudaStreams(torch.device("cuda", 0), 2)
