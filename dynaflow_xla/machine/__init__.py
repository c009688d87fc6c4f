"""This machine: who it is, which cores a process may use, and the numbers that stand for its speed."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

from dynaflow_xla.machine import figures, processors
from dynaflow_xla.machine.figures import (
    ASSUMED as ASSUMED,
    STREAMS_NS as STREAMS_NS,
    TURNS_NS as TURNS_NS,
    Kind as Kind,
    Numbers as Numbers,
)

ALIGNMENT = 64
"""Bytes: XLA:CPU uses memory in place only from multiples of it; a cache line, too. The engine places
scratch by the same number (``_engine.ALIGNMENT``)."""

CUDA_ALIGNMENT = 256
"""The same for XLA on CUDA: what its allocator aligns buffers to."""

THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables of the environment that limit the threads of libraries."""

_BINDING = ("OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
"""Variables by which OpenMP's runtimes bind threads to cores; places alone mean it, too."""

_GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")
"""One of these is there with a driver: of a computer, a board, and Linux inside of Windows."""

_CPUINFO = Path("/proc/cpuinfo")
_MEMBER = Path("/proc/self/cgroup")

# x86 says "model name"; other kernels give the parts that together name a model, or the board's chip.
_NAMES = ("model name", "cpu model", "Hardware")
_PARTS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_PARTS_ELSEWHERE = ("cpu", "machine", "uarch", "isa")


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """Rounds up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def cores() -> int:
    """Cores that this process may use: those of the thread that asks, which its lanes have, too."""
    return len(os.sched_getaffinity(0))


def may_have_gpu() -> bool:
    """Whether the system shows a driver of NVIDIA's: lanes may be streams then. Starts no driver."""
    return any(os.path.exists(path) for path in _GPU_FILES)


def bound_by() -> str:
    """A sentence about the variable by which OpenMP bound this thread to one core of several; else "".

    Its first parallel loop binds the thread that runs it, and what that one starts from then on, lanes
    included, is bound with it. Other threads show that the process may use more.
    """
    mine = os.sched_getaffinity(0)
    name = next((name for name in _BINDING if _binds(os.environ.get(name, ""))), "")
    if len(mine) > 1 or not name:
        return ""
    process = set(mine)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            process |= os.sched_getaffinity(int(thread))
    if len(process) < 2:
        return ""
    all_of_them = range(len(process)) if process == {*range(len(process))} else process
    return (
        f"{name}={os.environ[name]} has OpenMP bind threads to a core each, this one and its lanes to core "
        f"{min(mine)}, of {len(process)} that the process may use: start Python without it, or call "
        f"os.sched_setaffinity(0, {all_of_them}) before lanes run"
    )


def _binds(value: str) -> bool:
    return value.strip().lower() not in ("", "false", "none", "disabled")


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


@functools.cache
def cpu_model() -> str:
    """The processor's name; every model has another one, as far as the system tells them apart."""
    return named(_text(_CPUINFO)) or platform.processor() or platform.machine()


def named(cpuinfo: str) -> str:
    """The processors' names in a text like ``/proc/cpuinfo``; "" if there are none.

    A machine can have cores of several models.
    """
    values = processors.fields(cpuinfo)
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


@functools.cache
def assumed() -> Numbers:
    """This machine's numbers as long as nothing was measured: by its processor, where that is known."""
    return processors.assumed_of(_text(_CPUINFO))


_in_force: Numbers | None = None


def numbers() -> Numbers:
    """This machine's numbers, as measured or assumed; a process reads them once."""
    global _in_force
    if _in_force is None:
        _in_force = assumed()  # should what follows raise: warnings may be errors
        _in_force = figures.kept(identity(), assumed())
    return _in_force


def hand_over_ns(platform: str) -> float:
    """What one lane of a platform ("cpu", "cuda") waits for another, beside copies."""
    return STREAMS_NS if platform == "cuda" else numbers().hand_over_ns


def use(made: Numbers | None) -> None:
    """Plans that are made from now on assume these numbers; None: what is kept is read again."""
    global _in_force
    _in_force = made


def keep(made: Numbers) -> Path:
    """Writes numbers of this machine for later processes, and uses them in this one; returns the file.

    Raises:
        OSError: it cannot be written.
    """
    file = figures.keep(made, identity())
    use(made)
    return file
