"""Estimated work of an aten operator: operations, bytes moved, nanoseconds on one core.

Operation counts come from PyTorch's own registry where it has one (products, convolutions,
attention). The rates are for one general-purpose core (``gpu`` has a GPU's) and only rank regions against
each other; ``Auto`` measures before it decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dynaflow_xla import machine
from dynaflow_xla.frontends.torch.capture.costs import elements, gpu
from dynaflow_xla.frontends.torch.capture.costs.hints import hint, shape_of, tensor_bytes
from dynaflow_xla.ir import lapack, work
from dynaflow_xla.ir.work import Spread, Work

# Fitted to PyTorch 2.13 on one core of a 2024 server processor with AVX-512.
GEMM_FLOPS_PER_NS = 95.0
CONV_FLOPS_PER_NS = 50.0
ATTENTION_FLOPS_PER_NS = 55.0
FFT_FLOPS_PER_NS = 30.0
_OTHER_TYPES = {
    torch.float64: 2.0, torch.complex64: 4.0, torch.complex128: 8.0, torch.int8: 2.6, torch.uint8: 2.6,
    torch.int16: 2.6, torch.int32: 5.5, torch.int64: 8.0,
}  # fmt: skip
"""How many times as long as float32 products and convolutions of these take."""
CONV_3D, CONV_GROUPED_NS = 3.0, 3.0
"""How many times as long with three dimensions; what an element of a grouped one's result takes beside."""
_TRILINEAR_NS = 0.035  # a product of three
_UNCOUNTED = {"_euclidean_dist": 1.5, "_int_mm": 0.1}
"""Products that PyTorch's registry leaves out: what an element of the result takes beside."""
BYTES_PER_NS, CACHED_BYTES_PER_NS = 40.0, 80.0
CACHED_BYTES = 4 << 20
"""So much is in a cache when it is moved."""
OP_OVERHEAD_NS = 1_500.0
"""An eager operator: dispatch, allocation, the Python call."""

SPREAD_NS = 8_000.0
"""What takes less is not shared out among threads: 32,768 elements are the least (ATen's grain size)."""

_FACTORIZATIONS = {
    "linalg_cholesky_ex": "cholesky", "cholesky": "cholesky", "linalg_lu_factor_ex": "lu",
    "linalg_lu": "lu", "_linalg_solve_ex": "lu", "_linalg_det": "lu", "linalg_qr": "qr",
    "geqrf": "geqrf", "linalg_householder_product": "householder_product", "_linalg_eigh": "eigh",
    "linalg_eig": "eig", "_linalg_eigvals": "eigvals", "_linalg_svd": "svd",
    "linalg_inv_ex": "inverse", "linalg_solve_triangular": "triangular_solve",
    "triangular_solve": "triangular_solve", "linalg_ldl_factor_ex": "ldl",
    "linalg_matrix_exp": "exponential", "cholesky_solve": "cholesky_solve", "linalg_pinv": "svd",
}  # fmt: skip
_SOLUTIONS = {"linalg_solve_triangular": 0, "triangular_solve": 1, "cholesky_solve": 1}
"""Solutions by a matrix that is decomposed already, and which argument that is."""
_WITH_VECTORS = frozenset(["_linalg_eigh", "_linalg_svd"])
"""What takes as its third argument whether vectors are computed."""
_SORTS = frozenset("sort argsort msort median nanmedian mode".split())
_UNIQUE = frozenset("unique_dim _unique2".split())
_SELECTIONS = frozenset("topk kthvalue".split())
_ROW_NS = 1_000.0
"""A row of a selection."""
_OVER_ALL = frozenset("msort median nanmedian unique_dim _unique2".split())
"""Without an axis these take all elements as one row."""
_BY_ROW = (
    _SORTS | _SELECTIONS | _UNIQUE | frozenset("cumsum cumprod cummax cummin logcumsumexp".split())
)
"""One row of these has one thread."""

_RECURRENT = frozenset("mkldnn_rnn_layer rnn_layer rnn_layer_backward".split())
_STEPS = {"lstm": (4_000.0, 1.0), "gru": (14_000.0, 1.0)}
"""What a time step takes beside its product, and how many of ``Spread.steps`` it is: oneDNN's one loop, some
ten operators; else ``_SHORT_STEP``."""
_SHORT_STEP = (6_000.0, 0.5)
_BETTER_SHARED = 0.015
"""oneDNN's threads share an LSTM better than other products: this part of a step comes off that."""
_ROWS_ALONE, _AT_MOST = 4, 0.85
"""Of a product with the state: so many rows are as fast on one core as on several, and of all rows this
share is divided at most. oneDNN divides all of it."""


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []


def _concrete(value: Any) -> Any:
    """Shapes in place of tensors, hints in place of symbols, for the flop formulas."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, torch.Tensor):
        return torch.empty(shape_of(value), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_concrete(item) for item in value)
    return value


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


def estimate(
    target: Any, args: Any, kwargs: Any, out: Any, device: torch.device | None = None
) -> Work:
    """The work of one call with example values.

    Args:
        target: The operator.
        args: Its arguments.
        kwargs: The same by name.
        out: What it returns.
        device: Where it runs, if the examples do not tell.
    """
    outs = _tensors(out)
    where = device or (outs[0].device if outs else None)
    on_gpu = where is not None and where.type == "cuda"
    if _is_view(target):
        return Work() if on_gpu else Work(ns=OP_OVERHEAD_NS)
    inner = [a for a in args if isinstance(a, torch.fx.GraphModule)]
    if inner:
        return _higher_order(str(target), inner, args)
    ins = _tensors((args, kwargs))
    moved = sum(map(tensor_bytes, ins)) + sum(map(tensor_bytes, outs))
    if not outs:
        return Work(ns=200.0)
    name = getattr(getattr(target, "overloadpacket", target), "__name__", "")
    flops, work_ns = _work(name, target, args, kwargs, ins, outs, out)
    kind = _kind(name, target, args, ins, outs)
    if on_gpu:
        product = kind in ("products", "convolutions")
        return Work(flops, moved, gpu.nanoseconds(flops, moved, outs, product))
    work_ns = max(work_ns, moved / (BYTES_PER_NS if moved > CACHED_BYTES else CACHED_BYTES_PER_NS))
    work_ns /= machine.numbers().speed("torch", kind)
    made = Work(flops, moved, work_ns + OP_OVERHEAD_NS)
    if name in _RECURRENT:
        return made._replace(spread=_shared_by_steps(ins, args, work_ns))
    if kind == "serial" or work_ns < SPREAD_NS:
        return made
    return made._replace(spread=Spread(**{_SHARED_AS.get(kind, kind): work_ns}))


_SHARED_AS = {"elements": "rows"}


def _kind(
    name: str, target: Any, args: Any, ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> machine.Kind:
    """What of the machine decides how long an operator takes, and whether its threads share it."""
    if "convolution" in name or name.startswith("mkldnn_conv"):
        return "convolutions"
    if getattr(target, "overloadpacket", None) in flop_registry or _is_attention(name):
        return "products"
    if name in _RECURRENT or name in _UNCOUNTED or name == "_trilinear":
        return "products"
    if name in _FACTORIZATIONS or name in elements.RANDOM or "bernoulli" in name:
        return "serial"
    if name == "clone" and ins and elements.is_turned_by_one_thread(ins[0], outs[0]):
        return "serial"
    if name in _BY_ROW and ins:
        shape = shape_of(ins[0])
        return "serial" if math.prod(shape) < 2 * _row(name, args, shape) else "elements"
    return "elements"


def _row(name: str, args: Any, shape: Sequence[int]) -> int:
    """Elements that are sorted, selected from or added up together."""
    given = args[2:] if name in _SELECTIONS else args[1:]
    numbers = [a for a in given if isinstance(a, int) and not isinstance(a, bool)]
    if not numbers and name in _OVER_ALL:
        return max(1, math.prod(shape))
    axis = numbers[0] if numbers else -1
    return max(1, shape[axis]) if shape and -len(shape) <= axis < len(shape) else 1


def _shared_by_steps(ins: list[torch.Tensor], args: Any, work_ns: float) -> Spread:
    """What threads share of a recurrent layer with an input ``[steps, rows, width]``.

    All steps' products with the input are one; those with the state may be too short each. Fitted to two
    threads on near cores (``machine.distance``), batches of 1 to 32 rows and states of 64 to 512.
    """
    weights = [shape_of(t) for t in ins if t.ndim == 2][:2]
    if len(weights) < 2 or not ins or ins[0].ndim < 2:
        return Spread(products=work_ns)
    steps, rows = _steps_and_rows(ins)
    kind = _kind_of_layer(ins, args)
    with_input, with_state = map(math.prod, weights)
    of_products = 2.0 * steps * rows * (with_input + with_state) / GEMM_FLOPS_PER_NS
    input_share = with_input / max(1, with_input + with_state)
    state_share = _AT_MOST * max(0.0, 1.0 - _ROWS_ALONE / max(1, rows))
    shared = min(work_ns, of_products) * (input_share + (1.0 - input_share) * state_share)
    handed = steps * _STEPS.get(kind, _SHORT_STEP)[1]
    if kind == "lstm":
        shared = work_ns
        handed = max(0.0, handed - _BETTER_SHARED * work_ns / machine.numbers().step_ns)
    return Spread(products=shared, steps=handed)


def _steps_and_rows(ins: list[torch.Tensor]) -> tuple[int, int]:
    steps, *rows, _ = shape_of(ins[0])
    return steps, math.prod(rows)


def _kind_of_layer(ins: list[torch.Tensor], args: Any) -> str:
    """What a recurrent layer is; "lstm" is one that oneDNN runs, of float32, others do about what GRUs do.

    oneDNN's own operators do not say what they are.
    """
    kinds = [arg for arg in args[:3] if isinstance(arg, str)]
    kind = kinds[0] if kinds else "lstm"
    return "gru" if kind == "lstm" and ins[0].dtype is not torch.float32 else kind


def _is_attention(name: str) -> bool:
    return name.startswith(("_scaled_dot_product", "scaled_dot_product"))


def _attention_flops(ins: list[torch.Tensor], backward: bool) -> float:
    """Of both products, ``[batch, heads, queries, width]`` each operand; PyTorch counts CUDA's alone."""
    first = 1 if backward else 0
    (*lead, queries, width), (*_, keys, _) = (shape_of(t) for t in ins[first : first + 2])
    return math.prod(lead) * 4.0 * queries * keys * width * (2.5 if backward else 1.0)


def _higher_order(name: str, inner: list[Any], args: Any) -> Work:
    works = [_graph(gm) for gm in inner]
    trips = 1
    if "while" in name:
        trips = work.LOOP_TRIPS
    elif "scan" in name or "map" in name:
        sizes = [shape_of(t)[0] for t in _tensors(args) if t.ndim]
        trips = max(sizes, default=1)
    elif "cond" in name:
        works = [work.longest(works)]
    return work.together([work.together(works).times(trips), Work(ns=OP_OVERHEAD_NS)])


def _graph(gm: Any) -> Work:
    return work.together(
        estimate(node.target, example(node.args), example(node.kwargs), node.meta["val"])
        for node in gm.graph.nodes
        if node.op == "call_function" and "val" in node.meta
    )


def example(arg: Any) -> Any:
    """An argument with its nodes' example values in place of the nodes."""
    return torch.fx.node.map_arg(arg, lambda n: n.meta.get("val"))


def _factorization(
    kind: str, name: str, args: Any, ins: list[torch.Tensor], result: torch.Tensor
) -> tuple[float, float]:
    """(operations, nanoseconds) of LAPACK's work."""
    shape, columns = shape_of(ins[0]), None
    if name in _SOLUTIONS and len(ins) > 1:
        n = shape_of(ins[_SOLUTIONS[name]])[-1]
        *batch, _, _ = made = shape_of(result)  # batches of both may be broadcast
        shape, columns = (*batch, n, n), math.prod(made[-2:]) // max(1, n)
    vectors = name not in _WITH_VECTORS or len(args) < 3 or args[2] is not False
    ns = lapack.nanoseconds(kind, shape, columns, vectors=vectors, few=0)  # MKL
    return lapack.flops(kind, shape, columns), ns


def _convolution_ns(flops: float, args: Any, outs: list[torch.Tensor]) -> float:
    """What a convolution takes; ``args`` as of ``aten.convolution`` or its backward."""
    ns = flops / CONV_FLOPS_PER_NS * _OTHER_TYPES.get(outs[0].dtype, 1.0)
    if outs[0].ndim > 4:
        ns *= CONV_3D
    groups = max((hint(a) for a in args[-2:] if _is_count(a)), default=1)
    grouped = CONV_GROUPED_NS * math.prod(shape_of(outs[0])) if groups > 1 else 0.0
    return ns + grouped


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _work(
    name: str,
    target: Any,
    args: Any,
    kwargs: Any,
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    out: Any,
) -> tuple[float, float]:
    """(operations, nanoseconds) apart from memory traffic and overhead."""
    out_size = sum(math.prod(shape_of(t)) for t in outs)
    in_size = max((math.prod(shape_of(t)) for t in ins), default=0)
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        flops = float(formula(*_concrete(args), **_concrete(kwargs), out_val=_concrete(out)))
        if "conv" in name:
            return flops, _convolution_ns(flops, args, outs)
        rate = ATTENTION_FLOPS_PER_NS if _is_attention(name) else GEMM_FLOPS_PER_NS
        return flops, flops / rate * _OTHER_TYPES.get(outs[0].dtype, 1.0)
    if _is_attention(name) and len(ins) > 2 and ins[1].ndim >= 2:
        flops = _attention_flops(ins, "backward" in name)
        return flops, flops / ATTENTION_FLOPS_PER_NS
    if name in _FACTORIZATIONS and ins and ins[0].ndim >= 2:
        return _factorization(_FACTORIZATIONS[name], name, args, ins, outs[0])
    if name in _RECURRENT or name.endswith("_cell"):
        # Every weight matrix [gates*hidden, k] meets every step and row of the input once.
        rows = math.prod(shape_of(ins[0])[:-1]) if ins else 1
        flops = 2.0 * rows * sum(math.prod(shape_of(t)) for t in ins[1:] if t.ndim == 2)
        beside = 3.0 * out_size
        if name in _RECURRENT and ins and ins[0].ndim > 1:
            step_ns, _ = _STEPS.get(_kind_of_layer(ins, args), _SHORT_STEP)
            beside += _steps_and_rows(ins)[0] * step_ns
        return flops, flops / GEMM_FLOPS_PER_NS + beside
    if name in _SORTS and ins:
        steps = work.comparisons(in_size, _row(name, args, shape_of(ins[0])))
        return steps, steps * 4.8
    if name in _SELECTIONS and ins:
        rows = in_size // _row(name, args, shape_of(ins[0]))
        return float(in_size), 1.2 * in_size + _ROW_NS * rows
    if name in _UNCOUNTED and len(ins) > 1:
        flops = 2.0 * out_size * shape_of(ins[0])[-1]
        return flops, flops / GEMM_FLOPS_PER_NS + _UNCOUNTED[name] * out_size
    if name == "_trilinear" and len(ins) > 1:
        flops = 2.0 * math.prod(shape_of(ins[1])) * shape_of(ins[0])[0]
        return flops, flops * _TRILINEAR_NS
    if name.startswith("_fft"):
        lengths = [shape_of(ins[0])[d] for d in args[1]] if ins else [1]
        flops = work.fourier(in_size, math.prod(lengths)) * work.of_primes(lengths)
        return flops, flops / FFT_FLOPS_PER_NS + 1_000.0
    if name in elements.RANDOM:
        drawn = max(out_size, in_size)
        return 20.0 * drawn, elements.RANDOM[name] * drawn
    flops = float(max(out_size, in_size))
    return flops, elements.nanoseconds(name, args, ins, outs, in_size, out_size)
