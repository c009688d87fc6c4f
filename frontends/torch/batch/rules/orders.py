"""Rules of operators that put rows into an order of data's, and of those that know such an order.

They are asked before the ordinary rules, about operands of all states, and give None where they have nothing
to say. The words are those of ``dynaflow_xla.batch.row_orders.orders``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dynaflow_xla.batch.axes import reshaped
from dynaflow_xla.batch.row_orders import groups, item_numbers, orders, permutations
from dynaflow_xla.batch.states import (
    InOrder,
    Inverse,
    ItemNumbers,
    Keyed,
    Rows,
    Same,
    Sizes,
    State,
)
from dynaflow_xla.frontends.torch.batch.rules.indexing import HOW
from dynaflow_xla.frontends.torch.batch.rules.pointwise import dtype_of
from dynaflow_xla.frontends.torch.batch.rules.shapes import out_shapes
from dynaflow_xla.frontends.torch.batch.walking.probes import PROBES, varying
from dynaflow_xla.frontends.torch.batch.walking.registry import RULES, in_order
from dynaflow_xla.frontends.torch.batch.walking.walk import Site

_BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63, "uint8": 8,
         "float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # fmt: skip
"""Types, and how long integers may be that each of them holds exactly."""


def _ordinary(site: Site) -> list[State]:
    made = RULES[site.op.kind](site)
    return made if isinstance(made, list) else site.each(made)


def _dtype(site: Site, result: int = 0) -> str:
    return site.walker.captured.graph.values[site.op.outputs[result]].dtype


def _dim(site: Site, given: Any, default: int = -1) -> int:
    return int(site.args.get("dim", default)) % max(1, len(site.shape(given)))


# -- what begins an order ------------------------------------------------------------------------------


@in_order("sort", "msort")
def _sort(site: Site) -> list[State] | None:
    given = site.args["self"]
    axis, shape = _dim(site, given, -1 if site.op.kind == "sort" else 0), site.shape(given)
    rows = orders.at(site.raw(given)) or site.raw(given)
    if not isinstance(rows, Rows) or rows.axis != axis or math.prod(shape) != shape[axis]:
        return None  # each column has an order of its own
    places = item_numbers.counting(axis, rows.outer, rows.inner, site.walker.sizes)
    made = permutations.ordered(
        [site.raw(given), places], axis, site.walker.sizes, site.origin,
        rising=not site.args.get("descending", False),
    )  # fmt: skip
    return made if made is None else made[: 2 if site.op.kind == "sort" else 1]


@in_order("arange")
def _arange(site: Site) -> State | None:
    shapes = out_shapes(site)
    if not varying(shapes):
        return None
    start, step = (site.fixed(site.args.get(*at)) for at in (("start", 0), ("step", 1)))
    site.pair(site.args["end"])
    each = [n[0] / rows for n, rows in zip(shapes, PROBES, strict=True)]
    if (start, step) != (0, 1) or each[0] != each[1] or each[0] != int(each[0]) or each[0] < 2:
        return None
    if not _dtype(site).startswith("int"):
        return None
    return item_numbers.counting(0, 1, int(each[0]), site.walker.sizes)


@in_order("topk")
def _topk(site: Site) -> list[State] | None:
    given = site.args["self"]
    values, places = _ordinary(site)
    return [values, groups.keyed(places, 0, site.shape(given)[_dim(site, given)] - 1)]


@in_order("argmax", "argmin")
def _argmax(site: Site) -> State | None:
    given = site.args["self"]
    if site.args.get("dim") is None:
        return None
    return groups.keyed(_ordinary(site)[0], 0, site.shape(given)[_dim(site, given)] - 1)


@in_order("max", "min")
def _extreme(site: Site) -> list[State] | None:
    given = site.args["self"]
    if site.args.get("dim") is None or len(site.op.outputs) != 2:
        return None
    if orders.is_ordered([site.raw(given)]):
        return None
    values, places = _ordinary(site)
    return [values, groups.keyed(places, 0, site.shape(given)[_dim(site, given)] - 1)]


@in_order("cat", "stack")
def _together(site: Site) -> State | None:
    """Integers that are put together lie within the bounds of all of them."""
    keys = [groups.key_of(site.raw(x)) for x in site.args["tensors"]]
    if not keys or not all(isinstance(site.raw(x), Keyed) for x in site.args["tensors"]):
        return None
    lows, highs = [k.low for k in keys if k], [k.high for k in keys if k]
    low = None if None in lows else min(n for n in lows if n is not None)
    high = None if None in highs else max(n for n in highs if n is not None)
    return groups.keyed(_ordinary(site)[0], low, high)


# -- integers, element by element ----------------------------------------------------------------------

_INTEGER: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "sign": np.sign,
    "abs": np.abs, "maximum": np.maximum, "minimum": np.minimum, "fmod": np.fmod,
    "remainder": np.mod, "floor_divide": np.floor_divide, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@in_order(*_INTEGER, "div")
def _elementwise(site: Site) -> State | None:
    given = [site.args[n] for n in ("self", "other") if n in site.args]
    states = [site.raw(a) for a in given]
    function: Callable[..., Any] | None
    if site.op.kind == "div":
        # Numbers of items are not negative, so that towards zero is down.
        rounds = site.args.get("rounding_mode") is not None and all(_natural(s) for s in states)
        function = np.floor_divide if rounds else None
    else:
        function = _INTEGER[site.op.kind]
    if function is None or site.args.get("alpha", 1) != 1:
        return None
    rank = len(site.outs[0])
    if any(len(site.shape(a)) not in (0, rank) for a in given):
        return None
    if not any(isinstance(s, ItemNumbers) for s in states):
        return None
    made = item_numbers.elementwise(function, states, site.walker.sizes)
    if isinstance(made, ItemNumbers):
        most = max(int(np.abs(t).max(initial=0)) for t in made.tables)
        if most.bit_length() > _BITS.get(_dtype(site), 0) or not _dtype(site).startswith("int"):
            return None
    return made


def _natural(state: State) -> bool:
    if isinstance(state, ItemNumbers):
        return all(int(t.min(initial=0)) >= 0 for t in state.tables)
    return isinstance(state, Same) and type(state.fill) is int and state.fill > 0


@in_order("clamp", "clamp_min", "clamp_max")
def _clamp(site: Site) -> State | None:
    state = site.raw(site.args["self"])
    if groups.key_of(state) is None:
        return None
    bounds = [site.args.get(name) for name in ("min", "max")]
    if not all(b is None or type(b) is int for b in bounds):
        return None
    return groups.clamped(state, *map(site.fixed, bounds))


# -- values that stay what they are --------------------------------------------------------------------


@in_order("clone", "alias", "detach", "contiguous", "lift_fresh")
def _identity(site: Site) -> State | None:
    state = site.raw(site.args["self"])
    return state if orders.is_ordered([state]) else None


@in_order("_to_copy")
def _convert(site: Site) -> State | None:
    given = site.args["self"]
    state, before, after = site.raw(given), dtype_of(site, given), _dtype(site)
    bits = _BITS.get(after, 0)
    if before == after:
        return state
    if isinstance(state, ItemNumbers | Inverse):
        rows = orders.at(state)
        assert rows is not None
        most = max(site.walker.sizes) * rows.outer * rows.inner
        if isinstance(state, ItemNumbers):
            most = max(most, *(int(np.abs(t).max(initial=0)) for t in state.tables))
        return state if after.startswith("int") and most.bit_length() <= bits else None
    if isinstance(state, Keyed | InOrder) and state.key is not None:
        low, high = state.key.low, state.key.high
        if low is None or high is None or low < 0:
            return None
        return state if high.bit_length() <= bits else None
    if isinstance(state, Sizes):
        return state if state.most and state.most.bit_length() <= bits else None
    return None


@in_order("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy", "unsqueeze", "squeeze")
def _reshape(site: Site) -> State | None:
    given = site.args["self"]
    state = site.raw(given)
    if "dtype" in site.args or not orders.is_ordered([state]):
        return None
    old, new = site.shape(given), site.outs[0]
    rows = orders.at(state)
    assert rows is not None or isinstance(state, Sizes)
    if rows is None:
        return None
    if isinstance(state, Keyed | Inverse):
        return replace(state, rows=reshaped(rows, old, new, site.probes[0]))
    if isinstance(state, ItemNumbers):
        same = [a for a in range(len(new)) if new[a] == old[state.axis] and
                math.prod(new[:a]) == math.prod(old[: state.axis]) == 1]  # fmt: skip
        return replace(state, axis=same[0]) if len(same) == 1 else None
    if isinstance(state, InOrder):
        made = site.framed(state.order)[0]
        return replace(made, key=state.key) if isinstance(made, InOrder) else made
    return None


# -- reading and writing by number ---------------------------------------------------------------------


def _only(site: Site) -> tuple[int, Any] | None:
    """(the dimension that is indexed, its index), if there is but one."""
    found = [(d, i) for d, i in enumerate(site.args["indices"]) if i is not None]
    return found[0] if len(found) == 1 else None


@in_order("index", "_unsafe_index")
def _index(site: Site) -> State | None:
    found = _only(site)
    if found is None:
        return _several(site)
    dim, index = found
    places = {d: dim + d for d in range(len(site.shape(index)))}
    return permutations.taken(
        site.raw(site.args["self"]), site.raw(index), dim=dim, places=places,
        sizes=site.walker.sizes,
    )  # fmt: skip


def _several(site: Site) -> State | None:
    """``w[tokens, slots]``: the row by its number, a place in it by any number that is the item's own."""
    given, indices = site.args["self"], site.args["indices"]
    at = [d for d, index in enumerate(indices) if index is not None]
    state = orders.plain(site.raw(given))
    if not isinstance(state, Rows) or state.axis not in at or at != list(range(at[0], at[-1] + 1)):
        return None
    if len({len(site.shape(indices[d])) for d in at}) != 1:
        return None
    index = site.raw(indices[state.axis])
    by = item_numbers.numbers(index, site.walker.sizes)
    if by is None or by.order is None:
        return None
    for d in at:
        if d != state.axis and orders.into(site.raw(indices[d]), by.order) not in (
            Rows(by.axis), Same(0),
        ):  # fmt: skip
            return None
    return permutations.taken(
        state, index, dim=state.axis, places={by.axis: at[0] + by.axis}, sizes=site.walker.sizes
    )


@in_order("index_select")
def _index_select(site: Site) -> State | None:
    index, given = site.args["index"], site.args["self"]
    dim = _dim(site, given)
    return permutations.taken(
        site.raw(given), site.raw(index), dim=dim, places={0: dim}, sizes=site.walker.sizes
    )


def _written(
    site: Site, dim: int, index: Any, updates: Any, how: str | None, places: dict[int, int]
) -> State | None:  # fmt: skip
    given = site.args["self"]
    if how == "add" and len(site.shape(given)) == 1:
        made = groups.counted(
            site.raw(index), site.raw(given), site.raw(updates), site.shape(given)[0], site.origin
        )
        made = _exact(site, made, index)
        if made is not None and math.prod(site.shape(updates)) in (1, math.prod(site.shape(index))):
            return made
    return permutations.written(
        site.raw(given), site.raw(index), site.raw(updates), how=HOW[how], dim=dim, places=places,
        sizes=site.walker.sizes,
    )  # fmt: skip


@in_order("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(site: Site) -> State | None:
    found, values = _only(site), site.args["values"]
    if found is None:
        return None
    dim, index = found
    rank = len(site.outs[0]) - 1 + len(site.shape(index))
    if len(site.shape(values)) != rank and not isinstance(site.raw(values), Same):
        return None
    places = {d: dim + d for d in range(len(site.shape(index)))}
    return _written(site, dim, index, values, "add" if site.args["accumulate"] else None, places)


@in_order("index_add", "index_copy")
def _index_add(site: Site) -> State | None:
    if site.args.get("alpha", 1) != 1:
        return None
    dim = _dim(site, site.args["self"])
    how = "add" if site.op.kind == "index_add" else None
    return _written(site, dim, site.args["index"], site.args["source"], how, {0: dim})


@in_order("scatter_add", "scatter")
def _scatter(site: Site) -> State | None:
    """Of one dimension; of more, each element of the index is a number of its own."""
    index = site.args["index"]
    if len(site.shape(index)) != 1 or site.args.get("reduce") is not None:
        return None
    how = "add" if site.op.kind == "scatter_add" else None
    updates = site.args["src"] if "src" in site.args else site.args["value"]
    return _written(site, 0, index, updates, how, {0: 0})


# -- groups --------------------------------------------------------------------------------------------


@in_order("histc")
def _histc(site: Site) -> State | None:
    """Counts of integers, if each has a bin of its own: the last one holds both of its ends."""
    state = site.raw(site.args["self"])
    bins, low, high = (
        site.fixed(site.args.get(n, d)) for n, d in (("bins", 100), ("min", 0), ("max", 0))
    )
    if low != 0 or high != bins - 1 or not 2 <= bins <= 1 << 16:
        return None
    rows = orders.at(state)
    if rows is None:
        return None
    made = groups.counted(state, Same(0, 0), Same(0, 1), bins, site.origin)
    return _exact(site, made, site.args["self"])


def _exact(site: Site, made: State | None, given: Any) -> State | None:
    """Counts of elements of ``given`` that the type of the result holds."""
    most = _elements(site, given)
    if not isinstance(made, Sizes) or most.bit_length() > _BITS.get(_dtype(site), 0):
        return None
    return replace(made, most=most)


def _elements(site: Site, given: Any) -> int:
    """How many elements a value has at the largest batch in question."""
    count = math.prod(site.shape(given))
    return -(-count * max(site.walker.sizes) // site.probes[0])


@in_order("cumsum")
def _cumsum(site: Site) -> State | None:
    state = site.raw(site.args["self"])
    made = groups.summed_up(state)
    if not isinstance(made, Sizes) or made.most.bit_length() > _BITS.get(_dtype(site), 0):
        return None
    return made


@in_order("transformers.grouped_mm_fallback", "_grouped_mm")
def _grouped(site: Site) -> State | None:
    left = site.args.get("input", site.args.get("self"))
    right = site.args.get("weight", site.args.get("mat2"))
    ends = site.args.get("offs")
    if site.args.get("bias") is not None or ends is None:
        return None
    if len(site.shape(left)) == 2 and len(site.shape(right)) == 3:
        return groups.grouped(
            site.raw(left), site.raw(right), site.raw(ends), axis=0, place=0, upto=True,
            groups=site.shape(right)[0],
        )  # fmt: skip
    if len(site.shape(left)) == 2 and len(site.shape(right)) == 2:
        return groups.grouped_sum(
            site.raw(left), site.raw(right), site.raw(ends), site.origin, axes=(1, 0), upto=True,
            groups=site.outs[0][0],
        )  # fmt: skip
    return None


@in_order("transformers.grouped_mm_fallback_backward")
def _grouped_backward(site: Site) -> list[State] | None:
    items, weight, ends, grad = (
        site.raw(site.args[n]) for n in ("input", "weight", "offs", "grad_output")
    )
    count = site.shape(site.args["weight"])[0]
    return [
        groups.grouped(grad, weight, ends, axis=0, place=0, upto=True, groups=count),
        groups.grouped_sum(
            items, grad, ends, site.origin, axes=(0, 0), upto=True, groups=count
        ),
    ]  # fmt: skip
