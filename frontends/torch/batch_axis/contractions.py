"""Rules of products, convolutions, attention, factorizations, transforms and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.algebra import linear, nonlinear, product
from dynaflow_xla.batch.states import (
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    is_plain_same,
)
from dynaflow_xla.frontends.torch.batch_axis.reductions import parameter_gradient
from dynaflow_xla.frontends.torch.batch_axis.walk import Site, at_axis, rule, varying


def _contract(
    site: Site, left: State, right: State, dims: tuple[Sequence[Any], Sequence[Any]]
) -> State:
    """A product summed over some dimensions.

    ``dims``: for each dimension of the left and of the right operand where it is in the result, or
    the letter of the sum it is in.
    """
    moved: list[State] = []
    summed: list[Rows] = []
    for state, places in zip((left, right), dims, strict=True):
        if isinstance(state, Position):
            raise Refuse("computes with the position of a row in the batch")
        if isinstance(state, Rows):
            place = places[state.axis]
            if isinstance(place, str):
                summed.append(state)
                moved.append(Same(state.power))
            else:
                moved.append(at_axis(state, place))
        else:
            moved.append(state)
    if not summed:
        return product(*moved)
    if any(isinstance(s, Rows | Partial) for s in moved) or len(summed) == 1:
        raise Refuse("multiplies rows of the batch with other rows of it")
    a, b = summed
    if (a.outer, a.inner) != (b.outer, b.inner):
        raise Refuse("combines rows of the batch that are laid out in different orders")
    return Partial(a.power + b.power, site.origin)


def _matrix_product(site: Site, left: Any, right: Any) -> State:
    """[n, k] x [k, m], or [b, n, k] x [b, k, m], or [n, k] x [k]."""
    a, b = site.state(left), site.state(right)
    ranks = len(site.shape(left)), len(site.shape(right))
    dims: dict[tuple[int, int], tuple[Sequence[Any], Sequence[Any]]] = {
        (2, 2): ((0, "k"), ("k", 1)),
        (3, 3): ((0, 1, "k"), (0, "k", 2)),
        (2, 1): ((0, "k"), ("k",)),
        (1, 1): (("k",), ("k",)),
    }
    if ranks not in dims:
        raise NoRule
    return _contract(site, a, b, dims[ranks])


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


@rule("linear", "_mkl_linear", "mkldnn_linear")
def _linear_layer(site: Site) -> State:
    state = site.state(site.tensors()[0])
    rank = len(site.shape(site.tensors()[0]))
    if isinstance(state, Rows) and state.axis == rank - 1:
        raise NoRule
    if any(isinstance(site.state(t), Rows) for t in site.tensors()[1:]):
        raise NoRule
    made = product(state, site.state(site.tensors()[1]))
    return linear([made, *map(site.state, site.tensors()[2:])])


@rule("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution",
      "mkldnn_convolution")  # fmt: skip
def _convolution(site: Site) -> State:
    state, weight = site.states("input", "weight")
    bias = site.state(site.args.get("bias"))
    if isinstance(weight, Rows) or isinstance(bias, Rows):
        raise NoRule
    if isinstance(state, Rows) and state.axis != 0:
        raise Refuse("slides over the batch, or sums over it as over channels")
    return linear([product(state, weight), bias])


@rule("convolution_backward")
def _convolution_backward(site: Site) -> list[State]:
    grad, state, weight = site.states("grad_output", "input", "weight")
    for one in (grad, state):
        if isinstance(one, Rows) and one.axis != 0:
            raise Refuse("slides over the batch, or sums over it as over channels")
    if isinstance(weight, Rows):
        raise NoRule
    both = product(grad, state)
    of_input = product(grad, weight)
    return [of_input, parameter_gradient(site, both), parameter_gradient(site, grad)]


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
    state = site.state(mask)
    if isinstance(state, Rows | Position):
        return at_axis(state, state.axis + rank - len(site.shape(mask)))
    return state


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
    if any(isinstance(site.state(t), Rows) for t in site.tensors() if t not in rows):
        raise NoRule
    return _by_shape(site, _in_batches(site, {0}, rows))


@rule(*(f"{name}_backward" for name in _ATTENTION))
def _attention_backward(site: Site) -> list[State]:
    grad = site.state(site.args["grad_out"])
    named = [site.args[name] for name in ("query", "key", "value", "out") if name in site.args]
    rest = _in_batches(site, {0, 1}, named)
    if isinstance(grad, Rows) and grad.axis > 1:
        raise Refuse("attends from one row of the batch to others")
    return _by_shape(site, product(grad, nonlinear([rest, _mask(site, len(site.shape(named[0])))])))


@rule("_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_cholesky_ex", "cholesky", "linalg_inv_ex",
      "linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet", "linalg_eig",
      "linalg_matrix_exp", "linalg_householder_product", "geqrf", "linalg_ldl_factor_ex",
      "linalg_eigvals", "_linalg_eigvals", "linalg_pinv", "inverse", "cholesky_inverse",
      "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "cholesky_solve",
      "ormqr")  # fmt: skip
def _matrices(site: Site) -> list[State]:
    tensors = site.tensors()
    if len({len(site.shape(t)) for t in tensors if not is_plain_same(site.state(t))}) > 1:
        raise NoRule  # of different rank: the batch would have to be lined up
    return _by_shape(site, _in_batches(site, None, tensors, 2))


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fft(site: Site) -> State:
    state, rank = site.state(site.args["self"]), len(site.outs[0])
    if isinstance(state, Rows) and state.axis in {d % rank for d in site.args["dim"]}:
        raise Refuse("transforms along the batch")
    return linear([state])


@rule("rnn_layer", "dynaflow_xla.rnn_layer")
def _rnn(site: Site) -> list[State]:
    state = _in_batches(site, {1}, [site.args["input"], *site.args["hx"]])
    if any(isinstance(site.state(p), Rows | Partial) for p in site.args["params"]):
        raise NoRule
    return _by_shape(site, state)


@rule("dynaflow_xla.lstm_cell", "dynaflow_xla.gru_cell", "dynaflow_xla.rnn_tanh_cell",
      "dynaflow_xla.rnn_relu_cell")  # fmt: skip
def _cell(site: Site) -> list[State]:
    hx = site.args["hx"]
    rows = [site.args["input"], *(hx if isinstance(hx, (list, tuple)) else [hx])]
    if any(isinstance(site.state(t), Rows | Partial) for t in site.tensors() if t not in rows):
        raise NoRule
    if any(len(site.shape(t)) != 2 for t in rows):
        raise NoRule  # a single row without a batch
    return _by_shape(site, _in_batches(site, {0}, rows))


@rule("dynaflow_xla.rnn_layer_backward")
def _rnn_backward(site: Site) -> list[State]:
    inner = _in_batches(site, {1}, [site.args["input"], *site.args["hx"]])
    grads = [site.state(g) for g in site.args["grads"] if g is not None]
    total = product(linear(grads), inner)
    if isinstance(total, Rows) and total.axis != 1:
        raise NoRule
    rows = 1 + len(site.args["hx"])
    count = len(site.op.payload.outputs)
    return [total] * rows + [parameter_gradient(site, total)] * (count - rows)


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


@rule(*_PLANES)
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


@rule("_c10d_functional.all_reduce", "_c10d_functional.wait_tensor", "_c10d_functional.broadcast",
      "_c10d_functional.all_reduce_coalesced", "c10d_functional.all_reduce")  # fmt: skip
def _everywhere(site: Site) -> State:
    """Element by element over the processes, each of which has the same nano-batches."""
    state = site.state(site.tensors()[0])
    reduction = str(site.args.get("reduce_op", "sum"))
    return state if reduction in ("sum", "avg") else nonlinear([state])


@rule("_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor")
def _along_ranks(site: Site) -> State:
    state = site.state(site.args["input"])
    if not isinstance(state, Rows) or state.axis != 0:
        return state
    ranks = int(site.fixed(site.args["group_size"]))
    if site.op.kind.endswith("into_tensor"):
        return Rows(0, state.outer * ranks, state.inner, state.power)
    if state.outer % ranks:
        raise Refuse("gives each process other rows of the batch")
    return Rows(0, state.outer // ranks, state.inner, state.power)
