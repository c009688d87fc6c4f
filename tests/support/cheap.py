"""XLA compilations as cheap as can be, for tests of values: a fifth of the time for small programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

# LLVM's optimisations; kernels from MLIR, which takes longer than all of LLVM; threads for a few
# instructions. What XLA does with a program before (fusion, layouts, buffers) is as it always is.
_WANTED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def _known() -> tuple[str, ...]:
    """Those that this version of XLA has."""
    return tuple(name for name in _WANTED if _is_known(name))


def _is_known(name: str) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={name: _WANTED[name]}).lower(1.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def options() -> dict[str, Any]:
    """For ``compiler_options`` of ``jax.jit`` and ``dfx.schedule``."""
    return {name: _WANTED[name] for name in _known()}


def flags() -> str:
    """The same for ``XLA_FLAGS`` of a process that has this version of XLA."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options().items())
