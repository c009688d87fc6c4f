"""This machine: who it is, and what the planner, the simulator and the frontends assume of it.

The numbers are constants and not measured when a process starts. A plan is known by its content: numbers
that differ from process to process would make another plan of the same function in each, and what ``Auto``
keeps on disk would not be found again. Where the difference matters, ``Auto`` measures the plans themselves.
What an operator costs depends on who compiles it, so that is said beside each frontend's capture.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

ALIGNMENT = 64
"""Bytes: XLA:CPU uses memory in place only from multiples of it; a cache line, too. The engine places
scratch by the same number (``_engine.ALIGNMENT``)."""

CUDA_ALIGNMENT = 256
"""The same for XLA on CUDA: what its allocator aligns buffers to."""

COPY_BYTES_PER_NS = 8.0
"""Speed of one core's copy from memory to memory that is in use: a server's core of 2024."""

FRESH_COPY_BYTES_PER_NS = 4.0
"""The same into memory that was just allocated: the system clears its pages first."""

HAND_OVER_NS = 5_000.0
"""From a signal on one lane to the end of the wait for it on another, gates of both included. (The event
alone takes 0.1 us while the waiting lane is awake: ``benchmarks/engine_native.py``; a lane that sleeps is
woken first, so a planner does well to assume more.)"""

LANE_START_NS = 3_000.0
"""From the start of a stage until a lane's program runs; for lanes of Python steps: to take the interpreter
lock and call XLA (``benchmarks/pjrt_execute.py``)."""

LANES_NS = 40_000.0
"""To leave the outer program for lanes and to come back: the custom call, and what XLA would have done
beside it. (Lanes that are awake start within ``LANE_START_NS``.)"""

LANE_WAKE_NS = 30_000.0
"""What every lane beside the caller's costs then: it sleeps and is woken, and so is the caller in the end."""

FORK_NS = 35_000.0
"""To hand an operator's work to a pool of threads and to wait for them: sleeping threads are woken each time.
(Between 25 and 60 us on two cores of a virtual machine: small functions on XLA's pool beside the same on a
pool of one thread.)"""

_SHARED = {"products": 0.96, "convolutions": 0.93, "elements": 0.75}
"""What of a kind of work more cores share, by Amdahl's law: two cores are 1.92, 1.87 and 1.6 times as fast as
one, sixteen 10, 7.8 and 3.4 times."""

_CPUINFO = Path("/proc/cpuinfo")
_MEMBER = Path("/proc/self/cgroup")

# x86 says "model name"; other kernels give the parts that together name a model, or the board's chip.
_NAMES = ("model name", "cpu model", "Hardware")
_PARTS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_PARTS_ELSEWHERE = ("cpu", "machine", "uarch", "isa")


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """Rounds up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def hand_over_ns(size: int) -> float:
    """A value of ``size`` bytes from lane to lane: the signal, and a copy at each end."""
    return HAND_OVER_NS + 2 * size / COPY_BYTES_PER_NS


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/sys/fs/cgroup"), member: Path = _MEMBER) -> float | None:
    """Cores' worth of time that the control groups of this process allow; None where they do not limit it.

    Such a limit does not take cores away: threads on all of them run until the time of a period is used up,
    and then all stand still. So lanes that wait for each other are slowed down more than one by one.

    Args:
        root: Where control groups are mounted.
        member: Which one this process is in, as the kernel lists it.
    """
    found: list[float] = []
    for line in _text(member).splitlines():
        _, kinds, path = (line.split(":", 2) + ["", ""])[:3]
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / kinds if kinds and (root / kinds).is_dir() else root / "cpu" if kinds else root
        group = top / path.strip().lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            if kinds:
                quota = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
            else:
                given = (_text(folder / "cpu.max").split() + ["", ""])[:2]
                quota = given[0], given[1]
            if quota[0].strip().isdigit() and quota[1].strip().isdigit():
                found.append(int(quota[0]) / max(1, int(quota[1])))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def speed_up(kind: str, cores: int) -> float:
    """How many times as fast as one core so many are at a kind of work, see ``ir.work.Spread``."""
    share = _SHARED[kind]
    return 1.0 / (1.0 - share + share / max(1, cores))


@functools.cache
def cpu_model() -> str:
    """The processor's name; every model has another one, as far as the system tells them apart."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    return named(text) or platform.processor() or platform.machine()


def named(cpuinfo: str) -> str:
    """The processors' names in a text like ``/proc/cpuinfo``; "" if there are none.

    A machine can have cores of several models.
    """
    values: dict[str, dict[str, None]] = {}
    for line in cpuinfo.splitlines():
        key, found, value = line.partition(":")
        if found and value.strip():
            values.setdefault(key.strip(), {})[value.strip()] = None
    for name in _NAMES:
        if name in values:
            return ", ".join(values[name])
    for parts in (_PARTS, _PARTS_ELSEWHERE):
        if told := [f"{part} {'/'.join(values[part])}" for part in parts if part in values]:
            return ", ".join(told)
    return ""


def identity() -> tuple[str, ...]:
    """What tells this machine from others, for keys of what is kept on disk."""
    return platform.machine(), cpu_model(), str(cores())
