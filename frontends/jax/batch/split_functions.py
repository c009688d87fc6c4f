"""The functions of a split function's regions: slices in front of them, sums and joins of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from dynaflow_xla.batch.expansion.specs import MergeSpec, Reads
from dynaflow_xla.batch.expansion.split import Arrays
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.regions.functions import Second, cut_rows, region_function
from dynaflow_xla.ir.graph import Region


def _widened(x: Any) -> Any:
    # No promotion: types of 8 bits have none, nor has any other where JAX's is set to "strict".
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x


ARRAYS = Arrays(
    cut=cut_rows,
    concatenate=jnp.concatenate,
    zeros_like=jnp.zeros_like,
    widened=_widened,
    as_type=lambda x, like: x.astype(like.dtype),
)


def with_second(
    part: Captured,
    made: Region,
    local: Region,
    reads: Sequence[tuple[int, Any]],
    kept: Sequence[int],
    second: Second,
) -> Callable[..., list[Any]]:
    """As ``SplitGraph.single``, for a region ``made`` that gets some inputs twice; ``local`` in ``part``."""
    op_of = dict(zip(made.ops, local.ops, strict=True))
    twice = [n for n, (value, _) in enumerate(reads) if value in second.values]
    inner = region_function(
        part,
        local,
        Second(
            tuple(local.inputs[n] for n in twice),
            frozenset(op_of[i] for i in second.readers),
            frozenset(op_of[i] for i in second.between),
            frozenset(op_of[i] for i in second.products),
            second.deps,
        ),
    )

    def run(*args: Any) -> list[Any]:
        env = dict(zip(made.inputs, args[: len(made.inputs)], strict=True))
        twice_from, deps_from = len(made.inputs), len(made.inputs) + len(second.values)
        other = dict(zip(second.values, args[twice_from:deps_from], strict=True))
        outs = inner(
            *[ARRAYS.read(env[v], cut) for v, cut in reads],
            *[ARRAYS.read(other[reads[n][0]], reads[n][1]) for n in twice],
            *args[deps_from:],
        )
        return [outs[n] for n in kept]

    return run


def merged(spec: MergeSpec, inputs: Sequence[int], reads: Reads) -> Callable[..., list[Any]]:
    """A region that puts a result together from the nano-batches'."""

    def run(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        parts = [ARRAYS.read(env[v], cut) for v, cut in reads]
        if spec.how == "concat":
            return [ARRAYS.joined(parts, spec)]
        return [ARRAYS.total(parts, spec)]

    return run
