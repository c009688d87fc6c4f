"""Rules of gathers, scatters and dynamic slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.algebra import homogeneous, linear, nonlinear
from dynaflow_xla.batch.states import NoRule, Partial, Position, Refuse, Rows, Same, State
from dynaflow_xla.frontends.jax.batch_axis.shapes import batch_axis, moved
from dynaflow_xla.frontends.jax.batch_axis.walk import Site, rule

_BY_NUMBER = "takes rows of the batch by their number"


def _check_index(state: State) -> None:
    """Indices that scale with the batch, or are totals over it, address other elements."""
    if not isinstance(state, Position):
        nonlinear([state])


def _addresses_own_row(indices: State, mapped: Sequence[int], axis: int) -> bool:
    """Whether the index into dimension ``axis`` of the operand is the row's own number."""
    return (
        isinstance(indices, Position)
        and indices.dim is not None
        and axis in mapped
        and indices.coordinates == {list(mapped).index(axis)}
    )


def _index_rows(indices: State, rank: int) -> Position | None:
    """A bare position ([B, 1], one coordinate) in the form of coordinates."""
    if not isinstance(indices, Position):
        return None
    if indices.axis == rank - 1 or indices.dim not in (None, rank - 1):
        raise Refuse("computes with the position of a row in the batch")
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


@rule("gather")
def _gather(site: Site) -> State:
    site.same_params("slice_sizes")
    operand, indices = site.ins[0], _with_coordinates(site.ins[1], site.shape(1))
    _check_index(indices)
    numbers = site.params["dimension_numbers"]
    sizes = [e.params["slice_sizes"] for e in site.eqns]
    a, c = batch_axis(operand), batch_axis(indices)
    _same_but(sizes, a)
    if isinstance(operand, Position):
        raise Refuse("computes with the position of a row in the batch")
    offset = _numbers(numbers.offset_dims)
    placed = [d for d in range(len(site.out_shape())) if d not in offset]
    if not isinstance(operand, Same) or operand.power:
        _check_fill(site, operand)
    if c is None:
        if not isinstance(operand, Rows):
            return operand if isinstance(operand, Partial) else _without_fill(operand)
        assert a is not None
        if a in _numbers(numbers.start_index_map) or not _full(site, 0, a, sizes):
            raise Refuse(_BY_NUMBER)
        gone = {*_numbers(numbers.collapsed_slice_dims), *_numbers(numbers.operand_batching_dims)}
        if a in gone:
            raise Refuse(_BY_NUMBER)
        kept = [d for d in range(len(site.shape(0))) if d not in gone]
        return moved(_without_fill(operand), offset[kept.index(a)])
    if c == len(site.shape(1)) - 1:
        raise Refuse("takes the rows of the batch as the coordinates of one element")
    if isinstance(operand, Partial):
        raise Refuse(
            "takes elements of a total over the batch, before it is complete", operand.origin
        )
    if isinstance(operand, Same):
        if isinstance(indices, Position):
            raise Refuse("looks up values by the position of a row in the batch")
        assert isinstance(indices, Rows)
        return Rows(placed[c], indices.outer, indices.inner, operand.power)
    assert isinstance(operand, Rows) and a is not None
    if any(int(s[a]) != 1 for s in sizes):
        raise Refuse("combines every row of the batch with every other row")
    batching = _numbers(numbers.operand_batching_dims)
    if a in batching:
        if _numbers(numbers.start_indices_batching_dims)[batching.index(a)] != c:
            raise Refuse("combines every row of the batch with every other row")
        if isinstance(indices, Position):
            raise Refuse("looks up values by the position of a row in the batch")
        return moved(linear([Rows(0, operand.outer, operand.inner, operand.power),
                             _matching(indices, operand.power)]), placed[c])  # fmt: skip
    if not _addresses_own_row(indices, _numbers(numbers.start_index_map), a):
        raise Refuse(_BY_NUMBER)
    if (operand.outer, operand.inner) != (1, 1):
        raise Refuse(_BY_NUMBER)
    return Rows(placed[c], 1, 1, operand.power)


def _matching(indices: State, power: int) -> State:
    """The layout of index rows, to be held against that of what they index."""
    assert isinstance(indices, Rows)
    return Rows(0, indices.outer, indices.inner, power, None if indices.fill is None else 0)


def _without_fill(state: State) -> State:
    """What is filled in for elements out of bounds is not the known value."""
    if isinstance(state, Rows):
        return Rows(state.axis, state.outer, state.inner, state.power)
    return Same(state.power) if isinstance(state, Same) else state


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


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(site: Site) -> State:
    site.same_params()
    operand, updates = site.ins[0], site.ins[2]
    indices = _with_coordinates(site.ins[1], site.shape(1))
    _check_index(indices)
    adds = site.name[8:] in ("add", "sub")
    if site.name == "scatter" and site.params.get("update_jaxpr") is not None:
        raise NoRule("is a scatter with a function of the user's")
    if isinstance(operand, Position) or isinstance(updates, Position):
        raise Refuse("computes with the position of a row in the batch")
    a, c, u = batch_axis(operand), batch_axis(indices), batch_axis(updates)
    if a is None and u is None and c is None:
        if adds:
            return linear([operand, updates])
        return homogeneous([operand, updates]) if "mul" not in site.name else nonlinear(site.ins)
    numbers = site.params["dimension_numbers"]
    window = _numbers(numbers.update_window_dims)
    inserted = _numbers(numbers.inserted_window_dims)
    batching = _numbers(numbers.operand_batching_dims)
    mapped = _numbers(numbers.scatter_dims_to_operand_dims)
    scatter_dims = [d for d in range(len(site.shape(2))) if d not in window]
    if c == len(site.shape(1)) - 1:
        raise Refuse("takes the rows of the batch as the coordinates of one element")
    if a is None:
        # Rows go to places of something shared: a sum over the batch if they are added to zeros.
        if c is None or u is None or u != scatter_dims[c] or isinstance(indices, Position):
            raise Refuse("writes rows of the batch by their number")
        if not adds:
            raise Refuse("writes all rows of the batch into one array")
        rows = linear([Rows(0, x.outer, x.inner, fill=0 if x.fill is not None else None)
                       for x in (indices, updates) if isinstance(x, Rows)])  # fmt: skip
        assert isinstance(rows, Rows) and isinstance(updates, Rows)
        return linear([operand, Partial(updates.power, site.origin)])
    if u is None or isinstance(operand, Partial) or isinstance(updates, Partial):
        raise Refuse("writes to all rows of the batch something that is no row")
    assert isinstance(operand, Rows) and isinstance(updates, Rows)
    if c is None:
        kept = [d for d in range(len(site.shape(0))) if d not in inserted and d not in batching]
        if a not in kept or a in mapped or window[kept.index(a)] != u:
            raise Refuse("writes rows of the batch by their number")
        sizes = [site.shape(2, t)[u] == site.shape(0, t)[a] for t in site.traces()]
        if not all(sizes):
            raise Refuse("writes rows of the batch by their number")
        layout: list[State] = []
    else:
        if scatter_dims[c] != u:
            raise Refuse("combines every row of the batch with every other row")
        if a in batching:
            if _numbers(numbers.scatter_indices_batching_dims)[batching.index(a)] != c:
                raise Refuse("combines every row of the batch with every other row")
            if isinstance(indices, Position):
                raise Refuse("looks up values by the position of a row in the batch")
            layout = [moved(_matching(indices, 0), a)]
        else:
            own = a in inserted and _addresses_own_row(indices, mapped, a)
            if not own or (operand.outer, operand.inner) != (1, 1):
                raise Refuse("writes rows of the batch by their number")
            layout = [Rows(a)]
    values = [operand, moved(updates, a)]
    made = nonlinear(values) if "mul" in site.name else linear(values)
    if layout:
        nonlinear([*layout, *(_layout(v) for v in values)])
    assert isinstance(made, Rows)
    return made


def _layout(state: State) -> State:
    assert isinstance(state, Rows)
    return Rows(state.axis, state.outer, state.inner, 0, None if state.fill is None else 0)


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
        raise Refuse(_BY_NUMBER)
    if isinstance(operand, Position):
        raise Refuse("computes with the position of a row in the batch")
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
