"""Rules of operators that read or write elements by their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import nonlinear, product, rows_of
from dynaflow_xla.batch.states import (
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    is_plain_same,
    is_zero,
)
from dynaflow_xla.frontends.torch.batch_axis.walk import Site, at_axis, rule

_BY_NUMBER = "takes rows of the batch by their number"


def _dtype(site: Site, arg: Any) -> str:
    return site.walker.captured.graph.values[arg.value].dtype


@rule("embedding")
def _embedding(site: Site) -> State:
    weight, indices = site.states("weight", "indices")
    if isinstance(weight, Rows):
        raise Refuse(_BY_NUMBER)
    if isinstance(weight, Partial) or not is_plain_same(weight):
        raise NoRule
    if isinstance(indices, Position):
        raise Refuse("computes with the position of a row in the batch")
    return nonlinear([indices])


@rule("embedding_dense_backward")
def _embedding_backward(site: Site) -> State:
    grad, indices = site.states("grad_output", "indices")
    if site.args.get("scale_grad_by_freq"):
        raise Refuse("divides by how often an index is in the batch")
    both = product(grad, nonlinear([indices]))
    return Partial(both.power, site.origin) if isinstance(both, Rows) else both


def _places(site: Site, indices: Sequence[Any]) -> tuple[list[int], int, int]:
    """Indexed dimensions; where theirs are in the result; how many those are."""
    at = [d for d, index in enumerate(indices) if index is not None]
    if any(_dtype(site, indices[d]) in ("bool", "uint8") for d in at):
        raise NoRule  # as many results as there are true elements
    rank = max(len(site.shape(indices[d])) for d in at)
    adjacent = at == list(range(at[0], at[-1] + 1))
    return at, at[0] if adjacent else 0, rank


def _index_states(site: Site, indices: Sequence[Any], at: list[int], rank: int) -> list[State]:
    """States of the indices, lined up with each other."""
    made = []
    for d in at:
        state = site.state(indices[d])
        if isinstance(state, Rows | Position):
            state = at_axis(state, state.axis + rank - len(site.shape(indices[d])))
        made.append(state)
    return made


def _addressed(state: Rows, indices: list[State], at: list[int]) -> tuple[State, bool]:
    """(state of the indices together, whether they address each row by its own number)."""
    own = [s for d, s in zip(at, indices, strict=True) if d == state.axis]
    others = [s for d, s in zip(at, indices, strict=True) if d != state.axis]
    if not own:
        return nonlinear(others), False
    if not isinstance(own[0], Position):
        raise Refuse(_BY_NUMBER)
    if (state.outer, state.inner) != (1, 1):
        raise NoRule
    return nonlinear([Rows(own[0].axis), *others]), True


@rule("index", "_unsafe_index")
def _index(site: Site) -> State:
    given, indices = site.args["self"], site.args["indices"]
    state = site.state(given)
    if isinstance(state, Position):
        raise Refuse("computes with the position of a row in the batch")
    at, place, rank = _places(site, indices)
    states = _index_states(site, indices, at, rank)
    if not isinstance(state, Rows):
        together = nonlinear(states)
        if isinstance(together, Rows):
            if not is_plain_same(state):
                raise NoRule
            return at_axis(together, together.axis + place)
        return nonlinear([state]) if isinstance(state, Partial) else state
    together, own = _addressed(state, states, at)
    if own:
        assert isinstance(together, Rows)
        return Rows(together.axis + place, 1, 1, state.power)
    if isinstance(together, Rows):
        raise Refuse("combines every row of the batch with every other row")
    before = sum(1 for d in range(state.axis) if d not in at)
    return at_axis(state, before + (rank if before >= place else 0))


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(site: Site) -> State:
    given, indices, values = site.args["self"], site.args["indices"], site.args["values"]
    state = site.state(given)
    at, place, rank = _places(site, indices)
    states = _index_states(site, indices, at, rank)
    addressed = len(site.shape(given)) - len(at) + rank
    put = site.state(values)
    if isinstance(put, Rows | Position):
        put = at_axis(put, put.axis + addressed - len(site.shape(values)))
    if not isinstance(state, Rows):
        together = nonlinear(states)
        if isinstance(together, Rows):
            together = at_axis(together, together.axis + place)
        if isinstance(put, Partial) and is_plain_same(together) and is_zero(state):
            return put
        rows = rows_of([together, put], put.power if isinstance(put, Rows | Same) else 0)
        if not isinstance(rows, Rows):
            return nonlinear([state, rows])
        if site.args["accumulate"] and is_zero(state):
            return Partial(rows.power, site.origin)
        raise Refuse("writes rows of the batch into one tensor, over each other")
    together, own = _addressed(state, states, at)
    if own:
        assert isinstance(together, Rows)
        target: State = at_axis(together, together.axis + place)
    else:
        if isinstance(together, Rows):
            raise Refuse("writes each row of the batch into every other row")
        before = sum(1 for d in range(state.axis) if d not in at)
        target = at_axis(state, before + (rank if before >= place else 0))
    power = put.power if isinstance(put, Rows | Same) else 0
    if isinstance(put, Rows) and (put.axis != target.axis):  # type: ignore[union-attr]
        raise Refuse("writes each row of the batch into every other row")
    if not is_zero(state) and power != state.power:
        raise Refuse("combines values that scale differently with the batch size")
    return Rows(state.axis, state.outer, state.inner, power)


@rule("index_select")
def _index_select(site: Site) -> State:
    given = site.args["self"]
    state, index = site.states("self", "index")
    dim = site.args["dim"] % max(1, len(site.shape(given)))
    if isinstance(state, Rows | Position):
        if dim == state.axis:
            raise Refuse(_BY_NUMBER)
        if isinstance(index, Rows | Position):
            raise Refuse("combines every row of the batch with every other row")
        return state
    if isinstance(index, Rows):
        if not is_plain_same(state):
            raise NoRule
        return at_axis(index, dim)
    if isinstance(index, Position):
        raise Refuse("computes with the position of a row in the batch")
    return state


@rule("gather", "take_along_dim")
def _gather(site: Site) -> State:
    state, index = site.states("self", "index")
    dim = site.args["dim"] % max(1, len(site.outs[0]))
    for one in (state, index):
        if isinstance(one, Rows | Position) and one.axis == dim and isinstance(state, Rows):
            raise Refuse(_BY_NUMBER)
    if isinstance(index, Position):
        raise Refuse("computes with the position of a row in the batch")
    if isinstance(state, Same) and isinstance(index, Rows):
        if index.axis != dim or not is_plain_same(state):
            raise NoRule
        return nonlinear([index])
    if isinstance(state, Rows) and isinstance(index, Same):
        raise NoRule  # of as many rows as the index has
    power = state.power if isinstance(state, Rows | Same) else 0
    return rows_of([state, index], power)


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(site: Site) -> State:
    given = site.args["self"]
    state, index = site.states("self", "index")
    dim = site.args["dim"] % max(1, len(site.shape(given)))
    source = site.state(site.args.get("src", site.args.get("value")))
    power = source.power if isinstance(source, Rows | Same) else 0
    if isinstance(state, Rows):
        if state.axis == dim:
            raise Refuse("writes to rows of the batch by their number")
        if not isinstance(index, Rows):
            raise NoRule
        if power and not is_zero(state):
            raise NoRule
        return rows_of([state, index, source], power)
    rows = rows_of([index, source], power)
    if not isinstance(rows, Rows):
        return nonlinear([state, rows])
    if site.op.kind == "scatter_add" and is_zero(state):
        return Partial(rows.power, site.origin)
    raise Refuse("writes rows of the batch into one tensor, over each other")


@rule("index_add", "index_copy", "index_fill")
def _index_add(site: Site) -> State:
    given = site.args["self"]
    state, index = site.states("self", "index")
    source = site.state(site.args.get("source", site.args.get("value")))
    dim = site.args["dim"] % max(1, len(site.shape(given)))
    power = source.power if isinstance(source, Rows | Same) else 0
    if isinstance(state, Rows):
        if dim == state.axis or isinstance(index, Rows):
            raise Refuse("writes to rows of the batch by their number")
        if power != state.power and not is_zero(state):
            raise NoRule
        return rows_of([state, source], power)
    if isinstance(index, Rows):
        index = at_axis(index, dim)
    rows = rows_of([index, source], power)
    if not isinstance(rows, Rows):
        return nonlinear([state, rows])
    if site.op.kind == "index_add" and is_zero(state):
        return Partial(rows.power, site.origin)
    raise Refuse("writes rows of the batch into one tensor, over each other")


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
    boundaries = site.args.get("boundaries", site.args.get("sorted_sequence"))
    if not is_plain_same(site.state(boundaries)):
        raise NoRule
    return nonlinear([site.state(site.args["self"])])
