"""Rules of primitives that put rows into an order of data's, and of those that know such an order.

They are asked before the ordinary rules, about operands of all states, and give None where they have nothing
to say. The words are those of ``dynaflow_xla.batch.row_orders.orders``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.row_orders import bounds, groups, item_numbers, orders, permutations
from dynaflow_xla.batch.states import (
    Below,
    InOrder,
    Inverse,
    ItemNumbers,
    Keyed,
    Listed,
    Position,
    Refuse,
    Rows,
    Same,
    Sizes,
    State,
    moved,
)
from dynaflow_xla.frontends.jax.batch.rules import searches
from dynaflow_xla.frontends.jax.batch.rules.elementwise import counts_to
from dynaflow_xla.frontends.jax.batch.rules.indexing import HOW
from dynaflow_xla.frontends.jax.batch.rules.shapes import varying_axis
from dynaflow_xla.frontends.jax.batch.rules.walk import INTEGER, RULES, Site, has_integers, in_order


def _integer(site: Site, result: int = 0) -> bool:
    return jax.dtypes.issubdtype(site.eqns[0].outvars[result].aval.dtype, np.integer)


def _ordinary(site: Site, ins: Sequence[State] | None = None) -> list[State]:
    """What the ordinary rule says of operands of these states, or of what it may know of them."""
    made = RULES[site.name](site.with_ins(ins or [orders.plain(s) for s in site.ins]))
    return made if isinstance(made, list) else site.each_result(made)


# -- what begins an order ------------------------------------------------------------------------------


@in_order("sort")
def _sort(site: Site) -> list[State] | None:
    site.same_params()
    axis = int(site.params["dimension"])
    if math.prod(site.shape(0)) != site.shape(0)[axis]:
        return None  # each column has an order of its own
    return permutations.ordered(site.ins, axis, site.sizes, site.origin)


@in_order("iota")
def _iota(site: Site) -> State | None:
    site.same_params("shape", "sharding")
    lengths = {tuple(e.params["shape"]) for e in site.eqns}
    if len(lengths) == 1:
        return None
    axis, inner = varying_axis(site)
    if int(site.params["dimension"]) != axis or inner == 1:
        return None
    most = site.sizes[0] * inner
    if not counts_to(site.params["dtype"], most) or most > item_numbers.MOST_ITEMS:
        return None
    return item_numbers.counting(axis, 1, inner, site.sizes)


@in_order("top_k")
def _top_k(site: Site) -> list[State] | None:
    values, places = _ordinary(site)
    rank = len(site.shape(0))
    dim = int(site.params.get("axis", rank - 1))
    return [values, groups.keyed(places, 0, site.shape(0)[dim] - 1)]


@in_order("argmax", "argmin")
def _argmax(site: Site) -> State | None:
    (axis,) = (int(a) for a in site.params["axes"])
    return groups.keyed(_ordinary(site)[0], 0, site.shape(0)[axis] - 1)


# -- integers, element by element ----------------------------------------------------------------------

INTEGER.update({
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "sign": np.sign,
    "abs": np.abs, "max": np.maximum, "min": np.minimum, "rem": np.fmod, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "not": lambda a: ~np.asarray(a),
    "div": lambda a, b: np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)),
})  # fmt: skip


@in_order(*INTEGER)
def _elementwise(site: Site) -> State | None:
    site.same_params()
    if any(isinstance(s, Below) for s in site.ins):
        return searches.added(site)
    dtypes = [v.aval.dtype for v in (*site.eqns[0].invars, *site.eqns[0].outvars)]
    if not all(
        jax.dtypes.issubdtype(d, np.bool_) or jax.dtypes.issubdtype(d, np.integer) for d in dtypes
    ):
        return None
    if any(isinstance(s, ItemNumbers | Position) for s in site.ins):
        made = item_numbers.elementwise(INTEGER[site.name], site.ins, site.sizes)
        if isinstance(made, ItemNumbers):
            low = min(int(t.min(initial=0)) for t in made.tables)
            high = max(int(t.max(initial=0)) for t in made.tables)
            return made if has_integers(dtypes[-1], low, high) else None
        return made if any(isinstance(s, ItemNumbers) for s in site.ins) else None
    return _bounded(site) or _folded(site)


def _folded(site: Site) -> State | None:
    """A function of known values is known, too."""
    rows = [s for s in site.ins if isinstance(s, Rows)]
    fills = [s.fill if isinstance(s, Same | Rows) and not s.power else None for s in site.ins]
    if not rows or any(type(f) not in (int, bool) for f in fills):
        return None
    try:
        with np.errstate(all="raise"):
            fill = np.asarray(INTEGER[site.name](*fills)).item()
    except ArithmeticError:
        return None
    known = has_integers(site.eqns[0].outvars[0].aval.dtype, fill, fill)
    like = next((s for n, s in enumerate(site.ins) if isinstance(s, Rows)
                 and site.shape(n) == site.out_shape()), None)  # fmt: skip
    return replace(like, fill=fill) if known and like is not None else None


def _bounded(site: Site) -> State | None:
    """Integers of which bounds are known, beside a known number."""
    fills = [s.fill if isinstance(s, Same | Rows) else None for s in site.ins]
    if len(fills) != 2 or (fills[0] is None) == (fills[1] is None):
        return None
    left = fills[1] is not None  # the integers are the left operand
    state, bound = (site.ins[0], fills[1]) if left else (site.ins[1], fills[0])
    if not isinstance(bound, int) or site.shape(0 if left else 1) != site.out_shape():
        return None
    if site.name in ("max", "min"):
        low, high = (bound, None) if site.name == "max" else (None, bound)
        return groups.clamped(state, low, high)
    if site.name in ("lt", "ge", "gt", "le"):
        # x < b, x >= b; x > b is x >= b + 1; b > x is x < b.
        name = site.name if left else {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}[site.name]
        bound += name in ("gt", "le")
        return groups.compared(state, bound, below=name in ("lt", "le"))
    return None


@in_order("clamp")
def _clamp(site: Site) -> State | None:
    low, state, high = site.ins
    fills = [s.fill if isinstance(s, Same) else None for s in (low, high)]
    if not all(isinstance(f, int) for f in fills):
        return None
    return groups.clamped(state, *fills)


@in_order("select_n")
def _select(site: Site) -> State | None:
    which, *cases = site.ins
    if isinstance(which, Same | Rows) and which.fill is not None:
        number = int(which.fill)
        return cases[number] if site.shape(1 + number) == site.out_shape() else None
    if isinstance(which, ItemNumbers) and all(isinstance(c, ItemNumbers | Same) for c in cases):
        choose = np.choose if len(cases) > 2 else None
        if choose is None and site.shape(0) == site.out_shape():
            return item_numbers.elementwise(
                lambda w, a, b: np.where(w, b, a), [which, *cases], site.sizes
            )
    return None


# -- values that stay what they are --------------------------------------------------------------------


@in_order("copy", "stop_gradient", "name", "optimization_barrier")
def _identity(site: Site) -> list[State] | None:
    site.same_params()
    return list(site.ins) if orders.is_ordered(site.ins) else None


def holds(dtype: Any, low: int | None, high: int | None) -> bool:
    """Whether a type has all integers between these."""
    if low is None or high is None:
        return False
    if jax.dtypes.issubdtype(dtype, np.integer):
        return has_integers(dtype, low, high)
    if jax.dtypes.issubdtype(dtype, np.floating):
        return max(abs(low), abs(high)) <= 2 ** jax.numpy.finfo(dtype).nmant
    return False


@in_order("convert_element_type")
def _convert(site: Site) -> State | None:
    site.same_params()
    (state,) = site.ins
    before, after = site.eqns[0].invars[0].aval.dtype, site.eqns[0].outvars[0].aval.dtype
    integers = jax.dtypes.issubdtype(before, np.integer) and _integer(site)
    if isinstance(state, ItemNumbers | Inverse):
        tables = state.tables if isinstance(state, ItemNumbers) else ()
        most = max((int(abs(t).max(initial=0)) for t in tables), default=0)
        order = state.order
        most = max(most, site.sizes[0] * order.each if order is not None else 0)
        return state if integers and counts_to(after, most) else None
    if isinstance(state, Listed):
        return searches.converted(site, state)
    if isinstance(state, Sizes | Below):
        return state if integers and jax.numpy.iinfo(after).bits >= 32 else None
    if isinstance(state, Keyed | InOrder) and state.key is not None:
        low, high = state.key.low, state.key.high
        wider = integers and before == after
        return state if wider or holds(after, low, high) else None
    return None


@in_order("reshape", "squeeze")
def _reshape(site: Site) -> State | None:
    site.same_params("new_sizes", "sharding")
    state = site.ins[0]
    if len(site.ins) != 1 or (site.name == "reshape" and site.params["dimensions"] is not None):
        return None
    old = [site.shape(0, t) for t in site.traces()]
    new = [site.out_shape(0, t) for t in site.traces()]
    if isinstance(state, Position) and state.dim is None:
        try:
            return _ordinary(site)[0]
        except Refuse:
            counted = item_numbers.counting(state.axis, 1, 1, site.sizes)
            return item_numbers.reshaped_numbers(counted, old, new, site.sizes)
    if isinstance(state, ItemNumbers):
        return item_numbers.reshaped_numbers(state, old, new, site.sizes)
    if isinstance(state, Keyed | Inverse):
        (rows,) = _ordinary(site, [state.rows])
        assert isinstance(rows, Rows)
        return _with_rows(state, rows)
    if isinstance(state, InOrder) and state.key is not None:
        return _keep_key(site.framed(state.order)[0], state)
    return None


def _with_rows(state: Keyed | Inverse, rows: Rows) -> State:
    if isinstance(state, Keyed):
        return Keyed(rows, state.key, state.placed)  # elements keep their order
    return Inverse(state.order, rows)


def _keep_key(made: State, state: InOrder) -> State:
    return InOrder(made.order, made.rows, state.key) if isinstance(made, InOrder) else made


@in_order("transpose")
def _transpose(site: Site) -> State | None:
    site.same_params()
    (state,) = site.ins
    if not isinstance(state, Keyed):
        return None
    axis = list(site.params["permutation"]).index(state.rows.axis)
    return Keyed(moved(state.rows, axis), state.key)  # type: ignore[arg-type]


@in_order("broadcast_in_dim")
def _broadcast(site: Site) -> State | None:
    site.same_params("shape", "sharding")
    if len(site.ins) != 1:
        return None
    (state,) = site.ins
    if isinstance(state, Listed):
        return searches.repeated(site, state)
    dims = [int(d) for d in site.params["broadcast_dimensions"]]
    where = orders.at(state)
    if where is None or site.shape(0)[where.axis] != site.out_shape()[dims[where.axis]]:
        return None
    if isinstance(state, ItemNumbers):
        return item_numbers.numbered(
            dims[state.axis], state.outer, state.inner, state.tables, state.order
        )
    same = math.prod(site.shape(0)) == math.prod(site.out_shape())
    if isinstance(state, Inverse) and same and dims == sorted(dims):
        return Inverse(state.order, Rows(dims[where.axis], where.outer, where.inner))
    if isinstance(state, Keyed) and same:
        return Keyed(Rows(dims[where.axis], where.outer, where.inner), state.key)
    if isinstance(state, InOrder) and same and state.key is not None:
        return _keep_key(site.framed(state.order)[0], state)
    return None


@in_order("slice")
def _slice(site: Site) -> State | None:
    """A part of integers lies within the same bounds."""
    (state,) = site.ins
    if isinstance(state, Below):
        return searches.sliced(site, state)
    if not isinstance(state, Keyed):
        return None
    return groups.keyed(_ordinary(site)[0], state.key.low, state.key.high)


# -- reading and writing by number ---------------------------------------------------------------------


def _addressed(
    site: Site, gone: Sequence[int], mapped: Sequence[int], batching: Sequence[int]
) -> int | None:
    """The one dimension that indices address, if all others are whole."""
    if len(mapped) != 1 or tuple(gone) != tuple(mapped) or batching:
        return None
    return mapped[0] if site.shape(1)[-1] == 1 else None


@in_order("gather")
def _gather(site: Site) -> State | None:
    site.same_params("slice_sizes")
    numbers = site.params["dimension_numbers"]
    dim = _addressed(
        site, list(numbers.collapsed_slice_dims), [int(d) for d in numbers.start_index_map],
        list(numbers.operand_batching_dims),
    )  # fmt: skip
    if dim is None:
        return None
    for trace, eqn in enumerate(site.eqns):
        shape = site.shape(0, trace)
        if any(int(n) != shape[d] for d, n in enumerate(eqn.params["slice_sizes"]) if d != dim):
            return None
    offset = [int(d) for d in numbers.offset_dims]
    placed = [d for d in range(len(site.out_shape())) if d not in offset]
    return permutations.taken(
        site.ins[0], site.ins[1], dim=dim, places=dict(enumerate(placed)), sizes=site.sizes
    )


@in_order("scatter", "scatter-add", "scatter-min", "scatter-max")
def _scatter(site: Site) -> State | None:
    site.same_params()
    if site.name == "scatter" and site.params.get("update_jaxpr") is not None:
        return None
    operand, index, updates = site.ins
    numbers = site.params["dimension_numbers"]
    dim = _addressed(
        site, list(numbers.inserted_window_dims),
        [int(d) for d in numbers.scatter_dims_to_operand_dims], list(numbers.operand_batching_dims),
    )  # fmt: skip
    if dim is None:
        return None
    window = [int(d) for d in numbers.update_window_dims]
    left = [d for d in range(len(site.shape(0))) if d != dim]
    for trace in site.traces():
        whole, part = site.shape(0, trace), site.shape(2, trace)
        if any(whole[d] != part[at] for d, at in zip(left, window, strict=True)):
            return None
    if site.name == "scatter-add" and not left:
        drops = "DROP" in str(site.params["mode"]).upper()
        made = groups.counted(index, operand, updates, site.shape(0)[0], site.origin, drops=drops)
        if made is not None:
            return made
    places = dict(enumerate(d for d in range(len(site.shape(2))) if d not in window))
    return permutations.written(
        operand, index, updates, how=HOW[site.name], dim=dim, places=places,
        sizes=site.sizes,
    )  # fmt: skip


# -- groups --------------------------------------------------------------------------------------------


@in_order("cumsum")
def _cumsum(site: Site) -> State | None:
    site.same_params()
    (state,) = site.ins
    if site.params.get("reverse"):
        return None
    return bounds.running(state) if isinstance(state, Below) else groups.summed_up(state)


@in_order("ragged_dot_general")
def _ragged(site: Site) -> State | None:
    site.same_params()
    left, right, sizes, *rest = site.ins
    if rest or site.params.get("group_offset") is not None:
        return None
    numbers = site.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), batched = numbers.dot_dimension_numbers
    ragged = [int(d) for d in numbers.lhs_ragged_dimensions]
    if any(map(len, batched)) or len(ragged) != 1 or len(site.shape(2)) != 1:
        return None
    (axis,) = ragged
    sums = [int(d) for d in left_sum]
    if axis not in sums:
        if not numbers.rhs_group_dimensions:
            raise Refuse(groups.GROUPS)
        place = [d for d in range(len(site.shape(0))) if d not in sums].index(axis)
        return groups.grouped(left, right, sizes, axis=axis, place=place)
    other = int(list(right_sum)[sums.index(axis)])
    return groups.grouped_sum(left, right, sizes, site.origin, axes=(axis, other))
