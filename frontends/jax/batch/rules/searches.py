"""Searches among sorted integers, and the known integers that are searched for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_xla.batch.row_orders import bounds
from dynaflow_xla.batch.states import Below, InOrder, Listed, Same, State, is_zero
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.rules import equality
from dynaflow_xla.frontends.jax.batch.rules.walk import INTEGER, Site, has_integers, in_order, lists
from dynaflow_xla.frontends.jax.capture import capture

# -- integers that are known one by one ----------------------------------------------------------------


@lists("iota")
def _iota(site: Site) -> State | None:
    shape, dtype = site.out_shape(), site.eqns[0].outvars[0].aval.dtype
    if len(shape) != 1 or not 1 < shape[0] <= equality.MOST_LISTED:
        return None
    if not has_integers(dtype, 0, shape[0] - 1):
        return None
    return Listed((tuple(range(shape[0])),) * len(site.eqns), Same())


@lists("add", "sub", "mul", "max", "min")
def _elementwise(site: Site) -> State | None:
    if not any(isinstance(s, Listed) for s in site.ins):
        return None
    dtype, length = site.eqns[0].outvars[0].aval.dtype, site.out_shape()
    given = [listed(s, site.shape(n)) for n, s in enumerate(site.ins)]
    if len(length) != 1 or any(g is None or len(g) not in (1, *length) for g in given):
        return None
    made = INTEGER[site.name](*(np.asarray(g, dtype=object) for g in given))
    values = tuple(int(n) for n in np.broadcast_to(made, length))
    if not has_integers(dtype, min(values), max(values)):
        return None
    return Listed((values,) * len(site.eqns), Same())


def listed(state: State, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The integers of a value of at most one dimension that is the same in all traces, if they are known."""
    if isinstance(state, Listed):
        return state.values[0] if not state.plain.power else None
    if isinstance(state, Same) and not state.power and type(state.fill) is int and len(shape) < 2:
        length = shape[0] if shape else 1
        return (state.fill,) * length if length <= equality.MOST_LISTED else None
    return None


def converted(site: Site, state: Listed) -> State | None:
    """The same integers in another type, if it has them."""
    every = [n for values in state.values for n in values]
    dtype = site.eqns[0].outvars[0].aval.dtype
    is_integer = jax.dtypes.issubdtype(dtype, np.integer)
    return state if is_integer and has_integers(dtype, min(every), max(every)) else None


def repeated(site: Site, state: Listed) -> State | None:
    """One integer for all elements of a line, or the integers as they are."""
    shapes = {site.out_shape(0, t) for t in site.traces()}
    if len(shapes) != 1 or len(shape := shapes.pop()) > 1:
        return None
    length = shape[0] if shape else 1
    if not 0 < length <= equality.MOST_LISTED:
        return None
    if all(len(v) == length for v in state.values):
        return state
    if any(len(v) != 1 for v in state.values):
        return None
    return Listed(tuple(v * length for v in state.values), state.plain)


# -- searches ------------------------------------------------------------------------------------------


@in_order("scan")
def _search(site: Site) -> list[State] | None:
    """The loop of ``jnp.searchsorted``, known by being the same program.

    With items that are sorted, the result is how many of them are below what is searched for.
    """
    if len(site.ins) != 4 or not isinstance(site.ins[0], InOrder):
        return None
    items, wanted, low, high = site.ins
    found = listed(wanted, site.shape(1))
    if found is None or len(site.shape(1)) != 1 or len(site.shape(0)) != 1 or not is_zero(low):
        return None
    if not isinstance(high, Listed) or any(
        set(high.values[t]) != {site.shape(0, t)[0]} for t in site.traces()
    ):
        return None
    for side in ("left", "right"):
        if all(_is_search(eqn, side) for eqn in site.eqns):
            made = bounds.searched(items, found, site.origin, after=side == "right")
            return None if made is None else [Below(made.key, made.origin, None), made]
    return None


def _is_search(eqn: Any, side: str) -> bool:
    avals = [v.aval for v in eqn.invars[:2]]
    expected = _loop_of_search(
        *((tuple(a.shape), np.dtype(a.dtype)) for a in avals), side, bool(jax.config.jax_enable_x64)
    )
    if expected is None or _compat.scan_counts(eqn.params) != (2, 2):
        return False
    if _compat.scan_counts(expected.params) != (2, 2) or len(eqn.invars) != len(expected.invars):
        return False
    names = ("jaxpr", "length", "reverse")
    return all(equality.same_param(eqn.params[n], expected.params[n]) for n in names)


@functools.lru_cache(maxsize=256)
def _loop_of_search(items: Any, wanted: Any, side: str, wide: bool) -> Any:
    """The loop in ``jnp.searchsorted`` of operands with these shapes and types; None if it has none."""
    made = jax.make_jaxpr(
        lambda a, v: jnp.searchsorted(a, v, side=side, method="scan"), return_shape=False
    )(jax.ShapeDtypeStruct(*items), jax.ShapeDtypeStruct(*wanted))
    loops = [eqn for eqn in _equations(made.jaxpr) if eqn.primitive.name == "scan"]
    return loops[0] if len(loops) == 1 else None


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in ("jit", "pjit"):
            yield from _equations(eqn.params["jaxpr"].jaxpr)
        elif eqn.primitive.name == capture.HI_CALL:
            yield from _equations(_compat.expanded(eqn).jaxpr)


# -- what is found -------------------------------------------------------------------------------------


def added(site: Site) -> State | None:
    """Sums and differences of what searches find."""
    signs = {"add": (1, 1), "sub": (1, -1)}.get(site.name)
    shape = site.out_shape()
    if signs is None or len(shape) != 1 or any(site.shape(n) != shape for n in (0, 1)):
        return None
    return bounds.added(site.ins, signs, shape[0])


def sliced(site: Site, state: Below) -> State | None:
    """Some of what searches find."""
    site.same_params()
    (start,), (end,) = site.params["start_indices"], site.params["limit_indices"]
    (step,) = site.params["strides"] or (1,)
    return bounds.taken(state, slice(start, end, step))


@in_order("concatenate")
def _concatenate(site: Site) -> State | None:
    if not any(isinstance(s, Below) for s in site.ins) or len(site.out_shape()) != 1:
        return None
    return bounds.joined(site.ins, [site.shape(n)[0] for n in range(len(site.ins))])
