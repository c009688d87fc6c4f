"""Rules of operators that move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import linear
from dynaflow_xla.batch.axes import concatenated, reshaped, runs
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
from dynaflow_xla.frontends.torch.batch.rules.pointwise import converted, dtype_of
from dynaflow_xla.frontends.torch.batch.walking.probes import rows_by_shape, varying
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site


def out_value(site: Site, number: int = 0) -> int:
    """The id of a result."""
    made: list[int] = [v for v in site.op.payload.outputs if v is not None]
    return made[number]


def out_shapes(site: Site, number: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a result at both probes."""
    value = out_value(site, number)
    return site.walker.shapes[value]


@rule("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy", first=True,
      sizes=("size", "shape"))  # fmt: skip
def _view(site: Site) -> State:
    given = site.args["self"]
    state = site.state(given)
    if "dtype" in site.args:
        raise NoRule("takes the same bytes as another type")
    new = site.outs[0]
    if isinstance(state, Rows):
        return reshaped(state, site.shape(given), new, site.probes[0])
    if isinstance(state, Position):
        made = reshaped(Rows(state.axis), site.shape(given), new, site.probes[0])
        if made.outer * made.inner != 1:
            raise Refuse(POSITION)
        return moved(state, made.axis)
    return state


@rule("expand", "expand_copy", "broadcast_to", first=True, sizes=("size",))
def _expand(site: Site) -> State:
    given = site.args["self"]
    state, by = site.state(given), len(site.outs[0]) - len(site.shape(given))
    if isinstance(state, Rows | Position):
        return moved(state, state.axis + by)
    rows = rows_by_shape(out_shapes(site))
    if rows is None:
        return state
    if isinstance(state, Partial):
        raise Refuse("needs a total over the batch, before it is complete", state.origin)
    assert isinstance(state, Same)
    return Rows(rows.axis, 1, rows.inner, state.power, state.fill)


@rule("copy", first=True)
def _copy(site: Site) -> State:
    given = site.args["src"]
    into = dtype_of(site, site.args["self"])
    state = converted(site.aligned(given), dtype_of(site, given), into)
    rows = rows_by_shape(out_shapes(site))
    if rows is None or not isinstance(state, Same):
        return state
    return Rows(rows.axis, 1, rows.inner, state.power, state.fill)


@rule("as_strided", "as_strided_copy", "as_strided_scatter")
def _as_strided(site: Site) -> State:
    """Of values without rows: nano-batches have them in the same shape and strides, parts of totals."""
    states = site.states("self", *(["src"] if "src" in site.args else []))
    if not all(isinstance(state, Partial | Same) for state in states):
        raise NoRule("takes rows of the batch by their places in memory")
    return linear(states) if len(states) > 1 else states[0]


def _moved(site: Site, order: Sequence[int]) -> State:
    state = site.state(site.args["self"])
    if isinstance(state, Rows | Position):
        return moved(state, list(order).index(state.axis))
    return state


@rule("permute", "permute_copy")
def _permute(site: Site) -> State:
    rank = len(site.outs[0])
    return _moved(site, [d % rank for d in site.args["dims"]])


@rule("transpose", "transpose_copy", "swapaxes")
def _transpose(site: Site) -> State:
    rank = len(site.outs[0])
    order = list(range(rank))
    if rank:
        names = ("axis0", "axis1") if "axis0" in site.args else ("dim0", "dim1")
        a, b = (site.args[name] % rank for name in names)
        order[a], order[b] = order[b], order[a]
    return _moved(site, order)


@rule("t", "numpy_T", "t_copy", "mT", "mH", "adjoint")
def _transpose_all(site: Site) -> State:
    order = list(range(len(site.outs[0])))
    if site.op.kind == "numpy_T":
        return _moved(site, order[::-1])
    return _moved(site, [*order[:-2], *order[-2:][::-1]])


@rule("unsqueeze", "unsqueeze_copy")
def _unsqueeze(site: Site) -> State:
    state = site.state(site.args["self"])
    dim = site.args["dim"] % len(site.outs[0])
    if isinstance(state, Rows | Position):
        return moved(state, state.axis + (dim <= state.axis))
    return state


@rule("squeeze", "squeeze_copy")
def _squeeze(site: Site) -> State:
    given = site.args["self"]
    state, shape = site.state(given), site.shape(given)
    if not isinstance(state, Rows | Position):
        return state
    if "dim" not in site.args:
        raise NoRule  # of a nano-batch of one row it would take the batch away, too
    dims = site.args["dim"] if isinstance(site.args["dim"], (list, tuple)) else [site.args["dim"]]
    gone = {d % len(shape) for d in dims if shape[d] == 1}
    if state.axis in {d % len(shape) for d in dims}:
        raise NoRule
    return moved(state, state.axis - sum(d < state.axis for d in gone))


def _runs(site: Site, state: Rows, starts: Sequence[int], stops: Sequence[int]) -> Rows:
    """Rows ``start:stop`` of the batch's axis, at both probes: whole runs of it, or a refusal."""
    return runs(state, list(zip(starts, stops, strict=True)), site.probes)


@rule("slice", "slice_copy", first=True)
def _slice(site: Site) -> State:
    given = site.args["self"]
    state = site.state(given)
    shapes = site.walker.shapes[given.value]
    dim = site.args["dim"] % len(shapes[0])
    if not isinstance(state, Rows | Position) or dim != state.axis:
        if any(a != b for a, b in (site.pair(site.args[n]) for n in ("start", "end"))):
            sizes = out_shapes(site)
            if varying(sizes) != varying(shapes) or sizes[0][dim] != sizes[1][dim]:
                raise Refuse("takes a part whose size depends on the batch size")
            raise Refuse("takes a part whose place depends on the batch size")
        return state
    if site.fixed(site.args["step"]) != 1:
        raise Refuse("takes some rows of the batch, by their number")
    lengths = [shape[dim] for shape in shapes]
    starts = [n or 0 for n in site.pair(site.args["start"])]
    ends = [
        s if n is None else n for n, s in zip(site.pair(site.args["end"]), lengths, strict=True)
    ]
    starts = [min(max(n + s if n < 0 else n, 0), s) for n, s in zip(starts, lengths, strict=True)]
    ends = [min(max(n + s if n < 0 else n, 0), s) for n, s in zip(ends, lengths, strict=True)]
    if starts == [0, 0] and ends == lengths:
        return state
    if isinstance(state, Position):
        raise Refuse("takes some rows of the batch, by their number")
    return _runs(site, state, starts, ends)


@rule("select", "select_copy")
def _select(site: Site) -> State:
    given = site.args["self"]
    state, dim = site.state(given), site.args["dim"] % len(site.shape(given))
    if isinstance(state, Rows | Position):
        if dim == state.axis:
            raise Refuse("takes one row of the batch, by its number")
        site.fixed(site.args["index"])
        return moved(state, state.axis - (dim < state.axis))
    return state


@rule("split", "split_with_sizes", "chunk", "unbind", "split_copy", "split_with_sizes_copy",
      "unbind_copy", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")  # fmt: skip
def _split(site: Site) -> State | list[State]:
    given = site.args["self"]
    state, dim = site.state(given), site.args["dim"] % len(site.shape(given))
    if not isinstance(state, Rows | Position):
        return state
    gone = site.op.kind.startswith("unbind")
    if dim != state.axis:
        return moved(state, state.axis - (gone and dim < state.axis))
    if gone or isinstance(state, Position):
        raise Refuse("takes the rows of the batch apart, by their number")
    for name in ("split_size", "split_sizes", "chunks"):
        for item in _items(site.args.get(name)):
            site.pair(item)  # where the parts begin is asked of their shapes
    made: list[State] = []
    at = [0, 0]
    for value in site.op.payload.outputs:
        if value is None:
            raise NoRule
        ends = [a + s[dim] for a, s in zip(at, site.walker.shapes[value], strict=True)]
        made.append(_runs(site, state, at, ends))
        at = ends
    return made


def _items(arg: Any) -> Sequence[Any]:
    return arg if isinstance(arg, (list, tuple)) else (arg,)


@rule("cat", "stack")
def _cat(site: Site) -> State:
    # By an old custom empty lines are left out.
    tensors = [t for t in site.args["tensors"] if site.shape(t) != (0,)]
    dim = site.args["dim"] % len(site.outs[0])
    states = [site.state(t) for t in tensors]
    if site.op.kind == "cat":
        return concatenated(states, dim)
    return linear([_with_new(state, dim) for state in states])


def _with_new(state: State, dim: int) -> State:
    """The state once a dimension has come in at ``dim``."""
    axis = batch_axis(state)
    return state if axis is None else moved(state, axis + (dim <= axis))


@rule("select_scatter", "slice_scatter")
def _replaced(site: Site) -> State:
    """A part is replaced: what is kept and what is new lie side by side along ``dim``."""
    given = site.args["self"]
    dim = site.args["dim"] % len(site.shape(given))
    old, new = site.states("self", "src")
    select = site.op.kind == "select_scatter"
    if select:
        new = _with_new(new, dim)
    if any(isinstance(s, Rows | Position) and s.axis == dim for s in (old, new)):
        if not select and _is_all(site, dim):
            return new
        raise Refuse("replaces rows of the batch, by their number")
    for name in ("index",) if select else ("start", "end", "step"):
        if site.args[name] is not None:
            site.fixed(site.args[name])
    return linear([old, new])


def _is_all(site: Site, dim: int) -> bool:
    """Whether a slice of an operator's ``self`` takes everything, at both probes."""
    lengths = [shape[dim] for shape in site.walker.shapes[site.args["self"].value]]
    ends = [n is None or n >= s for n, s in zip(site.pair(site.args["end"]), lengths, strict=True)]
    starts = [not n for n in site.pair(site.args["start"])]
    return all((*starts, *ends)) and site.fixed(site.args["step"]) == 1


@rule("repeat", first=True)
def _repeat(site: Site) -> State:
    given = site.args["self"]
    state = site.state(given)
    by = len(site.outs[0]) - len(site.shape(given))
    repeats = [site.pair(n) for n in site.args["repeats"]]
    if isinstance(state, Same):
        rows = rows_by_shape(out_shapes(site))
        if rows is None:
            return state
        return Rows(rows.axis, 1, rows.inner, state.power, state.fill)
    if not isinstance(state, Rows):
        raise NoRule
    times = site.fixed(site.args["repeats"][state.axis + by])
    if any(a != b for a, b in repeats):
        raise Refuse("repeats as often as the batch has rows")
    return Rows(state.axis + by, state.outer * times, state.inner, state.power, state.fill)


@rule("flip", "roll", "rot90")
def _turned(site: Site) -> State:
    given = site.args["self"]
    state, rank = site.state(given), len(site.shape(given))
    dims = site.args["dims"]
    if isinstance(state, Rows | Position) and (not dims or state.axis in {d % rank for d in dims}):
        raise Refuse("moves rows of the batch to other places")
    return state


@rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
      "replication_pad2d", "reflection_pad3d", "replication_pad3d")  # fmt: skip
def _pad(site: Site) -> State:
    given = site.args["self"]
    state, rank = site.state(given), len(site.shape(given))
    padding = site.fixed(site.args.get("pad", site.args.get("padding")))
    touched = {rank - 1 - n // 2 for n, amount in enumerate(padding) if amount}
    if batch_axis(state) in touched:
        raise Refuse("adds rows to the batch")
    value = site.args.get("value")
    return linear([state, Same(0, 0) if value is None else site.state(value)])


@rule("tril", "triu")
def _triangle(site: Site) -> State:
    """Some elements become 0."""
    state, rank = site.state(site.args["self"]), len(site.outs[0])
    if batch_axis(state) in (rank - 2, rank - 1):
        raise Refuse("tells rows of the batch by their number")
    return linear([state])


@rule("diagonal", "diagonal_copy")
def _diagonal(site: Site) -> State:
    state, rank = site.state(site.args["self"]), len(site.shape(site.args["self"]))
    dims = {site.args["dim1"] % rank, site.args["dim2"] % rank}
    axis = batch_axis(state)
    if axis is None:
        return state
    if axis in dims:
        raise Refuse("tells rows of the batch by their number")
    return moved(state, axis - sum(d < axis for d in dims))


@rule("diagonal_scatter")
def _diagonal_replaced(site: Site) -> State:
    old, new = site.states("self", "src")
    rank = len(site.shape(site.args["self"]))
    dims = {site.args["dim1"] % rank, site.args["dim2"] % rank}
    if batch_axis(old) in dims or batch_axis(new) == rank - 2:
        raise Refuse("tells rows of the batch by their number")
    if (axis := batch_axis(new)) is not None:
        new = moved(new, [d for d in range(rank) if d not in dims][axis])
    return linear([old, new])


@rule("narrow_copy")
def _narrowed(site: Site) -> State:
    state, rank = site.state(site.args["self"]), len(site.outs[0])
    if batch_axis(state) == site.args["dim"] % rank:
        raise Refuse("takes some rows of the batch, by their number")
    site.fixed([site.args["start"], site.args["length"]])
    return state


@rule("diag_embed")
def _diagonal_matrix(site: Site) -> State:
    """The last dimension becomes two, anywhere; the rest is 0."""
    state = linear([site.state(site.args["self"])])
    if batch_axis(state) == len(site.outs[0]) - 2:
        raise Refuse("tells rows of the batch by their number")
    return _onto_diagonals(site, state)


def _onto_diagonals(site: Site, state: State) -> State:
    """Where the rows of all but the last dimension are once that has become two."""
    axis, rank = batch_axis(state), len(site.outs[0])
    if axis is None:
        return state
    dims = {site.args["dim1"] % rank, site.args["dim2"] % rank}
    return moved(state, [d for d in range(rank) if d not in dims][axis])


@rule("view_as_real", "view_as_complex")
def _pairs(site: Site) -> State:
    """A last dimension of 2 comes or goes."""
    state = linear([site.state(site.args["self"])])
    if batch_axis(state) == len(site.outs[0]):
        raise Refuse("takes the rows of the batch as parts of one number")
    return state


@rule("unfold", "unfold_copy")
def _unfold(site: Site) -> State:
    given = site.args["self"]
    state = site.state(given)
    dim = site.args["dimension"] % max(1, len(site.shape(given)))
    if isinstance(state, Rows | Position) and state.axis == dim:
        raise Refuse("puts neighbouring rows of the batch together")
    return state


# -- gradients of the above ------------------------------------------------------------------------


@rule("slice_backward", "select_backward", "unfold_backward", "diagonal_backward",
      sizes=("input_sizes", "input_size"))  # fmt: skip
def _placed(site: Site) -> State:
    """Zeros around a gradient."""
    given = site.args.get("grad_output", site.args.get("grad_in"))
    state = linear([site.state(given)])
    if not isinstance(state, Rows):
        if rows_by_shape(out_shapes(site)) is not None:
            raise Refuse("puts a value into one row of the batch, by its number")
        return state
    dim = site.args["dim"] % len(site.outs[0]) if "dim" in site.args else -1
    kind = site.op.kind
    if kind == "slice_backward":
        if dim != state.axis:
            return state
        whole = site.walker.shapes[given.value] == out_shapes(site)
        if whole and site.fixed(site.args["step"]) == 1:
            for name in ("start", "end"):
                site.pair(site.args[name])
            return state
        raise Refuse("puts values into some rows of the batch, by their number")
    if kind == "select_backward":
        return _with_new(state, dim)
    # The last dimension of the gradient goes through windows, or through diagonals.
    if state.axis in (dim, len(site.shape(given)) - 1):
        raise Refuse("puts values into places that rows of the batch share")
    if kind == "unfold_backward":
        return state
    return _onto_diagonals(site, state)
