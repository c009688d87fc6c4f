"""Rules of reductions, scans along an axis, windows, sorts, contractions, transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import common_power, homogeneous, linear, nonlinear, product
from dynaflow_xla.batch.axes import contraction, summed, without
from dynaflow_xla.batch.states import (
    NoRule,
    Partial,
    Refuse,
    Rows,
    Same,
    State,
    batch_axis,
    scaled,
)
from dynaflow_xla.frontends.jax.batch.rules.walk import Site, rule


@rule("reduce_sum")
def _reduce_sum(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axes = [int(a) for a in site.params["axes"]]
    made = summed(state, axes, site.origin)
    return without(made, axes) if batch_axis(state) not in axes else made


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
      "argmax", "argmin")  # fmt: skip
def _reduce(site: Site) -> State:
    site.same_params("computation")  # which its jaxpr says, too
    axes = [int(a) for a in site.params.get("axes", site.params.get("dimensions", ()))]
    if any(batch_axis(s) in axes for s in site.ins):
        raise Refuse("reduces over the batch, and not by a sum")
    if site.name in ("reduce_max", "reduce_min"):
        return without(homogeneous(site.ins), axes)
    if site.name in ("argmax", "argmin"):
        return without(homogeneous(site.ins, 0), axes)
    return without(nonlinear(site.ins), axes)


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


def _has_the_same_rows(site: Site) -> None:
    """What is placed has the rows of what chooses the places: JAX does not look at that when it traces."""
    for axis in {batch_axis(s) for s in site.ins[:2]}:
        if axis is not None and any(
            site.shape(0, t)[axis] != site.shape(1, t)[axis] for t in site.traces()
        ):
            raise Refuse("places all rows of one operand where a nano-batch of the other chooses")


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
    if site.name.startswith("select_and_scatter"):
        _has_the_same_rows(site)
    if site.name == "reduce_window_sum":
        return linear(site.ins)
    if site.name in ("reduce_window_max", "reduce_window_min"):
        return homogeneous(site.ins)
    if site.name == "select_and_scatter_add":  # (values to place, operand that chooses the places)
        values, chooser = site.ins
        homogeneous([chooser])
        return product(values, nonlinear([scaled(chooser, 0)]))
    return nonlinear(site.ins)


@rule("sort")
def _sort(site: Site) -> list[State]:
    site.same_params()
    if any(batch_axis(s) == int(site.params["dimension"]) for s in site.ins):
        raise Refuse("sorts along the batch")
    flat = nonlinear([scaled(s, 0) for s in site.ins])
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


@rule("dot_general")
def _dot_general(site: Site) -> State:
    site.same_params()
    contract, batch = site.params["dimension_numbers"]
    places: list[list[Any]] = []
    offset = len(batch[0])
    for side in (0, 1):
        contracted, batched = [list(map(int, d[side])) for d in (contract, batch)]
        where: list[Any] = []
        for d in range(len(site.shape(side))):
            if d in contracted:
                where.append(f"sum {contracted.index(d)}")
            elif d in batched:
                where.append(batched.index(d))
            else:
                where.append(offset)
                offset += 1
        places.append(where)
    return contraction(site.ins[0], site.ins[1], (places[0], places[1]), site.origin)


def _own_weights(site: Site) -> State | None:
    """Rows of which each has weights of its own: its groups, as ``vmap`` of a convolution has it."""
    x, w = site.ins
    numbers = site.params["dimension_numbers"]
    counts = [(e.params["feature_group_count"], e.params["batch_group_count"]) for e in site.eqns]
    # Are groups of features (0), or of the operand's batch (1)?
    side = 0 if counts[0][0] > 1 else 1
    if (
        not (isinstance(x, Rows) and isinstance(w, Rows) and x.outer == w.outer == 1)
        or (x.axis, w.axis) != (numbers.lhs_spec[1 - side], numbers.rhs_spec[0])
        or any(c[1 - side] != 1 for c in counts)
        # Groups lie in order, as many for each row in every trace.
        or any(c[side] * site.sizes[0] != counts[0][side] * n
               for c, n in zip(counts, site.sizes, strict=True))
        or counts[0][side] % site.sizes[0]
    ):  # fmt: skip
        return None
    site.same_params("feature_group_count", "batch_group_count", "lhs_shape", "rhs_shape")
    return Rows(numbers.out_spec[1], 1, w.inner, x.power + w.power)


@rule("conv_general_dilated")
def _conv(site: Site) -> State:
    if (made := _own_weights(site)) is not None:
        return made
    site.same_params("lhs_shape", "rhs_shape")
    numbers = site.params["dimension_numbers"]
    groups = site.params["feature_group_count"], site.params["batch_group_count"]
    specs = numbers.lhs_spec, numbers.rhs_spec
    places: list[list[Any]] = []
    for side, spec in enumerate(specs):
        # Specifications begin with (batch, features) and (out features, in features).
        where: list[Any] = [None] * len(spec)
        where[spec[0]], where[spec[1]] = numbers.out_spec[side], "features"
        places.append(where)
        axis = batch_axis(site.ins[side])
        plain = groups == (1, 1) or (side == 0 and groups[1] == 1 and axis == spec[0])
        if axis in spec[:2] and not plain:
            raise NoRule("is a grouped convolution with the batch among the grouped dimensions")
    return contraction(site.ins[0], site.ins[1], (places[0], places[1]), site.origin)


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
    return site.each_result(nonlinear(site.ins))


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
    if isinstance(matrix, Same) and matrix.power == 0 and isinstance(right, Partial):
        site.same_params()
        return [linear([right])]  # a share of the right-hand side gives a share of the solution
    return leading_axes(site, (2, 2))
