"""Results of nano-batches that are written where they belong in the whole result, instead of joined.

A concatenation of parts that come one after another reads and writes all of them once more. The
primitive ``dfx_place`` writes one part into the whole array, in place, so XLA computes it in the
kernel that makes the part. Each write follows the one before: only parts whose regions run in an
order anyway are placed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla.ir.partitioned import PartitionedGraph

dfx_place_p = Primitive("dfx_place")


@dataclass(frozen=True)
class RowsOfWhole:
    """Where a part lies in a whole value: ``axis``, its first row there, and the rows of the whole."""

    whole: int
    axis: int
    start: int
    rows: int


def places(
    pg: PartitionedGraph,
    merges: Iterable[tuple[int, Sequence[int], int]],
    before: Callable[[int, int], bool],
    waiting: Mapping[int, Sequence[int]],
) -> dict[int, RowsOfWhole]:
    """Which values are written into a whole one.

    Those that are made one after another, and for which nobody waits who may be later than the next
    write: it would need a copy.

    Args:
        pg: The regions.
        merges: Whole values, the values they consist of, and the axis.
        before: Whether one region is over before another starts.
        waiting: Values that gates read -> the regions of these gates.
    """
    made: dict[int, RowsOfWhole] = {}
    maker = pg.producer_region()
    values = pg.graph.values
    for whole, parts, axis in merges:
        if values[whole].dtype.startswith("key<") or len(set(parts)) != len(parts):
            continue
        if any(v not in maker or v in made for v in parts):
            continue
        order = sorted(parts, key=lambda v: sum(before(maker[w], maker[v]) for w in parts))
        pairs = list(itertools.pairwise(order))
        if not all(before(maker[v], maker[w]) for v, w in pairs) or any(
            r != maker[w] and not before(r, maker[w]) for v, w in pairs for r in waiting.get(v, ())
        ):
            continue
        start = 0
        for value in parts:
            made[value] = RowsOfWhole(whole, axis, start, values[whole].shape[axis])
            start += values[value].shape[axis]
    return made


def write(whole: Any | None, part: Any, place: RowsOfWhole) -> Any:
    """The whole array with a part written into it; other rows are undefined if there is none yet."""
    operands = (part,) if whole is None else (whole, part)
    return dfx_place_p.bind(*operands, axis=place.axis, start=place.start, rows=place.rows)


def _shape(part: Any, axis: int, rows: int) -> tuple[int, ...]:
    return (*part.shape[:axis], rows, *part.shape[axis + 1 :])


@dfx_place_p.def_abstract_eval
def _abstract(*avals: Any, axis: int, start: int, rows: int) -> Any:
    part = avals[-1]
    return part.update(shape=_shape(part, axis, rows), weak_type=False)


def _compute(*operands: Any, axis: int, start: int, rows: int) -> Any:
    part = operands[-1]
    whole = (
        operands[0] if len(operands) > 1 else jax.lax.empty(_shape(part, axis, rows), part.dtype)
    )
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis)


dfx_place_p.def_impl(_compute)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    out = dfx_place_p.bind(*primals, **params)
    if all(isinstance(t, ad.Zero) for t in tangents):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    filled = [ad.instantiate_zeros(t) for t in tangents]
    return out, dfx_place_p.bind(*filled, **params)


def _jet(primals: Sequence[Any], series: Sequence[Sequence[Any]], **params: Any) -> Any:
    terms = [dfx_place_p.bind(*parts, **params) for parts in zip(*series, strict=True)]
    return dfx_place_p.bind(*primals, **params), terms


def _transpose(ct: Any, *operands: Any, axis: int, start: int, rows: int) -> list[Any]:
    part = operands[-1]
    if isinstance(ct, ad.Zero):
        return [None] * len(operands)
    rows_of_part = (part.aval if ad.is_undefined_primal(part) else part).shape[axis]
    stop = start + rows_of_part
    # The whole's own rows are disjoint from these: each of its parts takes its rows of the cotangent.
    cts = [ct, jax.lax.slice_in_dim(ct, start, stop, axis=axis)]
    return cts[-len(operands) :]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, axis: int, start: int, rows: int) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    return dfx_place_p.bind(*moved, axis=axis + 1, start=start, rows=rows), 0


ad.primitive_jvps[dfx_place_p] = _jvp
jet.jet_rules[dfx_place_p] = _jet
ad.primitive_transposes[dfx_place_p] = _transpose
batching.primitive_batchers[dfx_place_p] = _batch
mlir.register_lowering(dfx_place_p, mlir.lower_fun(_compute, multiple_results=False))
