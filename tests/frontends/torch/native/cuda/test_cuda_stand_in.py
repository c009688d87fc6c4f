"""The parts that talk to torch.cuda, with a torch.cuda that notes what it is told."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from round_robin import RoundRobin

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.errors import EngineError  # noqa: E402
from dynaflow_xla.frontends.torch._compat import operators  # noqa: E402
from dynaflow_xla.frontends.torch.native.compiling import compilers  # noqa: E402
from dynaflow_xla.frontends.torch.native.cuda import (  # noqa: E402
    capturing,
    graphs,
    streams as lanes_of,
)

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream as a vector clock: how far into every stream's work it is known to come after."""

    def __init__(self, world: World, address: int) -> None:
        self.stream_id = 0 if address == 1 else address
        self.world, self.address = world, address
        self.clock: dict[int, int] = {address: 0}

    def record_event(self) -> dict[int, int]:
        self.clock[self.address] += 1
        self.world.told.append(("record", self.address))
        return dict(self.clock)

    def wait_event(self, event: dict[int, int]) -> None:
        self.world.told.append(("wait", self.address))
        for address, time in event.items():
            self.clock[address] = max(self.clock.get(address, 0), time)


class World:
    """Stands for torch.cuda on CPU tensors."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.caller = Stream(self, 1)
        self.current = self.caller
        self.made: list[Stream] = []
        self.capturing = False
        self.replayed: list[Any] = []
        self.pools = self.engines = 0
        self.pools_used: list[int] = []
        self.primed: list[Any] = []
        self.blas = False
        self.ran: list[int] = []

    def stream(self, device: Any, **_: Any) -> Stream:
        self.made.append(Stream(self, 100 + len(self.made)))
        return self.made[-1]

    def start_blas(self) -> int:
        assert not self.capturing and self.current is self.caller
        self.blas = True
        return 1

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def of_engine(self, device: int, lanes: int, priorities: Any, sms: Any) -> Any:
        assert len(priorities) == len(sms) == lanes
        self.engines += 1
        return SimpleNamespace(streams=[500 + 10 * self.engines + n for n in range(lanes - 1)])

    def external(self, address: int, device: Any) -> Stream:
        self.made.append(Stream(self, address))
        return self.made[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(
        self, graph: Any, pool: Any, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.pools_used.append(pool)
        self.capturing, before = True, self.current
        self.current = stream
        clocks = [s.clock[s.address] for s in self.made]
        try:
            yield
            now = zip(self.made, clocks, strict=True)
            lanes = [s for s, then in now if s.clock[s.address] != then and s is not stream]
            assert all(s.address >= 500 for s in lanes), "captured on a stream that others use"
            joined = all(self.current.clock.get(s.address) == s.clock[s.address] for s in lanes)
            assert joined, "a lane's branch was not joined: CUDA refuses such a capture"
        finally:
            self.capturing, self.current = False, before


class Graph:
    world: World

    def replay(self) -> None:
        self.world.replayed.append(self)

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert self.world.blas, "cuBLAS would be started in the capture, which is refused"
        assert self.world.told[-1] == ("synchronize", DEVICE), "replays read what captures set"
        assert not self.world.capturing and self.world.current.address >= 500
        self.world.capturing, self.lanes = True, self.world.current
        self.world.primed.append(self)
        self.pool = pool

    def capture_end(self) -> None:
        assert self.world.current is self.lanes
        self.world.capturing = False


@pytest.fixture
def args() -> list[Any]:
    return list(torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def plain(args: Any) -> Any:
    """A plan, captured while torch.cuda is what it is."""
    fast = dfx.schedule(model, strategy=RoundRobin(), lanes=2, backend="torch")
    with torch.no_grad():
        fast(*args)
        return fast._dfx_core.planned(tuple(args), {}).native


@pytest.fixture
def world(plain: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    Graph.world = made
    for name, stand_in in {
        "is_available": lambda: True,
        "init": lambda: None,
        "Stream": made.stream,
        "ExternalStream": made.external,
        "current_stream": lambda device: made.current,
        "stream": made.on,
        "is_current_stream_capturing": lambda: made.capturing,
        "graph_pool_handle": made.pool,
        "current_blas_handle": made.start_blas,
        "device": contextlib.nullcontext,
        "CUDAGraph": Graph,
        "graph": made.graph,
        "synchronize": lambda device: made.told.append(("synchronize", device)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(operators, "_handle", lambda index: made.current.address)
    monkeypatch.setattr(lanes_of, "_spare", {})
    monkeypatch.setattr(lanes_of, "_broken", [])
    monkeypatch.setattr(capturing, "_matrix", lambda device: torch.ones(2, 2))
    monkeypatch.setattr(lanes_of._engine, "CudaStreams", made.of_engine)
    return made


def model(x: Any, w: Any) -> Any:
    return torch.tanh(torch.sin(x) @ w) + torch.cos(x) * 2, x @ w


def test_a_plan_is_one_graph_with_a_branch_a_lane(world: World, plain: Any, args: Any) -> None:
    plan = graphs.on_cuda(plain, DEVICE, graph=True)
    assert isinstance(plan, graphs.GraphedPlan) and len(world.made) == 1
    with torch.no_grad():
        first = plan(list(args))
        assert not world.replayed and ("wait", 100) in world.told
        assert world.caller.clock[100] == world.made[0].clock[100]  # joined
        for want, got in zip(model(*args), first, strict=True):
            torch.testing.assert_close(want, got)
        plan(list(args))  # captured, then replayed
        told = len(world.told)
        for _ in range(3):
            plan(list(args))
    assert len(world.replayed) == 4 and len(set(map(id, world.replayed))) == 1
    assert all(address == 1 for _, address in world.told[told:]), "a replay touches lanes"
    assert not world.capturing
    # Captured on streams that nothing else uses, whose workspaces outlive the plan.
    used = [a for what, a in world.told[:told] if what != "synchronize" and a >= 500]
    assert used and len(world.primed) == 1 and world.primed[0].pool not in world.pools_used
    plan.release()
    world.replayed.clear()
    gc.collect()
    for _ in range(3):
        plan(list(args))
    assert len(set(world.pools_used)) == 2, "a pool goes with the last graph in it"
    assert len(world.primed) == 2 and world.primed[0].pool == world.primed[1].pool
    other = graphs.on_cuda(plain, DEVICE, graph=True)
    for _ in range(2):
        other(list(args))
    assert world.primed[2].pool != world.primed[0].pool, "plans that live share workspaces"
    del plan
    gc.collect()
    third = graphs.on_cuda(plain, DEVICE, graph=True)
    for _ in range(2):
        third(list(args))
    assert world.primed[3].pool == world.primed[0].pool and world.engines == 2


def test_what_is_given_back_is_for_the_next_plan(world: World, plain: Any, args: Any) -> None:
    """Streams and workspaces, but only behind what the one before may still run there."""
    first, second = (graphs.on_cuda(plain, DEVICE, graph=True) for _ in range(2))
    with torch.no_grad():
        for _ in range(3):
            first(list(args))
        waited = world.told.count(("synchronize", DEVICE))
        first.release()
        assert world.told.count(("synchronize", DEVICE)) == waited + 1
        assert world.told[-1] == ("synchronize", DEVICE), "memory goes while graphs run"
        assert world.engines == 1
        before, other = world.caller, Stream(world, 3)
        world.caller = world.current = other
        second(list(args))
        before.clock[1] += 1  # what the first plan still has to do
        last = before.clock[1]
        second(list(args))
        assert world.engines == 1 and world.primed[0].pool == world.primed[1].pool
        assert other.clock.get(1, 0) >= last, "two replays write one workspace at a time"
        told = len(world.told)
        second(list(args))
        assert len(world.told) == told, "it waits once"
        for want, got in zip(model(*args), second(list(args)), strict=True):
            torch.testing.assert_close(want, got)


def test_a_plan_that_is_gone_keeps_nothing(world: World, plain: Any, args: Any) -> None:
    """Graphs, their buffers and results, and the caller's tensors."""
    plan = graphs.on_cuda(plain, DEVICE, graph=True)
    w = args[1].clone()
    with torch.no_grad():
        for _ in range(3):
            plan([args[0].clone(), w])
    made = plan._last
    assert made.moved
    held = [weakref.ref(x) for x in (made, made.replay.__self__, *made.results.outputs, w)]
    held += [weakref.ref(made.inputs[n]) for n in made.moved]
    world.replayed.clear()
    spare = [x for each in lanes_of._spare.values() for x in each]
    assert not spare
    del made, plan, w
    gc.collect()
    assert not [x for x in held if x() is not None]
    (place,) = [x for each in lanes_of._spare.values() for x in each]
    assert place.streams


def test_a_failure_in_a_capture_leaves_it_joined(
    world: World, plain: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA ends a capture with unjoined branches by an error that would hide the first one."""
    plan = graphs.on_cuda(plain, DEVICE, graph=True)
    with torch.no_grad():
        plan(list(args))
        steps = [s for stage, _ in plan.runner._stages for s in stage if s.stretch is not None]
        late = next(s for s in steps if s.lane == 1)
        scope: dict[str, Any] = {}
        exec(
            "def broken(env): raise RuntimeError('out of memory')", scope
        )  # one line, like a stretch
        good, late.stretch = late.stretch, replace(late.stretch, run=scope["broken"])
        ended: list[Any] = []
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda *a: ended.append(a), raising=False
        )
        with (
            pytest.warns(dfx.FallbackWarning, match="cannot be captured.*out of memory"),
            pytest.raises(EngineError, match="out of memory"),
        ):
            plan(list(args))
        assert not world.capturing
        assert len(world.primed) == 2, "generators believe to be captured until some capture ends"
        assert world.current is world.caller and ended == [(0, world.pools_used[0])]
        late.stretch = good
        for want, got in zip(model(*args), plan.runner(list(args)), strict=True):
            torch.testing.assert_close(want, got)
    del plan
    gc.collect()
    broken = [key for key, spare in lanes_of._spare.items() if key[2] == 2 and spare]
    assert not broken, "streams of a capture that failed are lent again"
    assert len(lanes_of._broken) == 1, "they are destroyed, and the allocator knows them"


def test_confined_lanes_are_streams_of_the_engine(
    world: World, plain: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(lanes_of, "_spare", {})

    class Streams:
        streams = [777]

        def __init__(self, **options: Any) -> None:
            asked.append(options)

    monkeypatch.setattr(lanes_of._engine, "CudaStreams", Streams)
    lanes = dfx.Lanes(2, priorities=(0, -1), sms=(0, 32))
    plan = graphs.on_cuda(plain, DEVICE, graph=False, lanes=lanes)
    assert asked == [{"device": 0, "lanes": 2, "priorities": [0, -1], "sms": [0, 32]}]
    with torch.no_grad():
        for want, got in zip(model(*args), plan(list(args)), strict=True):
            torch.testing.assert_close(want, got)
    assert ("record", 777) in world.told
    other = graphs.on_cuda(plain, DEVICE, graph=False, lanes=lanes)
    assert len(asked) == 2, "two plans that live share streams"
    del plan, other
    gc.collect()
    for _ in range(3):  # nothing is made, nothing destroyed
        graphs.on_cuda(plain, DEVICE, graph=False, lanes=lanes)
        gc.collect()
    assert len(asked) == 2
    monkeypatch.setattr(lanes_of, "_spare", {})

    def refuse(**options: Any) -> None:
        raise RuntimeError("the CUDA driver has no green contexts")

    monkeypatch.setattr(lanes_of._engine, "CudaStreams", refuse)
    with pytest.raises(EngineError, match="cannot make Lanes.*no green contexts"):
        graphs.on_cuda(plain, DEVICE, graph=False, lanes=lanes)


def test_lanes_that_cannot_be_made_say_so(
    world: World, plain: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    with pytest.raises(
        EngineError, match="cannot make 2 lanes on cuda:0: CUDA error: out of memory"
    ):
        graphs.on_cuda(plain, DEVICE, graph=True)


def test_a_cpu_has_no_such_lanes(args: Any) -> None:
    fast = dfx.schedule(
        model, strategy=RoundRobin(), lanes=dfx.Lanes(2, sms=(0, 8)), backend="torch"
    )
    with (
        torch.no_grad(),
        pytest.raises(dfx.UnsupportedError, match="which lanes of a CPU have not"),
    ):
        fast(*args)


def test_compiled_regions_of_a_gpu_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One structure on two devices is two compiled regions; AOTInductor's are for the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cpu = torch.device("cpu")
    assert compilers._machine(cpu) != compilers._machine(DEVICE)
    assert compilers._machine(DEVICE) != compilers._machine(torch.device("cuda", 1))
    captured = SimpleNamespace(device=DEVICE, symbolic=False)
    with pytest.raises(dfx.UnsupportedError, match="compiles regions for the CPU, .* on cuda:0"):
        compilers.Compiler(captured, None, False, "aoti", None)


def test_a_plan_on_streams_is_predicted_without_copies(plain: Any) -> None:
    """134 MB of results were predicted to take 50 ms: copied by a core of the CPU."""
    from dynaflow_xla.timelines.simulator import simulate, where_it_runs

    regions = tuple(replace(r, cost_ns=1_000.0) for r in plain.pg.regions)
    pg = replace(plain.pg, regions=regions)
    for value in (v for v in pg.graph.values):
        object.__setattr__(value, "shape", (1 << 13, 1 << 13))
    made = simulate(plain.plan, pg, **where_it_runs(SimpleNamespace(on_streams=True)))
    assert made.total_ns < 20_000


@pytest.mark.parametrize(("given", "threads", "streams"), [(None, 2, 8), (1, 1, 1), (2, 2, 2)])
def test_streams_are_as_many_as_asked_for_however_many_cores_the_host_has(
    given: int | None, threads: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    core = dfx.schedule(torch.nn.Linear(2, 2), lanes=given)._dfx_core
    assert core.options.lanes_on(gpu=False) == threads
    assert core.options.lanes_on(gpu=True) == streams
    for on_gpu, lanes in ((False, threads), (True, streams)):
        made = core.candidates(batched=True, on_gpu=on_gpu)
        assert any(f"lanes={lanes}" in repr(c) for c in made.values())
        assert (lanes > 1) == any(isinstance(c, dfx.NanoBatch) for c in made.values())
