"""``dfx_order``: the identity on its first operands, which run after all others in an XLA GPU program.

On CUDA it is a custom call that aliases the gated operands in place and reads the dependences; XLA
makes an edge of its CUDA graph from that. An operand that cannot be aliased (an argument, or a value
with another reader) passes beside it: the call gates a scalar, the smallest number of the operand's
type, and the operand becomes its maximum with it, which XLA computes in the kernel that reads it.
Elsewhere it is nothing at all: the operands themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.watching import telling

dfx_xla_gate_p = Primitive("dfx_xla_gate")
dfx_xla_gate_p.multiple_results = True

dfx_xla_witness_p = Primitive("dfx_xla_witness")
dfx_xla_witness_p.multiple_results = True

_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def order(xs: Sequence[Any], deps: Sequence[Any], beside: Sequence[bool] = ()) -> list[Any]:
    """Each of ``xs``, unchanged; who reads a result of this runs after every one of ``deps``.

    Args:
        xs: Arrays of any shape and dtype, at least one; typed keys as their words.
        deps: Arrays that have to exist first.
        beside: For each of ``xs``, whether it cannot be taken in place; default: none.
    """
    return dfx_xla_gate_p.bind(  # type: ignore[no-any-return]
        *xs, *deps, beside=tuple(beside) or (False,) * len(xs)
    )


def behind(equation: Any, deps: Sequence[Any]) -> list[Any]:
    """An equation with one result, which then passes beside a gate that waits for variables.

    Their types are not looked at: what stands for a value may be given instead of it.
    """
    (out,) = equation.outvars
    made = _compat.new_var(out.aval)
    gate = equation.replace(
        primitive=dfx_xla_gate_p, invars=[made, *deps], outvars=[out], params={"beside": (True,)}
    )
    return [equation.replace(outvars=[made]), gate]


def witness(x: Any) -> tuple[Any, Any]:
    """The same array, and a scalar that is there once the array is.

    A gate that reads the scalar waits for the array and leaves its memory free for who comes next.
    The scalar has no value: its memory is all that gates look at.
    """
    return tuple(dfx_xla_witness_p.bind(x))


@dfx_xla_gate_p.def_impl
def _impl(*operands: Any, beside: tuple[bool, ...]) -> list[Any]:
    return list(operands[: len(beside)])


@dfx_xla_gate_p.def_abstract_eval
def _abstract(*avals: Any, beside: tuple[bool, ...]) -> list[Any]:
    return list(avals[: len(beside)])


def _pass_outside(values: Sequence[Any], others: Sequence[Any], *, beside: tuple[bool, ...]) -> Any:
    """The rule for values and what is beside each: a tangent, a series, the axis of a batch.

    Tangents pass outside of the gate: the order of the plan is the order of the values it was made for,
    and a residual kept alive only to be waited for would cost memory.
    """
    gated = len(beside)
    return order(values[:gated], values[gated:], beside), list(others[:gated])


def _transpose(cotangents: Sequence[Any], *operands: Any, beside: tuple[bool, ...]) -> list[Any]:
    return [*cotangents, *(None for _ in operands[len(beside) :])]


def _lower_identity(ctx: Any, *operands: Any, beside: tuple[bool, ...]) -> Any:
    return operands[: len(beside)]


@dfx_xla_witness_p.def_impl
def _witness_impl(x: Any) -> list[Any]:
    return [x, jnp.zeros(_SCALAR.shape, _SCALAR.dtype)]


@dfx_xla_witness_p.def_abstract_eval
def _witness_abstract(x: Any) -> list[Any]:
    return [x, jax.core.ShapedArray(_SCALAR.shape, _SCALAR.dtype)]


def _witness_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    made = dfx_xla_witness_p.bind(*primals)
    return made, [*tangents, ad.Zero(jax.typeof(made[1]).to_tangent_aval())]


def _witness_jet(primals: Sequence[Any], series: Sequence[Any]) -> Any:
    return dfx_xla_witness_p.bind(*primals), [*series, jet.zero_series]


def _witness_batch(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    return dfx_xla_witness_p.bind(*args), [*dims, None]


def _witness_cuda(ctx: Any, x: Any) -> Any:
    if _compat.device_count(ctx) > 1:
        return mlir.lower_fun(_witness_impl, multiple_results=True)(ctx, x)
    xla.ensure_order_gate()
    return mlir.lower_fun(_witness_call, multiple_results=True)(ctx, x)


def _witness_call(x: Any) -> list[Any]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(xla.ORDER_TARGET, [like, _SCALAR], input_output_aliases={0: 0})
    return list(call(x))


def _lower_cuda(ctx: Any, *operands: Any, beside: tuple[bool, ...]) -> Any:
    if _compat.device_count(ctx) > 1:
        telling.fallback(
            "a scheduled function got arrays that span several devices outside shard_map. XLA cannot "
            "partition its order gates, so optimization barriers stand in for them; those order "
            "XLA's schedule but not the nodes of a CUDA graph. Call it inside jax.shard_map.",
        )
        barrier = mlir.lower_fun(
            lambda *xs: jax.lax.optimization_barrier(xs)[: len(beside)], multiple_results=True
        )
        return barrier(ctx, *operands)
    xla.ensure_order_gate()
    return mlir.lower_fun(functools.partial(_call, beside), multiple_results=True)(ctx, *operands)


def _call(beside: tuple[bool, ...], *operands: Any) -> list[Any]:
    xs, deps = operands[: len(beside)], operands[len(beside) :]
    outside = [i for i, out in enumerate(beside) if out]
    scalars = {str(xs[i].dtype): _smallest(xs[i].dtype) for i in outside}
    taken = [x for i, x in enumerate(xs) if i not in outside] + list(scalars.values())
    call = jax.ffi.ffi_call(
        xla.ORDER_TARGET,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in taken],
        input_output_aliases={i: i for i in range(len(taken))},
    )
    passed = list(call(*taken, *deps))
    bounds = dict(zip(scalars, passed[len(passed) - len(scalars) :], strict=True))
    inside = iter(passed)
    return [
        jnp.maximum(x, bounds[str(x.dtype)]) if i in outside else next(inside)
        for i, x in enumerate(xs)
    ]


def _smallest(dtype: Any) -> Any:
    """The number below all others of a type: no maximum with it changes anything."""
    if dtype.kind == "b":
        return jnp.zeros((), bool)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.full((), jnp.iinfo(dtype).min, dtype)
    return jnp.full((), -jnp.inf, dtype)


ad.primitive_jvps[dfx_xla_gate_p] = _pass_outside
jet.jet_rules[dfx_xla_gate_p] = _pass_outside
ad.primitive_transposes[dfx_xla_gate_p] = _transpose
batching.primitive_batchers[dfx_xla_gate_p] = _pass_outside
mlir.register_lowering(dfx_xla_gate_p, _lower_identity)
mlir.register_lowering(dfx_xla_gate_p, _lower_cuda, platform="cuda")

ad.primitive_jvps[dfx_xla_witness_p] = _witness_jvp
jet.jet_rules[dfx_xla_witness_p] = _witness_jet
batching.primitive_batchers[dfx_xla_witness_p] = _witness_batch
mlir.register_lowering(dfx_xla_witness_p, mlir.lower_fun(_witness_impl, multiple_results=True))
mlir.register_lowering(dfx_xla_witness_p, _witness_cuda, platform="cuda")
