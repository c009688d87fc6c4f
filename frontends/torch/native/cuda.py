"""Running a plan on CUDA: lanes are torch streams, the caller's stream is lane 0.

One thread enqueues everything, in plan order; nothing waits for the device. Every other lane waits
for what came before the call on the caller's stream, and the caller's stream waits for every lane
at the end, also after a failure.

Memory: PyTorch frees a tensor in the order of the stream it was made on. A tensor that another lane
reads is told to the allocator (``record_stream``), so its bytes are not given away before that lane
is past them; results are told the caller's stream.

A :class:`GraphedPlan` captures such a call as one CUDA graph, a branch a lane.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import EngineError, UnsupportedError
from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.native.stretches.regions import Stretch
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.planning.instructions import Record, Wait


class Streams(Protocol):
    """What the runner needs of a device: streams by lane number, 0 is the caller's."""

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Makes a lane's stream the current one."""

    def record(self, lane: int, event: Any = None) -> Any:
        """An event behind what the lane has been given so far; one that nobody needs any more, if given."""

    def caller(self) -> tuple[int, bool]:
        """Which stream lane 0 is now, and whether it is being captured."""

    def wait(self, lane: int, event: Any) -> None:
        """What the lane is given from now on comes after the event."""

    def used_by(self, lane: int, tensor: torch.Tensor) -> None:
        """Tells the allocator that the lane reads the tensor."""


# One thread enqueues or captures at a time: PyTorch has 32 streams and deals them out anew, and what one
# thread enqueues on a stream that another captures would become part of that graph.
_enqueuing = threading.RLock()
_spare: dict[Any, list[Any]] = {}
_spare_lock = threading.Lock()


def _own_streams(user: object, device: int, lanes: int, gpu: Lanes) -> Any:
    """Streams of the engine for ``user`` alone, as long as it lives; then they are spare.

    They are never destroyed: PyTorch's allocator records events on the streams that read a tensor when
    that is freed, which may be long after the plan is gone.
    """
    key = (device, lanes, gpu)
    with _spare_lock:
        spare = _spare.setdefault(key, [])
        made = spare.pop() if spare else None
    if made is None:
        made = _engine.CudaStreams(
            device=device, lanes=lanes, priorities=list(gpu.priorities[:lanes]),
            sms=list(gpu.sms[:lanes]),
        )  # fmt: skip
    weakref.finalize(user, spare.append, made)
    return made


class CudaStreams:
    """Lanes on one CUDA device, for one call at a time.

    Args:
        device: Such as ``torch.device("cuda", 0)``.
        lanes: Number of lanes with the caller's.
        gpu: Priorities and multiprocessors of lanes, if they have some.
    """

    def __init__(self, device: torch.device, lanes: int, gpu: Lanes | None = None) -> None:
        if not torch.cuda.is_available():
            raise EngineError(
                "this PyTorch finds no CUDA device; torch.cuda.is_available() is False"
            )
        self.device = device
        try:
            if gpu is None:
                self._own = [torch.cuda.Stream(device) for _ in range(lanes - 1)]
            else:
                torch.cuda.init()
                streams = _own_streams(self, device.index or 0, lanes, gpu).streams
                self._own = [torch.cuda.ExternalStream(s, device) for s in streams]
        except RuntimeError as error:
            raise EngineError(f"cannot make {gpu or lanes} lanes on {device}: {error}") from error

    def _stream(self, lane: int) -> Any:
        return torch.cuda.current_stream(self.device) if lane == 0 else self._own[lane - 1]

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Makes a lane's stream the current one. Never nested, so lane 0 is whatever is current outside."""
        return torch.cuda.stream(self._stream(lane))  # type: ignore[no-any-return]

    def record(self, lane: int, event: Any = None) -> Any:
        """A CUDA event behind what the lane's stream holds so far."""
        return self._stream(lane).record_event(event)

    def caller(self) -> tuple[int, bool]:
        """The caller's stream, and whether a capture of the caller's is going on."""
        handle = torch.cuda.current_stream(self.device).cuda_stream
        return handle, torch.cuda.is_current_stream_capturing()

    def wait(self, lane: int, event: Any) -> None:
        """The lane's stream goes on once the event is over."""
        self._stream(lane).wait_event(event)

    def used_by(self, lane: int, tensor: torch.Tensor) -> None:
        """Keeps the tensor's memory until the lane's stream is past its use."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream(lane))


@dataclass
class _StreamStep:
    lane: int
    stretch: Stretch | None = None
    event: Record | Wait | None = None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()


@dataclass
class StreamRunner:
    """A native plan on streams.

    Attributes:
        plain: The plan, as it would run on the CPU's lanes.
        streams: The lanes.
    """

    plain: native.Native
    streams: Streams
    _stages: list[tuple[list[_StreamStep], Stretch | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stage, outer in self.plain.stages:
            self._stages.append((_steps(stage), outer))

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Enqueues a call; flat inputs to flat outputs, in the order of the caller's stream.

        Raises:
            EngineError: a region failed; names it, and has the exception as its cause.
        """
        memory, streams = self.plain.memory, self.streams
        env = memory.environment(list(inputs))
        # The lane in whose order a value's memory is freed.
        home = {value: 0 for value, x in enumerate(env) if x is not None}
        call = native._Call(env, torch.is_inference_mode_enabled(), False)
        try:
            with torch.no_grad(), _enqueuing:
                for steps, outer in self._stages:
                    self._run_stage(steps, call, home)
                    if outer is not None:
                        self._run(outer, call)
        except Exception as error:
            cause = call.error[1] if call.error else error
            raise self.plain._explain(call, error) from cause
        memory.finish(env)
        for into, value in memory.written:
            streams.used_by(0, env[value])
            env[into].copy_(env[value])
        outputs = [out[1] if isinstance(out, tuple) else env[out] for out in memory.results]
        for out in outputs:
            if isinstance(out, torch.Tensor):
                streams.used_by(0, out)
        return outputs

    def _run_stage(self, steps: list[_StreamStep], call: Any, home: dict[int, int]) -> None:
        streams, env = self.streams, call.env
        lanes = sorted({step.lane for step in steps} - {0})
        fork = streams.record(0) if lanes else None
        for lane in lanes:
            streams.wait(lane, fork)
        events: dict[int, Any] = {}
        try:
            for step in steps:
                if isinstance(step.event, Record):
                    events[step.event.event] = streams.record(step.lane)
                elif isinstance(step.event, Wait):
                    streams.wait(step.lane, events[step.event.event])
                elif step.stretch is not None:
                    for value in step.reads:
                        if home[value] != step.lane and isinstance(env[value], torch.Tensor):
                            streams.used_by(step.lane, env[value])
                    if step.lane == 0:
                        self._run(step.stretch, call)
                    else:
                        with streams.on(step.lane):
                            self._run(step.stretch, call)
                    for value in step.makes:
                        home[value] = step.lane
        finally:
            for (
                lane
            ) in lanes:  # also after a failure: the caller frees memory in its stream's order
                streams.wait(0, streams.record(lane))

    @staticmethod
    def _run(stretch: Stretch, call: Any) -> None:
        try:
            stretch.run(call.env)
        except Exception as error:
            call.error = (stretch, error)
            raise


def _steps(stage: native.Stage) -> list[_StreamStep]:
    layout, _ = native._stretches(stage.instructions, True)
    steps = []
    for lane, item in layout:
        if isinstance(item, Record | Wait):
            steps.append(_StreamStep(lane, event=item))
        if not isinstance(item, int):
            continue
        stretch = stage.order[item]
        steps.append(_StreamStep(lane, stretch, reads=stretch.reads, makes=stretch.makes))
    return steps


class GraphCapture(Protocol):
    """Capture and replay of a device's work."""

    def capture(self, run: Any) -> tuple[Any, list[Any]]:
        """Captures ``run()``; what replays it, and its results."""


class CudaGraphs:
    """CUDA graphs of PyTorch, all in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Any) -> tuple[Any, list[Any]]:
        """Captures ``run()`` as one CUDA graph; returns the graph and its results."""
        graph = torch.cuda.CUDAGraph()
        with _enqueuing, torch.cuda.graph(graph, pool=self._pool):
            results = run()
        return graph.replay, results


class _Graphed:
    """A captured call.

    Args:
        replay: Enqueues it on the caller's stream.
        inputs: What it reads: the caller's own tensors and values, or buffers of the graph.
        moved: Numbers of the inputs that are buffers, to which each call copies.
        outputs: What it writes.

    Attributes:
        done: Behind the last replay and the copies of its results.
        stream: On which that was enqueued.
    """

    def __init__(
        self, replay: Any, inputs: list[Any], moved: list[int], outputs: list[Any]
    ) -> None:
        self.replay, self.inputs, self.moved, self.outputs = replay, inputs, moved, outputs
        self.done: Any = None
        self.stream = 0
        tensors = [n for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        self._there = [n for n in tensors if n not in moved]
        self._values = [(n, x) for n, x in enumerate(inputs) if not isinstance(x, torch.Tensor)]
        self._places = [_place(inputs[n]) for n in self._there]
        self._copied = [(n, _signature(inputs[n])) for n in moved]

    def strayed(self, inputs: Sequence[Any]) -> list[int]:
        """Numbers of the inputs that are read in place and lie elsewhere now."""
        return [n for n in self._there if _address(inputs[n]) != _address(self.inputs[n])]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether a replay computes a call of these: most calls are like the last one."""
        for n, place in zip(self._there, self._places, strict=True):
            x = inputs[n]
            if (x.data_ptr(), x.shape, x.stride(), x.dtype) != place:
                return False
        return all(_signature(inputs[n]) == known for n, known in self._copied) and all(
            inputs[n] == value for n, value in self._values
        )


class GraphedPlan:
    """A plan as CUDA graphs: one a signature, at most ``keep``, the one used longest ago goes first.

    The first call of a signature runs directly. The second shows which inputs stay where they are
    (parameters) and is captured: those are read in place from then on, the others are copied to
    buffers of the graph. If such an input moves after all, the graph is made anew and copies it, too.
    Results are copies: the next replay writes the graph's own, and waits for them on the device.

    Args:
        runner: The plan on streams.
        graphs: How to capture.
        keep: Graphs to keep.
    """

    def __init__(self, runner: StreamRunner, graphs: GraphCapture, keep: int = 8) -> None:
        if any(outer is not None for _, outer in runner._stages):
            raise UnsupportedError(
                f"{runner.plain.captured.graph.name!r} has operators with effects or on the host, which "
                "no CUDA graph can hold; it runs on streams"
            )
        self.runner, self.keep = runner, keep
        self._graphs = graphs
        self._made: OrderedDict[Any, _Graphed] = OrderedDict()
        self._seen: OrderedDict[Any, list[int]] = OrderedDict()
        self._movers: Recent[Any, set[int]] = Recent(4 * keep)
        self._lock = threading.Lock()
        self._last: _Graphed | None = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs on streams at first, then replays a CUDA graph of the inputs' shapes."""
        stream, capturing = self.runner.streams.caller()
        if capturing:  # of the caller's: lanes become branches of that graph
            return self.runner(inputs)
        with self._lock:
            made = self._last
            if made is None or not made.fits(inputs):
                made = self._last = self._graph_of(inputs)
                if made is None:
                    return self.runner(inputs)
            return self._replay(made, inputs, stream)

    def release(self) -> None:
        """Gives up all graphs and their memory; later calls make them anew."""
        with self._lock:
            self._last = None
            self._made.clear()
            self._seen.clear()

    def _graph_of(self, inputs: Sequence[Any]) -> _Graphed | None:
        """The graph of such inputs, made if it is time for it; None: the plan runs on streams."""
        key = tuple(_signature(x) for x in inputs)
        made = self._made.get(key)
        if made is not None:
            strayed = made.strayed(inputs)
            if not strayed:
                self._made.move_to_end(key)
                return made
            self._movers.setdefault(key, set()).update(strayed)
            del self._made[key]
            self._seen.pop(key, None)
        before = self._seen.get(key)
        self._seen[key] = [_address(x) for x in inputs]
        while len(self._seen) > 4 * self.keep:
            self._seen.popitem(last=False)
        if before is None:
            return None
        made = self._capture(inputs, before, self._movers.get(key, set()))
        if made is not None:
            self._made[key] = made
            while len(self._made) > self.keep:
                self._made.popitem(last=False)
        return made

    def _replay(self, made: _Graphed, inputs: Sequence[Any], stream: int) -> list[Any]:
        streams = self.runner.streams
        if made.done is not None and made.stream != stream:
            streams.wait(0, made.done)  # on one stream the order is there
        for number in made.moved:
            made.inputs[number].copy_(inputs[number])
        made.replay()
        results = [x.clone() if isinstance(x, torch.Tensor) else x for x in made.outputs]
        made.done, made.stream = streams.record(0, made.done), stream
        return results

    def _capture(
        self, inputs: Sequence[Any], before: Sequence[int], movers: set[int]
    ) -> _Graphed | None:
        graph = self.runner.plain.captured.graph
        written = {v for v, _ in self.runner.plain.captured.epilogue}
        kept, moved = [], []
        for number, (value, x, address) in enumerate(
            zip(graph.inputs, inputs, before, strict=True)
        ):
            if isinstance(x, torch.Tensor) and (number in movers or _address(x) != address):
                if value in written:
                    return None  # what the graph writes must be the caller's own
                moved.append(number)
                x = torch.empty_like(x).copy_(x)
            kept.append(x)
        replay, outputs = self._graphs.capture(lambda: self.runner(list(kept)))
        return _Graphed(replay, kept, moved, outputs)


def _signature(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return x


def _place(x: torch.Tensor) -> Any:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, torch.Tensor) else 0


def on_cuda(
    plain: native.Native, device: torch.device, *, graph: bool, lanes: Lanes | None = None
) -> Any:
    """A plan on the streams of a device, as CUDA graphs if asked for and possible.

    Raises:
        EngineError: the device cannot be used.
    """
    runner = StreamRunner(plain, CudaStreams(device, plain.plan.lanes, lanes))
    if not graph or any(outer is not None for _, outer in runner._stages):
        return runner
    return GraphedPlan(runner, CudaGraphs())
