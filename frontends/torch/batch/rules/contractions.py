"""Rules of products, convolutions, attention, factorizations, transforms and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import gradient, homogeneous, linear, nonlinear, product
from dynaflow_xla.batch.axes import contraction, off_batch, parameter_gradient, summed
from dynaflow_xla.batch.states import (
    NoRule,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    batch_axis,
    is_plain_same,
    moved,
)
from dynaflow_xla.frontends.torch.batch.walking.probes import varying
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site, shifted


def _matrix_product(site: Site, left: Any, right: Any) -> State:
    """[n, k] x [k, m], or [b, n, k] x [b, k, m], or [n, k] x [k]."""
    ranks = len(site.shape(left)), len(site.shape(right))
    dims: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any]]] = {
        (2, 2): ((0, "k"), ("k", 1)),
        (3, 3): ((0, 1, "k"), (0, "k", 2)),
        (2, 1): ((0, "k"), ("k",)),
        (1, 1): (("k",), ("k",)),
    }
    if ranks not in dims:
        raise NoRule(f"is a product of tensors of {ranks[0]} and {ranks[1]} dimensions")
    return contraction(site.state(left), site.state(right), dims[ranks], site.origin)


@rule("mm", "bmm", "mv", "dot", "vdot", "matmul", "_int_mm")
def _mm(site: Site) -> State:
    left, right = site.tensors()[:2]
    return _matrix_product(site, left, right)


@rule("addmm", "baddbmm", "addmv", "_addmm_activation")
def _addmm(site: Site) -> State:
    bias, left, right = site.tensors()[:3]
    site.fixed([site.args.get("alpha", 1), site.args.get("beta", 1)])
    made = linear([site.aligned(bias), _matrix_product(site, left, right)])
    return nonlinear([made]) if site.op.kind == "_addmm_activation" else made


@rule("addr")
def _outer_product(site: Site) -> State:
    site.fixed([site.args["alpha"], site.args["beta"]])
    left, right = site.states("vec1", "vec2")
    made = contraction(left, right, ((0,), (1,)), site.origin)
    return linear([site.aligned(site.args["self"]), made])


@rule("linalg_cross")
def _cross(site: Site) -> State:
    factors = [site.aligned(site.args[name]) for name in ("self", "other")]
    for state in factors:
        off_batch(state, [site.args["dim"] % len(site.outs[0])], "combines rows of the batch")
    return product(*factors)


@rule("_cdist_forward", "_euclidean_dist")
def _distances(site: Site) -> State:
    """Of each of the P rows of one to each of the R rows of the other: [..., P, R]."""
    rank = len(site.outs[0])
    states = []
    for number, name in enumerate(("x1", "x2")):
        state = site.aligned(site.args[name])
        off_batch(state, [rank - 1], "takes distances over the batch")
        if batch_axis(state) == rank - 2:
            state = moved(state, rank - 2 + number)
        states.append(state)
    return nonlinear(states)


@rule("_cdist_backward")
def _distances_backward(site: Site) -> State:
    """Of [..., P, R] distances for the P rows [..., P, M] of the one: a sum over the R of the other."""
    last = len(site.outs[0]) - 1
    names = ("grad", "cdist", "x1", "x2")
    states = [site.aligned(site.args[name]) for name in names]
    grad, cdist, x1, x2 = (site.shape(site.args[name]) for name in names)
    for state in states[2:]:
        off_batch(state, [last], "takes distances over the batch")
    if batch_axis(states[3]) == last - 1:
        states[3] = moved(states[3], last)
    made = gradient(states[0], states[1:])
    if (axis := batch_axis(made)) is not None:
        # Kernels count on it that sizes fit.
        sizes = grad, cdist, (*x1[:-1], 1), (*x2[:-2], 1, x2[-2])
        for state, size in zip(states, sizes, strict=True):
            along = ((1,) * (last + 1 - len(size)) + size)[axis]
            if batch_axis(state) is None and along != 1:
                raise NoRule("takes rows of the batch beside a tensor that is not cut with them")
    return summed(made, [last], site.origin)


@rule("linear")
def _linear_layer(site: Site) -> State:
    given, weight, *bias = site.tensors()
    rank = len(site.shape(given))
    last = rank - 1
    made = contraction(
        site.state(given), site.state(weight),
        ((*range(last), "k"), (last, "k")[-len(site.shape(weight)) :]), site.origin,
    )  # fmt: skip
    return linear([made, *(site.aligned(b) for b in bias)])


@rule("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution",
      "mkldnn_convolution")  # fmt: skip
def _convolution(site: Site) -> State:
    given = site.args["input"] if "input" in site.args else site.args["self"]
    state, weight = site.state(given), site.state(site.args["weight"])
    bias = site.state(site.args.get("bias"))
    if any(isinstance(s, Rows | Position) for s in (weight, bias)):
        raise NoRule("has a kernel of its own for each row of the batch")
    if len(site.shape(given)) != len(site.shape(site.args["weight"])):
        raise NoRule("is a convolution of a single sample")
    _is_first(state)
    return linear([product(state, weight), bias])


def _is_first(state: State) -> None:
    if isinstance(state, Rows | Position) and state.axis != 0:
        raise Refuse("slides over the batch, or sums over it as over channels")


@rule("convolution_backward")
def _convolution_backward(site: Site) -> list[State]:
    grad, state, weight = site.states("grad_output", "input", "weight")
    _is_first(grad)
    _is_first(state)
    if isinstance(weight, Rows | Position):
        raise NoRule("has a kernel of its own for each row of the batch")
    of_weight = parameter_gradient(product(grad, state), site.origin)
    return [product(grad, weight), of_weight, parameter_gradient(grad, site.origin)]


def _in_batches(site: Site, axes: set[int] | None, tensors: Sequence[Any], free: int = 0) -> State:
    """What computes something for each index of leading dimensions on its own.

    Args:
        site: The operator.
        axes: Where the batch may be; None: anywhere but in the last ``free`` dimensions.
        tensors: Operands that have these dimensions, or are the same for all.
        free: See ``axes``.
    """
    states = []
    for tensor in tensors:
        state, rank = site.state(tensor), len(site.shape(tensor))
        if isinstance(state, Rows | Position):
            fine = state.axis < rank - free if axes is None else state.axis in axes
            if not fine:
                raise Refuse("combines rows of the batch with each other")
        states.append(state)
    return nonlinear(states)


def _by_shape(site: Site, state: State) -> list[State]:
    """For each result the state if its size depends on the batch, else the same for all."""
    made: list[State] = []
    for value in site.op.payload.outputs:
        shapes = site.walker.shapes.get(-1 if value is None else value)
        rows = shapes is not None and bool(varying(shapes))
        made.append(state if rows or not isinstance(state, Rows) else Same())
    return made


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention",
)  # fmt: skip


def _mask(site: Site, rank: int) -> State:
    """A mask is broadcast over [B, H, T, S]."""
    name = "attn_mask" if "attn_mask" in site.args else "attn_bias"
    mask = site.args.get(name)
    return shifted(site.state(mask), rank - len(site.shape(mask)))


@rule(*_ATTENTION)
def _attention(site: Site) -> list[State]:
    qkv = [site.args[name] for name in ("query", "key", "value")]
    state = _in_batches(site, {0, 1}, qkv)
    mask = _mask(site, len(site.shape(qkv[0])))
    if isinstance(mask, Rows) and mask.axis > 1:
        raise Refuse("attends from one row of the batch to others")
    return _by_shape(site, nonlinear([state, mask]))


@rule("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
def _fused_layer(site: Site) -> list[State]:
    """[B, T, D] in and out, weights that are no rows."""
    rows = [site.args[n] for n in ("src", "query", "key", "value", "mask") if site.args.get(n)]
    _check_shared(site, [t for t in site.tensors() if t not in rows])
    mask = site.args.get("mask")
    if mask and site.args.get("mask_type") == 1:
        # Of padding, [B, T]: it is not broadcast.
        split = [isinstance(site.state(t), Rows | Position) for t in (rows[0], mask)]
        if split[0] != split[1]:
            raise Refuse(
                "takes a padding mask with a row for each row of its source, and only one of the two has the "
                "batch: name both in in_axes"
            )
    return _by_shape(site, _in_batches(site, {0}, rows))


def _check_shared(site: Site, parameters: Sequence[Any]) -> None:
    """Parameters are the same in every nano-batch."""
    if not all(is_plain_same(site.state(p)) for p in parameters):
        raise NoRule("has parameters that depend on the batch")


@rule(*(f"{name}_backward" for name in _ATTENTION[:-1]))
def _attention_backward(site: Site) -> list[State]:
    grad = site.state(site.args.get("grad_out", site.args.get("grad_out_")))
    named = [
        site.args[name]
        for name in ("query", "key", "value", "out", "logsumexp")
        if name in site.args
    ]
    rest = _in_batches(site, {0, 1}, named)
    if isinstance(grad, Rows) and grad.axis > 1:
        raise Refuse("attends from one row of the batch to others")
    return _by_shape(site, gradient(grad, [rest, _mask(site, len(site.shape(named[0])))]))


# Of operands that are no matrices, how many of their last dimensions belong together.
_CORE = {
    "linalg_householder_product": (2, 1), "ormqr": (2, 1, 2), "linalg_lu_solve": (2, 1, 2),
    "lu_unpack": (2, 1),
}  # fmt: skip


@rule("_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_cholesky_ex", "cholesky", "linalg_inv_ex",
      "linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet", "linalg_eig",
      "linalg_matrix_exp", "linalg_householder_product", "geqrf", "linalg_ldl_factor_ex",
      "linalg_eigvals", "_linalg_eigvals", "linalg_pinv", "inverse", "cholesky_inverse",
      "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "cholesky_solve",
      "ormqr", "linalg_lu_solve", "lu_unpack")  # fmt: skip
def _matrices(site: Site) -> list[State]:
    tensors = site.tensors()
    core = _CORE.get(site.op.kind, (2,) * len(tensors))
    leading = [len(site.shape(t)) - n for t, n in zip(tensors, core, strict=True)]
    batched = {n for n, t in zip(leading, tensors, strict=True) if not is_plain_same(site.state(t))}
    if len(batched) > 1:
        raise NoRule("has operands of different rank: the batch would have to be lined up")
    states = [_in_batches(site, None, [t], n) for t, n in zip(tensors, core, strict=True)]
    return _by_shape(site, nonlinear(states))


@rule("with_effects")
def _checks(site: Site) -> list[State]:
    """What raises where a factorization failed: each nano-batch looks at its own rows."""
    if str(site.args["1"]) != "aten._linalg_check_errors.default":
        raise NoRule(f"has an effect, that of {site.args['1']}")
    return site.each(Same())


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fft(site: Site) -> State:
    state, rank = site.state(site.args["self"]), len(site.outs[0])
    if isinstance(state, Rows) and state.axis in {d % rank for d in site.args["dim"]}:
        raise Refuse("transforms along the batch")
    return linear([state])


@rule("dynaflow_xla.rnn_layer")
def _rnn(site: Site) -> list[State]:
    state = _in_batches(site, {1}, [site.args["input"], *site.args["hx"]])
    _check_shared(site, site.args["params"])
    return _by_shape(site, state)


@rule("dynaflow_xla.lstm_cell", "dynaflow_xla.gru_cell", "dynaflow_xla.rnn_tanh_cell",
      "dynaflow_xla.rnn_relu_cell")  # fmt: skip
def _cell(site: Site) -> list[State]:
    hx = site.args["hx"]
    rows = [site.args["input"], *(hx if isinstance(hx, (list, tuple)) else [hx])]
    _check_shared(site, [t for t in site.tensors() if t not in rows])
    if any(len(site.shape(t)) != 2 for t in rows):
        raise NoRule  # a single row without a batch
    return _by_shape(site, _in_batches(site, {0}, rows))


@rule("dynaflow_xla.rnn_layer_backward")
def _rnn_backward(site: Site) -> list[State]:
    inner = _in_batches(site, {1}, [site.args["input"], *site.args["hx"]])
    _check_shared(site, site.args["params"])
    grads = [site.state(g) for g in site.args["grads"] if g is not None]
    total = product(linear(grads), inner)
    if isinstance(total, Rows) and total.axis != 1:
        raise NoRule
    rows = 1 + len(site.args["hx"])
    count = len(site.op.payload.outputs)
    return [total] * rows + [parameter_gradient(total, site.origin)] * (count - rows)


_PLANES = {
    "max_pool2d_with_indices": 2, "max_pool2d": 2, "avg_pool2d": 2, "_adaptive_avg_pool2d": 2,
    "adaptive_max_pool2d": 2, "max_pool3d_with_indices": 3, "avg_pool3d": 3, "avg_pool1d": 1,
    "_adaptive_avg_pool3d": 3, "adaptive_max_pool3d": 3, "adaptive_avg_pool1d": 1,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3,
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3, "pixel_shuffle": 3, "pixel_unshuffle": 3, "channel_shuffle": 3,
    "im2col": 3, "col2im": 2, "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
    "_upsample_nearest_exact2d": 2, "grid_sampler_2d": 3, "grid_sampler_3d": 4,
    "max_pool2d_with_indices_backward": 2, "avg_pool2d_backward": 2,
    "_adaptive_avg_pool2d_backward": 2, "adaptive_max_pool2d_backward": 2,
    "max_pool3d_with_indices_backward": 3, "avg_pool3d_backward": 3,
    "_adaptive_avg_pool3d_backward": 3, "upsample_nearest1d_backward": 1,
    "upsample_nearest2d_backward": 2, "upsample_bilinear2d_backward": 2,
    "upsample_bicubic2d_backward": 2,
}  # fmt: skip


@rule(*_PLANES, sizes=("input_size",))
def _planes(site: Site) -> list[State]:
    """Each plane (the last dimensions) on its own."""
    tensors = site.tensors()
    if site.op.kind.endswith("_backward"):
        grad, rest = site.state(tensors[0]), tensors[1:]
        state = product(grad, _in_batches(site, None, rest, _PLANES[site.op.kind]))
        _in_batches(site, None, tensors[:1], _PLANES[site.op.kind])
    else:
        state = _in_batches(site, None, tensors, _PLANES[site.op.kind])
    return _by_shape(site, state)


def _reduced(state: State, reduction: str) -> State:
    """Over the processes, each of which has a value of this state."""
    if reduction in ("sum", "avg"):
        return linear([state])
    return homogeneous([state]) if reduction in ("max", "min") else nonlinear([state])


@rule("_c10d_functional.all_reduce")
def _everywhere(site: Site) -> State:
    """Element by element over the processes, each of which has the same nano-batches."""
    return _reduced(site.state(site.tensors()[0]), str(site.args["reduce_op"]))


@rule("_c10d_functional.all_reduce_coalesced")
def _all_everywhere(site: Site) -> list[State]:
    return [_reduced(site.state(t), str(site.args["reduce_op"])) for t in site.tensors()]


@rule("_c10d_functional.wait_tensor", "_c10d_functional.broadcast")
def _of_another(site: Site) -> State:
    return site.state(site.tensors()[0])


@rule("_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor")
def _along_ranks(site: Site) -> State:
    state = site.state(site.args["input"])
    ranks = int(site.fixed(site.args["group_size"]))
    if site.op.kind.endswith("into_tensor"):
        state = linear([state])
    else:
        state = _reduced(state, str(site.args["reduce_op"]))
    if not isinstance(state, Rows) or state.axis != 0:
        return state
    if site.op.kind.endswith("into_tensor"):
        return Rows(0, state.outer * ranks, state.inner, state.power)
    if state.outer % ranks:
        raise Refuse("gives each process other rows of the batch")
    return Rows(0, state.outer // ranks, state.inner, state.power)


@rule("_c10d_functional.all_to_all_single")
def _exchanged(site: Site) -> State:
    """Parts of axis 0 go to the processes, each of which has the same nano-batches, and come from them.

    Rows along another axis stay where they are. Along axis 0 a part of whole runs of the batch is
    exchanged for other processes' runs of the same rows.
    """
    tensor = site.args["input"]
    state = linear([site.state(tensor)])
    parts = [
        [site.pair(part) for part in site.args[name]]
        for name in ("input_split_sizes", "output_split_sizes")
    ]
    if not isinstance(state, Rows) or state.axis != 0:
        site.fixed([*site.args["input_split_sizes"], *site.args["output_split_sizes"]])
        return state
    ranks = len(parts[0])
    rows = [shape[0] for shape in site.walker.shapes[tensor.value]]
    even = [tuple(n // ranks for n in rows)] * ranks
    if parts != [even, even] or state.outer % ranks:
        raise Refuse("exchanges the rows of the batch between processes")
    return Rows(0, state.outer, state.inner, state.power)
