"""One trial of ``doctor``, in a process of its own: a broken library may kill it, or never return.

``python -m dynaflow_xla.cli.health.probe jax`` prints JSON: what works. What fails ends with an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import sys
import warnings
from typing import Any

import dynaflow_xla as dfx
from dynaflow_xla import dispatch, machine
from dynaflow_xla.cli.cases import cases_of


def engine() -> dict[str, Any]:
    """Loads the compiled engine; jaxlib's shared library need not be there."""
    found: Any = importlib.import_module("dynaflow_xla.ffi._engine")
    return {"abi": found.PLAN_ABI_VERSION}


def framework(name: str) -> dict[str, Any]:
    """Runs a function of two parts on two lanes, and compares with the original."""
    frontend = dispatch.frontend(name)
    told = frontend.about()
    fn, args = cases_of(frontend)["sorts"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = dfx.schedule(fn, strategy=dfx.Branches(wide=False), lanes=2)
        dfx.verify(fast, *args)
    told["lanes"] = len(dfx.plan(fast, *args).lanes_used)
    if machine.cores() > 1 and not told["gpu"]:
        measured = dfx.profile(fast, *args)
        told["overlap"] = measured.concurrent_ns() / max(1, measured.total_ns)
    return told


def driver() -> dict[str, Any]:
    """NVIDIA's driver and its devices, asked as any CUDA program asks."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    if code := cuda.cuInit(0):
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return {"failed": f"cuInit: {(text.value or b'').decode() or code}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for number in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode())
    return {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "devices": names}


_TRIALS = {"engine": engine, "gpu": driver}


if __name__ == "__main__":
    what = sys.argv[1]
    # Whatever libraries print goes where nobody reads JSON.
    with contextlib.redirect_stdout(sys.stderr):
        made = _TRIALS[what]() if what in _TRIALS else framework(what)
    print(json.dumps(made))
