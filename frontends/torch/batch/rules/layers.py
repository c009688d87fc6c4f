"""Rules of further layers: pooling, resampling, padding, losses of rows, and their gradients."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.algebra import nonlinear, product
from dynaflow_xla.batch.axes import parameter_gradient
from dynaflow_xla.batch.states import (
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    moved,
)
from dynaflow_xla.frontends.torch.batch.rules.contractions import _by_shape, _in_batches
from dynaflow_xla.frontends.torch.batch.rules.reductions import _loss
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site

_ALONE = "combines rows of the batch with each other"

# How many of the last dimensions an operator takes together.
_PLANES = {
    "max_pool1d": 1, "max_pool3d": 3, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3,
    "adaptive_max_pool1d": 1, "max_unpool2d": 2, "max_unpool3d": 3,
    "_upsample_nearest_exact1d": 1, "_upsample_nearest_exact3d": 3, "_upsample_lanczos2d_aa": 2,
    "native_channel_shuffle": 3, "affine_grid_generator": 2,
}  # fmt: skip
_PLANES_BACKWARD = {
    "adaptive_max_pool3d_backward": 3, "max_unpool2d_backward": 2, "max_unpool3d_backward": 3,
    "upsample_linear1d_backward": 1, "upsample_nearest3d_backward": 3,
    "upsample_trilinear3d_backward": 3, "_upsample_nearest_exact1d_backward": 1,
    "_upsample_nearest_exact2d_backward": 2, "_upsample_nearest_exact3d_backward": 3,
    "_upsample_bilinear2d_aa_backward": 2, "_upsample_bicubic2d_aa_backward": 2,
    "grid_sampler_2d_backward": 3, "grid_sampler_3d_backward": 4,
    "fractional_max_pool2d_backward": 2, "fractional_max_pool3d_backward": 3,
    "affine_grid_generator_backward": 3,
}  # fmt: skip


def _look_at_sizes(site: Site) -> None:
    """Sizes of a whole tensor, the batch's among them: what comes of them is in the result's shape."""
    for name in ("input_size", "output_size", "size"):
        given = site.args.get(name)
        for size in given if isinstance(given, (list, tuple)) else ():
            site.pair(size)


@rule(*_PLANES)
def _planes(site: Site) -> list[State]:
    _look_at_sizes(site)
    return _by_shape(site, _in_batches(site, None, site.tensors(), _PLANES[site.op.kind]))


@rule(*_PLANES_BACKWARD)
def _planes_backward(site: Site) -> list[State]:
    _look_at_sizes(site)
    free = _PLANES_BACKWARD[site.op.kind]
    grad, *others = site.tensors()
    _in_batches(site, None, [grad], min(free, len(site.shape(grad)) - 1))
    rest = _in_batches(site, None, others, free) if others else Same()
    return _by_shape(site, product(site.state(grad), rest))


@rule("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional(site: Site) -> list[State]:
    free = 2 if site.op.kind.endswith("2d") else 3
    samples = site.state(site.args["random_samples"])
    state = _in_batches(site, None, [site.args["self"]], free)
    if isinstance(samples, Rows) and samples.axis > 1:
        raise Refuse(_ALONE)
    return _by_shape(site, nonlinear([state, samples]))


@rule("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
      "replication_pad1d_backward", "replication_pad2d_backward",
      "replication_pad3d_backward")  # fmt: skip
def _pad_backward(site: Site) -> State:
    grad, state = site.states("grad_output", "self")
    rank = len(site.outs[0])
    touched = {rank - 1 - n // 2 for n, by in enumerate(site.fixed(site.args["padding"])) if by}
    for one in (grad, state):
        if isinstance(one, Rows | Position) and one.axis in touched:
            raise Refuse("adds rows to the batch")
    # Of the padded tensor only the shape matters.
    return product(grad, Same())


@rule("_trilinear")
def _trilinear(site: Site) -> State:
    """The product of three tensors, each with dimensions more, summed over some."""
    states: list[State] = []
    for name, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        state = site.state(site.args[name])
        if isinstance(state, Rows | Position):
            axis = state.axis
            for dim in sorted(site.args[expand]):
                axis += dim <= axis
            state = moved(state, axis)
        states.append(state)
    summed = set(site.args["sumdim"])
    over = [s for s in states if isinstance(s, Rows) and s.axis in summed]
    both = product(product(states[0], states[1]), states[2])
    if not over:
        if isinstance(both, Rows):
            return moved(both, both.axis - sum(dim < both.axis for dim in summed))
        return both
    if not isinstance(both, Rows):
        raise NoRule
    if len(over) < 2:  # beside a tensor with as many entries as the whole batch has rows
        raise Refuse("multiplies rows of the batch with something that is not cut with them")
    return Partial(both.power, site.origin)


@rule("linear_backward")
def _linear_backward(site: Site) -> list[State]:
    state, grad, weight = site.states("self", "grad_output", "weight")
    rank = len(site.shape(site.args["self"]))
    for one in (state, grad):
        if isinstance(one, Rows) and one.axis == rank - 1:
            raise Refuse("sums over the rows of the batch as over features")
    if isinstance(weight, Rows):
        raise NoRule
    both = product(grad, state)
    of_bias = parameter_gradient(grad, site.origin)
    return [product(grad, weight), parameter_gradient(both, site.origin), of_bias]


@rule("_pdist_forward", "_pdist_backward")
def _pairs(site: Site) -> State:
    if any(isinstance(site.state(tensor), Rows) for tensor in site.tensors()):
        raise Refuse("compares each row of the batch with every other row")
    raise NoRule


@rule("embedding_renorm")
def _renorm(site: Site) -> State:
    if isinstance(site.state(site.args["indices"]), Rows):
        raise Refuse("scales those rows of the weight that the whole batch names (max_norm)")
    raise NoRule


# -- losses ----------------------------------------------------------------------------------------


@rule("binary_cross_entropy_with_logits")
def _with_logits(site: Site) -> State:
    rank = max(len(site.shape(tensor)) for tensor in site.tensors())
    states: list[State] = []
    for tensor in site.tensors():
        state = site.state(tensor)
        if isinstance(state, Rows | Position):
            state = moved(state, state.axis + rank - len(site.shape(tensor)))
        states.append(state)
    return _loss(site, nonlinear(states), site.args["reduction"])


def _of_rows(site: Site, *tensors: Any) -> State:
    """Of operands ``[B, C]`` or ``[B]``."""
    states = [site.state(tensor) for tensor in tensors]
    if any(isinstance(state, Rows) and state.axis != 0 for state in states):
        raise Refuse(_ALONE)
    return nonlinear(states)


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin(site: Site) -> list[State]:
    each = _of_rows(site, site.args["self"], site.args["target"])
    if isinstance(site.state(site.args.get("weight")), Rows):
        raise NoRule
    loss = _loss(site, each, site.args["reduction"])
    return [loss, *[each] * (len(site.op.payload.outputs) - 1)]


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margin_backward(site: Site) -> State:
    others = [site.args[n] for n in ("self", "target", "is_target") if n in site.args]
    made = product(site.state(site.args["grad_output"]), _of_rows(site, *others))
    if site.args["reduction"] == 1 and isinstance(made, Rows):
        return Rows(made.axis, made.outer, made.inner, made.power - 1)
    return made
