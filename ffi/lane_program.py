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

ALIGNMENT = 64
"""Bytes: XLA:CPU takes memory in place only at this alignment, and copies it otherwise."""

_CACHE_ENTRIES = 32


class LaneProgram:
    """Callable for the engine: ``program(addresses)`` runs the executable on views of them.

    Called by one lane, hence by one thread at a time. A view says where memory is, not what is in
    it, so views are kept by address and used again: callers' loops reuse the same buffers.

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
            self._consts = [jax.device_put(np.asarray(c), device) for c in consts]
        self._views: OrderedDict[tuple[int, ...], list[Any]] = OrderedDict()

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Runs to the end.

        Raises:
            EngineError: with the lane's and its regions' names and what XLA said.
        """
        views = self._views.get(addresses)
        if views is None:
            views = self._make_views(addresses)
        try:
            self._execute(views)
        except Exception as error:
            raise EngineError(f"{self.name} failed: {error}") from error

    def _make_views(self, addresses: tuple[int, ...]) -> list[Any]:
        if len(addresses) != len(self._specs):
            raise EngineError(
                f"lane program {self.name!r} takes {len(self._specs)} buffers, got {len(addresses)}"
            )
        # Lane threads have JAX's default settings; without x64, 64-bit memory would be narrowed.
        with jax.enable_x64(True):
            return self._make_views_x64(addresses)

    def _make_views_x64(self, addresses: tuple[int, ...]) -> list[Any]:
        views = list(self._consts)
        all_in_place = True
        for address, spec, aval in zip(addresses, self._specs, self._avals, strict=True):
            size = int(np.prod(spec.shape)) * spec.dtype.itemsize
            if size == 0:
                array = np.zeros(spec.shape, spec.dtype)
            else:
                raw = (ctypes.c_char * size).from_address(address)
                array = np.frombuffer(raw, np.uint8).view(spec.dtype).reshape(spec.shape)
            view = _compat.put_view(aval, self._sharding, array, self._device)
            if size and view.unsafe_buffer_pointer() != address:
                all_in_place = (
                    False  # XLA copied: the content is a snapshot, good for this call only
                )
                self.copied_views += 1
            views.append(view)
        if all_in_place:
            self._views[addresses] = views
            if len(self._views) > _CACHE_ENTRIES:
                self._views.popitem(last=False)
        return views
