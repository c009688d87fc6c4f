"""Calls of a plan as CUDA graphs, a branch a lane: one launch instead of one an operator."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.native.cuda import devices, holdable
from dynaflow_xla.frontends.torch.native.cuda.capturing import CudaGraphs, GraphCapture, Turn
from dynaflow_xla.frontends.torch.native.cuda.results import Results
from dynaflow_xla.frontends.torch.native.cuda.streams import CudaStreams, StreamRunner, enqueuing
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.watching import telling

_NEVER: tuple[set[int], set[int]] = (set(), set())

_WORTH, _LONGEST = 32, 1024
"""So many replays make up for a capture; at most so many calls run on streams before the next one."""


class _Graphed:
    """A captured call.

    Args:
        replay: Enqueues it on the caller's stream.
        inputs: What it reads: the caller's own tensors and values, or buffers of the graph.
        moved: Numbers of the inputs that are buffers, to which each call copies.
        outputs: What it writes.
        given: The caller's inputs at the capture.
        stream: The stream that the caller had then, on which the buffers were made.
        turn: Of the graphs that it shares memory with.
    """

    def __init__(
        self, replay: Any, inputs: list[Any], moved: list[int], outputs: list[Any],
        given: Sequence[Any], stream: int, turn: Turn,
    ) -> None:  # fmt: skip
        self.replay, self.inputs, self.moved, self.turn = replay, inputs, moved, turn
        self.results = Results(outputs)
        self.stream, self.replays = stream, 0
        tensors = [n for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        there = [n for n in tensors if n not in moved]
        self._there = there
        self._kept = [inputs[n] for n in there]
        # As numbers: a parameter stays the same object when other memory is put under it.
        self._addresses = [_address(x) for x in self._kept]
        self._places = _places(self._kept)
        self._types = [x.dtype for x in self._kept]
        self._values = [(n, x) for n, x in enumerate(inputs) if not isinstance(x, torch.Tensor)]
        self._copied = [(n, _signature(given[n])) for n in moved]

    def strayed(self, inputs: Sequence[Any]) -> list[int]:
        """Numbers of the inputs that are read in place and lie elsewhere now."""
        known = zip(self._there, self._addresses, strict=True)
        return [n for n, address in known if _address(inputs[n]) != address]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether a replay computes a call of these: most calls are like the last one."""
        there = [inputs[n] for n in self._there]
        if _places(there) != self._places:
            return False
        if (
            not all(map(operator.is_, there, self._kept))
            and [x.dtype for x in there] != self._types
        ):
            return False  # the same memory, seen as something else
        return all(_signature(inputs[n]) == known for n, known in self._copied) and all(
            inputs[n] is value or inputs[n] == value for n, value in self._values
        )


class GraphedPlan:
    """A plan as CUDA graphs: one a signature, at most ``keep``, the one used longest ago goes first.

    The first call of a signature runs directly. The second shows which inputs stay where they are
    (parameters) and is captured: those are read in place from then on, the others are copied to
    buffers of the graph. If such an input moves after all, the graph is made anew in the same way; the
    second time it copies it, too.
    Results are copies: the next replay writes the graph's own. Graphs of a plan share memory, so each comes
    after what the last one did, on whatever stream it is called. A plan that cannot be captured runs on
    streams, which is told once.

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
        values = {value for value, _ in runner.plain.captured.epilogue}
        inputs = runner.plain.captured.graph.inputs
        self._written = {number for number, value in enumerate(inputs) if value in values}
        self._graphs = graphs
        self._made: OrderedDict[Any, _Graphed] = OrderedDict()
        self._seen: OrderedDict[Any, list[int]] = OrderedDict()
        self._movers: Recent[Any, tuple[set[int], set[int]]] = Recent(4 * keep)
        self._patience: Recent[Any, list[int]] = Recent(4 * keep)
        self._lock = threading.Lock()
        self._last: _Graphed | None = None
        self._why_not = ""
        self._may_yet = False  # there was no memory for it, which may be another time
        self._elsewhere = False  # calls wrote into other tensors than the calls before
        self._repeatable = holdable.repeatable(runner.plain.captured)
        self._by_strides = holdable.read_by_strides(runner.plain.captured)
        if why_not := holdable.why_not(runner.plain.captured):
            self._cannot(why_not)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs on streams at first, then replays a CUDA graph of the inputs' shapes."""
        stream, capturing = self.runner.streams.caller(), self.runner.streams.capturing()
        # In a capture of the caller's lanes become branches of that graph.
        if capturing or self._why_not:
            return self.runner(inputs)
        try:
            with self._lock:
                made = self._last
                if made is not None and made.fits(inputs):
                    return self._replay(made, inputs, stream)
            # Always in this order: what is enqueued meanwhile may be a plan that calls this one.
            with enqueuing, self._lock:
                made = self._last = self._graph_of(inputs)
                if made is not None:
                    return self._replay(made, inputs, stream)
        except torch.OutOfMemoryError:
            if self._written or not self._repeatable:
                raise
            with enqueuing, self._lock:
                self._may_yet = True
                self._cannot("there is no memory for copies of its results")
            made = None  # with its memory
        return self._on_streams(inputs)

    def _on_streams(self, inputs: Sequence[Any]) -> list[Any]:
        """A call that lacks memory is made again without the graphs, which keep some."""
        try:
            return self.runner(inputs)
        except Exception as error:
            if not (self._made and self._repeatable and devices.out_of_memory(error)):
                raise
        self.release()
        return self.runner(inputs)

    def release(self) -> None:
        """Gives up all graphs and their memory, and what is known of inputs; later calls begin anew."""
        with enqueuing, self._lock:
            self._drop()
            if self._may_yet:
                self._why_not, self._may_yet = "", False

    def _drop(self) -> None:
        self._graphs.release()
        self._last = None
        self._movers.clear()
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
            # What strays once may have been another tensor before, as Auto's trials have copies.
            once, often = self._movers.setdefault(key, (set(), set()))
            often.update(once.intersection(strayed))
            once.update(strayed)
            del self._made[key]
            self._seen.pop(key, None)
        elif (waits := self._patience.get(key)) is not None and waits[1] > 0:
            waits[1] -= 1
            return None
        before = self._seen.get(key)
        self._seen[key] = [_address(x) for x in inputs]
        while len(self._seen) > 4 * self.keep:
            self._seen.popitem(last=False)
        if before is None:
            return None
        made = self._capture(inputs, before, self._movers.get(key, _NEVER)[1])
        if made is not None:
            self._made[key] = made
            while len(self._made) > self.keep:
                self._evicted(*self._made.popitem(last=False))
        return made

    def _evicted(self, key: Any, made: _Graphed) -> None:
        """Of a graph that went before it was worth its capture the next one is longer in coming.

        More signatures than graphs, in turn, would have each call capture.
        """
        if made.replays < _WORTH:
            waits = self._patience.setdefault(key, [1, 0])
            waits[0] = min(_LONGEST, 4 * waits[0])
            waits[1] = waits[0]

    def _replay(self, made: _Graphed, inputs: Sequence[Any], stream: int) -> list[Any]:
        streams = self.runner.streams
        made.turn.begin(streams, stream)
        try:
            if stream != made.stream:  # the allocator knows the buffers as the other one's
                for number in made.moved:
                    streams.used_by(0, made.inputs[number])
                made.stream = stream
            for number in made.moved:
                made.inputs[number].copy_(inputs[number])
            made.replay()
            made.replays += 1
            self._note_writes(inputs)
            return made.results.copies()
        finally:  # also without memory for copies: the next plan with this turn waits for what is enqueued
            made.turn.end(streams)

    def _note_writes(self, inputs: Sequence[Any]) -> None:
        """Has autograd know what the graph wrote into the caller's tensors, as operators would."""
        for x in (inputs[number] for number in self._written):
            if isinstance(x, torch.Tensor) and not x.is_inference():
                torch.autograd.graph.increment_version(x)

    def _capture(
        self, inputs: Sequence[Any], before: Sequence[int], movers: set[int]
    ) -> _Graphed | None:
        here = self.runner.plain.captured.device.type
        if any(isinstance(x, torch.Tensor) and x.device.type != here for x in inputs):
            # A number of the CPU's becomes a part of the kernel that reads it.
            self._cannot("it reads a tensor of the CPU, whose value a graph would keep")
            return None
        moved = [
            number
            for number, (x, address) in enumerate(zip(inputs, before, strict=True))
            if isinstance(x, torch.Tensor) and (number in movers or _address(x) != address)
        ]
        if self._written.intersection(moved):
            self._elsewhere = True
            return None  # what the graph writes must be the caller's own
        if self._by_strides.intersection(moved):
            self._cannot("it reads an argument by strides, as no copy of it can be read")
            return None
        kept = list(inputs)
        try:
            with torch.inference_mode(False):  # later calls may be in another mode
                for number in moved:
                    kept[number] = torch.empty_like(inputs[number]).copy_(inputs[number])
            replay, outputs = self._graphs.capture(lambda streams: self.runner(list(kept), streams))
        except Exception as error:  # what fails without a capture, too, raises there
            self._may_yet = devices.out_of_memory(error)
            self._cannot(_first_of(error))
            return None
        stream = self.runner.streams.caller()
        return _Graphed(replay, kept, moved, outputs, inputs, stream, self._graphs.turn)

    def _cannot(self, why: str) -> None:
        self._why_not = why
        self._drop()  # of what was captured before nothing is replayed any more
        name = self.runner.plain.captured.graph.name
        telling.fallback(
            f"{name!r} cannot be captured as a CUDA graph ({why}); it runs on streams, a launch an operator",
        )

    def told(self) -> list[str]:
        """Lines of ``explain``."""
        if self._why_not:
            return [f"no CUDA graph can hold it ({self._why_not}): calls run on streams"]
        told = [f"calls are replays of a CUDA graph, a branch a lane; {len(self._made)} captured"]
        if self._elsewhere:
            told.append("calls that write into other tensors than the ones before run on streams")
        return told


def _first_of(error: BaseException) -> str:
    """What went wrong first: errors that end a capture say no more than that there was one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return (str(error) or type(error).__name__).splitlines()[0]


def _signature(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return x


def _places(tensors: list[torch.Tensor]) -> Any:
    """Where tensors lie, and how; each call asks, so loops in Python would count."""
    return [
        list(map(ask, tensors))
        for ask in (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
    ]


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, torch.Tensor) else 0


def on_cuda(
    plain: native.Native, device: torch.device, *, graph: bool, lanes: Lanes | None = None
) -> Any:
    """A plan on the streams of a device, as CUDA graphs if asked for and possible.

    Raises:
        EngineError: the device cannot be used.
    """
    count = 1 + max(plain.plan.lanes_used, default=0)
    runner = StreamRunner(plain, CudaStreams(device, count, lanes))
    if not graph or any(outer is not None for _, outer in runner._stages):
        return runner
    return GraphedPlan(runner, CudaGraphs(device, count, lanes))
