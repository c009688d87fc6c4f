"""A lane program: one compiled executable on a lane's own client, fed with views of the caller's memory."""

from __future__ import annotations

import ctypes
import math
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import ShapeDtypeStruct
from jax.core import ShapedArray
from jax.profiler import TraceAnnotation
from jax.sharding import SingleDeviceSharding

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import EngineError
from dynaflow_xla.ffi import _compat
from dynaflow_xla.machine import ALIGNMENT

_CACHE_ENTRIES = 32
_CACHE_ADDRESSES = 64

_SMALL_BYTES = 1 << 16
"""Up to here, copying an input that lies at a new address is quicker than making a view of it: a view
takes some 50 to 100 us where the processor has just done something else, a copy at most 10."""


@dataclass
class _Operands:
    """What an executable takes for one combination of addresses.

    Attributes:
        views: Its operands.
        copies: (target, source, bytes) of what is copied before it runs.
        small: Inputs among these that are copied because views of them were not there yet.
    """

    views: list[Any]
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    small: list[int] = field(default_factory=list)


class LaneProgram:
    """Callable for the engine: ``program(addresses)`` runs the executable on views of them.

    Called by one lane, hence by one thread at a time. A view says where memory is, not what is in
    it, so views are kept by address and used again: callers' loops reuse the same buffers. They are kept
    for each shape and type too, because a training step's state comes from few addresses in many
    combinations: what was a parameter's memory in one step is a moment's in the next. Small inputs are
    copied until the same addresses come again.

    Memory that is not aligned is copied here, before each call, into memory that is. XLA would copy
    it, too, but a large copy in the background, and a program on a synchronous client does not wait
    for the definition of its inputs: it would read memory that nobody has written yet.

    Attributes:
        copied_views: How many inputs the last call copied because they were not aligned.
        repeatable: For the engine: all errors of its own are EngineErrors; others, on the main thread, are
            those of signal handlers.

    Args:
        name: For messages.
        executable: A compiled JAX program for ``device`` whose outputs carry no data.
        specs: Shape and dtype of each input.
        device: The lane's device.
        consts: Arrays that JAX hoisted out of the program; they come before the inputs.
    """

    repeatable = True

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
        self._sizes = [math.prod(s.shape) * s.dtype.itemsize for s in specs]
        with jax.enable_x64(True):
            made = [jax.device_put(np.asarray(c), device) for c in consts]
        self._consts = jax.block_until_ready(made)
        self._aligned: dict[int, tuple[int, Any]] = {}
        self._views: OrderedDict[tuple[int, ...], _Operands] = OrderedDict()
        alike = Counter((s.shape, s.dtype) for s in specs)
        kinds: dict[Any, Recent[int, Any]] = {
            kind: Recent(_CACHE_ADDRESSES * count) for kind, count in alike.items()
        }
        self._known = [kinds[s.shape, s.dtype] for s in specs]

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Runs to the end.

        Raises:
            EngineError: with the lane's and its regions' names and what XLA said.
        """
        try:
            made = self._views.get(addresses)
            if made is None:
                made = self._make_views(addresses)
            elif made.small:
                made = self._make_views(addresses, again=True)
            for target, source, size in made.copies:
                ctypes.memmove(target, source, size)
        except EngineError:
            raise
        except Exception as error:
            if _of_a_handler(error):
                raise
            text = str(error) or type(error).__name__
            raise EngineError(f"{self.name} failed: its inputs cannot be viewed: {text}") from error
        self.copied_views = len(made.copies) - len(made.small)
        try:
            if TraceAnnotation.is_enabled():
                with TraceAnnotation(f"dynaflow_xla {self.name}"):
                    self._execute(made.views)
            else:
                self._execute(made.views)
        except Exception as error:
            at = error.__traceback__
            if at is not None and at.tb_next is not None and _handlers_run_here():
                raise  # a signal's handler ran here: XLA itself leaves no Python frame
            raise EngineError(f"{self.name} failed: {error}") from error

    def _make_views(self, addresses: tuple[int, ...], *, again: bool = False) -> _Operands:
        if len(addresses) != len(self._specs):
            raise EngineError(
                f"lane program {self.name!r} takes {len(self._specs)} buffers, got {len(addresses)}"
            )
        made = _Operands(list(self._consts))
        # Lane threads have JAX's default settings; without x64, 64-bit memory would be narrowed.
        with jax.enable_x64(True):
            for index, (address, known) in enumerate(zip(addresses, self._known, strict=True)):
                size = self._sizes[index]
                aligned = address % ALIGNMENT == 0 or not size
                view = known.get(address) if aligned else None
                if view is None and aligned and (again or not 0 < size <= _SMALL_BYTES):
                    view = known[address] = self._view(index, self._memory(index, address))
                elif view is None:
                    target, view = self._aligned_input(index)
                    made.copies.append((target, address, size))
                    if aligned:
                        made.small.append(index)
                made.views.append(view)
        self._views[addresses] = made
        if len(self._views) > _CACHE_ENTRIES:
            self._views.popitem(last=False)
        return made

    def _aligned_input(self, index: int) -> tuple[int, Any]:
        """Where an input is copied to, and the view of that."""
        if index not in self._aligned:
            memory = aligned_bytes(self._sizes[index])  # the view keeps it
            self._aligned[index] = memory.ctypes.data, self._view(index, memory)
        return self._aligned[index]

    def _memory(self, index: int, address: int) -> Any:
        size = self._sizes[index]
        if size == 0:
            return np.zeros(0, np.uint8)
        return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)

    def _view(self, index: int, memory: Any) -> Any:
        spec = self._specs[index]
        array = memory.view(spec.dtype).reshape(spec.shape)
        view = _compat.put_view(self._avals[index], self._sharding, array, self._device)
        if self._sizes[index] and view.unsafe_buffer_pointer() != memory.ctypes.data:
            raise EngineError(
                f"{self.name}: XLA must take input {index} ({spec.dtype}{list(spec.shape)}) in "
                "place and copied it; this version of jaxlib is not supported"
            )
        return view


def _handlers_run_here() -> bool:
    """Whether this thread is the one on which Python runs handlers of signals."""
    return threading.get_ident() == threading.main_thread().ident


def _of_a_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it: a handler gets the frame that it interrupted, its caller's."""
    if not _handlers_run_here():
        return False
    at = error.__traceback__
    while at is not None:
        below = at.tb_frame.f_back or at
        for given in at.tb_frame.f_locals.values():
            if any(one is below for one in (given if isinstance(given, tuple) else (given,))):
                return True
        at = at.tb_next
    return False


def aligned_bytes(size: int) -> Any:
    """Memory that XLA:CPU uses in place."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
