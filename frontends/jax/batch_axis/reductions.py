"""Rules of reductions, scans along an axis, windows, sorts, contractions, transforms."""

from __future__ import annotations

from collections.abc import Sequence

from dynaflow_xla.batch.algebra import common_power, homogeneous, linear, nonlinear, product
from dynaflow_xla.batch.axes import summed_rows
from dynaflow_xla.batch.states import NoRule, Partial, Refuse, Rows, Same, State
from dynaflow_xla.frontends.jax.batch_axis.shapes import batch_axis, drop_axes, moved
from dynaflow_xla.frontends.jax.batch_axis.walk import Site, rule


@rule("reduce_sum")
def _reduce_sum(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axes = [int(a) for a in site.params["axes"]]
    if isinstance(state, Rows) and state.axis in axes:
        return summed_rows(state, site.origin)
    return drop_axes(linear([state]), axes)


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
      "argmax", "argmin")  # fmt: skip
def _reduce(site: Site) -> State:
    site.same_params()
    axes = [int(a) for a in site.params.get("axes", site.params.get("dimensions", ()))]
    if any(batch_axis(s) in axes for s in site.ins):
        raise Refuse("reduces over the batch, and not by a sum")
    if site.name in ("reduce_max", "reduce_min"):
        return drop_axes(homogeneous(site.ins), axes)
    if site.name in ("argmax", "argmin"):
        return drop_axes(homogeneous(site.ins, 0), axes)
    return drop_axes(nonlinear(site.ins), axes)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(site: Site) -> State:
    site.same_params()
    if batch_axis(site.ins[0]) == int(site.params["axis"]):
        raise Refuse("accumulates along the batch")
    if site.name == "cumsum":
        return linear(site.ins)
    return homogeneous(site.ins) if site.name in ("cummax", "cummin") else nonlinear(site.ins)


def _plain_window(site: Site, axis: int) -> bool:
    """Whether a window does not extend along an axis."""
    neutral = {
        "window_dimensions": 1, "window_strides": 1, "padding": (0, 0),
        "base_dilation": 1, "window_dilation": 1,
    }  # fmt: skip
    return all(
        tuple(p[axis]) == value if isinstance(value, tuple) else p[axis] == value
        for key, value in neutral.items()
        if (p := site.params.get(key)) is not None
    )


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
      "select_and_scatter", "select_and_scatter_add", "select_and_gather_add")  # fmt: skip
def _window(site: Site) -> State:
    site.same_params()
    if not isinstance(site.params.get("padding", ()), tuple):
        raise NoRule("has a padding that is not written out")
    for state in site.ins:
        axis = batch_axis(state)
        if axis is not None and not _plain_window(site, axis):
            raise Refuse("slides a window along the batch")
    if site.name == "reduce_window_sum":
        return linear(site.ins)
    if site.name in ("reduce_window_max", "reduce_window_min"):
        return homogeneous(site.ins)
    if site.name == "select_and_scatter_add":  # (values to place, operand that chooses the places)
        values, chooser = site.ins
        homogeneous([chooser])
        return product(values, nonlinear([_flat(chooser)]))
    return nonlinear(site.ins)


def _flat(state: State) -> State:
    if isinstance(state, Rows):
        return Rows(state.axis, state.outer, state.inner)
    return Same() if isinstance(state, Same) else state


@rule("sort")
def _sort(site: Site) -> list[State]:
    site.same_params()
    if any(batch_axis(s) == int(site.params["dimension"]) for s in site.ins):
        raise Refuse("sorts along the batch")
    flat = nonlinear([_flat(s) for s in site.ins])
    return [product(flat, Same(common_power([s]))) for s in site.ins]


@rule("top_k", "approx_top_k")
def _top_k(site: Site) -> list[State]:
    site.same_params()
    (state,) = site.ins
    rank = len(site.shape(0))
    dim = int(site.params.get("axis", site.params.get("reduction_dimension", rank - 1))) % rank
    if batch_axis(state) == dim:
        raise Refuse("picks the largest rows of the batch")
    return [homogeneous([state]), homogeneous([state], 0)]


@rule("fft")
def _fft(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axis = batch_axis(state)
    if axis is not None and axis >= len(site.shape(0)) - len(site.params["fft_lengths"]):
        raise Refuse("transforms along the batch")
    return linear([state])


# -- contractions ------------------------------------------------------------------------------------


def _contract(
    site: Site, places: Sequence[tuple[str, int]], out_axis: Sequence[dict[tuple[str, int], int]]
) -> State:
    """The state of a bilinear operator.

    Args:
        site: The operator, with two operands.
        places: For each operand that has rows: what the operator does with that axis ("batch", "contract",
            "free") and which pairing or axis it is.
        out_axis: For each operand: (place -> axis of the result).
    """
    left, right = site.ins
    if not (isinstance(left, Rows) and isinstance(right, Rows)):
        for state in site.ins:
            if isinstance(state, Rows):
                other = right if state is left else left
                (place,) = places
                if place[0] != "free":
                    raise Refuse("pairs rows of the batch with elements that are no rows")
                made = product(state, other) if state is left else product(other, state)
                return moved(made, out_axis[0 if state is left else 1][place])
        return product(left, right)
    first, second = places
    if first[0] == "free" or second[0] == "free" or first != second:
        raise Refuse("combines every row of the batch with every other row")
    paired = product(
        Rows(0, left.outer, left.inner, left.power, left.fill),
        Rows(0, right.outer, right.inner, right.power, right.fill),
    )
    if first[0] == "contract":
        return Partial(paired.power if isinstance(paired, Rows) else 0, site.origin)
    return moved(paired, out_axis[0][first])


@rule("dot_general")
def _dot_general(site: Site) -> State:
    site.same_params()
    contract, batch = site.params["dimension_numbers"]
    places: list[tuple[str, int]] = []
    out_axis: list[dict[tuple[str, int], int]] = [{}, {}]
    ranks = [len(site.shape(0)), len(site.shape(1))]
    offset = len(batch[0])
    for side in (0, 1):
        contracted, batched = [list(map(int, d[side])) for d in (contract, batch)]
        free = [d for d in range(ranks[side]) if d not in contracted and d not in batched]
        out_axis[side] = {("batch", n): n for n in range(len(batched))}
        out_axis[side] |= {("free", d): offset + n for n, d in enumerate(free)}
        offset += len(free)
        axis = batch_axis(site.ins[side])
        if axis is not None:
            kind = "contract" if axis in contracted else "batch" if axis in batched else "free"
            dims = {"contract": contracted, "batch": batched}.get(kind)
            places.append((kind, dims.index(axis) if dims is not None else axis))
    return _contract(site, places, out_axis)


@rule("conv_general_dilated")
def _conv(site: Site) -> State:
    site.same_params("lhs_shape", "rhs_shape")
    numbers = site.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    grouped = site.params["feature_group_count"] != 1 or site.params["batch_group_count"] != 1
    # Specifications begin with (batch, features) and (out features, in features).
    names = [
        {lhs_spec[0]: ("free", 0), lhs_spec[1]: ("contract", 0)},
        {rhs_spec[0]: ("free", 0), rhs_spec[1]: ("contract", 0)},
    ]
    places = []
    for side in (0, 1):
        axis = batch_axis(site.ins[side])
        if axis is None:
            continue
        if axis not in names[side]:
            raise Refuse("slides a window along the batch")
        place = names[side][axis]
        if grouped and not (
            side == 0 and axis == lhs_spec[0] and site.params["batch_group_count"] == 1
        ):
            raise NoRule("is a grouped convolution with the batch among the grouped dimensions")
        places.append(place)
    return _contract(site, places, [{("free", 0): out_spec[0]}, {("free", 0): out_spec[1]}])


@rule("ragged_dot_general")
def _ragged(site: Site) -> State:
    raise Refuse("assigns rows to groups by their position in the batch")


def leading_axes(site: Site, core: Sequence[int]) -> list[State]:
    """Operators on the last dimensions (``core`` of each operand), batched over those before."""
    site.same_params()
    for number, state in enumerate(site.ins):
        axis = batch_axis(state)
        if axis is not None and axis >= len(site.shape(number)) - core[number]:
            raise Refuse("treats the rows of the batch as the rows of one matrix")
    return site.each(nonlinear(site.ins))


_MATRICES: dict[str, tuple[int, ...]] = {
    "cholesky": (2,), "eig": (2,), "eigh": (2,), "lu": (2,), "qr": (2,), "geqrf": (2,), "svd": (2,),
    "schur": (2,), "hessenberg": (2,), "tridiagonal": (2,), "lu_pivots_to_permutation": (1,),
    "householder_product": (2, 1), "tridiagonal_solve": (1, 1, 1, 2), "cholesky_update": (2, 1),
    "geqp3": (2, 1), "ormqr": (2, 1, 2), "symmetric_product": (2, 2),
}  # fmt: skip


@rule(*_MATRICES)
def _matrices(site: Site) -> list[State]:
    return leading_axes(site, _MATRICES[site.name])


@rule("triangular_solve")
def _triangular_solve(site: Site) -> list[State]:
    matrix, right = site.ins
    rank = len(site.shape(1))
    columns = rank - 1 if site.params["left_side"] else rank - 2
    if isinstance(matrix, Same) and matrix.power == 0 and batch_axis(right) == columns:
        site.same_params()
        return [linear([right])]  # one triangular system, a right-hand side for each row
    return leading_axes(site, (2, 2))
