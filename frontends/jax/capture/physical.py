"""Values and the memory behind them: typed PRNG keys are stored as arrays of words."""

from __future__ import annotations

from typing import Any

import jax

from dynaflow_xla.frontends.jax import _compat


def is_key(aval: Any) -> bool:
    """Whether a value is a typed PRNG key array."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def spec(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace with for an abstract value."""
    return _compat.struct_like(aval)


def physical_spec(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the memory behind a value (key arrays are uint32 words)."""
    spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.eval_shape(jax.random.key_data, spec) if is_key(aval) else spec


def physical_aval(aval: Any) -> Any:
    """Abstract value of the memory behind a value."""
    if not is_key(aval):
        return aval
    spec = physical_spec(aval)
    return jax.core.ShapedArray(spec.shape, spec.dtype)


def to_physical(x: Any, aval: Any) -> Any:
    """The array behind a value."""
    return jax.random.key_data(x) if is_key(aval) else x


def from_physical(x: Any, aval: Any) -> Any:
    """The value in front of an array."""
    if is_key(aval):
        return jax.random.wrap_key_data(x, impl=_compat.key_impl(aval.dtype))
    return x
