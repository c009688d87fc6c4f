"""What PyTorch's operators on elements take on one core, as measured: nanoseconds an element.

PyTorch 2.13 on an AMD EPYC of the fourth generation, 131,072 float32; what is vectorized takes what it moves
in memory. Shapes matter: these rank operators within a factor of two as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture.costs.hints import hint, shape_of, strides_of

_OF_INPUT = {
    "exp": 0.8, "exp2": 0.3, "log": 1.1, "log1p": 0.8, "log2": 1.0, "log10": 1.1, "expm1": 1.2, "tanh": 2.5,
    "sigmoid": 0.4, "sin": 1.25, "cos": 1.35, "tan": 1.7, "erf": 1.3, "erfc": 1.8, "erfinv": 1.9,
    "sqrt": 0.45, "rsqrt": 0.3, "asin": 1.5, "acos": 1.6, "atan": 2.4, "atan2": 1.4, "sinh": 1.4,
    "cosh": 1.3, "asinh": 22.0, "acosh": 10.0, "atanh": 1.35, "lgamma": 4.5, "digamma": 19.0, "gelu": 0.5,
    "silu": 0.4, "softplus": 1.5, "mish": 3.8, "elu": 1.4, "logit": 1.1, "isnan": 0.6,
    "gelu_backward": 0.75, "silu_backward": 0.75,
    "isinf": 0.6, "fmod": 1.2, "remainder": 1.35, "hypot": 1.1, "tril": 0.55, "triu": 0.55,
    "_softmax": 0.7, "_log_softmax": 0.6, "logsumexp": 1.2, "max": 1.0, "min": 1.0, "argmax": 1.1,
    "argmin": 1.1, "var": 6.0, "std": 6.0, "var_mean": 6.0, "std_mean": 6.0, "any": 2.3, "all": 2.3,
    "cumsum": 0.9, "cumprod": 0.75, "cummax": 1.1, "cummin": 1.1, "logcumsumexp": 27.0, "nonzero": 4.6,
    "_unique2": 14.0, "unique_dim": 14.0, "bincount": 0.85, "pixel_shuffle": 2.4, "glu": 0.27,
    "native_layer_norm": 0.6, "native_group_norm": 0.3, "native_batch_norm": 2.0,
    "_native_batch_norm_legit": 2.0, "_native_batch_norm_legit_functional": 2.0,
    "_batch_norm_with_update": 2.0, "_batch_norm_with_update_functional": 2.0,
    "_native_batch_norm_legit_no_training": 0.2, "_batch_norm_no_update": 0.2,
    "_adaptive_avg_pool2d": 0.8, "scatter": 0.7, "scatter_add": 0.8, "scatter_reduce": 1.0,
    "index_add": 0.35,
    "index_put": 0.6, "_unsafe_index_put": 0.6, "index_reduce": 1.0, "embedding_dense_backward": 0.35,
    "polygamma": 7.0, "igamma": 45.0, "igammac": 70.0, "special_zeta": 140.0, "i0": 25.0, "special_i0e": 18.0,
    "special_i1": 10.0, "special_i1e": 2.0, "special_bessel_j0": 3.2, "special_bessel_j1": 3.2,
    "special_bessel_y0": 6.0, "special_bessel_y1": 6.0, "special_erfcx": 16.0, "special_ndtri": 4.0,
    "special_entr": 3.0, "histc": 5.0, "gcd": 12.0, "lcm": 14.0, "log_sigmoid_forward": 1.3,
}  # fmt: skip
"""By elements of the largest input."""

_OF_RESULT = {
    "eq": 0.5, "ne": 0.5, "lt": 0.5, "le": 0.5, "gt": 0.5, "ge": 0.5, "where": 0.8, "masked_fill": 0.8,
    "embedding": 0.1, "index_select": 0.1, "index": 0.7, "_unsafe_index": 0.7, "gather": 0.6, "take": 1.9,
    "upsample_bicubic2d": 11.0,
    "index_copy": 0.6, "index_fill": 0.6,
    "upsample_nearest2d": 3.3, "upsample_bilinear2d": 3.4, "im2col": 1.4, "grid_sampler_2d": 1.6,
}  # fmt: skip
"""By elements of the result; of ``where`` by a mask that is half regular."""

RANDOM = {
    "rand": 3.0, "rand_like": 3.0, "randint": 3.0, "randint_like": 3.0, "randperm": 3.0, "uniform": 3.0,
    "uniform_": 3.0, "multinomial": 30.0, "exponential": 15.0, "randn": 3.4, "randn_like": 3.4, "normal": 3.4,
    "normal_": 3.4, "normal_functional": 3.4, "log_normal": 3.4, "cauchy": 3.4, "geometric": 3.4,
    "bernoulli": 12.0, "bernoulli_": 12.0, "native_dropout": 3.3,
    "poisson": 28.0, "_standard_gamma": 50.0, "_sample_dirichlet": 55.0,
}  # fmt: skip
"""By elements of the result, or of what it is drawn from; one generator, so one core."""

_POOLS = {
    "max_pool2d_with_indices": (12.5, 1.75), "avg_pool2d": (8.0, 0.5),
    "max_pool3d_with_indices": (12.5, 1.75), "avg_pool3d": (8.0, 0.5),
}  # fmt: skip
"""An element of the result, and an element of its window."""
_DIVISIONS = frozenset("div floor_divide remainder fmod".split())
_INTEGERS_DIVIDED = 3.5
_OF_COMPLEX = {"abs": 4.0, "div": 3.5, "angle": 10.0}
_COMPLEX_FUNCTION = 35.0  # the C++ library's, one after the other
_INTERLEAVED = 3.5  # an element of a stack along the innermost axis

_SMALL_POWERS = (1, 2, 3, -1, -2)
_POWER, _ROOT, _PLAIN = 2.5, 0.45, 0.1
_TRANSPOSED, _PERMUTED = 0.8, 0.16
_SEARCHED = 3.0  # a step of a binary search
_DISTANCES = {2.0: 0.03, 1.0: 0.5, math.inf: 0.5}  # of two points along one dimension, by the power
_OTHER_DISTANCE = 8.0


def nanoseconds(
    name: str,
    args: Sequence[Any],
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    in_size: int,
    out_size: int,
) -> float:
    """What an operator takes apart from its call, if it is not bound by what it moves.

    Args:
        name: Of the operator.
        args: Of the call.
        ins: Its tensors.
        outs: Its results.
        in_size: Elements of the largest input.
        out_size: Elements of all results.
    """
    if ins and ins[0].is_complex() and (name in _OF_COMPLEX or name in _OF_INPUT or name == "pow"):
        return _OF_COMPLEX.get(name, _COMPLEX_FUNCTION) * in_size
    if name in _DIVISIONS and not (outs[0].is_floating_point() or outs[0].is_complex()):
        return _INTEGERS_DIVIDED * out_size
    if name in _POOLS and ins:
        each, of_window = _POOLS[name]
        return (each + of_window * _window(name, args)) * math.prod(shape_of(outs[0]))
    if name in _OF_INPUT:
        return _OF_INPUT[name] * in_size
    if name in _OF_RESULT:
        return _OF_RESULT[name] * out_size
    if name == "pow":
        return _power(args) * out_size
    if name == "clone" and ins:
        return _copied(ins[0], outs[0]) * out_size
    if name in ("searchsorted", "bucketize") and ins:
        searched = shape_of(ins[0] if name == "searchsorted" else ins[-1])
        return _SEARCHED * out_size * math.log2(max(2, *searched[-1:]))
    if name == "_cdist_forward" and ins:
        each = _DISTANCES.get(args[2], _OTHER_DISTANCE) if len(args) > 2 else _DISTANCES[2.0]
        return each * out_size * hint(ins[0].shape[-1])
    if name == "stack" and outs[0].ndim and len(args) > 1 and args[1] in (-1, outs[0].ndim - 1):
        return _INTERLEAVED * out_size
    return _PLAIN * max(out_size, in_size)


def _window(name: str, args: Sequence[Any]) -> int:
    """Elements of a window that is pooled."""
    given = args[1] if len(args) > 1 else 1
    sizes = [hint(n) for n in (given if isinstance(given, (list, tuple)) else (given,))]
    return math.prod(sizes) ** ((3 if "3d" in name else 2) if len(sizes) == 1 else 1)


def _power(args: Sequence[Any]) -> float:
    exponent = args[1] if len(args) > 1 else None
    if isinstance(exponent, (int, float)):
        if exponent in _SMALL_POWERS:
            return _PLAIN
        if abs(exponent) == 0.5:
            return _ROOT
    return _POWER


def _copied(source: torch.Tensor, made: torch.Tensor) -> float:
    """By whether the places in memory change, and whether neighbours stay neighbours."""
    if not _has_strides(source, made) or strides_of(source) == strides_of(made):
        return _PLAIN
    if 0 in strides_of(source) or _innermost(source) == _innermost(made):
        return _PERMUTED
    return _TRANSPOSED


def _innermost(tensor: torch.Tensor) -> int | None:
    """The axis whose elements are neighbours in memory."""
    sized = enumerate(zip(shape_of(tensor), strides_of(tensor), strict=True))
    return next((axis for axis, (n, step) in sized if n > 1 and step == 1), None)


def is_turned_by_one_thread(source: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a copy is that of a whole transposed matrix, which PyTorch does not share out."""
    if not _has_strides(source, made) or source.ndim != 2:
        return False
    rows, columns = shape_of(source)
    turned = strides_of(source) == (1, rows) and strides_of(made) == (columns, 1)
    return turned and min(rows, columns) > 1


def _has_strides(*tensors: torch.Tensor) -> bool:
    """Sparse tensors, and those in oneDNN's own layout, have none."""
    return all(t.layout == torch.strided for t in tensors)
