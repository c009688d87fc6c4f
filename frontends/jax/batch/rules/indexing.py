"""Rules of gathers, scatters and dynamic slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.algebra import linear, nonlinear
from dynaflow_xla.batch.axes import BY_NUMBER
from dynaflow_xla.batch.indexing import How, gathered, scattered
from dynaflow_xla.batch.states import (
    POSITION,
    NoRule,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    batch_axis,
)
from dynaflow_xla.frontends.jax.batch.rules.walk import Site, rule


def _index_rows(indices: State, rank: int) -> Position | None:
    """A bare position ([B, 1], one coordinate) in the form of coordinates."""
    if not isinstance(indices, Position):
        return None
    if indices.axis == rank - 1 or indices.dim not in (None, rank - 1):
        raise Refuse(POSITION)
    return indices


def _with_coordinates(indices: State, shape: Sequence[int]) -> State:
    position = _index_rows(indices, len(shape))
    if position is None or position.dim is not None:
        return indices
    return Position(position.axis, len(shape) - 1, frozenset(range(shape[-1])))


def _full(site: Site, operand: int, axis: int, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether a window spans a whole dimension in every trace."""
    return all(int(s[axis]) == site.shape(operand, t)[axis] for t, s in enumerate(sizes))


def _same_but(values: Sequence[Sequence[Any]], axis: int | None) -> None:
    rest = {tuple(int(x) for d, x in enumerate(v) if d != axis) for v in values}
    if len(rest) != 1:
        raise Refuse("takes a window whose size depends on the batch size")


def _numbers(dims: Any) -> list[int]:
    return [int(d) for d in dims]


@dataclass(frozen=True)
class _Dimensions:
    """What the dimension numbers of a gather or scatter say of the operand and of the indices.

    Attributes:
        kept: Dimension of the operand that is taken whole in every trace -> of the result or updates.
        paired: Dimension of the operand -> of the indices it runs along with.
        places: Dimension of the indices -> of the result or updates.
    """

    kept: dict[int, int]
    paired: dict[int, int]
    places: dict[int, int]


def _own(indices: State, mapped: Sequence[int]) -> int | None:
    """The dimension of the operand that row numbers among the coordinates address."""
    if not isinstance(indices, Position) or len(indices.coordinates) != 1:
        return None
    (coordinate,) = indices.coordinates
    return mapped[coordinate]


def _dimensions(
    site: Site, rank: int, offset: Sequence[int], gone: Sequence[int], mapped: Sequence[int],
    paired: dict[int, int], whole: Callable[[int, int], bool],
) -> _Dimensions:  # fmt: skip
    left = [d for d in range(len(site.shape(0))) if d not in gone]
    kept = dict(zip(left, offset, strict=True))
    placed = [d for d in range(rank) if d not in offset]
    return _Dimensions(
        kept={d: at for d, at in kept.items() if d not in mapped and whole(d, at)},
        paired=paired,
        places=dict(enumerate(placed)),
    )


@rule("gather")
def _gather(site: Site) -> State:
    site.same_params("slice_sizes")
    operand, indices = site.ins[0], _with_coordinates(site.ins[1], site.shape(1))
    numbers = site.params["dimension_numbers"]
    sizes = [e.params["slice_sizes"] for e in site.eqns]
    _same_but(sizes, batch_axis(operand))
    if not isinstance(operand, Same) or operand.power:
        _check_fill(site, operand)
    batching = _numbers(numbers.operand_batching_dims)
    mapped = _numbers(numbers.start_index_map)
    dims = _dimensions(
        site, len(site.out_shape()), _numbers(numbers.offset_dims),
        [*_numbers(numbers.collapsed_slice_dims), *batching], mapped,
        dict(zip(batching, _numbers(numbers.start_indices_batching_dims), strict=True)),
        lambda d, at: _full(site, 0, d, sizes),
    )  # fmt: skip
    a = batch_axis(operand)
    if batch_axis(indices) is not None and a is not None and any(int(s[a]) != 1 for s in sizes):
        raise Refuse("combines every row of the batch with every other row")
    return gathered(
        operand, indices, kept=dims.kept, paired=dims.paired, own=_own(indices, mapped),
        places=dims.places, fills=True,
    )  # fmt: skip


def _check_fill(site: Site, operand: State) -> None:
    """What is filled in for elements out of bounds must scale, or add up, as the operand does."""
    if "FILL" not in str(site.params["mode"]).upper():
        return
    power = operand.power if isinstance(operand, Rows | Same) else None
    value = site.params["fill_value"]
    inexact = jax.dtypes.issubdtype(site.eqns[0].outvars[0].aval.dtype, np.inexact)
    is_nan = value is None and inexact or value is not None and value != value
    if power != 0 and not is_nan and value != 0:
        raise Refuse("fills in a constant beside values that scale with the batch size")


HOW: dict[str, How] = {
    "scatter": "set", "scatter-add": "add", "scatter-sub": "add", "scatter-mul": "multiply",
    "scatter-min": "extreme", "scatter-max": "extreme",
}  # fmt: skip


@rule(*HOW)
def _scatter(site: Site) -> State:
    site.same_params()
    operand, updates = site.ins[0], site.ins[2]
    indices = _with_coordinates(site.ins[1], site.shape(1))
    if site.name == "scatter" and site.params.get("update_jaxpr") is not None:
        raise NoRule("is a scatter with a function of the user's")
    numbers = site.params["dimension_numbers"]
    batching = _numbers(numbers.operand_batching_dims)
    mapped = _numbers(numbers.scatter_dims_to_operand_dims)
    dims = _dimensions(
        site, len(site.shape(2)), _numbers(numbers.update_window_dims),
        [*_numbers(numbers.inserted_window_dims), *batching], mapped,
        dict(zip(batching, _numbers(numbers.scatter_indices_batching_dims), strict=True)),
        lambda d, at: all(site.shape(2, t)[at] == site.shape(0, t)[d] for t in site.traces()),
    )  # fmt: skip
    a = batch_axis(operand)
    if batch_axis(indices) is not None and a is not None and a not in dims.paired:
        if a not in _numbers(numbers.inserted_window_dims):
            raise Refuse("writes rows of the batch by their number")
    return scattered(
        operand, indices, updates, how=HOW[site.name], kept=dims.kept, paired=dims.paired,
        own=_own(indices, mapped), places=dims.places, origin=site.origin,
    )  # fmt: skip


@rule("dynamic_slice")
def _dynamic_slice(site: Site) -> State:
    site.same_params("slice_sizes")
    operand, *starts = site.ins
    sizes = [e.params["slice_sizes"] for e in site.eqns]
    axis = batch_axis(operand)
    _same_but(sizes, axis)
    for start in starts:
        nonlinear([start])
    # A window as long as its dimension is moved to its beginning, whatever the start.
    if axis is not None and not _full(site, 0, axis, sizes):
        raise Refuse(BY_NUMBER)
    if isinstance(operand, Position):
        raise Refuse(POSITION)
    return operand


@rule("dynamic_update_slice")
def _dynamic_update_slice(site: Site) -> State:
    site.same_params()
    operand, update, *starts = site.ins
    for start in starts:
        nonlinear([start])
    axis = batch_axis(operand)
    if axis is None and batch_axis(update) is not None:
        raise Refuse("writes rows of the batch by their number")
    if axis is not None:
        sizes = [site.shape(1, t) for t in site.traces()]
        if batch_axis(update) != axis or not _full(site, 0, axis, sizes):
            raise Refuse("writes rows of the batch by their number")
    return linear([operand, update])
