"""Rules of primitives that move data: broadcasts, reshapes, slices, joins, iota."""

from __future__ import annotations

from dataclasses import replace

from dynaflow_xla.batch.algebra import linear, nonlinear
from dynaflow_xla.batch.axes import concatenated, leads_to, reshaped, runs
from dynaflow_xla.batch.states import (
    POSITION,
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    batch_axis,
    moved,
)
from dynaflow_xla.frontends.jax.batch.rules.elementwise import counts_to
from dynaflow_xla.frontends.jax.batch.rules.walk import Site, rule


def varying_axis(site: Site) -> tuple[int, int]:
    """For a result that exists only per batch: (its axis that follows the batch, elements a row)."""
    shapes = [site.out_shape(0, t) for t in site.traces()]
    axes = {
        d
        for shape in shapes
        for d in range(len(shape))
        if len(shape) == len(shapes[0]) and shape[d] != shapes[0][d]
    }
    if len(axes) != 1:
        raise Refuse("makes a value whose shape depends on the batch size along several axes")
    axis = axes.pop()
    inner = shapes[0][axis] // site.sizes[0]
    if inner == 0 or any(s[axis] != n * inner for s, n in zip(shapes, site.sizes, strict=True)):
        raise Refuse("makes a value whose size is not a multiple of the batch size")
    return axis, inner


@rule("broadcast_in_dim")
def _broadcast(site: Site) -> State:
    site.same_params("shape", "sharding")
    if len(site.ins) != 1:
        raise NoRule("has a dynamic shape")
    (state,) = site.ins
    dims = site.params["broadcast_dimensions"]
    axis = batch_axis(state)
    if axis is not None:
        return moved(state, int(dims[axis]))
    if all(site.out_shape(0, t) == site.out_shape() for t in site.traces()):
        return state
    if isinstance(state, Partial):
        raise Refuse("gives to every row a total over the batch", state.origin)
    axis, inner = varying_axis(site)
    assert isinstance(state, Same)
    return Rows(axis, 1, inner, state.power, state.fill)


@rule("reshape", "squeeze")
def _reshape(site: Site) -> State:
    site.same_params("new_sizes", "sharding")
    state = site.ins[0]
    if len(site.ins) != 1:
        raise NoRule("is a reshape with a dynamic shape")
    if isinstance(state, Same | Partial):
        return state
    if isinstance(state, Position):
        if state.dim is not None:
            raise Refuse(POSITION)
        rows: State = Rows(state.axis)
    else:
        rows = state
    assert isinstance(rows, Rows)
    order = list(range(len(site.shape(0))))
    if site.name == "reshape" and site.params.get("dimensions") is not None:
        # It transposes first, as vmap of a convolution asks for it.
        order = list(site.params["dimensions"])
        rows = replace(rows, axis=order.index(rows.axis))
    old = [[site.shape(0, t)[d] for d in order] for t in site.traces()]
    made = reshaped(rows, old[0], site.out_shape(), site.sizes[0])
    if not all(
        leads_to(made, rows, old[t], site.out_shape(0, t), n) for t, n in enumerate(site.sizes)
    ):
        raise Refuse("reshapes in a way that depends on the batch size")
    if isinstance(state, Position):
        if made.outer != 1 or made.inner != 1:
            raise Refuse(POSITION)
        return Position(made.axis)
    return made


@rule("transpose")
def _transpose(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axis = batch_axis(state)
    return state if axis is None else moved(state, list(site.params["permutation"]).index(axis))


@rule("rev")
def _rev(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    if batch_axis(state) in site.params["dimensions"]:
        raise Refuse("reverses the order of the batch")
    return moved(state, state.axis) if isinstance(state, Position) else state


@rule("slice")
def _slice(site: Site) -> State:
    site.same_params("start_indices", "limit_indices")
    (state,) = site.ins
    axis = batch_axis(state)
    bounds = []
    rest = set()
    for eqn in site.eqns:
        starts, limits = (
            tuple(map(int, eqn.params[k])) for k in ("start_indices", "limit_indices")
        )
        if axis is None:
            rest.add((starts, limits))
            continue
        bounds.append((starts[axis], limits[axis]))
        rest.add((starts[:axis] + starts[axis + 1 :], limits[:axis] + limits[axis + 1 :]))
    if len(rest) != 1:
        raise Refuse("takes a part whose bounds depend on the batch size")
    if axis is None:
        return state
    strides = site.params["strides"]
    if strides is not None and strides[axis] != 1:
        raise Refuse("takes some rows of the batch by their number")
    if isinstance(state, Position):
        whole = all(b == (0, n) for b, n in zip(bounds, site.sizes, strict=True))
        if not whole or state.dim is not None:
            raise Refuse(POSITION)
        return state
    assert isinstance(state, Rows)
    return runs(state, bounds, site.sizes)


@rule("split")
def _split(site: Site) -> list[State]:
    site.same_params("sizes")
    (state,) = site.ins
    axis = int(site.params["axis"])
    sizes = [tuple(map(int, e.params["sizes"])) for e in site.eqns]
    count = len(sizes[0])
    if batch_axis(state) != axis:
        if len(set(sizes)) != 1:
            raise Refuse("splits into parts whose sizes depend on the batch size")
        return [moved(state, a) if (a := batch_axis(state)) is not None else state] * count
    if not isinstance(state, Rows):
        raise Refuse(POSITION)
    parts: list[State] = []
    for n in range(count):
        bounds = [(sum(s[:n]), sum(s[: n + 1])) for s in sizes]
        parts.append(runs(state, bounds, site.sizes))
    return parts


@rule("pad")
def _pad(site: Site) -> State:
    site.same_params()
    state, value = site.ins
    axis = batch_axis(state)
    if axis is not None and tuple(site.params["padding_config"][axis]) != (0, 0, 0):
        raise Refuse("pads the batch")
    return linear([state, value])


@rule("concatenate")
def _concatenate(site: Site) -> State:
    site.same_params()
    dim = int(site.params["dimension"])
    if any(isinstance(s, Position) for s in site.ins):
        return _index_columns(site, dim)
    return concatenated(site.ins, dim)


def _index_columns(site: Site, dim: int) -> State:
    """Coordinates of elements, side by side; some of them are the row's own number."""
    axis = next(s.axis for s in site.ins if isinstance(s, Position))
    coordinates: set[int] = set()
    offset = 0
    for number, state in enumerate(site.ins):
        width = site.shape(number)[dim]
        if isinstance(state, Position):
            if state.axis != axis or state.axis == dim or state.dim not in (None, dim):
                raise Refuse(POSITION)
            own = range(width) if state.dim is None else sorted(state.coordinates)
            coordinates.update(offset + c for c in own)
        elif not isinstance(nonlinear([state]), Rows):
            raise Refuse(POSITION)
        elif state != Rows(axis, fill=getattr(state, "fill", None)):
            raise Refuse("combines the position of a row with rows laid out in another order")
        offset += width
    return Position(axis, dim, frozenset(coordinates))


@rule("iota")
def _iota(site: Site) -> State:
    site.same_params("shape", "sharding")
    axis, inner = varying_axis(site)
    if int(site.params["dimension"]) != axis:
        return Rows(axis, 1, inner)
    if inner != 1 or not counts_to(site.params["dtype"], site.sizes[0]):
        raise Refuse("numbers the elements of the batch")
    return Position(axis)


@rule("tile")
def _tile(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    if not isinstance(state, Rows):
        return nonlinear([state]) if isinstance(state, Position) else state
    return replace(state, outer=state.outer * int(site.params["reps"][state.axis]))


@rule("stack")
def _stack(site: Site) -> State:
    site.same_params()
    state = linear(site.ins)
    axis = batch_axis(state)
    return state if axis is None else moved(state, axis + (int(site.params["axis"]) <= axis))


@rule("unstack")
def _unstack(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axis, dim = batch_axis(state), int(site.params["axis"])
    if axis is None:
        return state
    if axis == dim:
        raise Refuse("takes the rows of the batch apart")
    return moved(state, axis - (dim < axis))


@rule("bitcast_convert_type")
def _bitcast(site: Site) -> State:
    site.same_params()
    state = nonlinear(site.ins)
    if isinstance(state, Rows):
        rank = min(len(site.shape(0)), len(site.out_shape()))
        if state.axis >= rank:
            raise Refuse("regroups the bits of different rows")
    return state
