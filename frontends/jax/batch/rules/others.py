"""Rules of random numbers and of collectives."""

from __future__ import annotations

from dataclasses import replace

from dynaflow_xla.batch.algebra import linear, nonlinear
from dynaflow_xla.batch.states import POSITION, NoRule, Refuse, Rows, Same, State, batch_axis
from dynaflow_xla.frontends.jax.batch.rules.walk import Site, rule

_DRAW = (
    "draws random numbers for the whole batch from one key: which numbers a row gets depends on its "
    "position; give each row a key of its own (split before the function) to draw by rows"
)


_FIRST_KEY = (
    "with keys of {}, a batch of keys draws from the first one alone: which numbers a row gets depends on "
    'its position; keys of impl="threefry2x32" draw by rows'
)

_COUNTING = frozenset(["random_bits", "random_split", "random_fold_in", "random_gamma"])
_BY_ROWS = dict.fromkeys(("key<fry>", "key<fry4>", "key<phx2>", "key<phx4>"), _COUNTING) | {
    "key<rbg>": frozenset(["random_split", "random_fold_in"])
}
"""By type of key: what gives each key of a batch the numbers that it gives that key alone. (XLA's generator
of bits knows one key, and of a user's own implementation nothing is known.)"""


def _keys_apart(site: Site) -> None:
    """Raises Refuse if what a key of a batch gives depends on the others."""
    kind = str(site.eqns[0].invars[0].aval.dtype)
    together = any(not isinstance(state, Same) for state in site.ins)
    if together and site.name not in _BY_ROWS.get(kind, ()):
        raise Refuse(_FIRST_KEY.format(kind))


@rule("random_fold_in")
def _fold_in(site: Site) -> State:
    site.same_params()
    _keys_apart(site)
    return nonlinear(site.ins)


@rule("random_bits", "random_split")
def _draw(site: Site) -> State:
    site.same_params("shape")
    (key,) = site.ins
    _keys_apart(site)
    shapes = {tuple(e.params["shape"]) for e in site.eqns}
    if len(shapes) != 1:
        raise Refuse(_DRAW)
    return nonlinear([key])  # the key's dimensions come first in the result


@rule("random_wrap", "random_unwrap")
def _wrap(site: Site) -> State:
    site.same_params()
    state = nonlinear(site.ins)
    axis = batch_axis(state)
    if axis is not None and axis >= min(len(site.shape(0)), len(site.out_shape())):
        raise Refuse("regroups the bits of different rows")
    return state


@rule("random_gamma")
def _gamma(site: Site) -> State:
    site.same_params()
    key, alpha = site.ins
    _keys_apart(site)
    if batch_axis(key) is None and batch_axis(alpha) is not None:
        raise Refuse(_DRAW)
    return nonlinear([key, alpha])


@rule("rng_bit_generator", "iota_2x32_shape")
def _whole_draw(site: Site) -> State:
    raise Refuse(_DRAW)


@rule(
    "psum", "psum_invariant", "unreduced_psum", "ppermute", "pbroadcast", "pmax", "pmin",
    "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p",
)  # fmt: skip
def _across_devices(site: Site) -> list[State]:
    """Elementwise over devices; operands are independent of each other."""
    site.same_params()
    if site.params.get("axes") is not None and any(isinstance(a, int) for a in site.params["axes"]):
        raise NoRule("reduces over an axis of the array and over devices at once")
    if site.name in ("pmax", "pmin"):
        return [nonlinear([s]) for s in site.ins]
    return [linear([s]) for s in site.ins]


@rule(
    "all_gather", "all_gather_invariant", "all_gather_reduced", "reduce_scatter",
    "unreduced_reduce_scatter", "all_to_all",
)  # fmt: skip
def _regroup(site: Site) -> State:
    site.same_params()
    (state,) = site.ins
    axis = batch_axis(state)
    if axis is None:
        return linear([state])
    params = site.params
    if site.name == "all_to_all":
        if not params["tiled"] or axis in (params["split_axis"], params["concat_axis"]):
            raise NoRule("exchanges the rows of the batch between devices")
        return linear([state])
    dim = params.get("all_gather_dimension", params.get("scatter_dimension"))
    if not params["tiled"]:
        raise NoRule("adds or removes an axis")
    if dim != axis:
        return linear([state])
    if site.name in ("reduce_scatter", "unreduced_reduce_scatter"):
        raise Refuse("gives different rows of the batch to different devices")
    if not isinstance(state, Rows):
        raise Refuse(POSITION)
    return replace(state, outer=state.outer * int(params["axis_size"]), fill=None)


@rule("platform_index", "axis_index")
def _of_the_device(site: Site) -> State:
    site.same_params()
    return Same()
