"""Memory that calls take from the operating system and give back, and how a process keeps it instead.

The C library maps a large block for each result and unmaps it when the result goes. The kernel then clears
and maps each of its pages anew when the next call first writes there: a page fault for every 4 KiB, which
takes 0.1 to 0.3 us on hardware and 1.5 to 2 us in some virtual machines. XLA and PyTorch on a CPU both get
their memory there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Mapping
from numbers import Integral

from dynaflow_xla.errors import UnsupportedError, bad_argument, checks
from dynaflow_xla.watching import telling

# Parameters of mallopt (malloc.h, glibc).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_UNLIMITED = -1  # of the threshold: nothing is given back
_MOST = 2**31 - 1  # the parameter is an int
# Where a process comes to that frees large blocks: the library raises the first two by itself as long as
# nobody has set any of them.
_DEFAULTS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}
_PROBE = 40 << 20
"""Bytes that are asked for to see where they come from: more than are mapped by default, fewer than a
thread's own heap holds. Nothing of it is touched."""

_WORTH_TELLING, _WORTH_TELLING_NS = 0.1, 50_000.0
"""Part of a call, and nanoseconds, that page faults take at least where they are told of."""

_kept = False


def keep_memory(limit: int | None = None) -> None:
    """Has this process keep the memory that it frees, for the next call, instead of giving it back.

    Large results of XLA and PyTorch on a CPU are new memory at each call otherwise, whose pages the kernel
    clears one by one. That is most of the time of what does little with much memory, the original's as well
    as a schedule's. ``explain`` (under ``Auto``) and ``dynaflow-xla doctor`` say what it takes.

    Call it before the first JAX computation: threads that have a heap of their own by then keep it, and
    later ones may be given it; large blocks from there go back as before. All of the process has it, not only
    what is scheduled. In the first calls the heap grows, to several times what lives at once where blocks are
    large; then it stays as large as it once was. Threads that allocate at the same time wait for each other:
    functions of some tenths of a millisecond on several threads take some percent longer. Memory that is
    asked for cleared is cleared at once, and a large block that grows is copied. It is ``mallopt`` of glibc:
    ``M_MMAP_MAX`` 0, ``M_TRIM_THRESHOLD``, ``M_ARENA_MAX`` 1.

    Args:
        limit: Bytes that may lie free at the end of the heap, at most 2**31 - 1; None: any number. 0: nothing
            is kept from now on, and what is free is given back at once; threads still share one heap.

    Raises:
        PlanError: ``limit`` is no such number.
        UnsupportedError: the process's allocator is not glibc's, and has settings of its own.
    """
    number = None if limit is None else checks.integer(limit)
    if limit is not None and (number is None or not 0 <= number <= _MOST):
        raise bad_argument(
            limit,
            Integral,
            f"keep_memory(limit=...) must be None or 0 to {_MOST} bytes; got {limit!r}",
        )
    global _kept
    library = _library()
    if number == 0:
        _set(library, _DEFAULTS)
        _kept = False
        library.malloc_trim(0)
        return
    _set(library, {_MMAP_MAX: 0, _TRIM_THRESHOLD: _UNLIMITED if number is None else number})
    if not _from_heap(library):
        _set(library, _DEFAULTS)
        raise UnsupportedError(
            "keep_memory is for glibc's malloc, and this process has another one"
            f"{_preloaded()}: that one's own settings decide what is kept (jemalloc: "
            "MALLOC_CONF=dirty_decay_ms:-1)"
        )
    library.mallopt(_ARENA_MAX, 1)
    _kept = True
    if (others := _heaps(library) - 1) > 0:
        telling.fallback(
            f"threads have heaps of their own already ({others}), whose large blocks are given back as "
            "before: call keep_memory before the first JAX computation"
        )


def is_kept() -> bool:
    """Whether ``keep_memory`` is in force."""
    return _kept


def _library() -> ctypes.CDLL:
    names = ("mallopt", "malloc_trim", "malloc_info", "mallinfo")
    with contextlib.suppress(TypeError, OSError):  # Windows
        library = ctypes.CDLL(None)
        if all(hasattr(library, name) for name in names):
            return library
    raise UnsupportedError(
        "keep_memory is for glibc's malloc, and this system's C library is another one"
    )


def _set(library: ctypes.CDLL, parameters: Mapping[int, int]) -> None:
    for parameter, value in parameters.items():
        library.mallopt(parameter, value)


def _preloaded() -> str:
    named = os.environ.get("LD_PRELOAD", "")
    return f" (LD_PRELOAD={named})" if named else ""


class _MallInfo(ctypes.Structure):
    """What ``mallinfo`` returns; bytes modulo 2**32."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _from_heap(library: ctypes.CDLL) -> bool:
    """Whether a large block now comes from the heap of glibc's malloc."""
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.mallinfo.restype = _MallInfo
    before = library.mallinfo().uordblks
    block = library.malloc(_PROBE)
    if not block:
        return True  # the process has a limit; nothing can be said
    grown = (library.mallinfo().uordblks - before) % 2**32
    library.free(block)
    return bool(_PROBE // 2 <= grown < 2**31)


def _heaps(library: ctypes.CDLL) -> int:
    return _malloc_info(library).count("<heap nr=")


def _malloc_info(library: ctypes.CDLL) -> str:
    """What it writes: XML."""
    library.open_memstream.restype = ctypes.c_void_p
    library.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.fclose.argtypes = [ctypes.c_void_p]
    library.free.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = library.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        return ""
    library.malloc_info(0, stream)
    library.fclose(stream)
    try:
        return ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
    finally:
        library.free(text)


def faults() -> int:
    """Pages that the kernel has mapped anew for this process so far."""
    import resource  # Windows, where the package is only imported, has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def fault_ns() -> float:
    """Nanoseconds of a page fault, clearing included: measured once, in about a millisecond."""
    size = 1 << 20
    taken = []
    for _ in range(3):
        # Private, as malloc's are: pages that could be shared take half as long again.
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            start = time.perf_counter_ns()
            for place in range(0, size, mmap.PAGESIZE):
                fresh[place] = 1
            taken.append((time.perf_counter_ns() - start) / (size // mmap.PAGESIZE))
    return min(taken)


def told(pages: float, call_ns: float) -> str:
    """What page faults take of a call, as a sentence; "" where that is little, or memory is kept.

    Args:
        pages: Page faults of a call.
        call_ns: Nanoseconds of it.
    """
    took = pages * fault_ns() if pages >= 16 else 0.0
    if _kept or took < max(_WORTH_TELLING_NS, _WORTH_TELLING * call_ns):
        return ""
    return (
        f"a call takes {pages * mmap.PAGESIZE / 2**20:.3g} MiB of fresh memory from the system: "
        f"{pages:.0f} page faults, about {took / 1e6:.2g} ms of {call_ns / 1e6:.3g}. "
        "dynaflow_xla.keep_memory(), called first, keeps it"
    )
