"""The private names of jax and jaxlib that the run-time side uses, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config, mesh
from jaxlib import _jax, xla_client

_COMPILE_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_xla_profile_version",
    "jax_xla_runtime_errors",
)
"""Settings of JAX that reach XLA as compiler options, and do not show in a lowered program."""


def compile_settings() -> list[str]:
    """What those settings are now; one that this version of JAX has not is left out."""
    values = jax.config.values
    return [f"{name}={values[name]}" for name in _COMPILE_SETTINGS if name in values]


def put_view(aval: Any, sharding: Any, array: Any, device: Any) -> Any:
    """Wraps a NumPy array as a jax.Array on ``device``, in place where XLA can (about 2 us).

    ``jax.transfer_guard`` of the caller's thread is about the user's transfers: this is none.
    """
    try:
        return _jax.batched_device_put(aval, sharding, [array], [device], True)
    except RuntimeError as error:
        if "Disallowed" not in str(error):
            raise
    with jax.transfer_guard("allow"):
        return _jax.batched_device_put(aval, sharding, [array], [device], True)


def execute_function(compiled: Any) -> Callable[[list[Any]], Any]:
    """The cheapest way to run a ``jax.stages.Compiled`` on arrays of its own device (about 3 us)."""
    return compiled.runtime_executable().execute_sharded  # type: ignore[no-any-return]


def client_pointer(client: Any) -> int:
    """Address of a client's ``PJRT_Client``; 0 before jaxlib 0.10.1 and on clients without C API."""
    return int(getattr(client, "unsafe_client_pointer", 0) or 0)


def executable_pointer(executable: Any) -> int:
    """Address of a ``PJRT_LoadedExecutable``; 0 as above."""
    return int(getattr(executable, "unsafe_executable_pointer", 0) or 0)


def gpu_plugin_options() -> dict[str, Any]:
    """The options that JAX gives its own GPU client."""
    return dict(xla_client.generate_pjrt_gpu_plugin_options())


def share_executable(executable: Any, client: Any, device: Any) -> Any:
    """A compiled executable on another client of the same kind, without compiling again."""
    devices = _jax.DeviceList((device,))
    return client.deserialize_executable(
        executable.serialize(), devices, xla_client.CompileOptions()
    )


def dlpack_view(capsule: Any, device: Any) -> Any:
    """A DLPack capsule's memory as a jax.Array on ``device``, in place."""
    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None)


def execute_on_device(executable: Any, arguments: list[Any]) -> list[Any]:
    """Runs a loaded executable of one device on arrays of it; its outputs."""
    results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [shards[0] for shards in results]


def nothing_evaluated() -> contextlib.AbstractContextManager[Any]:
    """A block in which a trace evaluates nothing (``jax.ensure_compile_time_eval``): gates would run."""
    return config.eager_constant_folding(False)  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """A block without the mesh of ``jax.set_mesh``, also while something is traced.

    What is compiled for a lane's client is of other devices. The public way works outside of traces only.
    """
    contexts: list[tuple[Any, Any]] = []
    for name, nothing in (
        ("abstract_mesh_context_manager", "empty_abstract_mesh"),
        ("device_context", "empty_concrete_mesh"),
    ):
        if hasattr(config, name):  # None is no mesh there
            contexts.append((getattr(config, name), None))
        elif hasattr(mesh, name):  # jax 0.12
            contexts.append((getattr(mesh, name), getattr(mesh, nothing)))
    before = [context.swap_local(empty) for context, empty in contexts]
    try:
        yield
    finally:
        for (context, _), value in zip(contexts, before, strict=True):
            context.set_local(value)
