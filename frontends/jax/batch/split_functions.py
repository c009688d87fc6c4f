"""The functions of a split function's regions: slices in front of them, sums and joins of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from dynaflow_xla.batch import expand
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.regions.functions import Second, cut_rows, region_function
from dynaflow_xla.ir.graph import Region


def with_cuts(
    fn: Callable[..., list[Any]],
    inputs: Sequence[int],
    reads: Sequence[tuple[int, Any]],
    kept: Sequence[int],
) -> Callable[..., list[Any]]:
    """A region whose inputs are slices: ``reads`` says of what; ``kept`` are its outputs that are read."""

    def run(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        outs = fn(*[_cut(env[v], cut) for v, cut in reads])
        return [outs[n] for n in kept]

    return run


def with_second(
    part: Captured,
    made: Region,
    local: Region,
    reads: Sequence[tuple[int, Any]],
    kept: Sequence[int],
    second: Second,
) -> Callable[..., list[Any]]:
    """As ``with_cuts``, for a region ``made`` of ``local``, one of ``part``, that gets some inputs twice."""
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
            *[_cut(env[v], cut) for v, cut in reads],
            *[_cut(other[reads[n][0]], reads[n][1]) for n in twice],
            *args[deps_from:],
        )
        return [outs[n] for n in kept]

    return run


def _cut(x: Any, cut: expand.Cut | None) -> Any:
    return x if cut is None else cut_rows(x, cut)


def batched(
    fn: Callable[..., list[Any]],
    inputs: Sequence[int],
    reads: Sequence[Sequence[tuple[int, Any]]],
    axes_in: Sequence[int | None],
    places: Sequence[tuple[int, expand.Cut | None, bool]],
) -> Callable[..., list[Any]]:
    """Runs several nano-batches as one: their inputs joined, the outputs cut.

    ``places``: for each result the output it comes from, its rows there, and whether it is zero.
    """

    def run(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        joined = []
        for number, axis in enumerate(axes_in):
            parts = [_cut(env[v], cut) for v, cut in (read[number] for read in reads)]
            joined.append(parts[0] if axis is None else jnp.concatenate(parts, axis))
        outs = fn(*joined)
        return [jnp.zeros_like(outs[n]) if zero else _cut(outs[n], cut) for n, cut, zero in places]

    return run


def merged(
    spec: expand.MergeSpec, inputs: Sequence[int], reads: expand.Reads
) -> Callable[..., list[Any]]:
    """A region that puts a result together from the nano-batches'."""

    def run(*args: Any) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        parts = [_cut(env[v], cut) for v, cut in reads]
        if spec.how == "concat":
            return [jnp.concatenate(parts, spec.axis)]
        dtype = parts[0].dtype
        # Narrow floats are summed as float32: n roundings of a partial sum would add up.
        wide = (
            jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
        )
        terms = [x.astype(wide) for x in parts]
        if spec.how == "mean":
            terms = [x * jnp.asarray(w, wide) for x, w in zip(terms, spec.weights, strict=True)]
        return [functools.reduce(jnp.add, terms).astype(dtype)]

    return run
