"""XLA executables as steps of a device lane: through the PJRT C API, or from Python where that fails."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla.errors import EngineError, UnsupportedError
from dynaflow_xla.ffi import _compat, _engine
from dynaflow_xla.ffi.device_lanes import DeviceLanes, check_steps

# PJRT_Buffer_Type by the name of a dtype.
_PJRT_TYPES = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5,
    "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "bfloat16": 13,
    "complex64": 14, "complex128": 15,
    "float8_e5m2": 16, "float8_e4m3fn": 17, "float8_e4m3b11fnuz": 18, "float8_e5m2fnuz": 19,
    "float8_e4m3fnuz": 20,
}  # fmt: skip

# DLPack's type codes by the kind of a dtype.
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

_DEFAULT_STREAM = 0


def tensor(spec: Any) -> tuple[int, list[int]]:
    """Element type and shape as PJRT wants them.

    Raises:
        UnsupportedError: no PJRT type is known for the dtype.
    """
    name = np.dtype(spec.dtype).name
    if name not in _PJRT_TYPES:
        raise UnsupportedError(f"device lanes cannot pass {name} values between regions")
    return _PJRT_TYPES[name], list(spec.shape)


def add_step(
    program: Any,
    lanes: DeviceLanes,
    lane: int,
    name: str,
    executable: Any,
    consts: Sequence[Any],
    ins: tuple[Sequence[Any], Sequence[int]],
    outs: tuple[Sequence[Any], Sequence[int]],
    in_place: Sequence[bool],
) -> Any:
    """Adds an executable to a lane of an engine program.

    Args:
        program: The ``_engine.Program``.
        lanes: Where the lane's client is.
        lane: Its number.
        name: For messages.
        executable: A loaded executable of that client. It takes constants, inputs, and an argument for
            each output that is in place, which is donated and aliased with it.
        consts: Arrays on the lane's device.
        ins: Shapes and dtypes of the inputs, and their buffers in the program.
        outs: The same for the outputs.
        in_place: Which outputs are written where they belong.

    Returns:
        Counters of what the step does: executions, copied inputs and outputs.
    """
    specs_in, buffers_in = ins
    specs_out, buffers_out = outs
    if not lanes.problem:
        client = lanes.client(lane)
        return _engine.add_pjrt_launch(
            program,
            lane,
            name,
            lanes.api,
            _compat.client_pointer(client),
            _compat.executable_pointer(executable),
            (client, executable, tuple(consts)),
            [tensor(c) for c in consts],
            [c.unsafe_buffer_pointer() for c in consts],
            [tensor(s) for s in specs_in],
            [tensor(s) for s in specs_out],
            list(in_place),
            list(buffers_in),
            list(buffers_out),
        )
    step = PythonStep(
        name, executable, consts, specs_in, specs_out, in_place, lanes.device(lane),
        lanes.engine(lane + 1),
    )  # fmt: skip
    program.add_python_launch(lane, name, step, list(buffers_in), list(buffers_out))
    return step


class PythonStep:
    """Runs an executable from Python: callable with the addresses of inputs and outputs.

    Attributes:
        executions, copied_inputs, copied_outputs: What it did so far.
    """

    def __init__(
        self,
        name: str,
        executable: Any,
        consts: Sequence[Any],
        ins: Sequence[Any],
        outs: Sequence[Any],
        in_place: Sequence[bool],
        device: Any,
        engine: Any,
    ):
        self.name = name
        self.executions = self.copied_inputs = self.copied_outputs = 0
        self._executable, self._consts, self._device = executable, list(consts), device
        self._ins, self._outs, self._in_place = list(ins), list(outs), list(in_place)
        self._engine = engine
        self._under_way: deque[Any] = deque()  # a result of each execution that was not over

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Runs; on CUDA it enqueues and does not wait (unless each step is to be checked).

        Raises:
            EngineError: with the step's name and what XLA said, of this execution or of an earlier one
                that failed when its call had returned; then nothing of this call is run.
        """
        specs = [*self._ins, *self._outs]
        if len(addresses) != len(specs):
            raise EngineError(f"{self.name} takes {len(specs)} buffers, got {len(addresses)}")
        places = addresses[len(self._ins) :]
        self._tell_of_earlier()
        try:
            with jax.enable_x64(True):
                views = [self._view(a, s) for a, s in zip(addresses, self._ins, strict=False)]
                for address, spec, wanted in zip(places, self._outs, self._in_place, strict=True):
                    if wanted:
                        views.append(self._view(address, spec))
                results = _compat.execute_on_device(self._executable, [*self._consts, *views])
            if self._engine is not None:
                # What XLA could not enqueue is done at once, with the error in its results alone.
                for result in results:
                    if check_steps() or result.is_ready():
                        result.block_until_ready()
            for address, spec, result in zip(places, self._outs, results, strict=True):
                self._put(address, spec, result)
            if self._engine is not None and results:
                # One is enough: in the caller's memory, for any other is held till then; or the smallest.
                _, _, i = min(
                    (not p, r.nbytes, i)
                    for i, (p, r) in enumerate(zip(self._in_place, results, strict=True))
                )
                self._under_way.append(results[i])
        except Exception as error:
            raise EngineError(f"{self.name} failed: {error}") from error
        self.executions += 1

    def _tell_of_earlier(self) -> None:
        for _ in range(len(self._under_way)):
            try:
                result = self._under_way.popleft()
            except IndexError:
                return  # another thread has it
            try:
                if not result.is_ready():
                    self._under_way.append(result)
                    continue
                result.block_until_ready()
            except Exception as error:
                raise EngineError(
                    f"{self.name} failed after an earlier call had returned, whose results are not "
                    f"valid: {error}"
                ) from error

    def _view(self, address: int, spec: Any) -> Any:
        dtype = np.dtype(spec.dtype)
        if not int(np.prod(spec.shape, dtype=np.int64)):
            return jax.device_put(np.zeros(spec.shape, dtype), self._device)
        code = 4 if dtype.name == "bfloat16" else _DLPACK_CODES.get(dtype.kind)
        if code is None:
            raise UnsupportedError(f"the Python launcher cannot pass {dtype.name} values")
        view = _compat.dlpack_view(
            _engine.dlpack_capsule(
                address, list(spec.shape), code, dtype.itemsize * 8,
                self._engine is not None, 0 if self._engine is None else self._engine.device,
            ),
            self._device,
        )  # fmt: skip
        if view.unsafe_buffer_pointer() != address:
            self.copied_inputs += 1
            view.block_until_ready()  # a program on a synchronous client does not wait for a copy
        return view

    def _put(self, address: int, spec: Any, result: Any) -> None:
        size = int(np.prod(spec.shape, dtype=np.int64)) * np.dtype(spec.dtype).itemsize
        if self._engine is None:
            result.block_until_ready()
        where = result.unsafe_buffer_pointer()
        if where == address or size == 0:
            return
        self.copied_outputs += 1
        if self._engine is None:
            ctypes.memmove(address, where, size)
        else:
            self._engine.copy(address, where, size, _DEFAULT_STREAM)
