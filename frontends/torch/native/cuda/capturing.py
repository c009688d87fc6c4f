"""Capturing a plan as a CUDA graph, on streams that nothing else ever uses.

What a graph reads and writes lies in a memory pool of its plan's. cuBLAS needs more: PyTorch gives it a
workspace for each pair of handle and stream, which a graph holds as an address. It must not be one that
somebody else may write while the graph runs, or free: ``torch.compile(mode="reduce-overhead")`` frees those
that were made outside of captures whenever it captures. So each plan captures on streams of its own, and
their workspaces lie in a pool that lives as long as these streams do, which is for ever: the next plan gets
them, once this one is gone or gave its graphs back.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

import torch

from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.native.cuda.streams import (
    CudaStreams,
    Streams,
    engine_streams,
    enqueuing,
    lent,
)
from dynaflow_xla.kernels import Lanes

_MODE = "thread_local"
"""What other threads allocate meanwhile is none of the capture's business."""


class Turn:
    """Replays that share memory, of which each comes after the last one, whatever streams they are called on.

    They may be of one plan, or of one after another that had the same place.
    """

    def __init__(self) -> None:
        self._stream: int | None = None  # of the last replay
        self._lasting: Any = None  # the same, if it is there for good
        self._done: Any = None  # behind the last replay, if not

    def begin(self, streams: Streams, stream: int) -> None:
        """What the caller's stream gets from now on comes after the last replay, whatever stream had that.

        Streams of PyTorch's are there for good, others may be gone when the next call comes, and another one
        may have their handle: behind what they get an event stands for them.
        """
        if stream == self._stream and self._lasting is not None:
            return
        if self._stream is not None:
            streams.wait(0, self._done if self._lasting is None else self._lasting.record_event())
        self._stream, self._lasting = stream, streams.lasting()

    def end(self, streams: Streams) -> None:
        """A replay is enqueued."""
        if self._lasting is None:
            self._done = streams.record(0)


class GraphCapture(Protocol):
    """Capture and replay of a device's work."""

    @property
    def turn(self) -> Turn:
        """That of the graphs that are there."""

    def capture(self, run: Any) -> tuple[Any, list[Any]]:
        """Captures ``run(streams)``; what replays it, and its results."""

    def release(self) -> None:
        """Nobody will replay what was captured: what it needed is for others."""


class _Place:
    """Streams for captures and the memory of their workspaces.

    Attributes:
        streams: The lanes.
        turn: Of the graphs that use it: also of those of a plan that is gone, which may still run.
        broken: A capture on it failed.
    """

    def __init__(self, device: torch.device, lanes: int, gpu: Lanes | None) -> None:
        self._owner = engine_streams(device, lanes, gpu, first=0)
        self.streams = [torch.cuda.ExternalStream(s, device) for s in self._owner.streams]
        self._pool = torch.cuda.graph_pool_handle()
        self._device, self._small = device, _matrix(device)
        self.turn = Turn()
        self.broken = False
        self._kept: Any = None  # a pool is there as long as a graph of it is

    def with_workspaces(self) -> None:
        """Sees to it that this thread's handle has its workspaces here."""
        with torch.cuda.device(self._device):
            torch.cuda.current_blas_handle()  # cuBLAS must not be started in a capture
        # A capture sets the offsets of random numbers, which replays on other streams may still read.
        torch.cuda.synchronize(self._device)
        made = torch.cuda.CUDAGraph()
        first, *others = self.streams
        with torch.no_grad(), torch.cuda.stream(first):
            made.capture_begin(pool=self._pool, capture_error_mode=_MODE)
            try:
                begin = first.record_event()
                for stream in others:
                    stream.wait_event(begin)
                    with torch.cuda.stream(stream):
                        torch.mm(self._small, self._small)
                    first.wait_event(stream.record_event())
                torch.mm(self._small, self._small)
            finally:
                made.capture_end()
        self._kept = made


def _matrix(device: torch.device) -> torch.Tensor:
    return torch.ones(8, 8, device=device)


class CaptureStreams(CudaStreams):
    """The lanes of captures, lane 0 among them.

    Args:
        device: Such as ``torch.device("cuda", 0)``.
        lanes: Number of lanes.
        gpu: Priorities and multiprocessors of lanes, if they have some.
    """

    def _made(self, lanes: int, gpu: Lanes | None) -> list[Any]:
        torch.cuda.init()
        key = ("captures", self.device, lanes, gpu)
        self.place: _Place = lent(self, key, lambda: _Place(self.device, lanes, gpu))
        return self.place.streams

    def _stream(self, lane: int) -> Any:
        return self._own[lane]


class CudaGraphs:
    """CUDA graphs of one plan; they share memory, so no two may run at the same time.

    Args:
        device: Such as ``torch.device("cuda", 0)``.
        lanes: Number of lanes.
        gpu: Priorities and multiprocessors of lanes, if they have some.
    """

    def __init__(self, device: torch.device, lanes: int, gpu: Lanes | None) -> None:
        self._device, self._lanes, self._gpu = device, lanes, gpu
        self._streams: CaptureStreams | None = None
        self._pool: Any = None
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, run: Any) -> tuple[Any, list[Any]]:
        """Captures ``run(streams)`` as one CUDA graph; what replays it, and its results."""
        with enqueuing:
            if self._streams is None:
                self._streams = CaptureStreams(self._device, self._lanes, self._gpu)
            streams = self._streams
            try:
                streams.place.with_workspaces()
            except Exception:
                self._leave()
                raise
            if not self._alive or self._pool is None:  # a pool goes with the last graph in it
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            first = streams.place.streams[0]
            try:
                # PyTorch leaves its capture's stream the current one where that fails.
                with (
                    torch.cuda.stream(torch.cuda.current_stream(self._device)),
                    torch.cuda.graph(
                        graph, pool=self._pool, stream=first, capture_error_mode=_MODE
                    ),
                ):
                    results = run(streams)
            except Exception:
                self._leave()
                raise
            self._alive.add(graph)
        return graph.replay, results

    @property
    def turn(self) -> Turn:
        """That of the streams and workspaces, which others may have had before."""
        assert self._streams is not None, "nothing is captured"
        return self._streams.place.turn

    def release(self) -> None:
        """Gives streams and workspaces to the next plan that captures; nothing of this one is replayed.

        To be called before the graphs go: their memory may not be unmapped while they run, and PyTorch
        knows of no replay.
        """
        with enqueuing:
            if self._alive:
                torch.cuda.synchronize(self._device)
            self._streams = self._pool = None

    def _leave(self) -> None:
        """After a capture that failed: nothing of it is used again."""
        streams, pool = self._streams, self._pool
        self._streams = self._pool = None
        assert streams is not None
        streams.place.broken = True
        operators.end_allocations(self._device, pool)
        # Random generators believe to be captured until some capture ends well.
        with contextlib.suppress(RuntimeError):
            CaptureStreams(self._device, 1, None).place.with_workspaces()
