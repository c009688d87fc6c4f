"""Stand-ins for CUDA's streams and graphs that only keep books: what comes behind what, what is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.native.cuda import capturing, streams

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


class NoRoom(ReplayedOnCpu):
    """Captures that lack memory, or something else, as long as they fail."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error, self.fails = error, False

    def capture(self, run: Any) -> Any:
        if self.fails:
            raise self.error("there is none")
        return super().capture(run)


def native_of(fn: Any, *args: Any) -> Any:
    """The native plan of a function for these arguments."""
    fast = dfx.schedule(fn, strategy=RoundRobin(), lanes=2, backend="torch")
    with torch.no_grad():
        fast(*args)
        entry = fast._dfx_core.planned(args, {})
    return entry.native


def model(x: Any, w: Any) -> Any:
    a = torch.sin(x) @ w
    b = torch.cos(x) * 2
    return torch.tanh(a) + b @ w, a - b


def runner_of(args: Any, books: Books) -> streams.StreamRunner:
    runner = streams.StreamRunner(native_of(model, *args), books)
    books.watch(runner)
    return runner
