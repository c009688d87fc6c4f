"""Rules of operators that read or write elements by their number.

What an operator does is said in the terms of ``dynaflow_xla.batch.indexing``: which dimensions are taken
whole, which run along with the indices, where the indices' own dimensions are in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.batch.algebra import chosen, gradient, nonlinear, rows_of
from dynaflow_xla.batch.axes import parameter_gradient
from dynaflow_xla.batch.indexing import How, gathered, scattered, spread
from dynaflow_xla.batch.states import (
    POSITION,
    NoRule,
    Position,
    Refuse,
    Rows,
    State,
    batch_axis,
    is_plain_same,
)
from dynaflow_xla.frontends.torch.batch.rules.pointwise import dtype_of
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site, shifted


@rule("embedding")
def _embedding(site: Site) -> State:
    weight, indices = site.states("weight", "indices")
    rank = len(site.shape(site.args["indices"]))
    return gathered(
        weight, indices, kept={1: rank}, paired={}, own=0, places={d: d for d in range(rank)}
    )


@rule("embedding_dense_backward")
def _embedding_backward(site: Site) -> State:
    grad, indices = site.states("grad_output", "indices")
    if site.args.get("scale_grad_by_freq"):
        raise Refuse("divides by how often an index is in the batch")
    last = len(site.shape(site.args["indices"]))
    if batch_axis(grad) == last:
        raise NoRule("has the rows of the batch among the columns of the table")
    return parameter_gradient(gradient(grad, [indices]), site.origin)


@dataclass(frozen=True)
class _Indexed:
    """An operand with an index for some dimensions, in the terms of gathers and scatters."""

    index: State
    kept: Mapping[int, int]
    places: Mapping[int, int]
    own: int | None


def _indexed(site: Site, given: Any, indices: Sequence[Any]) -> _Indexed:
    """``given[indices]``; None among them takes a dimension whole."""
    at = [d for d, index in enumerate(indices) if index is not None]
    if not at or any(dtype_of(site, indices[d]) in ("bool", "uint8") for d in at):
        raise NoRule("has as many results as there are true elements")
    rank = max(len(site.shape(indices[d])) for d in at)
    adjacent = at == list(range(at[0], at[-1] + 1))
    place = at[0] if adjacent else 0
    states = [shifted(site.state(indices[d]), rank - len(site.shape(indices[d]))) for d in at]
    rest = [d for d in range(len(site.shape(given))) if d not in at]
    kept = {d: n + (rank if n >= place else 0) for n, d in enumerate(rest)}
    positions = [(d, s) for d, s in zip(at, states, strict=True) if isinstance(s, Position)]
    places = {k: place + k for k in range(rank)}
    if not positions:
        return _Indexed(nonlinear(states), kept, places, None)
    if len(positions) > 1:
        raise Refuse(POSITION)
    ((own, position),) = positions
    others = nonlinear([s for s in states if s is not position])
    if isinstance(others, Rows) and rows_of([others, Rows(position.axis)], 0) != others:
        raise Refuse("combines the position of a row with rows laid out in another order")
    return _Indexed(position, kept, places, own)


@rule("index", "_unsafe_index")
def _index(site: Site) -> State:
    given = site.args["self"]
    how = _indexed(site, given, site.args["indices"])
    return gathered(
        site.state(given), how.index, kept=how.kept, paired={}, own=how.own, places=how.places
    )


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(site: Site) -> State:
    given, values = site.args["self"], site.args["values"]
    if (filled := _filled(site)) is not None:
        return filled
    state, how = site.state(given), _indexed(site, given, site.args["indices"])
    rank = len(how.kept) + len(how.places)
    put = shifted(site.state(values), rank - len(site.shape(values)))
    axis = _target(state, how.index, how.places, how.kept)
    if not isinstance(put, Rows) or (axis is not None and put.axis != axis):
        # One value for all rows, which PyTorch repeats.
        size = (1,) * (rank - len(site.shape(values))) + site.shape(values)
        if axis is None or size[axis] == 1:
            put = spread(put, state, how.index, how.places, how.kept)
    return scattered(
        state, how.index, put, how="add" if site.args["accumulate"] else "set", kept=how.kept,
        paired={}, own=how.own, places=how.places, origin=site.origin,
    )  # fmt: skip


def _filled(site: Site) -> State | None:
    """One value written where a mask is true: a choice for each element, however many are true."""
    given, values, indices = (site.args[n] for n in ("self", "values", "indices"))
    at = [d for d, index in enumerate(indices) if index is not None]
    if len(at) != 1 or dtype_of(site, indices[at[0]]) != "bool" or site.args["accumulate"]:
        return None
    if any(n != 1 for n in site.shape(values)):
        return None
    value = site.state(values)
    if isinstance(value, Rows | Position):
        return None
    return chosen(shifted(site.state(indices[at[0]]), at[0]), [site.state(given), value])


def _target(
    state: State, index: State, places: Mapping[int, int], kept: Mapping[int, int]
) -> int | None:
    """The dimension of what is written along which the batch is."""
    axis = batch_axis(index)
    if axis is not None:
        return places.get(axis)
    axis = batch_axis(state)
    return kept.get(axis) if axis is not None else None


def _one_dim(site: Site) -> tuple[int, Mapping[int, int], Mapping[int, int]]:
    """(the dimension that is indexed, the others, which are taken whole, the index's own)."""
    rank = len(site.shape(site.args["self"]))
    dim = site.args["dim"] % max(1, rank)
    kept = {d: d for d in range(rank) if d != dim}
    return dim, kept, {0: dim} if site.shape(site.args["index"]) else {}


@rule("index_select")
def _index_select(site: Site) -> State:
    state, index = site.states("self", "index")
    dim, kept, places = _one_dim(site)
    return gathered(state, index, kept=kept, paired={}, own=dim, places=places)


@rule("index_add", "index_copy", "index_fill")
def _index_add(site: Site) -> State:
    state, index = site.states("self", "index")
    dim, kept, places = _one_dim(site)
    if site.op.kind == "index_fill":
        source = spread(site.state(site.args["value"]), state, index, places, kept)
    else:
        source = site.state(site.args["source"])
        site.fixed(site.args.get("alpha", 1))
    how: How = "add" if site.op.kind == "index_add" else "set"
    return scattered(
        state, index, source, how=how, kept=kept, paired={}, own=dim, places=places,
        origin=site.origin,
    )  # fmt: skip


def _pairing(site: Site, name: str = "index") -> tuple[int, Mapping[int, int], Mapping[int, int]]:
    """(the dimension that is indexed, dimensions that run along with the index, the index's own)."""
    rank = len(site.shape(site.args[name]))
    dim = site.args["dim"] % max(1, rank)
    return dim, {d: d for d in range(rank) if d != dim}, {d: d for d in range(rank)}


@rule("gather", "take_along_dim")
def _gather(site: Site) -> State:
    if site.args.get("dim") is None:
        raise NoRule("takes elements of everything in one line")
    name = "index" if "index" in site.args else "indices"
    dim, paired, places = _pairing(site, name)
    state, index = site.states("self", name)
    return gathered(state, index, kept={}, paired=paired, own=dim, places=places)


@rule("take")
def _take(site: Site) -> State:
    if not is_plain_same(site.state(site.args["self"])):
        raise Refuse("takes elements of the batch by their number")
    return nonlinear([site.state(site.args["index"])])


@rule("put")
def _put(site: Site) -> State:
    raise Refuse("writes elements by their number in the whole tensor")


HOW: Mapping[str | None, How] = {
    None: "set", "add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply",
    "mean": "extreme", "amax": "extreme", "amin": "extreme",
}  # fmt: skip


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(site: Site) -> State:
    state, index = site.states("self", "index")
    dim, paired, places = _pairing(site)
    how = "add" if site.op.kind == "scatter_add" else HOW[site.args.get("reduce")]
    if how == "add" and not site.args.get("include_self", True):
        how = "extreme"  # replaces what was there, and scales with both
    if "value" in site.args:
        source = spread(site.state(site.args["value"]), state, index, places, {})
    else:
        source = site.state(site.args["src"])
    return scattered(
        state, index, source, how=how, kept={}, paired=paired, own=dim, places=places,
        origin=site.origin,
    )  # fmt: skip


@rule("nonzero", "_unique2", "unique_consecutive", "masked_select", "bincount", "histc",
      "_local_scalar_dense")  # fmt: skip
def _counted(site: Site) -> State:
    """Whose result depends on all elements, its size even."""
    for tensor in site.tensors():
        if not is_plain_same(site.state(tensor)):
            raise Refuse("has a result that depends on all rows of the batch together")
    raise NoRule


@rule("bucketize", "searchsorted")
def _searched(site: Site) -> State:
    """Among boundaries that are the same for all, or among those of its own row."""
    boundaries = site.args.get("boundaries", site.args.get("sorted_sequence"))
    state, *among = (
        site.state(x) for x in (site.args["self"], boundaries, site.args.get("sorter"))
    )
    if len(site.shape(boundaries)) < 2:
        if not all(map(is_plain_same, among)):
            raise NoRule("searches among boundaries that depend on the batch")
        return nonlinear([state])
    last = len(site.shape(boundaries)) - 1
    lined_up = [site.state(x) for x in site.tensors()]
    if any(batch_axis(s) == last for s in lined_up):
        raise NoRule("searches along the rows of the batch")
    if len({batch_axis(s) for s in lined_up}) > 1:
        raise NoRule("searches each row among boundaries of its own number")
    return nonlinear([state, *among])


@rule("isin")
def _member(site: Site) -> State:
    among = nonlinear([site.state(site.args.get("test_elements", site.args.get("test_element")))])
    if isinstance(among, Rows):
        raise Refuse("looks for elements among the rows of the batch")
    return nonlinear([site.state(site.args.get("elements", site.args.get("element")))])
