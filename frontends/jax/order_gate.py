"""``dfx_order``: the identity on its first operands, which run after all others in an XLA GPU program.

On CUDA it is a custom call that aliases the gated operands in place and reads the dependences; XLA
makes an edge of its CUDA graph from that. Elsewhere it is nothing at all: the operands themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla.errors import FallbackWarning
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import _compat

dfx_xla_gate_p = Primitive("dfx_xla_gate")
dfx_xla_gate_p.multiple_results = True


def order(xs: Sequence[Any], deps: Sequence[Any]) -> list[Any]:
    """Each of ``xs``, unchanged; who reads a result of this runs after every one of ``deps``.

    Args:
        xs: Arrays of any shape and dtype, at least one; typed keys as their words.
        deps: Arrays that have to exist first.
    """
    return dfx_xla_gate_p.bind(*xs, *deps, gated=len(xs))  # type: ignore[no-any-return]


@dfx_xla_gate_p.def_impl
def _impl(*operands: Any, gated: int) -> list[Any]:
    return list(operands[:gated])


@dfx_xla_gate_p.def_abstract_eval
def _abstract(*avals: Any, gated: int) -> list[Any]:
    return list(avals[:gated])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, gated: int) -> Any:
    # Tangents pass outside of the gate: the order of the plan is the order of the values it was
    # made for, and a residual kept alive only to be waited for would cost memory.
    return order(primals[:gated], primals[gated:]), list(tangents[:gated])


def _transpose(cotangents: Sequence[Any], *operands: Any, gated: int) -> list[Any]:
    return [*cotangents, *(None for _ in operands[gated:])]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, gated: int) -> Any:
    return order(args[:gated], args[gated:]), list(dims[:gated])


def _lower_identity(ctx: Any, *operands: Any, gated: int) -> Any:
    return operands[:gated]


def _lower_cuda(ctx: Any, *operands: Any, gated: int) -> Any:
    if _compat.device_count(ctx) > 1:
        warnings.warn(
            "a scheduled function got arrays that span several devices outside shard_map. XLA cannot "
            "partition its order gates, so optimization barriers stand in for them; those order "
            "XLA's schedule but not the nodes of a CUDA graph. Call it inside jax.shard_map.",
            FallbackWarning,
            stacklevel=2,
        )
        barrier = mlir.lower_fun(
            lambda *xs: jax.lax.optimization_barrier(xs)[:gated], multiple_results=True
        )
        return barrier(ctx, *operands)
    xla.ensure_order_gate()
    rule = jax.ffi.ffi_lowering(
        xla.ORDER_TARGET,
        operand_output_aliases={i: i for i in range(gated)},
        has_side_effect=False,
    )
    return rule(ctx, *operands)


ad.primitive_jvps[dfx_xla_gate_p] = _jvp
ad.primitive_transposes[dfx_xla_gate_p] = _transpose
batching.primitive_batchers[dfx_xla_gate_p] = _batch
mlir.register_lowering(dfx_xla_gate_p, _lower_identity)
mlir.register_lowering(dfx_xla_gate_p, _lower_cuda, platform="cuda")
