"""Values of XLA's GPU kernels: each launch is computed from its fusion by XLA's CPU backend.

``installed()`` before the first compile; ``site/sitecustomize.py`` does it in every process. Which fusion a
launch means is exact: while one program is compiled no other is, so that the PTX texts that XLA had assembled
are that program's; each has a name of its own, which a launch finds in its module's image.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import os
import shutil
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import driver_trace
import hlo
import numpy as np

LIBRARY = os.environ.get("DYNAFLOW_XLA_STANDIN", "")


class Values:
    """Computes launches; counts what it computed, and names what it could not."""

    def __init__(self, ptx: Path) -> None:
        self.ptx = ptx
        self.driver = ctypes.CDLL(LIBRARY)
        self.driver.fake_module_image.restype = ctypes.c_char_p
        self.driver.fake_module_image.argtypes = [ctypes.c_uint64]
        self.driver.fake_device_memory.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
        self.computed: collections.Counter[str] = collections.Counter()
        self.unknown: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self._compiling = threading.RLock()
        self._lock = threading.RLock()
        self._modules: dict[str, list[hlo.Module]] = {}  # by name of a PTX text
        self._texts: dict[int, str] = {}  # its name, by number of a driver's module
        self._compiled: dict[str, Any] = {}  # by a kernel's text, and by the same without names
        self._callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_size_t), ctypes.c_int,
        )(self._run)  # fmt: skip

    def install(self) -> None:
        """Watches compiles and answers the driver."""
        from jaxlib import _jax

        compile_ = _jax.Client.compile_and_load

        def watched(client: Any, *args: Any, **kwargs: Any) -> Any:
            if client.platform == "cpu":
                return compile_(client, *args, **kwargs)
            with self._compiling:
                made = compile_(client, *args, **kwargs)
                self.learn(made.hlo_modules())
            return made

        _jax.Client.compile_and_load = watched
        self.driver.fake_values(self._callback)

    def end(self) -> None:
        """Before the interpreter does: a stream's thread must not call it any more."""
        self.driver.fake_values(None)
        driver_trace.Driver(LIBRARY).drain()

    def learn(self, modules: list[Any]) -> None:
        """The texts that appeared since the last time belong to these modules."""
        new = {f.name for f in self.ptx.iterdir() if f.is_file()} - self._modules.keys()
        parsed = [hlo.Module(m.to_string()) for m in modules] if new else []
        with self._lock:
            self._modules.update(dict.fromkeys(new, parsed))

    def kernel(self, name: str, module: int) -> hlo.Kernel | None:
        """What a launch means."""
        with self._lock:
            text = self._texts.get(module)
            if text is None:
                image = self.driver.fake_module_image(module).decode(errors="replace")
                text = self._texts[module] = image.rpartition("// made as ")[2]
            for known in self._modules.get(text, ()):
                if name in known.kernels:
                    return known.kernels[name]
        return None

    def _program(self, kernel: hlo.Kernel) -> Any:
        made = self._compiled.get(kernel.text)
        if made is not None:
            return made
        same = hlo.anonymous(kernel.text)
        made = self._compiled.get(same)
        if made is None:
            import jax
            from jaxlib import _hlo, _jax, xla_client

            device = jax.devices("cpu")[0]
            module = _hlo.hlo_module_from_text(kernel.text)
            text = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
            made = device.client.compile_and_load(text, [device], xla_client.CompileOptions())
            self._compiled[same] = made
        self._compiled[kernel.text] = made
        return made

    def _view(self, address: int, array: hlo.Array) -> np.ndarray[Any, Any]:
        if not self.driver.fake_device_memory(address, array.bytes):
            raise MemoryError(f"{array} at {address:#x} is not memory of a device")
        raw = (ctypes.c_char * array.bytes).from_address(address)
        flat = np.frombuffer(raw, hlo.DTYPES[array.dtype]).reshape(array.in_memory)
        return flat.transpose([array.order.index(i) for i in range(len(array.order))])

    def _run(self, raw: bytes, module: int, arguments: Any, sizes: Any, count: int) -> int:
        name = raw.decode()
        try:
            import jax

            kernel = self.kernel(name, module)
            if kernel is None or len(kernel.operands) + len(kernel.results) != count:
                self.unknown[name] += 1
                return 0
            pointers = [ctypes.c_uint64.from_address(arguments[i]).value for i in range(count)]
            n, device = len(kernel.operands), jax.devices("cpu")[0]
            operands = [
                jax.device_put(np.array(self._view(p, a)), device)
                for p, a in zip(pointers, kernel.operands, strict=False)
            ]
            results = self._program(kernel).execute_sharded(operands)
            parts = results.disassemble_into_single_device_arrays()
            for pointer, array, part in zip(pointers[n:], kernel.results, parts, strict=True):
                self._view(pointer, array)[...] = np.asarray(part[0])
            self.computed[name] += 1
            return 0
        except MemoryError as error:
            self.errors.append(f"{name}: {error}")
            return 1  # a fault, as on a device
        except Exception:
            self.errors.append(f"{name}: {traceback.format_exc(limit=-3)}")
            return 0

    def forget(self) -> None:
        """Before a test: nothing was computed."""
        self.computed.clear()
        self.unknown.clear()
        self.errors.clear()


@functools.cache
def installed() -> Values:
    """This process's, with a folder of its own for what XLA has assembled."""
    # In that of the process that started this one, which cleans up where this one is killed.
    folder = tempfile.mkdtemp(prefix="standin-ptx-", dir=os.environ.get("FAKE_CUDA_PTX"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["FAKE_CUDA_PTX"] = folder
    made = Values(Path(folder))
    made.install()
    atexit.register(made.end)
    return made
