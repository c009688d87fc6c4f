"""What a plan is made of: buffers, and instructions over numbered lanes."""

from __future__ import annotations

from typing import Literal

import msgspec

BufferKind = Literal["arg", "result", "scratch", "local", "stage"]


class PlanBuffer(msgspec.Struct, frozen=True):
    """Memory that holds one value.

    Attributes:
        id: Index in ``Plan.buffers``.
        kind: ``arg`` (caller's input), ``result`` (caller's output), ``scratch`` (crosses lanes,
            engine memory), ``local`` (never leaves its lane, managed by the lane program),
            ``stage`` (crosses an outer region, a value of the outer program).
        value: Value id in the graph.
        shape, dtype, bytes: As in the graph.
        index: Argument or result number for ``arg`` and ``result``, else -1.
        offset: Byte offset in scratch for ``scratch``; where a nano-batch begins within the argument
            or result for a part of one (see ``Slice``, ``Merge``); else -1.
    """

    id: int
    kind: BufferKind
    value: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    index: int = -1
    offset: int = -1


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Run ``region`` for nano-batch ``nano`` on ``lane``; reads ``ins``, writes ``outs`` (buffers).

    ``width`` is the number of cores that it runs on: those of its lane. A *wide* launch has all cores that
    there are: it is on no lane (-1), its width is 0, and it runs in the outer program between two stages,
    when no lane runs. Outer regions are always launched like that.
    ``replace`` names a replacement implementation, or "" for the region's own.
    """

    region: int
    name: str
    lane: int
    nano: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    replace: str = ""
    width: int = 1


class Record(msgspec.Struct, frozen=True, tag="record"):
    """All launched on ``lane`` before this is done: signal ``event``."""

    event: int
    lane: int


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """``lane`` goes on only after ``event`` was signalled."""

    event: int
    lane: int


class Slice(msgspec.Struct, frozen=True, tag="slice"):
    """Buffer ``out`` is rows ``start:stop`` of argument ``src`` along ``axis``, where they lie.

    It costs nothing and belongs to no lane; slices come before all else.
    """

    src: int
    out: int
    axis: int
    start: int
    stop: int


class Merge(msgspec.Struct, frozen=True, tag="merge"):
    """Result ``out`` is its ``srcs`` one after another along ``axis``, written where they belong.

    It costs nothing and belongs to no lane; merges come after all else. What cannot be put together
    in place (sums, means, inner axes) is a region of its own.
    """

    srcs: tuple[int, ...]
    out: int
    axis: int


Instruction = Launch | Record | Wait | Slice | Merge
