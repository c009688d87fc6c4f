"""Are the parameters and constants of one operator the same in two traces?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla.batch.states import (
    Listed,
    NoRule,
    Position,
    Refuse,
    Rows,
    Same,
    State,
)


def to_numpy(value: Any) -> np.ndarray:
    """A constant as a NumPy array; of keys, their bits."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        # The function may close over a key, and be traced while this runs.
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    return np.asarray(value)


def same_array(a: Any, b: Any) -> bool:
    """Same type, shape and bytes."""
    if a is b:
        return True
    if getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    x, y = to_numpy(a), to_numpy(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def same_jaxpr(a: Any, b: Any) -> bool:
    """Same equations on the same variables, with the same parameters and constants."""
    if a is b:
        return True
    consts = list(getattr(a, "consts", ())), list(getattr(b, "consts", ()))
    if len(consts[0]) != len(consts[1]) or not all(map(same_array, *consts)):
        return False
    a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
    names: dict[Any, Any] = {}

    def bind(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
        names.update(zip(xs, ys, strict=False))
        return len(xs) == len(ys) and all(x.aval == y.aval for x, y in zip(xs, ys, strict=True))

    def equal_atoms(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
        return len(xs) == len(ys) and all(
            isinstance(y, jcore.Literal) and x.aval == y.aval and same_array(x.val, y.val)
            if isinstance(x, jcore.Literal)
            else names.get(x) is y
            for x, y in zip(xs, ys, strict=True)
        )

    if not bind(a.constvars, b.constvars) or not bind(a.invars, b.invars):
        return False
    if len(a.eqns) != len(b.eqns):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive is not y.primitive or not equal_atoms(x.invars, y.invars):
            return False
        if x.params.keys() != y.params.keys():
            return False
        if not all(same_param(v, y.params[k]) for k, v in x.params.items()):
            return False
        if not bind(x.outvars, y.outvars):
            return False
    return equal_atoms(a.outvars, b.outvars)


def same_param(a: Any, b: Any) -> bool:
    """Equality of parameters: jaxprs by structure, arrays by bytes, functions by identity."""
    if a is b:
        return True
    if hasattr(a, "eqns"):
        return hasattr(b, "eqns") and same_jaxpr(a, b)
    if isinstance(a, np.ndarray | np.generic | jax.Array) and not np.isscalar(a):
        return hasattr(b, "dtype") and same_array(a, b)
    if isinstance(a, Mapping):
        return (
            isinstance(b, Mapping)
            and a.keys() == b.keys()
            and all(same_param(v, b[k]) for k, v in a.items())
        )
    if isinstance(a, list | tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same_param(x, y) for x, y in zip(a, b, strict=True))
        )
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


MOST_LISTED = 4096
"""So many integers are known one by one."""


def _kind(dtype: Any) -> str:
    """NumPy's letter for a type; "f" for the narrow floats too, which NumPy calls void."""
    if jax.dtypes.issubdtype(dtype, np.floating):
        return "f"
    return str(np.dtype(dtype).kind)


def _fill(value: np.ndarray) -> Any:
    """The value of every element, or None: not of NaN, not of types without plain equality."""
    if value.size == 0 or _kind(value.dtype) not in "biufc":
        return None
    first = value.reshape(-1)[0]
    return first.item() if bool((value == first).all()) else None


def constant_state(values: Sequence[Any], sizes: Sequence[int]) -> State:
    """The state of a literal or closed-over array, from its value in each trace.

    Args:
        values: Its value in the trace of the whole batch, then in those of the nano-batches.
        sizes: Rows of the batch in each trace.

    Raises:
        Refuse: the values differ in a way that no state describes.
    """
    traced = any(isinstance(v, jax.core.Tracer) for v in values)
    if all(v is values[0] if traced else same_array(v, values[0]) for v in values[1:]):
        fill = None if traced else _fill(to_numpy(values[0]))
        made = Same(0, fill)
        return made if traced or fill is not None else listed([values[0]] * len(values), made)
    if traced:
        raise Refuse("is a closed-over traced value, and another one for other batch sizes")
    arrays = [to_numpy(v) for v in values]
    whole = arrays[0]
    refusal = Refuse("is a constant that depends on the batch size")
    if any(a.dtype != whole.dtype or a.ndim != whole.ndim for a in arrays):
        raise refusal
    if all(a.shape == whole.shape for a in arrays):
        for power in (1, -1, 2, -2):
            if all(
                _proportional(whole, a, sizes[0], n, power)
                for a, n in zip(arrays, sizes, strict=True)
            ):
                return listed(arrays, Same(power))
        raise refusal
    differing = {d for a in arrays for d in range(a.ndim) if a.shape[d] != whole.shape[d]}
    if len(differing) != 1:
        raise refusal
    axis = differing.pop()
    inner = whole.shape[axis] // sizes[0]
    if inner == 0 or any(a.shape[axis] != n * inner for a, n in zip(arrays, sizes, strict=True)):
        raise refusal
    row = np.take(whole, [0], axis)
    if all(bool((a == row).all()) for a in arrays):
        return Rows(axis, 1, inner, 0, _fill(whole))
    if inner == 1 and whole.dtype.kind in "iu":
        shape = [-1 if d == axis else 1 for d in range(whole.ndim)]
        if all(
            bool((a == np.arange(n).reshape(shape)).all())
            for a, n in zip(arrays, sizes, strict=True)
        ):
            return Position(axis)
    raise refusal


def listed(values: Sequence[Any], plain: Same) -> State:
    """Integers of at most one dimension are known one by one, if they are not too many."""
    arrays = [to_numpy(v) for v in values]
    if any(a.ndim > 1 or not 0 < a.size <= MOST_LISTED or a.dtype.kind not in "iu" for a in arrays):
        return plain
    return Listed(tuple(tuple(a.reshape(-1).tolist()) for a in arrays), plain)


def _proportional(whole: np.ndarray, part: np.ndarray, b: int, n: int, power: int) -> bool:
    """Whether whole == (b / n)**power * part, up to the rounding of its type."""
    kind = _kind(whole.dtype)
    if kind in "iu" and power > 0:
        scaled = whole.astype(object) * n**power
        return np.array_equal(scaled, part.astype(object) * b**power)
    if kind not in "fc":  # integers that shrink as the batch grows would be rounded
        return False
    wide: Any = np.complex128 if kind == "c" else np.float64
    tolerance = 8 * float(jax.numpy.finfo(whole.dtype).eps)
    return bool(
        np.allclose(
            whole.astype(wide), part.astype(wide) * (b / n) ** power, rtol=tolerance, atol=0
        )
    )


def require_same_params(params: Sequence[Mapping[str, Any]], except_: Sequence[str]) -> None:
    """Checks that an operator has the same parameters in every trace.

    Raises:
        Refuse: one differs, apart from those in ``except_``.
        NoRule: the traces do not even have parameters of the same names.
    """
    whole = params[0]
    for other in params[1:]:
        if whole.keys() != other.keys():
            raise NoRule("has other parameters at another batch size")
        for key, value in whole.items():
            if key not in except_ and not same_param(value, other[key]):
                raise Refuse(f"has another {key} when the batch size is another")
