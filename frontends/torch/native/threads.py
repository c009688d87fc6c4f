"""Intra-op threads of lanes: those of a lane's cores while several lanes run, and the caller's setting after.

``torch.set_num_threads`` is no use here: it also sets what threads get that start later. OpenMP and
MKL have settings of each thread; where a build of PyTorch has neither, lanes keep what they have.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable

import torch

WORTH_ENDING_NS = 1e6
"""Nanoseconds on lanes from which on workers that spin are ended first. To make them again, with what
libraries keep for each thread, takes 0.1 to 0.5 ms; spinning, they take up to 7 ms of a lane's time, and of
some calls nothing."""

LOOK_NS = 20_000
"""Nanoseconds for which one looks whether a worker spins."""

_THREAD_CLOCK = 6
"""With ``~thread << 3`` the number of a thread's CPU clock: Linux, ``posix-timers.h``, CPUCLOCK_SCHED and
CPUCLOCK_PERTHREAD_MASK, as ``pthread_getcpuclockid`` makes it."""


_forked = False


def _in_child() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_in_child)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    # PyDLL keeps the GIL: giving it away and taking it back costs more than the call.
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        return ctypes.PyDLL(path)
    except OSError:
        return None


@functools.cache
def _settings() -> tuple[
    Callable[[], int] | None, Callable[[int], None] | None, Callable[[int], int] | None
]:
    library = _library()
    return (
        getattr(library, "omp_get_max_threads", None),
        getattr(library, "omp_set_num_threads", None),
        getattr(library, "MKL_Set_Num_Threads_Local", None),
    )


def others_run() -> bool:
    """Whether another thread of this process computes now, or spins; True where nothing tells.

    The process's own clock is of no use: it counts others up to the kernel's last tick.
    """
    try:
        others = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        clocks = [~thread << 3 | _THREAD_CLOCK for thread in others]
        start = time.perf_counter_ns()
        before = _used(clocks)
        while time.perf_counter_ns() - start < LOOK_NS:
            pass
        after = _used(clocks)
    except (OSError, ValueError):
        return True
    return any(b - a > LOOK_NS // 2 for a, b in zip(before, after, strict=True))


def _used(clocks: list[int]) -> list[int]:
    found = []
    for clock in clocks:
        try:
            found.append(time.clock_gettime_ns(clock))
        except OSError:  # a thread that ended meanwhile
            found.append(0)
    return found


def end_workers() -> bool:
    """Ends the OpenMP workers of this thread, if threads spin; returns whether it did.

    After work that it shared with a thread, a worker spins for milliseconds, and takes the core that a
    lane is to have: two LSTMs of 7 ms beside each other then took 14. One that sleeps is left: where a
    process rested, a new thread took up to 20 ms to come to a core of its own. Without OpenMP 5.0
    (``omp_pause_resource_all``) this does nothing. It has no effect on the threads of others. In a forked
    child it does nothing, either: its parent's workers do not exist there, and OpenMP would wait for them.
    """
    if _forked:
        return False
    pause = getattr(_library(), "omp_pause_resource_all", None)
    if pause is None or not others_run():
        return False
    pause(1)  # omp_pause_soft: what threads keep for the program stays
    return True


def make_workers() -> None:
    """Makes ended workers again while the cores are awake, so that who computes next need not.

    All that the parallel region does is to free nothing.
    """
    library = _library()
    region = getattr(library, "GOMP_parallel", None)
    free = getattr(library, "free", None)
    if region is not None and free is not None:
        region(ctypes.cast(free, ctypes.c_void_p), None, torch.get_num_threads(), 0)


def limit(cores: int = 1) -> tuple[int, int]:
    """Gives this thread so many intra-op threads; returns what ``restore`` needs."""
    torch.get_num_threads()  # a thread's first use takes over the process's setting
    get_omp, set_omp, set_mkl = _settings()
    before = 0
    if get_omp is not None and set_omp is not None:
        before = get_omp()
        set_omp(cores)
    return before, set_mkl(cores) if set_mkl is not None else -1


def restore(saved: tuple[int, int]) -> None:
    """Undoes ``limit`` on the same thread."""
    _, set_omp, set_mkl = _settings()
    if saved[0] and set_omp is not None:
        set_omp(saved[0])
    if saved[1] >= 0 and set_mkl is not None:
        set_mkl(saved[1])
