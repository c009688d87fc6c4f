"""How long a trace of the stand-in driver might take on a device: a check of plans, never a measurement.

A kernel alone takes the longest of its arithmetic and its memory traffic, at the rates below and with as many
multiprocessors as it has blocks, and at least ``floor_us``. Kernels that the driver was given no order
between share the multiprocessors and the memory, in proportion to what each could use alone. An edge inside
of a CUDA graph and a wait for an event of another stream cost time; so does each launch from the host, one
after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from driver_trace import Operation, Trace


@dataclass(frozen=True)
class Machine:
    """Rates of a device; the numbers of an NVIDIA H200 (SXM), as published, are the defaults."""

    multiprocessors: int = 132
    bytes_per_us: float = 4.8e6  # 4.8 TB/s
    one_bytes_per_us: float = (
        8e4  # that one multiprocessor can move: 60 of them use all of the memory
    )
    flops_per_us: float = 4e8  # of products in bfloat16: 400 TFLOP/s, two fifths of the nominal 989
    scalar_per_us: float = 3e7  # of everything else: elements, 30 T/s
    floor_us: float = 2.0  # the shortest kernel
    edge_us: float = 1.0  # between two kernels of a CUDA graph, or of one stream
    event_us: float = 1.5  # a wait for an event of another stream
    launch_us: float = 2.2  # the host, for each kernel that is not in a graph
    graph_us: float = 5.0  # the host, for each graph

    def share(self, kernel: Operation) -> float:
        """Of the multiprocessors."""
        return min(1.0, max(1, kernel.blocks) / self.multiprocessors)

    def alone_us(self, kernel: Operation) -> float:
        """A kernel that has the device to itself."""
        used = self.share(kernel) * self.multiprocessors
        memory = min(self.bytes_per_us, used * self.one_bytes_per_us)
        part = used / self.multiprocessors
        moved = sum(a.bytes for a in kernel.accesses)
        return max(
            self.floor_us,
            moved / memory,
            kernel.flops / (self.flops_per_us * part),
            moved / 4 / (self.scalar_per_us * part),
        )

    def memory(self, kernel: Operation) -> float:
        """The share of the memory's speed that it uses alone."""
        moved = sum(a.bytes for a in kernel.accesses)
        return min(1.0, moved / self.alone_us(kernel) / self.bytes_per_us)


H200 = Machine()


def issue_us(trace: Trace, machine: Machine) -> dict[int, float]:
    """When the host has asked for each kernel: a launch of a graph asks for all of it."""
    now, last, asked = 0.0, 0, {}
    for kernel in trace.kernels():
        if not kernel.graph:
            now += machine.launch_us
        elif kernel.launched != last:
            now += machine.graph_us
        last = kernel.launched
        asked[kernel.number] = now
    return asked


def simulate(trace: Trace, machine: Machine = H200) -> float:
    """Microseconds until the last kernel is over."""
    kernels = trace.kernels()
    asked = issue_us(trace, machine)
    before = {k.number: [a for a in kernels if trace.before(a, k)] for k in kernels}
    left = {k.number: machine.alone_us(k) for k in kernels}
    ended: dict[int, float] = {}
    waiting = {k.number: k for k in kernels}
    running: dict[int, Any] = {}
    now = 0.0

    def ready(k: Operation) -> float | None:
        """When it may begin; None while something before it is not over."""
        if any(a.number not in ended for a in before[k.number]):
            return None
        begin = asked[k.number]
        for a in before[k.number]:
            apart = a.stream != k.stream and not (a.graph and k.graph)
            begin = max(begin, ended[a.number] + (machine.event_us if apart else machine.edge_us))
        return begin

    while waiting or running:
        starts = {n: at for n, k in waiting.items() if (at := ready(k)) is not None}
        for number in [n for n, at in starts.items() if at <= now]:
            running[number] = waiting.pop(number)
        crowd = sum(machine.share(k) for k in running.values())
        traffic = sum(machine.memory(k) for k in running.values())
        speed = 1.0 / max(1.0, crowd, traffic)
        upcoming = [at for n, at in starts.items() if at > now]
        upcoming += [now + left[n] / speed for n in running]
        then = min(upcoming)
        for number in list(running):
            left[number] -= (then - now) * speed
            if left[number] <= 1e-9:
                ended[number] = then
                del running[number]
        now = then
    return now
