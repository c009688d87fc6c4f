"""A little of the CUDA driver, through ctypes: memory, a stream and graphs for tests without a framework."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NON_BLOCKING, _RELAXED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """Device 0's primary context, current on the thread that makes this; and a stream in it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("DYNAFLOW_XLA_LIBCUDA") or "libcuda.so.1")
        self.call("cuInit", 0)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self.stream = int(stream.value or 0)

    def call(self, function: str, *args: Any) -> None:
        """Calls a function of the driver; AssertionError with its status if it fails."""
        status = getattr(self._library, function)(*args)
        assert status == 0, f"{function} failed with status {status}"

    def context(self) -> int | None:
        """The calling thread's current context, if it has one."""
        found = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(found))
        return found.value

    def wait(self) -> None:
        """For the stream."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def array(self, values: np.ndarray[Any, Any]) -> Array:
        """A copy on the device."""
        made = Array(self, values)
        made.put(values)
        return made

    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """What the stream is given inside, as an executable graph in the list when it is over."""
        made: list[Any] = []
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        stream = ctypes.c_void_p(self.stream)
        self.call("cuStreamBeginCapture_v2", stream, _RELAXED)
        try:
            yield made
        finally:
            self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
        )
        made.append(executable)

    def launch(self, graph: Any) -> None:
        """An executable graph, on the stream."""
        self.call("cuGraphLaunch", graph, ctypes.c_void_p(self.stream))


class Array:
    """Memory of the device, for the rest of the process."""

    def __init__(self, driver: Driver, like: np.ndarray[Any, Any]) -> None:
        self._driver, self._like = driver, np.empty_like(like)
        address = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(like.nbytes))
        self.address = int(address.value)

    def put(self, values: np.ndarray[Any, Any]) -> None:
        """Other values, after what the stream was given, and before what it is given next.

        (A copy that no stream orders may return before the device's memory is written.)
        """
        source = np.ascontiguousarray(values, self._like.dtype)
        self._driver.call(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address),
            source.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(source.nbytes),
            ctypes.c_void_p(self._driver.stream),
        )  # fmt: skip
        self._driver.wait()

    def get(self) -> np.ndarray[Any, Any]:
        """The values, after what the stream was given."""
        self._driver.wait()
        made = np.empty_like(self._like)
        self._driver.call(
            "cuMemcpyDtoH_v2", made.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(self.address),
            ctypes.c_size_t(made.nbytes),
        )  # fmt: skip
        return made
