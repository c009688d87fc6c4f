"""Rules of operators along dimensions: sums, maxima, sorts, scans, softmax, norms of layers."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.algebra import gradient, linear, nonlinear, product, quotient
from dynaflow_xla.batch.axes import off_batch, parameter_gradient, summed, without
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
    is_plain_same,
    power_of,
    scaled,
)
from dynaflow_xla.frontends.torch.batch.rules.pointwise import converted, dtype_of
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site, shifted

_WHAT = {
    "amax": "the maximum", "amin": "the minimum", "max": "the maximum", "min": "the minimum",
    "argmax": "the maximum", "argmin": "the minimum", "any": "a condition", "all": "a condition",
    "var": "the variance", "std": "the standard deviation", "var_mean": "mean and variance",
    "std_mean": "mean and deviation", "logsumexp": "the log of a sum", "prod": "the product",
    "linalg_vector_norm": "the norm", "norm": "the norm", "median": "the median",
    "nanmedian": "the median", "mode": "the commonest value", "aminmax": "minimum and maximum",
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
    return state if site.args.get("keepdim", False) else without(state, dims)


def _in_type(site: Site) -> State:
    """The state of ``self`` once it has the type in which the operator works."""
    given, wanted = site.args["self"], site.args.get("dtype")
    before, state = dtype_of(site, given), site.state(given)
    return state if wanted is None else converted(state, before, str(wanted).split(".")[-1])


@rule("sum", "nansum", "mean")
def _sum(site: Site) -> State:
    state, dims = _in_type(site), _dims(site)
    if isinstance(state, Position):
        raise Refuse(POSITION)
    if site.op.kind == "nansum":
        state = nonlinear([scaled(state, 0)]) if isinstance(state, Partial) else linear([state])
    made = summed(state, dims, site.origin, mean=site.op.kind == "mean")
    return _kept(site, made, dims)


@rule(*_WHAT)
def _reduce(site: Site) -> State | list[State]:
    state, dims = site.state(site.args["self"]), _dims(site)
    if "other" in site.args:  # max and min of two tensors
        return nonlinear([site.aligned(site.args["self"]), site.aligned(site.args["other"])])
    if site.op.kind == "mode" and site.args.get("dim") is None:
        dims = [len(site.shape(site.args["self"])) - 1]
    off_batch(state, dims, f"takes {_WHAT[site.op.kind]} over the batch")
    return site.each(_kept(site, nonlinear([state]), dims))


@rule("count_nonzero")
def _count(site: Site) -> State:
    dims, state = _dims(site), nonlinear([scaled(site.state(site.args["self"]), 0)])
    return without(summed(state, dims, site.origin), dims)


@rule("dist", "trace")
def _of_all(site: Site) -> State:
    """One number of all elements."""
    for tensor in site.tensors():
        if batch_axis(site.state(tensor)) is not None:
            raise Refuse("makes one number of all rows of the batch")
    return nonlinear([site.state(t) for t in site.tensors()])


@rule("renorm")
def _slices(site: Site) -> State:
    """Each slice along a dimension for itself."""
    given = site.args["self"]
    state, rank = nonlinear([site.state(given)]), len(site.shape(given))
    off_batch(state, set(range(rank)) - {site.args["dim"] % rank}, "takes norms over the batch")
    site.fixed([site.args["p"], site.args["maxnorm"]])
    return state


_ALONG = {
    "_softmax": "takes a softmax over", "_log_softmax": "takes a softmax over",
    "_safe_softmax": "takes a softmax over", "softmax": "takes a softmax over",
    "log_softmax": "takes a softmax over",
    "sort": "sorts", "argsort": "sorts", "topk": "takes the largest rows of",
    "kthvalue": "sorts", "msort": "sorts",
    "cumsum": "adds up along", "cumprod": "multiplies up along", "logcumsumexp": "adds up along",
    "cummax": "scans along", "cummin": "scans along",
    "glu": "halves", "diff": "takes differences along",
    "unique_dim": "compares rows of", "_weight_norm_interface": "takes norms over",
}  # fmt: skip


def _added(site: Site) -> list[State]:
    """What ``diff`` puts before and behind."""
    return [site.state(site.args[n]) for n in ("prepend", "append") if n in site.args]


@rule(*(kind for kind in _ALONG if kind not in ("_weight_norm_interface", "unique_dim")))
def _along(site: Site) -> list[State]:
    given = site.args["self"]
    state, rank = site.state(given), len(site.shape(given))
    default = 0 if site.op.kind == "msort" else -1
    dim = site.args.get("dim", default) % max(rank, 1)
    off_batch(state, [dim], f"{_ALONG[site.op.kind]} the batch")
    if site.op.kind == "cumsum":
        return site.each(linear([_in_type(site)]))
    made = nonlinear([state, *_added(site)])
    if site.op.kind == "kthvalue":
        made = _kept(site, made, [dim])
    return site.each(made)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(site: Site) -> State:
    grad, output = site.states("grad_output", "output")
    dim = site.args["dim"] % max(len(site.outs[0]), 1)
    for state in (grad, output):
        off_batch(state, [dim], "takes a softmax over the batch")
    return gradient(grad, [output])


def _check_layer(site: Site, state: State) -> None:
    inner = len(site.args["normalized_shape"])
    rank = len(site.shape(site.args["input"]))
    if isinstance(state, Rows | Position) and state.axis >= rank - inner:
        raise Refuse("takes mean and variance over the batch")


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(site: Site) -> list[State]:
    _check_layer(site, site.state(site.args["input"]))
    state = nonlinear([site.state(site.args["input"]), _shared(site, "weight", "bias")])
    return [state if shape else Same() for shape in site.outs]


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(site: Site) -> list[State]:
    grad = site.state(site.args["grad_out"])
    for name in ("grad_out", "input"):
        _check_layer(site, site.state(site.args[name]))
    others = [site.state(a) for n, a in site.args.items() if n in ("input", "mean", "rstd")]
    total = parameter_gradient(gradient(grad, others), site.origin)
    of_input = gradient(grad, [*others, _shared(site, "weight")])
    return [of_input, *[total] * (len(site.op.payload.outputs) - 1)]


def _shared(site: Site, *names: str) -> State:
    """The state of parameters together, which have no rows."""
    states = [site.state(site.args.get(name)) for name in names]
    if any(isinstance(s, Rows | Position) for s in states):
        raise NoRule("has parameters of its own for each row of the batch")
    return nonlinear(states)


def _first_axis(state: State) -> None:
    if isinstance(state, Rows | Position) and state.axis != 0:
        raise Refuse("takes mean and variance over the batch")


@rule("native_group_norm", sizes=("N",))
def _group_norm(site: Site) -> list[State]:
    state = nonlinear([site.state(site.args["input"])])
    _first_axis(state)
    return site.each(nonlinear([state, _shared(site, "weight", "bias")]))


@rule("native_group_norm_backward", sizes=("N",))
def _group_norm_backward(site: Site) -> list[State]:
    grad, others = site.state(site.args["grad_out"]), site.states("input", "mean", "rstd")
    for state in (grad, *others):
        _first_axis(state)
    total = parameter_gradient(gradient(grad, others), site.origin)
    return [gradient(grad, [*others, _shared(site, "weight")]), total, total]


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
    if isinstance(state, Rows) and (training or site.args.get("running_mean") is None):
        raise Refuse(_TRAINING)
    shared = _shared(site, "weight", "bias", "running_mean", "running_var")
    state = nonlinear([state, shared])
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
        return _own_channels(site, state, gradient(grad, [state]))
    if site.args.get("train", True):
        raise Refuse(_TRAINING)
    if batch_axis(grad) == 1:
        raise NoRule("has the rows of the batch among the channels")
    shared = _shared(site, "weight", "running_mean", "running_var", "save_mean", "save_invstd")
    total = parameter_gradient(gradient(grad, [site.state(site.args["input"])]), site.origin)
    return [gradient(grad, [shared]), total, total]


def _loss(site: Site, each: State, reduction: Any) -> State:
    """Of each element's loss all (0), the mean (1) or the sum (2)."""
    if reduction == 0 or not isinstance(each, Rows):
        return each
    return Partial(-1 if reduction == 1 else 0, site.origin)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
      "soft_margin_loss")  # fmt: skip
def _elementwise_loss(site: Site) -> State:
    tensors = site.tensors()
    rank = max(len(site.shape(t)) for t in tensors)
    states = [shifted(site.state(t), rank - len(site.shape(t))) for t in tensors]
    return _loss(site, nonlinear(states), site.args["reduction"])


@rule("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
      "binary_cross_entropy_backward", "soft_margin_loss_backward")  # fmt: skip
def _elementwise_loss_backward(site: Site) -> State:
    grad = site.aligned(site.args["grad_output"])
    made = gradient(grad, [site.aligned(t) for t in site.tensors()[1:]])
    if site.args["reduction"] == 1 and isinstance(made, Rows):
        # Divided by the number of elements, which grows with the batch.
        return scaled(made, made.power - 1)
    return made


_MEAN_LOSS = (
    "is a mean over the rows whose target is not ignore_index, so nano-batches would have to be "
    "weighted by how many these are. Use reduction='none' or 'sum', or compute the loss outside"
)


def _rows_first(site: Site, *names: str) -> State:
    """Logits [B, C, ...] and labels [B, ...] together; weights of classes have no rows."""
    logits, labels = site.states("self", "target")
    for state in (logits, labels):
        if isinstance(state, Rows | Position) and state.axis != 0:
            raise NoRule("has the rows of the batch along another dimension than the first")
    if isinstance(logits, Rows) and len(site.shape(site.args["self"])) == 1:
        raise Refuse("takes the rows of the batch as classes")
    return nonlinear([logits, labels, _shared(site, "weight", *names)])


@rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(site: Site) -> list[State]:
    reduction, both = site.args["reduction"], _rows_first(site)
    if not isinstance(both, Rows):
        return [both, both]
    if reduction == 1:
        raise Refuse(_MEAN_LOSS)
    if reduction == 0:
        return [both, Same()]
    total = Partial(0, site.origin)
    return [total, total]


@rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(site: Site) -> State:
    rows = _rows_first(site)
    divisor = site.state(site.args["total_weight"])
    if isinstance(rows, Rows) and site.args["reduction"] == 1 and not is_plain_same(divisor):
        raise Refuse(_MEAN_LOSS)  # else divided by the whole batch's
    made = product(site.state(site.args["grad_output"]), rows)
    return quotient(made, divisor) if site.args["reduction"] == 1 else made
