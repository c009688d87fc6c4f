"""A lane program: one compiled executable on a lane's own client, fed with views of the caller's memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
from jax import ShapeDtypeStruct
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding

from dynaflow_xla.errors import EngineError
from dynaflow_xla.ffi import _compat
from dynaflow_xla.machine import ALIGNMENT

_CACHE_ENTRIES = 32
_CACHE_ADDRESSES = 64

_Views = tuple[list[Any], list[tuple[Any, Any]]]
"""Views for an executable, and (target, source) of what is copied before it runs."""

_View = tuple[Any, tuple[Any, Any] | None]
"""One view, and (target, source) if its memory is copied."""


class LaneProgram:
    """Callable for the engine: ``program(addresses)`` runs the executable on views of them.

    Called by one lane, hence by one thread at a time. A view says where memory is, not what is in
    it, so views are kept by address and used again: callers' loops reuse the same buffers. They are kept
    for each input too, because a training step's parameters come from few addresses in many combinations.

    Memory that is not aligned is copied here, before each call, into memory that is. XLA would copy
    it, too, but a large copy in the background, and a program on a synchronous client does not wait
    for the definition of its inputs: it would read memory that nobody has written yet.

    Attributes:
        copied_views: How many inputs the last call copied because they were not aligned.

    Args:
        name: For messages.
        executable: A compiled JAX program for ``device`` whose outputs carry no data.
        specs: Shape and dtype of each input.
        device: The lane's device.
        consts: Arrays that JAX hoisted out of the program; they come before the inputs.
    """

    def __init__(
        self,
        name: str,
        executable: Any,
        specs: list[ShapeDtypeStruct],
        device: Any,
        consts: list[Any],
    ):
        self.name = name
        self.copied_views = 0
        self._execute = _compat.execute_function(executable)
        self._specs = specs
        self._device = device
        self._sharding = SingleDeviceSharding(device)
        self._avals = [ShapedArray(s.shape, s.dtype) for s in specs]
        with jax.enable_x64(True):
            made = [jax.device_put(np.asarray(c), device) for c in consts]
        self._consts = jax.block_until_ready(made)
        self._aligned: dict[int, Any] = {}  # input -> where it is copied to if it is not aligned
        self._views: OrderedDict[tuple[int, ...], _Views] = OrderedDict()
        self._of_input: list[OrderedDict[int, _View]] = [OrderedDict() for _ in specs]

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Runs to the end.

        Raises:
            EngineError: with the lane's and its regions' names and what XLA said.
        """
        made = self._views.get(addresses)
        if made is None:
            made = self._make_views(addresses)
        views, copies = made
        for target, source in copies:
            np.copyto(target, source)
        self.copied_views = len(copies)
        try:
            self._execute(views)
        except Exception as error:
            raise EngineError(f"{self.name} failed: {error}") from error

    def _make_views(self, addresses: tuple[int, ...]) -> _Views:
        if len(addresses) != len(self._specs):
            raise EngineError(
                f"lane program {self.name!r} takes {len(self._specs)} buffers, got {len(addresses)}"
            )
        views, copies = list(self._consts), []
        for index, (address, known) in enumerate(zip(addresses, self._of_input, strict=True)):
            found = known.get(address)
            if found is None:
                found = known[address] = self._make_view(index, address)
                if len(known) > _CACHE_ADDRESSES:
                    known.popitem(last=False)
            view, copy = found
            views.append(view)
            if copy is not None:
                copies.append(copy)
        self._views[addresses] = made = views, copies
        if len(self._views) > _CACHE_ENTRIES:
            self._views.popitem(last=False)
        return made

    def _make_view(self, index: int, address: int) -> _View:
        spec = self._specs[index]
        size = int(np.prod(spec.shape)) * spec.dtype.itemsize
        copy = None
        if size == 0:
            memory = np.zeros(0, np.uint8)
        else:
            memory = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
            if address % ALIGNMENT:
                if index not in self._aligned:
                    self._aligned[index] = aligned_bytes(size)
                copy = self._aligned[index], memory
                memory = self._aligned[index]
        array = memory.view(spec.dtype).reshape(spec.shape)
        # Lane threads have JAX's default settings; without x64, 64-bit memory would be narrowed.
        with jax.enable_x64(True):
            view = _compat.put_view(self._avals[index], self._sharding, array, self._device)
        if size and view.unsafe_buffer_pointer() != memory.ctypes.data:
            raise EngineError(
                f"{self.name}: XLA must take input {index} ({spec.dtype}{list(spec.shape)}) in "
                "place and copied it; this version of jaxlib is not supported"
            )
        return view, copy


def aligned_bytes(size: int) -> Any:
    """Memory that XLA:CPU uses in place."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
