"""Intra-op threads of lanes: those of a lane's cores while several lanes run, and the caller's setting after.

``torch.set_num_threads`` is no use here: it also sets what threads get that start later. OpenMP and
MKL have settings of each thread; where a build of PyTorch has neither, lanes keep what they have.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch

WORTH_ENDING_NS = 1e6
"""Nanoseconds on lanes from which on workers that spin are ended first. To make them again, with what
libraries keep for each thread, takes 0.1 to 0.5 ms; spinning, they take up to 7 ms of a lane's time, and of
some calls nothing."""


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


def end_workers() -> None:
    """Ends the OpenMP workers of this thread, which makes new ones when it needs them.

    After work that it shared with a thread, a worker spins for milliseconds, and takes the core that a
    lane is to have: two LSTMs of 7 ms beside each other then took 14. Without OpenMP 5.0
    (``omp_pause_resource_all``) this does nothing. It has no effect on the threads of others. In a forked
    child it does nothing, either: its parent's workers do not exist there, and OpenMP would wait for them.
    """
    if _forked:
        return
    pause = getattr(_library(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(1)  # omp_pause_soft: what threads keep for the program stays


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
