"""The stand-in driver's trace: what it was asked to do, and in which order it was told to do it."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes."""

    address: int
    bytes: int
    write: bool

    def meets(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        apart = (
            self.address + self.bytes <= other.address
            or other.address + other.bytes <= self.address
        )
        return (self.write or other.write) and not apart


@dataclass
class Operation:
    """One line of the trace."""

    number: int
    stream: int
    kind: str
    name: str
    module: int = 0
    graph: int = 0
    arguments: list[bytes] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    regions: tuple[str, ...] = ()
    blocks: int = 1
    flops: float = 0.0  # of products
    launched: int = 0  # which launch of a graph
    lane: int | None = None  # whose stream it is

    def __str__(self) -> str:
        where = f"stream {self.stream}" if self.lane is None else f"lane {self.lane}"
        if self.graph:
            where = f"graph {self.graph} on {where}"
        named = f" of {', '.join(self.regions[:3])}" if self.regions else ""
        return f"{self.kind} {self.name or self.number} ({where}{named})"

    def of(self, region: str) -> bool:
        """Whether it belongs to a marked region."""
        # A nano-batch's has its number behind its name.
        mark = re.compile(rf"(^|[/(]){re.escape(region)}(~\d+)?($|[/)])")
        return any(mark.search(path) for path in self.regions)


class Trace:
    """Operations and the order between them."""

    def __init__(
        self,
        text: str,
        kernel: Callable[[str, int], Any] | None = None,
        lanes: dict[int, int] | None = None,
    ) -> None:
        self.lanes = lanes or {}  # by their streams' numbers
        self.operations: list[Operation] = []
        self.marks: list[tuple[int, str]] = []
        self._after: dict[int, int] = {}  # a bit for each operation that comes before
        self._known: dict[int, int] = {}  # the same, with what the host saw the end of
        self._host = 0
        self._bit: dict[int, int] = {}
        numbered: dict[int, Operation] = {}
        for line in text.splitlines():
            row = json.loads(line)
            if "mark" in row:
                self.marks.append((len(self.operations), row["mark"]))
                continue
            if "known" in row:
                for number in row["known"]:
                    self._host |= self._known.get(number, 0) | self._bit.get(number, 0)
                continue
            if "touched" in row:  # what it learned when it ran
                if (ran := numbered.get(row["touched"])) is not None:
                    new = dict.fromkeys(Access(*a) for a in row["accesses"])  # loops repeat them
                    ran.accesses += [a for a in new if a not in ran.accesses]
                continue
            numbered[row["op"]] = self._add(row, kernel)

    def _add(self, row: dict[str, Any], kernel: Callable[[str, int], Any] | None) -> Operation:
        made = Operation(
            row["op"], row["stream"], row["kind"], row["name"], row.get("module", 0),
            row.get("graph", 0), [bytes.fromhex(a) for a in row.get("arguments", ())],
            [Access(*a) for a in row["accesses"]],
        )  # fmt: skip
        made.blocks = row.get("blocks", 1)
        made.launched = row.get("launched", 0)
        made.lane = self.lanes.get(made.stream)
        self._bit[made.number] = 1 << len(self.operations)
        before, known = 0, self._host
        for number in row["after"]:
            before |= self._after.get(number, 0) | self._bit.get(number, 0)
            known |= self._known.get(number, 0)
        self._after[made.number] = before
        self._known[made.number] = known | before
        self.operations.append(made)
        meant = kernel(made.name, made.module) if kernel and made.kind == "kernel" else None
        if meant is not None and len(meant.operands) + len(meant.results) == len(made.arguments):
            made.regions, made.flops = meant.regions, meant.flops
            n = len(meant.operands)
            for i, (argument, array) in enumerate(
                zip(made.arguments, meant.operands + meant.results, strict=True)
            ):
                address = int.from_bytes(argument, "little")
                made.accesses.append(Access(address, array.bytes, i >= n))
        return made

    def before(self, a: Operation, b: Operation) -> bool:
        """Whether streams, events and graphs put `b` after `a`."""
        return bool(self._after[b.number] & self._bit[a.number])

    def ordered(self, a: Operation, b: Operation) -> bool:
        """Whether there is an order between the two, whichever."""
        return self.before(a, b) or self.before(b, a)

    def safe(self, a: Operation, b: Operation) -> bool:
        """Whether `a`, which was asked for first, is over when `b` begins; a host that waited orders, too."""
        return bool(self._known[b.number] & self._bit[a.number])

    def kernels(self, region: str = "") -> list[Operation]:
        """Kernels, or those of a marked region."""
        return [o for o in self.operations if o.kind == "kernel" and (not region or o.of(region))]

    def races(self) -> list[tuple[Operation, Operation, Access]]:
        """Pairs whose order matters and is not given."""
        found = []
        for i, b in enumerate(self.operations):
            for a in self.operations[:i]:
                if not a.accesses or not b.accesses or self.safe(a, b):
                    continue
                met = next((x for x in a.accesses for y in b.accesses if x.meets(y)), None)
                if met is not None:
                    found.append((a, b, met))
        return found

    def longest_chain(self, of: list[Operation] | None = None) -> int:
        """Kernels on the longest chain."""
        depth: dict[int, int] = {}
        counted = self.kernels() if of is None else of
        for b in counted:
            depth[b.number] = 1 + max(
                (depth[a.number] for a in counted if a.number in depth and self.before(a, b)),
                default=0,
            )
        return max(depth.values(), default=0)


def report(races: list[tuple[Operation, Operation, Access]]) -> str:
    """The pairs, in words."""
    return "\n".join(
        f"no order between {a} and {b}, which meet at {met.address:#x} ({met.bytes} bytes)"
        for a, b, met in races[:10]
    )


class Driver:
    """The stand-in driver, as tests ask it."""

    def __init__(self, path: str) -> None:
        self.functions = ctypes.CDLL(path)
        for name in ("fake_end_trace", "fake_misuse", "fake_missing_names", "fake_without_context"):
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.functions.fake_calls.restype = ctypes.c_longlong
        self.functions.fake_stream_number.restype = ctypes.c_uint64
        self.least_delay_us = 0

    def delay(self, us: int) -> None:
        """Random delays of up to so much before each operation."""
        self.functions.fake_delay(max(us, self.least_delay_us))

    def ignore_waits(self, on: bool) -> None:
        """The mutant: no stream waits for an event."""
        self.functions.fake_ignore_waits(int(on))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The first device's context is this thread's inside."""
        library, context = self.functions, ctypes.c_void_p()
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        library.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
            library.cuDevicePrimaryCtxRelease_v2(0)

    def drain(self) -> None:
        """Waits for every stream of the first device."""
        with self.current():
            self.functions.cuCtxSynchronize()

    def lose(self, status: int) -> None:
        """The device is lost from now on."""
        self.functions.fake_lose_device(status)

    def fail(self, function: str, status: int, skip: int = 0) -> None:
        """The next call of a function, after some, fails."""
        self.functions.fake_fail(function.encode(), status, skip)

    def calls(self, function: str) -> int:
        return int(self.functions.fake_calls(function.encode()))

    def missing(self) -> list[str]:
        """Functions that were called and that the stand-in lacks, since it was told to forget them."""
        return list(self.functions.fake_missing_names().decode().splitlines())

    def forget_missing(self) -> None:
        self.functions.fake_forget_missing()

    def misuse(self) -> str:
        """What a real driver would not forgive, since the last time it was asked."""
        return str(self.functions.fake_misuse().decode())

    def without_context(self) -> list[str]:
        """Functions that were refused because the thread had no context, since the last time."""
        return list(self.functions.fake_without_context().decode().split())

    def mark(self, text: str) -> None:
        self.functions.fake_mark(text.encode())

    def lanes(self) -> dict[int, int]:
        """Lanes of XLA executables by the numbers of their streams."""
        from dynaflow_xla.ffi import device_lanes

        return {
            int(self.functions.fake_stream_number(ctypes.c_void_p(stream))): lane
            for made in device_lanes._cuda.values()
            for lane, stream in enumerate(made._streams)
        }

    @contextmanager
    def tracing(self, kernel: Callable[[str, int], Any] | None = None) -> Iterator[list[Trace]]:
        """What happens inside, as one trace in the list when it is over."""
        made: list[Trace] = []
        self.functions.fake_begin_trace()
        try:
            yield made
        finally:
            text = self.functions.fake_end_trace().decode()
        made.append(Trace(text, kernel, self.lanes()))
