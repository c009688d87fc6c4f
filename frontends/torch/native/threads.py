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


@functools.cache
def _library() -> tuple[
    Callable[[], int] | None, Callable[[int], None] | None, Callable[[int], int] | None
]:
    # PyDLL keeps the GIL: giving it away and taking it back costs more than the call.
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        library = ctypes.PyDLL(path)
    except OSError:
        return None, None, None
    return (
        getattr(library, "omp_get_max_threads", None),
        getattr(library, "omp_set_num_threads", None),
        getattr(library, "MKL_Set_Num_Threads_Local", None),
    )


def limit(cores: int = 1) -> tuple[int, int]:
    """Gives this thread so many intra-op threads; returns what ``restore`` needs."""
    torch.get_num_threads()  # a thread's first use takes over the process's setting
    get_omp, set_omp, set_mkl = _library()
    before = 0
    if get_omp is not None and set_omp is not None:
        before = get_omp()
        set_omp(cores)
    return before, set_mkl(cores) if set_mkl is not None else -1


def restore(saved: tuple[int, int]) -> None:
    """Undoes ``limit`` on the same thread."""
    _, set_omp, set_mkl = _library()
    if saved[0] and set_omp is not None:
        set_omp(saved[0])
    if saved[1] >= 0 and set_mkl is not None:
        set_mkl(saved[1])
