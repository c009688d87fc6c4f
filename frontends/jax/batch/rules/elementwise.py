"""Rules of elementwise primitives (operands of one shape; size-1 and rank-0 ones are broadcast)."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.algebra import chosen, homogeneous, linear, nonlinear, product, quotient
from dynaflow_xla.batch.states import (
    POSITION,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    first_failure,
)
from dynaflow_xla.frontends.jax.batch.rules.walk import Site, has_integers, rule

NONLINEAR = """
    acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac is_finite lgamma
    log log1p log2 logistic mulhi nextafter not one_minus_square or polygamma polynomial
    population_count pow regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sin sinh sqrt tan tanh threefry2x32 threefry4x32
    philox2x32 philox4x32 xor zeta random_clone random_seed
""".split()


def _aligned(site: Site) -> None:
    """Elementwise operands have the result's rank, or none; a broadcast dimension has size 1."""
    rank = len(site.out_shape())
    for number in range(len(site.ins)):
        if len(site.shape(number)) not in (0, rank):
            raise Refuse("combines operands of different rank")


def _is(operand: Any, *kinds: Any) -> bool:
    dtype = getattr(operand.aval, "dtype", None)
    return dtype is not None and any(jax.dtypes.issubdtype(dtype, k) for k in kinds)


@rule(*NONLINEAR)
def _nonlinear(site: Site) -> State:
    _aligned(site)
    site.same_params()
    return nonlinear(site.ins)


@rule("neg", "real", "imag", "conj", "complex", "add", "sub", "add_any", "reduce_precision")
def _linear(site: Site) -> State:
    _aligned(site)
    site.same_params()
    return linear(site.ins)


@rule("copy", "stop_gradient", "name", "pvary", "reduced_vary_cast", "reduced_vary_cast_p",
      "sharding_constraint", "layout_constraint", "optimization_barrier", "reshard",
      "device_put")  # fmt: skip
def _identity(site: Site) -> list[State]:
    site.same_params()
    return list(site.ins)


def counts_to(dtype: Any, count: int) -> bool:
    """Whether a type is one of integers up to ``count``."""
    return jax.dtypes.issubdtype(dtype, np.integer) and int(jax.numpy.iinfo(dtype).max) >= count


def _keeps_sums(before: Any, after: Any) -> bool:
    """Whether a conversion is linear, up to the rounding of floats.

    Rounding to integers is not. Integers wrap around, which a wider type or a float would show: counts of
    32 bits and more are taken not to, unsigned ones (below zero) and narrow ones may.
    """
    if jax.dtypes.issubdtype(before, np.inexact):
        return jax.dtypes.issubdtype(after, np.inexact)
    if before == after:
        return True
    if not jax.dtypes.issubdtype(before, np.signedinteger) or jax.numpy.iinfo(before).bits < 32:
        return False
    return jax.dtypes.issubdtype(after, np.number)


@rule("convert_element_type", "to_edtype", "from_edtype")
def _convert(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    before, after = site.eqns[0].invars[0], site.eqns[0].outvars[0]
    if isinstance(state, Position):
        if not counts_to(after.aval.dtype, site.sizes[0]):
            raise Refuse(POSITION)
        return state
    made = state if _keeps_sums(before.aval.dtype, after.aval.dtype) else nonlinear([state])
    fill = state.fill if isinstance(state, Same | Rows) else None
    if fill is None or not isinstance(made, Same | Rows):
        return made
    # 0 and 1 keep their value in every type.
    keeps = fill in (0, 1) or (type(fill) is int and has_integers(after.aval.dtype, fill, fill))
    return replace(made, fill=fill if keeps else None)


@rule("mul")
def _mul(site: Site) -> State:
    _aligned(site)
    site.same_params()
    return product(*site.ins)


@rule("square")
def _square(site: Site) -> State:
    site.same_params()
    return homogeneous(site.ins, 2)


@rule("div")
def _div(site: Site) -> State:
    _aligned(site)
    site.same_params()
    if not _is(site.eqns[0].outvars[0], np.inexact):
        return nonlinear(site.ins)
    return quotient(*site.ins)


@rule("integer_pow")
def _integer_pow(site: Site) -> State:
    site.same_params()
    degree = int(site.params["y"])
    if not _is(site.eqns[0].outvars[0], np.inexact) and degree < 0:
        return nonlinear(site.ins)
    return linear(site.ins) if degree == 1 else homogeneous(site.ins, degree)


@rule("max", "min", "abs")
def _degree_1(site: Site) -> State:
    _aligned(site)
    site.same_params()
    return homogeneous(site.ins)


_COMPARISONS = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


@rule(*_COMPARISONS, "sign", "lt_to", "le_to", "eq_to")
def _degree_0(site: Site) -> State:
    _aligned(site)
    site.same_params()
    if site.name in ("lt", "ge") and isinstance(site.ins[0], Position) and site.ins[0].dim is None:
        # Indexing asks whether an index is negative; a position never is.
        bound = site.ins[1]
        if isinstance(bound, Same) and bound.fill is not None and bound.fill <= 0:
            return Rows(site.ins[0].axis, fill=site.name == "ge")
    return homogeneous(site.ins, 0)


@rule("select_n")
def _select(site: Site) -> State:
    site.same_params()
    which, *cases = site.ins
    failure = first_failure([which])
    if failure is not None:
        return failure
    if isinstance(which, Same | Rows) and which.fill is not None:
        number = int(which.fill)
        if site.shape(1 + number) == site.out_shape():
            return cases[number]
    failure = first_failure(cases)
    if failure is not None:
        return failure
    _aligned(site)
    return chosen(which, cases)
