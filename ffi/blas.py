"""Finds the OpenBLAS libraries that XLA:CPU's LAPACK calls use, so that the engine can limit them.

With several lanes each BLAS call would otherwise start threads for the whole machine, and lanes
would fight for cores: a call gets slower by an order of magnitude in the tail.
"""

from __future__ import annotations

import ctypes

import threadpoolctl

from dynaflow_xla.ffi import _engine

_PREFIXES = ("", "scipy_")
_SUFFIXES = ("", "64_", "_64")


def register() -> int:
    """Makes every loaded OpenBLAS known to the engine; returns how many were found."""
    found = 0
    for library in threadpoolctl.threadpool_info():
        if library.get("internal_api") != "openblas":
            continue
        dynlib = ctypes.CDLL(library["filepath"])
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                get = getattr(dynlib, f"{prefix}openblas_get_num_threads{suffix}", None)
                put = getattr(dynlib, f"{prefix}openblas_set_num_threads{suffix}", None)
                if get is None or put is None:
                    continue
                _engine.add_blas(_address(get), _address(put))
                found += 1
    return found


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
