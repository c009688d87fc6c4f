"""Lanes as extra PJRT clients of one device, driven by the engine through the PJRT C API.

A client computes on one stream of its own, so one client a lane is what makes lanes overlap. The
engine runs a lane's executables in C++; where jaxlib does not tell the addresses that this needs, a
Python step runs them instead (:mod:`dynaflow_xla.ffi.device_steps`), and ``problem`` says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import xla_client

from dynaflow_xla import machine
from dynaflow_xla.errors import EngineError
from dynaflow_xla.ffi import _compat, _engine, xla
from dynaflow_xla.kernels import Lanes

CUDA_RUN_TARGET = "dfx_run"
CUDA_GRAPH_TARGET = "dfx_run_graph"
STREAM_TARGET = "dfx_lane_stream"
MEMORY_FRACTION = 0.08
"""At most this share of the device's memory is a lane's own, for temporaries; it grows on demand."""

_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_ASYNC_DISPATCH = "PJRT_GPU_ENABLE_ASYNC_DISPATCH"
_lock = threading.Lock()
_cuda: dict[int, CudaLanes] = {}
_cuda_registered = False


@dataclass(eq=False)
class DeviceLanes:
    """The lanes of one device.

    Attributes:
        platform: ``"cpu"`` or ``"cuda"``: where the outer program runs.
        make_client: Makes the client of one more lane.
        api: Address of the plugin's ``PJRT_Api``, or 0.
        alignment: Bytes at which XLA uses memory in place.
        ordinal: The device's number.
        clients: Of the lanes made so far.
    """

    platform: str
    make_client: Callable[[], Any]
    api: int
    alignment: int
    ordinal: int = 0
    clients: list[Any] = field(default_factory=list)
    _making: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What programs on these lanes depend on: the same for lanes that run them alike."""
        return self.platform, self.ordinal, self.alignment, bool(self.api), check_steps()

    def client(self, lane: int) -> Any:
        """The lane's client, made on first use.

        Raises:
            EngineError: it cannot be made (no memory, no device).
        """
        if lane < len(self.clients):
            return self.clients[lane]
        with self._making:  # one thread makes a lane's client, the others wait for it
            while len(self.clients) <= lane:
                number = len(self.clients)
                try:
                    client = self.make_client()
                except Exception as error:
                    raise EngineError(
                        f"cannot make lane {number} on {self.platform}: {error}. A lane takes up to "
                        f"{MEMORY_FRACTION:.0%} of the device's memory: use fewer lanes, or leave room "
                        "with XLA_PYTHON_CLIENT_MEM_FRACTION."
                    ) from error
                self.clients.append(client)
            return self.clients[lane]

    def device(self, lane: int) -> Any:
        """The lane's device."""
        return self.client(lane).local_devices()[0]

    def engine(self, lanes: int) -> Any:
        """The CUDA engine over the streams of at least ``lanes`` lanes; None for lanes on the host."""
        return None

    def kernel_engine(self, lanes: Lanes | None) -> Any:
        """The engine for stages of kernels only, whose lanes are streams of the engine's own.

        Raises:
            EngineError: no CUDA, or lanes that the device cannot give.
        """
        raise EngineError(f"lanes on {self.platform} run no CUDA kernels")

    @property
    def problem(self) -> str:
        """Why steps run in Python, or ``""``."""
        if not self.api:
            return "the PJRT plugin was not found, so lanes run their executables from Python"
        if not _compat.client_pointer(self.client(0)):
            return "this jaxlib tells no PJRT client pointers, so lanes run their executables from Python"
        return ""


class CudaLanes(DeviceLanes):
    """Lanes on one CUDA device; the engine is made anew when more lanes are asked for."""

    def __init__(self, device: Any):
        """Makes no lane yet.

        Args:
            device: The JAX device of the outer program.

        Raises:
            EngineError: CUDA cannot be used, with the reason.
        """
        if problem := _engine.cuda_problem() or _enqueues_elsewhere():
            raise EngineError(f"no CUDA lanes: {problem}")
        ordinal = device.local_hardware_id or 0

        def make_client() -> Any:
            options = {
                **_compat.gpu_plugin_options(),
                "allocator": "bfc",
                "memory_fraction": MEMORY_FRACTION,
                "preallocate": False,
                "visible_devices": [ordinal],
            }
            return xla_client.make_c_api_client("cuda", options)

        super().__init__("cuda", make_client, _cuda_api(), machine.CUDA_ALIGNMENT, ordinal)
        self._streams: list[int] = []
        self._engine: Any = None
        # Streams and parts of the device go with the last program that runs on them.
        self._kernel_engines: WeakValueDictionary[Lanes | None, Any] = WeakValueDictionary()

    def engine(self, lanes: int) -> Any:
        """One engine for all programs of the device; one with more lanes takes its place when needed.

        Raises:
            EngineError: a lane or the engine cannot be made.
        """
        with _lock:
            if self._engine is None or len(self._streams) < lanes:
                while len(self._streams) < lanes:
                    self._streams.append(self._find_stream(len(self._streams)))
                try:
                    self._engine = _engine.CudaEngine(
                        device=self.ordinal, streams=self._streams, check_steps=check_steps()
                    )
                except RuntimeError as error:
                    raise EngineError(f"cannot make {lanes} lanes on CUDA: {error}") from error
            return self._engine

    def kernel_engine(self, lanes: Lanes | None) -> Any:
        """The engine of these lanes, made once; the lanes' priorities and multiprocessors are theirs."""
        with _lock:
            engine = self._kernel_engines.get(lanes)
            if engine is None:
                try:
                    engine = self._kernel_engines[lanes] = _engine.CudaEngine(
                        device=self.ordinal,
                        priorities=list(lanes.priorities if lanes else ()),
                        sms=list(lanes.sms if lanes else ()),
                        check_steps=check_steps(),
                    )
                except RuntimeError as error:
                    raise EngineError(f"cannot make {lanes or 'lanes'} on CUDA: {error}") from error
            return engine

    def _find_stream(self, lane: int) -> int:
        """The stream that a lane's client computes on: a custom call in that client sees it.

        Somebody's program is being traced or lowered when lanes are first asked for. So nothing here is a
        part of that trace, or of its mesh: the probe is compiled ahead of time and run as it is, on an
        array of now.
        """
        device = self.device(lane)
        sharding = jax.sharding.SingleDeviceSharding(device)

        def lane_stream(x: Any) -> Any:
            return jax.ffi.ffi_call(
                STREAM_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True
            )(x)

        with jax.ensure_compile_time_eval(), _compat.without_mesh():
            spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
            probe = jax.jit(lane_stream, in_shardings=sharding, out_shardings=sharding)
            compiled = probe.lower(spec).compile({"xla_gpu_enable_command_buffer": ""})
            given = jax.device_put(np.zeros((8,), np.float32), sharding)
            _engine.take_lane_stream()
            results = _compat.execute_on_device(compiled.runtime_executable(), [given])
            jax.block_until_ready(results)
        stream: int = _engine.take_lane_stream()
        if stream == 0 or stream in self._streams:
            raise EngineError(
                f"lane {lane} has no compute stream of its own (its client works on {stream:#x}): this "
                "jaxlib's CUDA clients cannot serve as lanes. Use backend='xla'."
            )
        return stream


def _enqueues_elsewhere() -> str:
    """Why lanes cannot order what XLA enqueues; "" if they can."""
    if os.environ.get(_ASYNC_DISPATCH, "").lower() in ("", "0", "false", "no", "off"):
        return ""
    return (
        f"{_ASYNC_DISPATCH} has XLA enqueue a lane's kernels on another thread when the lane has gone on, "
        "so that events would not order them and an error could not reach the call; unset it"
    )


def check_steps() -> bool:
    """Whether the host waits after each step, so that a fault is reported with the step's name."""
    return os.environ.get("DYNAFLOW_XLA_CHECK_STEPS", "0") not in ("", "0")


def cuda_lanes(device: Any) -> CudaLanes:
    """The lanes of a CUDA device, shared by all schedules.

    Raises:
        EngineError: CUDA cannot be used, with the reason.
    """
    _register_cuda()
    with _lock:
        key = device.local_hardware_id or 0
        if key not in _cuda:
            _cuda[key] = CudaLanes(device)
        return _cuda[key]


def _register_cuda() -> None:
    global _cuda_registered
    xla.ensure_registered()
    with _lock:
        if _cuda_registered:
            return
        handlers = _engine.handlers()
        jax.ffi.register_ffi_type(
            "dfx_cuda_run_state",
            {
                "type_id": handlers["cuda_state_type_id"],
                "type_info": handlers["cuda_state_type_info"],
            },
            platform="CUDA",
        )
        for target, execute in ((CUDA_RUN_TARGET, "execute"), (CUDA_GRAPH_TARGET, "graph")):
            jax.ffi.register_ffi_target(
                target,
                {
                    "instantiate": handlers["cuda_run_instantiate"],
                    "execute": handlers[f"cuda_run_{execute}"],
                },
                platform="CUDA",
            )
        jax.ffi.register_ffi_target(STREAM_TARGET, handlers["lane_stream"], platform="CUDA")
        _cuda_registered = True


def _cuda_api() -> int:
    """The address of the CUDA plugin's ``PJRT_Api``, 0 if the plugin is not where JAX installs it."""
    for package in _CUDA_PLUGINS:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            library = Path(folder) / "xla_cuda_plugin.so"
            if library.exists():
                return plugin_api(library)
    return 0


def plugin_api(library: Path) -> int:
    """The address of the ``PJRT_Api`` of a plugin's shared library."""
    get = ctypes.CDLL(str(library)).GetPjrtApi
    get.restype = ctypes.c_void_p
    return int(get() or 0)
