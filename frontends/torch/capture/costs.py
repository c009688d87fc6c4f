"""Estimated work of an aten operator: operations, bytes moved, nanoseconds on one core.

Operation counts come from PyTorch's own registry where it has one (products, convolutions,
attention). The rates are for one general-purpose core and only rank regions against each other;
``Auto`` measures before it decides.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dynaflow_xla import machine
from dynaflow_xla.ir import work
from dynaflow_xla.ir.work import Work

GEMM_FLOPS_PER_NS = 30.0
CONV_FLOPS_PER_NS = 20.0
FACTOR_FLOPS_PER_NS = 6.0
BYTES_PER_NS = machine.COPY_BYTES_PER_NS  # an eager operator goes through memory
OP_OVERHEAD_NS = 1_500.0
"""An eager operator: dispatch, allocation, the Python call."""

_FACTORIZATIONS = {
    "linalg_cholesky_ex": "cholesky", "cholesky": "cholesky", "linalg_lu_factor_ex": "lu",
    "linalg_lu": "lu", "_linalg_solve_ex": "lu", "_linalg_det": "lu", "linalg_qr": "qr",
    "geqrf": "geqrf", "linalg_householder_product": "householder_product", "_linalg_eigh": "eigh",
    "linalg_eig": "eig", "_linalg_eigvals": "eigvals", "_linalg_svd": "svd",
    "linalg_inv_ex": "inverse", "linalg_solve_triangular": "triangular_solve",
    "triangular_solve": "triangular_solve", "linalg_ldl_factor_ex": "ldl",
    "linalg_matrix_exp": "exponential", "cholesky_solve": "cholesky_solve",
}  # fmt: skip
_TRANSCENDENTAL = frozenset(
    "exp exp2 log log1p log2 log10 expm1 tanh sigmoid sin cos tan erf erfinv erfc pow sqrt rsqrt "
    "atan2 asin acos atan sinh cosh asinh acosh atanh lgamma digamma gelu silu softplus mish "
    "_softmax _log_softmax logsumexp elu selu logit gelu_backward silu_backward".split()
)
_SORTS = frozenset(
    "sort topk argsort msort median nanmedian kthvalue mode unique_dim _unique2".split()
)
_RANDOM = frozenset(
    "rand randn bernoulli native_dropout randint multinomial normal_functional".split()
)


def hint(number: Any) -> int:
    """An int, or the example value of a symbolic one."""
    node = getattr(number, "node", None)
    return int(number) if node is None else int(node.hint or 1)


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """Sizes; symbolic ones by the values they had when the graph was captured."""
    return tuple(hint(n) for n in value.shape)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of the dense value."""
    return math.prod(shape_of(value)) * value.element_size()


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


def estimate(target: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of one call with example values."""
    if _is_view(target):
        return Work(ns=OP_OVERHEAD_NS)
    inner = [a for a in args if isinstance(a, torch.fx.GraphModule)]
    if inner:
        return _higher_order(str(target), inner, args)
    ins, outs = _tensors((args, kwargs)), _tensors(out)
    moved = sum(map(tensor_bytes, ins)) + sum(map(tensor_bytes, outs))
    if not outs:
        return Work(ns=200.0)
    name = getattr(getattr(target, "overloadpacket", target), "__name__", "")
    flops, work_ns = _work(name, target, args, kwargs, ins, outs, out)
    return Work(flops, moved, max(work_ns, moved / BYTES_PER_NS) + OP_OVERHEAD_NS)


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
        return flops, flops / (CONV_FLOPS_PER_NS if "conv" in name else GEMM_FLOPS_PER_NS)
    if name in _FACTORIZATIONS and ins and ins[0].ndim >= 2:
        flops = work.factorization(_FACTORIZATIONS[name], shape_of(ins[0]))
        return flops, flops / FACTOR_FLOPS_PER_NS + 2_000.0
    if name in ("mkldnn_rnn_layer", "rnn_layer", "rnn_layer_backward") or name.endswith("_cell"):
        # Every weight matrix [gates*hidden, k] meets every step and row of the input once.
        rows = math.prod(shape_of(ins[0])[:-1]) if ins else 1
        flops = 2.0 * rows * sum(math.prod(shape_of(t)) for t in ins[1:] if t.ndim == 2)
        return flops, flops / 10.0 + 20.0 * out_size
    if name in _SORTS and ins:
        steps = work.comparisons(in_size, shape_of(ins[0])[-1] if ins[0].ndim else 1)
        return steps, steps * 2.0
    if name.startswith("_fft"):
        flops = work.fourier(in_size, in_size)
        return flops, flops / 4.0 + 1_000.0
    if name in _RANDOM:
        return 20.0 * out_size, 4.0 * out_size
    if name.startswith(("index", "gather", "scatter", "embedding", "_unsafe_index")):
        return 0.0, 2.0 * out_size
    if name in _TRANSCENDENTAL:
        return 10.0 * out_size, 1.5 * out_size
    return float(max(out_size, in_size)), 0.3 * max(out_size, in_size)
