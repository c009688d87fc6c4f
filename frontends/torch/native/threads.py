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
from typing import Any

import torch

from dynaflow_xla.ffi import _engine

LONG_NS = 5e5
"""Nanoseconds on lanes from which on workers that spin are kept from taking a lane's core. Spinning, they
take up to 7 ms of a lane's time, and of some calls nothing. A team takes 50 us more than lanes' own
threads that spin for the next call; to end workers and make them again takes 0.1 to 0.5 ms."""

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


_OPENMP = (
    "omp_set_num_threads", "omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads",
    "GOMP_parallel", "omp_pause_resource_all",
)  # fmt: skip


@functools.cache
def _openmp() -> dict[str, Any]:
    """Functions of the OpenMP library that PyTorch's loops use, by name: those that this one library has.

    PyTorch brings one. Its calls are bound in the process's scope first, where another may be that was
    preloaded (Intel's ``libiomp5.so``, say); one that is loaded there later is not PyTorch's. Two libraries
    know nothing of each other's settings and threads.
    """
    for library in (ctypes.PyDLL(None), _library()):
        found = {name: getattr(library, name, None) for name in _OPENMP}
        setting = found["omp_set_num_threads"]
        if setting is not None and _sets_pytorchs(setting):
            home = _home(setting)
            return {name: f for name, f in found.items() if f is not None and _home(f) == home}
    return {}


def _sets_pytorchs(setting: Callable[[int], None]) -> bool:
    """Whether PyTorch follows a function that sets how many threads there are."""
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    setting(other)
    follows = torch.get_num_threads() == other
    setting(before)
    return follows


class _Place(ctypes.Structure):
    """``Dl_info`` of ``dlfcn.h``."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _home(function: Any) -> int | None:
    """Where the library begins that a function is in."""
    place = _Place()
    ctypes.PyDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return place.base


@functools.cache
def _settings() -> tuple[
    Callable[[], int] | None, Callable[[int], None] | None, Callable[[int], int] | None
]:
    openmp = _openmp()
    return (
        openmp.get("omp_get_max_threads"),
        openmp.get("omp_set_num_threads"),
        getattr(_library(), "MKL_Set_Num_Threads_Local", None),
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


@functools.lru_cache(maxsize=8)
def _team(threads: int) -> Any:
    openmp = _openmp()
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    functions: list[Any] = [openmp.get(name) for name in names]
    if None in functions:
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return _engine.OpenMpTeam(*addresses, threads)


def team() -> Any:
    """The OpenMP threads of this thread, to run lanes of one core in place of the lanes' own; or None.

    After work that it shared with a thread, a worker spins for milliseconds, and takes the core that a
    lane is to have: two LSTMs of 7 ms beside each other then took 14. When the worker is the lane, it is
    awake for what is shared with it next, too: made or woken anew, it came to a core of its own up to
    20 ms later. In a forked child there is none: its parent's workers do not exist there, and OpenMP would
    wait for them.
    """
    count = torch.get_num_threads()
    return None if _forked or count < 2 else _team(count)


def end_workers() -> bool:
    """Ends the OpenMP workers of this thread, if threads spin; returns whether it did.

    For lanes that no team can run: each has workers of its own. One that sleeps is left: where a
    process rested, a new thread took up to 20 ms to come to a core of its own. Without OpenMP 5.0
    (``omp_pause_resource_all``) this does nothing. It has no effect on the threads of others. In a forked
    child it does nothing, either: its parent's workers do not exist there, and OpenMP would wait for them.
    """
    if _forked:
        return False
    pause = _openmp().get("omp_pause_resource_all")
    if pause is None or not others_run():
        return False
    pause(1)  # omp_pause_soft: what threads keep for the program stays
    return True


def make_workers() -> None:
    """Makes ended workers again while the cores are awake, so that who computes next need not.

    All that the parallel region does is to free nothing.
    """
    region = _openmp().get("GOMP_parallel")
    free = getattr(_library(), "free", None)
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


def are_own() -> bool:
    """Whether the number that ``limit`` sets is the thread's own, as OpenMP's is."""
    return _settings()[0] is not None


def restore(saved: tuple[int, int]) -> None:
    """Undoes ``limit`` on the same thread."""
    _, set_omp, set_mkl = _settings()
    if saved[0] and set_omp is not None:
        set_omp(saved[0])
    if saved[1] >= 0 and set_mkl is not None:
        set_mkl(saved[1])
