"""The primitive that stands for one stage of a plan in a jaxpr, and its lowering to the custom call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ffi import device_lanes, xla
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.watching import telling

dfx_call_p = Primitive("dfx_call")
dfx_call_p.multiple_results = True


@dfx_call_p.def_impl
def _impl(*args: Any, stage: Any) -> list[Any]:
    if _compat.names_culprits():
        return stage.reference(*args)  # type: ignore[no-any-return]
    return jax.jit(lambda *xs: dfx_call_p.bind(*xs, stage=stage))(*args)  # type: ignore[no-any-return]


@dfx_call_p.def_abstract_eval
def _abstract(*_: Any, stage: Any) -> Sequence[Any]:
    return stage.output_avals


def _lower_cpu(ctx: Any, *operands: Any, stage: Any) -> Any:
    if stage.platform != "cpu" or _runs_reference(ctx, stage):
        return _lower_other(ctx, *operands, stage=stage)
    # Without a side effect XLA may drop the call if nobody reads its results, as it may drop the original.
    # But a call of several results may be all that a while loop's body is: XLA then takes it for invariant,
    # moves it out of the loop, and the loop never ends (jaxlib 0.10.2; any custom call).
    rule = jax.ffi.ffi_lowering(xla.RUN_TARGET, has_side_effect=len(ctx.avals_out) > 1)
    return rule(ctx, *operands, plan=stage.hash)


def _lower_cuda(ctx: Any, *operands: Any, stage: Any) -> Any:
    if stage.platform != "cuda" or _runs_reference(ctx, stage):
        return _lower_other(ctx, *operands, stage=stage)
    # The scratch is one more result, so that XLA plans its memory: there are always several (`_lower_cpu`).
    scratch = jax.core.ShapedArray((max(1, stage.scratch_bytes),), np.uint8)
    target = device_lanes.CUDA_GRAPH_TARGET if stage.capturable else device_lanes.CUDA_RUN_TARGET
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    results = rule(ctx.replace(avals_out=[*ctx.avals_out, scratch]), *operands, plan=stage.hash)
    return results[:-1]


def _runs_reference(ctx: Any, stage: Any) -> bool:
    """Whether the reference has to stand in here, which warns: lanes belong to one device.

    Raises:
        UnsupportedError: it may not.
    """
    if _compat.device_count(ctx) == 1:
        return False
    what = (
        f"{stage.program_name!r} is part of a program for several devices outside shard_map (its arrays span "
        "them, or they are the mesh of jax.set_mesh), or inside of one that leaves axes of its mesh out"
    )
    way = (
        "Call the scheduled function inside jax.shard_map over all axes (each device runs its plan)"
    )
    if stage.replaceable:
        telling.fallback(f"{what}, so the original's operators run, without lanes. {way}")
        return True
    raise UnsupportedError(
        f"{what}, and lanes belong to one: XLA would gather arrays onto every device without a word. {way}, "
        "or call fast.original."
    )


def _lower_other(ctx: Any, *operands: Any, stage: Any) -> Any:
    return mlir.lower_fun(stage.reference, multiple_results=True)(ctx, *operands)


def _no_jvp(primals: Any, tangents: Any, *, stage: Any) -> Any:
    raise UnsupportedError(
        f"forward-mode differentiation of the scheduled function {stage.program_name!r} is not "
        "supported on the ffi backend; differentiate fast.original, or use reverse mode (jax.grad)."
    )


mlir.register_lowering(dfx_call_p, _lower_other)
mlir.register_lowering(dfx_call_p, _lower_cpu, platform="cpu")
mlir.register_lowering(dfx_call_p, _lower_cuda, platform="cuda")
ad.primitive_jvps[dfx_call_p] = _no_jvp


def bind(stage: Any, args: Sequence[Any]) -> list[Any]:
    """Runs a stage on values (tracers or arrays) in the order of ``stage.inputs``."""
    return dfx_call_p.bind(*args, stage=stage)  # type: ignore[no-any-return]
