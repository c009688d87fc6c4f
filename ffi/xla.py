"""Registration of the engine's custom calls with jaxlib, and one extra CPU client per lane.

Why extra clients: running a lane's program on the client that runs the outer program deadlocks
(its in-flight limit and its thread pool are held by the outer calls). A lane's client is
synchronous, has a pool of as many threads as the lane has cores, and serves that lane only. One of these at
most waits in a gate, since a lane's gates are chained and a lane runs one call at a time: what the gate waits
for never waits for this lane's other threads.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import jax
from jaxlib import xla_client

from dynaflow_xla.errors import EngineError, PlanError, step_failed
from dynaflow_xla.ffi import _engine

PLAN_ABI_VERSION = 1
RUN_TARGET = "dfx_run"
GATE_TARGET = "dfx_gate"
FAIL_TARGET = "dfx_test_fail"
ORDER_TARGET = "dfx_order"
CUMULATIVE_TARGET = "dfx_cumulative"

_lock = threading.Lock()
_registered = False
_gate_registered = False
_clients: dict[tuple[int, int], Any] = {}


def ensure_registered() -> None:
    """Registers handlers and the state type once, after the default backend exists.

    Raises:
        EngineError: the compiled engine speaks another plan version.
    """
    global _registered
    if _registered:
        return
    with _lock:
        if _registered:
            return  # type: ignore[unreachable]  # another thread was first
        if _engine.PLAN_ABI_VERSION != PLAN_ABI_VERSION:
            raise EngineError(
                f"this package speaks plan ABI {PLAN_ABI_VERSION}, its compiled engine speaks "
                f"{_engine.PLAN_ABI_VERSION}: reinstall dynaflow_xla so that both come from one build."
            )
        # jaxlib applies queued types after queued targets when it makes the backend: make the
        # backend first, then the order below is the order of effect.
        jax.local_devices(backend="cpu")
        handlers = _engine.handlers()
        jax.ffi.register_ffi_type(
            "dfx_run_state",
            {"type_id": handlers["state_type_id"], "type_info": handlers["state_type_info"]},
            platform="cpu",
        )
        jax.ffi.register_ffi_target(
            RUN_TARGET,
            {"instantiate": handlers["run_instantiate"], "execute": handlers["run_execute"]},
            platform="cpu",
        )
        jax.ffi.register_ffi_target(GATE_TARGET, handlers["gate"], platform="cpu")
        jax.ffi.register_ffi_target(FAIL_TARGET, handlers["fail"], platform="cpu")
        jax.ffi.register_ffi_target(CUMULATIVE_TARGET, handlers["cumulative"], platform="cpu")
        # Registered after jax's own exit handlers, hence run before them: calls in flight finish
        # while the interpreter still stands, later ones get an error.
        atexit.register(_engine.shutdown)
        _engine.watch_fork()
        _registered = True


def ensure_order_gate() -> None:
    """Registers the order gate once, for CPU and GPU programs; needs neither a GPU nor the CUDA plugin."""
    global _gate_registered
    with _lock:
        if not _gate_registered:
            for platform, handler in (("cpu", "order_gate"), ("CUDA", "cuda_order_gate")):
                jax.ffi.register_ffi_target(
                    ORDER_TARGET, _engine.handlers()[handler], platform=platform
                )
            _gate_registered = True


def check_process() -> None:
    """Raises EngineError in a forked child: neither lanes nor XLA's threads exist there."""
    if _engine.forked():
        raise EngineError(
            "this process was forked after dynaflow_xla (and JAX) had started threads; they do not "
            "exist in the child. Start workers with multiprocessing's 'spawn' or 'forkserver', or "
            "fork before the first scheduled call."
        )


def engine_error(error: BaseException) -> EngineError | None:
    """The engine's error inside one of XLA's; None if it is another error.

    XLA carries an error of a custom call as text: no type, no object, and several types of its own. So
    the engine's handlers put a mark in front, and it is looked for here and nowhere else. It is one of XLA's
    type, too, for who catches what the original raises (a callback's error inside of a region).
    """
    _, mark, text = str(error).rpartition(_engine.ENGINE_ERROR_MARK)
    if not mark:
        return None
    made = step_failed(text, error)
    made.__cause__ = error
    return made


def lane_device(lane: int, width: int = 1) -> Any:
    """The device of a lane's own CPU client with so many threads (made on first use)."""
    if lane < 0:
        raise PlanError(f"a lane number must be >= 0; got {lane}")
    ensure_registered()
    with _lock:
        if (lane, width) not in _clients:
            _clients[lane, width] = _make_client(width)
        return _clients[lane, width].local_devices()[0]


def _make_client(width: int) -> Any:
    # The pool's size is read from NPROC when the client is made; there is no other switch.
    previous = os.environ.get("NPROC")
    os.environ["NPROC"] = str(width)
    try:
        return xla_client.make_cpu_client(asynchronous=False)
    finally:
        if previous is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = previous
