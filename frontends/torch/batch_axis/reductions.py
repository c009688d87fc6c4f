"""Rules of operators along dimensions: sums, maxima, sorts, scans, softmax, norms of layers."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.algebra import linear, nonlinear, product
from dynaflow_xla.batch.axes import summed_rows
from dynaflow_xla.batch.states import (
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    is_plain_same,
    power_of,
)
from dynaflow_xla.frontends.torch.batch_axis.walk import Site, at_axis, axis_in, rule

_WHAT = {
    "amax": "the maximum", "amin": "the minimum", "max": "the maximum", "min": "the minimum",
    "argmax": "the maximum", "argmin": "the minimum", "any": "a condition", "all": "a condition",
    "var": "the variance", "std": "the standard deviation", "var_mean": "mean and variance",
    "std_mean": "mean and deviation", "logsumexp": "the log of a sum", "prod": "the product",
    "linalg_vector_norm": "the norm", "norm": "the norm", "median": "the median",
    "nanmedian": "the median", "mode": "the commonest value",
}  # fmt: skip


def _dims(site: Site) -> list[int]:
    """The dimensions reduced, counted from 0; all if none is given."""
    rank = len(site.shape(site.args["self"]))
    given = site.args.get("dim")
    if given is None or given == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in (given if isinstance(given, (list, tuple)) else [given])]


def _kept(site: Site, state: State, dims: list[int]) -> State:
    """The state where the batch is along none of the dimensions, which may disappear."""
    if isinstance(state, Rows | Position) and not site.args.get("keepdim", False):
        return at_axis(state, state.axis - sum(d < state.axis for d in dims))
    return state


def _unfilled(state: State) -> State:
    if isinstance(state, Rows):
        return Rows(state.axis, state.outer, state.inner, state.power)
    return Same(state.power) if isinstance(state, Same) else state


@rule("sum", "nansum", "mean")
def _sum(site: Site) -> State:
    state, dims = site.state(site.args["self"]), _dims(site)
    if isinstance(state, Position):
        raise Refuse("computes with the position of a row in the batch")
    if not axis_in(state, dims, len(site.shape(site.args["self"]))):
        return _unfilled(_kept(site, state, dims))
    assert isinstance(state, Rows)
    if site.op.kind == "nansum":
        state = Rows(state.axis, state.outer, state.inner, state.power)
    total = summed_rows(state, site.origin)
    if isinstance(total, Same):
        return Same(total.power - (site.op.kind == "mean"))
    assert isinstance(total, Partial)
    if site.op.kind == "mean":
        return Partial(total.power - 1, total.origin)
    return total


@rule(*_WHAT)
def _reduce(site: Site) -> State | list[State]:
    state, dims = site.state(site.args["self"]), _dims(site)
    if "other" in site.args:  # max and min of two tensors
        return nonlinear([site.aligned(site.args["self"]), site.aligned(site.args["other"])])
    if site.op.kind == "mode" and site.args.get("dim") is None:
        dims = [len(site.shape(site.args["self"])) - 1]
    if axis_in(state, dims, len(site.shape(site.args["self"]))):
        raise Refuse(f"takes {_WHAT[site.op.kind]} over the batch")
    made = _kept(site, nonlinear([state]), dims)
    return site.each(made)


_ALONG = {
    "_softmax": "takes a softmax over", "_log_softmax": "takes a softmax over",
    "_safe_softmax": "takes a softmax over", "softmax": "takes a softmax over",
    "log_softmax": "takes a softmax over",
    "sort": "sorts", "argsort": "sorts", "topk": "takes the largest rows of",
    "kthvalue": "sorts", "msort": "sorts",
    "cumsum": "adds up along", "cumprod": "multiplies up along", "logcumsumexp": "adds up along",
    "cummax": "scans along", "cummin": "scans along", "_cummax_helper": "scans along",
    "renorm": "takes norms over", "glu": "halves", "diff": "takes differences along",
    "unique_dim": "compares rows of", "_weight_norm_interface": "takes norms over",
}  # fmt: skip


@rule(*(kind for kind in _ALONG if kind not in ("_weight_norm_interface", "unique_dim", "renorm")))
def _along(site: Site) -> list[State]:
    given = site.args["self"]
    state, rank = site.state(given), len(site.shape(given))
    default = 0 if site.op.kind == "msort" else -1
    dim = site.args.get("dim", default) % max(rank, 1)
    if axis_in(state, [dim], rank):
        raise Refuse(f"{_ALONG[site.op.kind]} the batch")
    if site.op.kind == "cumsum":
        return site.each(_unfilled(linear([state])))
    made = nonlinear([state])
    if site.op.kind == "kthvalue":
        made = _kept(site, made, [dim])
    return site.each(made)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(site: Site) -> State:
    grad, output = site.states("grad_output", "output")
    rank = len(site.outs[0])
    for state in (grad, output):
        if axis_in(state, [site.args["dim"]], rank):
            raise Refuse("takes a softmax over the batch")
    return _linear_in(grad, output)


def _linear_in(grad: State, *others: State) -> State:
    """A gradient: linear in what comes in, whatever the rest."""
    for other in others:
        grad = product(grad, nonlinear([other]))
    return grad


def _check_layer(site: Site, state: State) -> None:
    inner = len(site.args["normalized_shape"])
    rank = len(site.shape(site.args["input"]))
    if isinstance(state, Rows | Position) and state.axis >= rank - inner:
        raise Refuse("takes mean and variance over the batch")


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(site: Site) -> list[State]:
    state = nonlinear([site.state(site.args["input"])])
    _check_layer(site, state)
    for name in ("weight", "bias"):
        if isinstance(site.state(site.args.get(name)), Rows):
            raise NoRule
        state = nonlinear([state, site.state(site.args.get(name))])
    return [state if shape else Same() for shape in site.outs]


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(site: Site) -> list[State]:
    grad = site.state(site.args["grad_out"])
    others = [a for n, a in site.args.items() if n in ("input", "mean", "rstd")]
    _check_layer(site, site.state(site.args["input"]))
    made = _linear_in(grad, *map(site.state, others))
    total = parameter_gradient(site, made)
    return [made, *[total] * (len(site.op.payload.outputs) - 1)]


def parameter_gradient(site: Site, rows: State) -> State:
    """What a gradient of parameters is where the gradient of rows is ``rows``: their sum."""
    if isinstance(rows, Rows):
        return Partial(rows.power, site.origin)
    return rows


@rule("native_group_norm")
def _group_norm(site: Site) -> list[State]:
    state = nonlinear([site.state(site.args["input"])])
    if isinstance(state, Rows) and state.axis != 0:
        raise Refuse("takes mean and variance over the batch")
    return site.each(nonlinear([state, site.state(site.args["weight"])])
                     if not isinstance(site.state(site.args["weight"]), Rows) else state)  # fmt: skip


@rule("native_group_norm_backward")
def _group_norm_backward(site: Site) -> list[State]:
    grad = site.state(site.args["grad_out"])
    made = _linear_in(grad, *site.states("input", "mean", "rstd"))
    if isinstance(made, Rows) and made.axis != 0:
        raise Refuse("takes mean and variance over the batch")
    total = parameter_gradient(site, made)
    return [made, total, total]


_TRAINING = (
    "takes its statistics over the batch, as batch norm does in training mode. Call eval() on the "
    "module, or use a norm of single rows (nn.GroupNorm, nn.LayerNorm)"
)


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
      "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm",
      "_batch_norm_with_update", "_batch_norm_with_update_functional",
      "_batch_norm_no_update", "batch_norm")  # fmt: skip
def _batch_norm(site: Site) -> list[State]:
    state = site.state(site.args["input"])
    kind = site.op.kind
    training = site.args.get("training", site.args.get("train", "with_update" in kind))
    if isinstance(state, Rows) and state.axis == 1:
        return _own_channels(site, state, nonlinear([state]))
    if isinstance(state, Rows) and (training or site.args.get("running_mean", "") is None):
        raise Refuse(_TRAINING)
    state = nonlinear([state])
    made: list[State] = [state]
    made += [Same()] * (len(site.op.payload.outputs) - 1)
    return made


def _own_channels(site: Site, rows: Rows, made: State) -> list[State]:
    """Channels that are rows themselves, as instance norm has them: each has its own statistics.

    What there is for each channel must be of the same rows.
    """
    each = Rows(0, rows.outer, rows.inner)
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"):
        given = site.args.get(name)
        state = site.state(given)
        if given is None or site.shape(given) == (0,):
            continue
        if not isinstance(state, Rows) or (state.fill is None and state != each):
            raise NoRule
    lengths = [site.walker.shapes.get(-1 if v is None else v) for v in site.op.payload.outputs]
    of_each = Rows(0, rows.outer, rows.inner, power_of(made))
    per = [of_each if s is not None and s[0] != s[1] else Same() for s in lengths[1:]]
    return [made, *per]


@rule("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(site: Site) -> list[State]:
    grad = site.state(site.args.get("grad_out", site.args.get("grad_output")))
    state = site.state(site.args["input"])
    if isinstance(state, Rows) and state.axis == 1:
        return _own_channels(site, state, _linear_in(grad, state))
    if site.args.get("train", True):
        raise Refuse(_TRAINING)
    made = _linear_in(grad, site.state(site.args["input"]))
    total = parameter_gradient(site, made)
    return [made, total, total]


def _loss(site: Site, each: State, reduction: Any) -> State:
    """Of each element's loss all (0), the mean (1) or the sum (2)."""
    if reduction == 0 or not isinstance(each, Rows):
        return each
    return Partial(-1 if reduction == 1 else 0, site.origin)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
      "soft_margin_loss")  # fmt: skip
def _elementwise_loss(site: Site) -> State:
    states = []
    for tensor in site.tensors():
        rank = max(len(site.shape(t)) for t in site.tensors())
        state = site.state(tensor)
        by = rank - len(site.shape(tensor))
        states.append(at_axis(state, state.axis + by) if isinstance(state, Rows) else state)
    return _loss(site, nonlinear(states), site.args["reduction"])


@rule("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
      "binary_cross_entropy_backward", "soft_margin_loss_backward")  # fmt: skip
def _elementwise_loss_backward(site: Site) -> State:
    grad = site.state(site.args["grad_output"])
    rest = nonlinear([site.aligned(t) for t in site.tensors()[1:]])
    made = product(site.aligned(site.args["grad_output"]), rest)
    if site.args["reduction"] == 1 and isinstance(made, Rows):
        # Divided by the number of elements, which grows with the batch.
        return Rows(made.axis, made.outer, made.inner, made.power - 1)
    del grad
    return made


_MEAN_LOSS = (
    "is a mean over the rows whose target is not ignore_index, so nano-batches would have to be "
    "weighted by how many these are. Use reduction='none' or 'sum', or compute the loss outside"
)


@rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(site: Site) -> list[State]:
    state, target = site.states("self", "target")
    reduction = site.args["reduction"]
    both = nonlinear([at_axis(s, 0) if isinstance(s, Rows) and s.axis == 0 else s
                      for s in (state, target)])  # fmt: skip
    if not isinstance(both, Rows):
        return [both, both]
    if both.axis != 0:
        raise NoRule
    if reduction == 1:
        raise Refuse(_MEAN_LOSS)
    if reduction == 0:
        return [both, Same()]
    total = Partial(0, site.origin)
    return [total, total]


@rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(site: Site) -> State:
    grad, state, target = site.states("grad_output", "self", "target")
    rows = nonlinear([state, target])
    divisor = site.state(site.args["total_weight"])
    if isinstance(rows, Rows) and site.args["reduction"] == 1 and not is_plain_same(divisor):
        raise Refuse(_MEAN_LOSS)  # else divided by the whole batch's
    return product(grad, rows)
