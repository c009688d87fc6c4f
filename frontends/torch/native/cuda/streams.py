"""Running a plan on CUDA: lanes are torch streams, the caller's stream is lane 0.

One thread enqueues everything, in plan order; nothing waits for the device. Every other lane waits
for what came before the call on the caller's stream, and the caller's stream waits for every lane
at the end, also after a failure.

Memory: PyTorch frees a tensor in the order of the stream it was made on. A tensor that another lane
reads is told to the allocator (``record_stream``), so its bytes are not given away before that lane
is past them; results are told the caller's stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dynaflow_xla.errors import EngineError
from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.native.stretches.regions import Stretch
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.planning.instructions import Record, Wait


class Streams(Protocol):
    """What the runner needs of a device: streams by lane number, 0 is the caller's."""

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Makes a lane's stream the current one."""

    def record(self, lane: int) -> Any:
        """An event behind what the lane has been given so far."""

    def caller(self) -> int:
        """The handle of the stream that lane 0 is now."""

    def capturing(self) -> bool:
        """Whether that one is being captured."""

    def lasting(self) -> Any:
        """The same stream, if it is there for good; else None."""

    def wait(self, lane: int, event: Any) -> None:
        """What the lane is given from now on comes after the event."""

    def used_by(self, lane: int, tensor: torch.Tensor) -> None:
        """Tells the allocator that the lane reads the tensor."""


# One thread enqueues or captures at a time: PyTorch has 32 streams and deals them out anew, and what one
# thread enqueues on a stream that another captures would become part of that graph.
enqueuing = threading.RLock()
_spare: dict[Any, list[Any]] = {}
_spare_lock = threading.Lock()


def lent(user: object, key: Any, make: Callable[[], Any]) -> Any:
    """What ``user`` alone has as long as it lives; then it is spare, for the next that asks by this key.

    Streams are never destroyed: PyTorch's allocator records events on the streams that read a tensor when
    that is freed, which may be long after the plan is gone.
    """
    with _spare_lock:
        spare = _spare.setdefault(key, [])
        made = spare.pop() if spare else None
    if made is None:
        made = make()
    weakref.finalize(user, _given_back, spare, made)
    return made


_broken: list[Any] = []
"""What nobody may use again, and what must not be destroyed either: the allocator knows its streams."""


def _given_back(spare: list[Any], made: Any) -> None:
    (_broken if getattr(made, "broken", False) else spare).append(made)


def engine_streams(device: torch.device, lanes: int, gpu: Lanes | None, first: int = 1) -> Any:
    """Streams of the engine's, for the lanes from ``first`` on.

    Args:
        device: Where.
        lanes: Number of lanes.
        gpu: Priorities and multiprocessors of lanes, if they have some.
        first: 1 without one for lane 0, which is otherwise one like any other.
    """
    given = () if gpu is None else gpu.priorities, () if gpu is None else gpu.sms
    priorities, sms = ([*g[:lanes], *[0] * (lanes - len(g))] for g in given)
    before = [0] * (1 - first)  # the engine makes none for its own lane 0
    return _engine.CudaStreams(
        device=device.index or 0, lanes=lanes + 1 - first, priorities=before + priorities,
        sms=before + sms,
    )  # fmt: skip


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
            self._own = self._made(lanes, gpu)
        except RuntimeError as error:
            raise EngineError(f"cannot make {gpu or lanes} lanes on {device}: {error}") from error

    def _made(self, lanes: int, gpu: Lanes | None) -> list[Any]:
        if gpu is None:
            return [torch.cuda.Stream(self.device) for _ in range(lanes - 1)]
        torch.cuda.init()
        key = ("lanes", self.device, lanes, gpu)
        made = lent(self, key, lambda: engine_streams(self.device, lanes, gpu))
        return [torch.cuda.ExternalStream(s, self.device) for s in made.streams]

    def _stream(self, lane: int) -> Any:
        return torch.cuda.current_stream(self.device) if lane == 0 else self._own[lane - 1]

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Makes a lane's stream the current one. Never nested, so lane 0 is whatever is current outside."""
        return torch.cuda.stream(self._stream(lane))  # type: ignore[no-any-return]

    def record(self, lane: int) -> Any:
        """A CUDA event behind what the lane's stream holds so far."""
        return self._stream(lane).record_event()

    def caller(self) -> int:
        """The handle of the caller's stream."""
        return operators.stream_handle(self.device)

    def capturing(self) -> bool:
        """Whether a capture of the caller's is going on."""
        return torch.cuda.is_current_stream_capturing()

    def lasting(self) -> Any:
        """The caller's stream, if it is the default one or one of those that PyTorch deals out."""
        stream = torch.cuda.current_stream(self.device)
        return stream if stream.stream_id == 0 or stream.stream_id & 1 else None

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

    def __call__(self, inputs: Sequence[Any], streams: Streams | None = None) -> list[Any]:
        """Enqueues a call; flat inputs to flat outputs, in the order of the caller's stream.

        Args:
            inputs: Of the plan.
            streams: Others than the plan's usual ones.

        Raises:
            EngineError: a region failed; names it, and has the exception as its cause.
        """
        memory, streams = self.plain.memory, streams or self.streams
        env = memory.environment(list(inputs))
        # The lane in whose order a value's memory is freed.
        home = {value: 0 for value, x in enumerate(env) if x is not None}
        call = native._Call(env, torch.is_inference_mode_enabled(), False)
        try:
            with torch.no_grad(), enqueuing:
                for steps, outer in self._stages:
                    self._run_stage(steps, call, home, streams)
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

    def _run_stage(
        self, steps: list[_StreamStep], call: Any, home: dict[int, int], streams: Streams
    ) -> None:
        env = call.env
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
