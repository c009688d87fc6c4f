"""Which integers rows are sorted by, how many there are of each, and products of rows group by group."""

from __future__ import annotations

from dataclasses import replace

from dynaflow_xla.batch.algebra import product
from dynaflow_xla.batch.row_orders.bounds import divides
from dynaflow_xla.batch.row_orders.orders import at
from dynaflow_xla.batch.states import (
    Below,
    InOrder,
    Inverse,
    Key,
    Keyed,
    Partial,
    Permutation,
    Refuse,
    Rows,
    Same,
    Sizes,
    State,
    SummedBy,
    is_zero,
)

GROUPS = "assigns rows to groups by their position in the batch"
_OTHER_GROUPS = (
    "multiplies rows in groups whose sizes are not known to be those of these rows: they must be counted "
    "from what the rows are sorted by, and that must be known to be from 0 to the number of groups"
)


def key_of(state: State) -> Key | None:
    """Which integers a value holds, if that is known."""
    return state.key if isinstance(state, Keyed | InOrder) else None


def keyed(rows: State, low: int | None = None, high: int | None = None) -> State:
    """Rows of integers within bounds, so that what is counted of them can be told apart."""
    if not isinstance(rows, Rows) or rows.fill is not None or rows.power:
        return rows
    return Keyed(rows, Key(low, high), placed=True)


def clamped(state: State, low: int | None, high: int | None) -> State | None:
    """Integers that are raised to ``low`` and cut off at ``high``."""
    key = key_of(state)
    if key is None or (low is not None and high is not None and low > high):
        return None
    new_low = key.low if low is None or (key.low is not None and key.low >= low) else low
    new_high = key.high if high is None or (key.high is not None and key.high <= high) else high
    if (new_low, new_high) == (key.low, key.high):
        return state
    # A bound that all elements pass leaves one value.
    if new_low is not None and high is not None:
        new_low = min(new_low, high)
    if new_high is not None and low is not None:
        new_high = max(new_high, low)
    assert isinstance(state, Keyed | InOrder)
    return replace(state, key=Key(new_low, new_high, key.base | {key}))


def compared(state: State, bound: int, *, below: bool) -> State | None:
    """Whether integers are below a bound (or at least as large), if the answer is one for all."""
    key, rows = key_of(state), at(state)
    if isinstance(state, Inverse):
        key = Key(low=0)
    if key is None or rows is None:
        return None
    if key.low is not None and key.low >= bound:
        return replace(rows, power=0, fill=not below)
    if key.high is not None and key.high < bound:
        return replace(rows, power=0, fill=below)
    return None


def counted(
    index: State, zeros: State, ones: State, classes: int, origin: SummedBy, *, drops: bool = False
) -> State | None:  # fmt: skip
    """How often each number is in ``index``: ones, added to zeros at these places.

    Args:
        index: The numbers, all of which are counted.
        zeros: What is added to.
        ones: What is added.
        classes: How many numbers are told apart.
        origin: The operator.
        drops: Numbers that are too large are left out.
    """
    key = key_of(index)
    if key is None or key.low is None or key.low < 0:
        return None
    if not drops and (key.high is None or key.high >= classes):
        return None
    if not is_zero(zeros) or not isinstance(ones, Same | Rows) or ones.fill != 1:
        return None
    return Sizes(key, origin)


def summed_up(state: State) -> State | None:
    """Running totals of the sizes of groups: where each of them ends."""
    return replace(state, upto=True) if isinstance(state, Sizes) and not state.upto else None


def grouped(
    items: State, shared: State, sizes: State, *, axis: int, place: int, upto: bool = False,
    groups: int | None = None,
) -> State:  # fmt: skip
    """Items, each multiplied with what is shared by its group; those of a group lie together.

    The groups of sorted items follow from which integers they are sorted by, and the sizes from how often
    each of these occurs. As both are the same integers in every trace, an item's group is its own integer.

    Args:
        items: The items.
        shared: For each group a factor.
        sizes: Of the groups.
        axis: Of ``items``, along which groups lie.
        place: Where that axis is in the result.
        upto: Sizes are where groups end.
        groups: How many groups there are, where items of none are not defined.

    Raises:
        Refuse: the groups of an item may depend on others.
    """
    order = _grouped_order(items, sizes, axis, upto, groups)
    if not isinstance(shared, Same):
        raise Refuse("multiplies rows of the batch with other rows of it")
    assert isinstance(items, InOrder)
    made = product(Rows(place, power=items.rows.power), shared)
    assert isinstance(made, Rows)
    return InOrder(order, made)


def grouped_sum(
    left: State, right: State, sizes: State, origin: SummedBy, *, axes: tuple[int, int],
    upto: bool = False, groups: int | None = None,
) -> State:  # fmt: skip
    """For each group the sum over its items of the products of two values; see :func:`grouped`."""
    order = _grouped_order(left, sizes, axes[0], upto, groups)
    if _grouped_order(right, sizes, axes[1], upto, groups) is not order:
        raise Refuse("combines rows in two different orders", order.origin, ordered=True)
    assert isinstance(left, InOrder) and isinstance(right, InOrder)
    return Partial(left.rows.power + right.rows.power, origin)


def _grouped_order(
    items: State, sizes: State, axis: int, upto: bool, groups: int | None
) -> Permutation:  # fmt: skip
    if not isinstance(items, InOrder) or items.rows != Rows(axis, power=items.rows.power):
        raise Refuse(GROUPS)
    if isinstance(sizes, Below) and not upto and groups is None and divides(sizes):
        if sizes.key.follows(items.order.key):
            return items.order
    if not isinstance(sizes, Sizes) or sizes.upto != upto:
        raise Refuse(_OTHER_GROUPS)
    if not sizes.key.follows(items.order.key):
        raise Refuse(_OTHER_GROUPS)
    if groups is not None and (sizes.key.high is None or sizes.key.high >= groups):
        raise Refuse(_OTHER_GROUPS)
    return items.order
