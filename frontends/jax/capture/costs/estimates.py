"""Estimated work of a JAX primitive: floating point operations, bytes moved, time on one core.

The rates are for one general-purpose core and only rank regions against each other; ``Auto``
measures before it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jcore

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.capture.costs import products, sharing, steps
from dynaflow_xla.frontends.jax.capture.costs.avals import aval_bytes, size
from dynaflow_xla.frontends.jax.capture.costs.fused import PRODUCTS, Applied
from dynaflow_xla.frontends.jax.capture.costs.kinds import FREE, TRANSCENDENTAL
from dynaflow_xla.frontends.jax.capture.costs.parts import applied, as_parts
from dynaflow_xla.ir import lapack, work
from dynaflow_xla.ir.work import Spread, Work

# Fitted to XLA:CPU of jaxlib 0.10 on one core of a 2024 server processor with AVX-512.
_PRODUCTS = frozenset(["dot_general", "ragged_dot", "ragged_dot_general"])
FFT_FLOPS_PER_NS = 38.0
BYTES_PER_NS = 50.0  # operators mostly read what is in a cache, or fused into them
SORT_NS, SORT_MORE_NS = 11.0, 2.0  # a comparison with its moves; for each further operand
OP_OVERHEAD_NS = 150.0

SPREAD_NS = 50_000.0
"""What takes less gains nothing by more threads, unless XLA hands it out whether it pays or not."""

FORKED_BYTES = 1 << 18
"""So much of a loop that memory bounds is work enough for one thread (XLA, ``parallel_task_assigner.cc``).
XLA:CPU hands out what is twice that, whether it pays or not."""

HANDED_OVER_FLOPS = 1000.0
"""XLA:CPU runs programs with less on the caller's thread, and hands others to a thread of its own."""

ONE_CORE = frozenset("sort top_k approx_top_k custom_call".split())

RANDOM_NS = {
    "random_bits": 3.0,
    "threefry2x32": 3.0,
    "rng_bit_generator": 14.0,
    "random_gamma": 220.0,
}
"""An element that is drawn; of a gamma distribution by rejections, one element after the other."""

TRIDIAGONAL_NS = 16.0  # a row of such a system

CUMULATIVE_NS = {"cumsum": 4.5, "cumprod": 5.0, "cummax": 9.0, "cummin": 9.0, "cumlogsumexp": 320.0}
"""An element, along rows. XLA makes them of windows of 16 elements, in three passes."""

CUMULATIVE_STRIDED = 2.5
"""How much longer it takes where neighbours do not lie side by side, or the whole is one row."""

ONE_PASS_NS = {"cumsum": 0.5, "cumprod": 0.6, "cummax": 1.1, "cummin": 1.1}
"""An element of 32 bits on a lane, along rows or across them: one pass of a kernel (``regions.one_pass``)."""

ONE_PASS_NARROW = 3.5
"""How much longer for floating point numbers of 16 bits, which are converted."""

ONE_PASS_CALL_NS = 500.0

INDEXED_NS = 0.65  # an element that is read or written by an index of its own
INDEXED_ROWS_NS = 0.15  # one of a row that has an index

TOP_NS = 25.0  # an element that is among the largest as yet

WINDOW_NS = 0.55  # an element of a window that is reduced

COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_to_all ppermute "
    "reduce_scatter psum_scatter pgather axis_index pbroadcast pbroadcast_dynamic pvary ragged_all_to_all "
    "psend precv preduced all_gather_reduced unreduced_psum unreduced_pmax unreduced_pmin "
    "unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p reduced_vary_cast "
    "reduced_vary_cast_p "
    "all_gather_start all_gather_reduced_start all_gather_done psum_start psum_invariant_start "
    "unreduced_psum_start psum_done reduce_scatter_start unreduced_reduce_scatter_start reduce_scatter_done "
    "all_to_all_start all_to_all_done pbroadcast_start pbroadcast_done ppermute_start ppermute_done".split()
)
"""Of every version of JAX that is supported; each knows some of them."""

CALLBACKS = frozenset(
    "pure_callback io_callback debug_callback debug_print buffer_callback outside_call infeed outfeed".split()
)
PURE_CALLBACKS = frozenset(["pure_callback", "buffer_callback"])
"""Those that say by an effect if they act on something besides their results."""
SCHEDULED = frozenset(["dfx_call", "dfx_program", "dfx_jvp", "dfx_linear"])
"""What scheduled functions are in a trace, and their derivatives."""

OUTER_CALLS = SCHEDULED | {"shard_map", "xla_pmap", "device_put"}

Leaf = Callable[[Any, str, dict[str, Any], steps.InLoop | None], Work]
"""The work of one operator without jaxprs; in which loop's step it is, if in one."""


def _called(eqn: Any) -> Any:
    """The jaxpr of a call that is looked through as if it was written in its place; None for others."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    if eqn.primitive.name == "custom_linear_solve":
        return eqn.params["jaxprs"].solve.jaxpr
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = getattr(eqn.params.get(key), "jaxpr", eqn.params.get(key))
        if hasattr(inner, "eqns"):
            return inner
    return interpreters.sparse_jaxpr(eqn)


def _of_called(eqn: Any, reads: list[Hashable]) -> list[Hashable]:
    """What of a call's operands its jaxpr takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return reads
    counts = eqn.params["const_lengths"]  # what its four functions close over, one after the other
    first = counts.matvec + counts.vecmat
    return reads[first : first + counts.solve] + reads[sum(counts) :]


def _steps(
    jaxpr: Any, given: Sequence[Hashable]
) -> tuple[list[tuple[Any, Applied]], list[Hashable]]:
    """Operators of a jaxpr, those of calls in their places, and what it returns; None: a constant.

    Args:
        jaxpr: Not closed.
        given: What its arguments are called outside.
    """
    scope = object()  # the same jaxpr may be called twice
    value: dict[Any, Hashable] = dict(zip(jaxpr.invars, given, strict=False))

    def read(atom: Any) -> Hashable:
        return None if isinstance(atom, jcore.Literal) else value.get(atom, (scope, atom))

    made: list[tuple[Any, Applied]] = []
    for eqn in jaxpr.eqns:
        reads = [read(atom) for atom in eqn.invars]
        if (inner := _called(eqn)) is not None:
            more, results = _steps(inner, _of_called(eqn, reads))
            made += more
            value.update(zip(eqn.outvars, results, strict=False))
            continue
        makes = [(scope, v) for v in eqn.outvars]
        value.update(zip(eqn.outvars, makes, strict=True))
        named = [v for v in reads if v is not None]
        made.append((eqn, applied(eqn, named, makes)))
    return made, [read(atom) for atom in jaxpr.outvars]


def _inner(jaxpr: Any, leaf: Leaf, loop: steps.InLoop | None = None) -> Work:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found, results = _steps(jaxpr, jaxpr.invars)
    works = [_walk(eqn, leaf, loop) for eqn, _ in found]
    spreads = as_parts([step for _, step in found], [w.spread for w in works], results)
    return work.together(w._replace(spread=s) for w, s in zip(works, spreads, strict=True))


def estimate(eqn: Any) -> Work:
    """The work of one equation, control flow included."""
    return _walk(eqn, _spreading)


def one_pass_ns(eqn: Any) -> float:
    """Nanoseconds of a cumulative operator where a lane runs it in one pass."""
    aval = eqn.invars[0].aval
    narrow = str(aval.dtype) in ("bfloat16", "float16")
    each = ONE_PASS_NS[eqn.primitive.name] * (ONE_PASS_NARROW if narrow else 1.0)
    each *= max(1.0, aval.dtype.itemsize / 4)
    moved = 2 * aval_bytes(aval) / BYTES_PER_NS
    ns = max(each * size(aval), moved) / machine.numbers().speed("jax", "elements")
    return ns + ONE_PASS_CALL_NS


def original_ns(jaxpr: Any, cores: int) -> float:
    """Nanoseconds that a whole function takes as XLA runs it on so many cores.

    Matrix products, convolutions and large loops over elements run on all of them, inside XLA's own loops
    too; sorts, scans' steps one after another and the like do not. What a plan gains is to be compared
    with this, not with one lane.
    """
    made = _inner(jaxpr, _spreading)
    return made.ns - made.spread.saved_ns(cores)


def elements_in_steps(jaxpr: Any) -> Spread:
    """What the steps of a function's ``scan`` and ``while`` share out of their own loops over elements."""

    def elements(eqn: Any, name: str, params: dict[str, Any], loop: steps.InLoop | None) -> Work:
        return _spreading(eqn, name, params, loop) if name not in PRODUCTS else Work()

    def in_loops(jaxpr: Any) -> Iterator[Work]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("scan", "while"):
                yield _walk(eqn, elements)
            else:
                for inner in jcore.jaxprs_in_params(eqn.params):
                    yield from in_loops(inner)

    return work.together(in_loops(jaxpr)).spread


def _spreading(
    eqn: Any, name: str, params: dict[str, Any], loop: steps.InLoop | None = None
) -> Work:
    """The work of one operator, and what of it XLA:CPU gives to all threads."""
    made = _primitive(eqn, name, params)
    kind: machine.Kind = "elements"
    forked = shares = vector = False
    if loop is not None and name not in FREE:
        if loop.small:
            ns = steps.small_ns(made, eqn, name, OP_OVERHEAD_NS)
            return made._replace(ns=ns / machine.numbers().speed("jax", "serial"))
        made = steps.in_step(made, eqn, name, OP_OVERHEAD_NS)
    if name in ONE_CORE or name in lapack.FACTORIZATIONS or name.startswith("scatter"):
        kind = "serial"
    elif name == "dot_general":
        kind = "products"
        # A vector is shared out if it is long, and waits for no thread.
        vector = steps.is_with_vector(eqn)
        forked = not vector and sharing.of_product(eqn.invars[0].aval, eqn.invars[1].aval, params)
        shares = vector or forked
    elif name in _PRODUCTS:
        kind, shares = "products", True
    elif name == "conv_general_dilated":
        kind = "convolutions"
        image, kernel = (v.aval for v in eqn.invars[:2])
        forked = shares = sharing.of_convolution(image, kernel, eqn.outvars[0].aval.shape, params)
    else:
        forked = shares = made.bytes_moved >= 2 * FORKED_BYTES
    scalar = name in ("argmax", "argmin") or (
        _scalar_ns(name, [v.aval for v in eqn.outvars]) is not None
    )
    # A Fourier transform computes as much as products do; memory is not what bounds it. A step's product
    # with a vector reads its matrix from a cache, and that bounds it.
    computes: machine.Kind = "serial" if scalar else "products" if name == "fft" else kind
    if vector and loop is not None:
        computes = "elements"
    speed = machine.numbers().speed("jax", computes)
    made = made._replace(ns=made.ns / speed)
    if kind == "serial":
        return made._replace(spread=Spread(products=_by_blas(eqn, name) * made.ns))
    spread = Spread(forks=float(forked))
    # A loop that is shorter than that may still be part of a longer chain, and a product that is handed out
    # gains as much of its time as a longer one.
    if made.ns >= SPREAD_NS or forked:
        spread = spread._replace(**{kind if shares else "tiles": made.ns})
    if loop is not None and name == "dot_general" and size(eqn.outvars[0].aval) <= _SMALL_RESULT:
        spread = spread._replace(forks=min(spread.forks, _FORK_OF_SMALL))
    return made._replace(spread=spread)


_WITHOUT_VECTORS_NS = 1.0
"""Functions that take so long an element are not computed with the processor's vectors."""


def _scalar_ns(name: str, outs: Sequence[Any]) -> float | None:
    """Nanoseconds an element of a loop at the speed of a core's ordinary instructions; None if vectors help.

    Args:
        name: The primitive's.
        outs: Its results, abstractly.
    """
    if name not in ("rem", "div") and name not in TRANSCENDENTAL:
        return None
    dtype = outs[0].dtype
    if name in TRANSCENDENTAL:
        ns = TRANSCENDENTAL[name]
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return 8.0 + 2 * ns
        return ns if ns >= _WITHOUT_VECTORS_NS else None
    if jnp.issubdtype(dtype, jnp.integer):
        return 0.8  # most are divided by a constant, which the compiler makes a product of
    return 12.0 if name == "rem" else None


_IN_VAIN = {
    "lu": -0.1,
    "cholesky": -0.5,
    "triangular_solve": 0.0,
    "geqrf": -0.5,
    "householder_product": -0.5,
    "qr": -0.5,
    "svd": -0.5,
}
"""What OpenBLAS's threads share of matrices of 100 to 500 rows; below 0: they make it longer. Else -0.2."""


_BY_MATRIX, _OF_MATRICES = frozenset(["eigh", "svd"]), 0.7
"""Of several matrices XLA gives each thread some, and these gain by it; others take up to 1.8 times."""


def _by_blas(eqn: Any, name: str) -> float:
    """The part of LAPACK's work that OpenBLAS's threads share with some gain; below 0: with a loss.

    Measured on two cores, 64 to 1536 rows: triangular solves gain, 1.1 to 1.5 times; factorizations of some
    hundred rows take 0.8 to 2.5 times as long as with one thread, and larger ones about the same.
    """
    if name not in lapack.FACTORIZATIONS or not eqn.invars or len(eqn.invars[0].aval.shape) < 2:
        return 0.0
    *batch, rows, columns = eqn.invars[0].aval.shape
    rows = min(rows, columns)
    if name in _BY_MATRIX and math.prod(batch) > 1:
        return _OF_MATRICES
    if name == "triangular_solve" and min(eqn.invars[1].aval.shape[-2:]) >= 64:
        return 0.6 if rows >= 128 else 0.0
    if rows >= 512:
        return 0.6 if machine.cores() > 2 else 0.0
    return _IN_VAIN.get(name, -0.2) if rows >= 100 else 0.0


def _reducing(shape: Sequence[int], axes: Sequence[int]) -> tuple[float, float]:
    """Nanoseconds an element of a reduction, and nanoseconds a result.

    Along rows each result is taken out of a vector; across large planes all results pass through memory for
    each plane anew. (AMD's Zen 4: 4 ns a row of 2 or 8 elements, 0.2 to 0.25 an element of 2 to 16 planes.)
    """
    if not axes:
        return 0.05, 0.0
    if len(shape) - 1 in axes:
        return 0.05, 8.0
    plane = math.prod(shape[max(axes) + 1 :])
    return (0.05 if plane <= 1 << 12 else 0.45), 0.0


_FORK_OF_LOOPS = 0.15
"""Of ``fork_ns``, in a step of loops alone: each core's part of what they read stays in its caches, while
a product's result lies in others'. (A step of 65,536 elements: 18 us, on one core 33.)"""


_FORK_OF_SMALL, _SMALL_RESULT = 0.3, 1 << 14
"""Of ``fork_ns``, in a step: products with results of so many elements at most. Threads hardly sleep between
steps, and lines of a small result pass between caches quickly. (8 to 64 rows of 512: 5 to 10 us; twice as
much where cores are far from each other. Steps without products: ``_FORK_OF_LOOPS``; whether their loops are
handed out at all: ``regions.handed_out``.)"""


def _step(parts: Sequence[Any], leaf: Leaf) -> Work:
    loop = steps.InLoop.of(parts)
    made = work.together(_inner(part, leaf, loop) for part in parts)
    made = made._replace(ns=made.ns + steps.TURN_NS)
    if any(has_products(part) for part in parts):
        return made
    spread = made.spread
    return made._replace(spread=spread._replace(forks=_FORK_OF_LOOPS * spread.forks))


def has_products(jaxpr: Any) -> bool:
    """Whether a function has matrix products or convolutions, inside of its calls and loops too."""
    return any(
        eqn.primitive.name in PRODUCTS or any(map(has_products, jcore.jaxprs_in_params(eqn.params)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _walk(eqn: Any, leaf: Leaf, loop: steps.InLoop | None = None) -> Work:
    name = eqn.primitive.name
    params = eqn.params
    if name == "scan":
        made = _step([params["jaxpr"]], leaf)
        return made._replace(ns=made.ns + steps.rows_ns(params)).times(int(params["length"]))
    if name == "while":
        return _step([params["body_jaxpr"], params["cond_jaxpr"]], leaf).times(work.LOOP_TRIPS)
    if name == "cond":
        return work.longest(_inner(branch, leaf, loop) for branch in params["branches"])
    inner = _called(eqn)
    return leaf(eqn, name, params, loop) if inner is None else _inner(inner, leaf, loop)


_VECTORS = ("compute_uv", "compute_left_eigenvectors", "compute_right_eigenvectors")
"""Parameters that say whether a decomposition has more than values."""


def _by_element(name: str, params: dict[str, Any]) -> bool:
    """Whether indices of a gather or scatter name single elements, not rows; rows if that is not known."""
    if name == "gather":
        return tuple(params.get("slice_sizes", ())[-1:]) == (1,)
    numbers = params.get("dimension_numbers")
    return numbers is not None and not numbers.update_window_dims


def _primitive(eqn: Any, name: str, params: dict[str, Any]) -> Work:
    ins = [v.aval for v in eqn.invars if hasattr(v.aval, "shape")]
    outs = [v.aval for v in eqn.outvars if hasattr(v.aval, "shape")]
    read = ins[1:] + outs if name in ("gather", "slice", "dynamic_slice") else ins
    moved = sum(map(aval_bytes, read)) + sum(map(aval_bytes, outs))
    out_size = sum(map(size, outs))
    in_size = max(map(size, ins), default=0)
    memory_ns = moved / BYTES_PER_NS
    if name in FREE:
        return Work()
    if name in _PRODUCTS:
        flops, cost = products.product(ins, outs[0], params)
        return Work(flops, moved, max(cost, memory_ns) + OP_OVERHEAD_NS)
    if name == "conv_general_dilated":
        flops, cost = products.convolution(ins, outs[0], params)
        return Work(flops, moved, max(cost, memory_ns) + OP_OVERHEAD_NS)
    if name in lapack.FACTORIZATIONS and ins and len(ins[0].shape) >= 2:
        columns = None
        if name == "triangular_solve":
            columns = ins[1].shape[-1 if params.get("left_side") else -2]
        wanted = [params[named] for named in _VECTORS if named in params]
        vectors = any(wanted) or not wanted
        ns = lapack.nanoseconds(name, ins[0].shape, columns, vectors=vectors)
        return Work(lapack.flops(name, ins[0].shape, columns), moved, ns)
    if name == "sort":
        dim = params["dimension"]
        steps = work.comparisons(in_size, ins[0].shape[dim] if ins[0].shape else 1)
        each = SORT_NS + SORT_MORE_NS * (len(ins) - 1)
        return Work(steps, moved, steps * each + OP_OVERHEAD_NS)
    if name in ("top_k", "approx_top_k"):
        axis = params.get("axis", params.get("reduction_dimension", -1))
        width = ins[0].shape[axis] if ins[0].shape else 1
        kept = max(1, outs[0].shape[axis]) if outs[0].shape else 1
        # Found again and again at first: each of the first elements is among the largest until then.
        found = in_size / max(width, 1) * kept * (1.0 + math.log(max(width / kept, 1.0)))
        return Work(float(in_size), moved, 1.2 * in_size + TOP_NS * found + OP_OVERHEAD_NS)
    if name == "fft":
        lengths = params["fft_lengths"]
        flops = work.fourier(in_size, math.prod(lengths)) * work.of_primes(lengths)
        if not jnp.issubdtype(ins[0].dtype, jnp.complexfloating):
            flops /= 2
        return Work(flops, moved, flops / FFT_FLOPS_PER_NS + 1000.0)
    if name in RANDOM_NS:
        return Work(20.0 * out_size, moved, RANDOM_NS[name] * out_size + OP_OVERHEAD_NS)
    if name == "tridiagonal_solve":
        return Work(10.0 * out_size, moved, TRIDIAGONAL_NS * out_size + OP_OVERHEAD_NS)
    if name == "gather" or name.startswith("scatter"):
        moving = out_size if name == "gather" else size(ins[-1])
        each = INDEXED_NS if _by_element(name, params) else INDEXED_ROWS_NS
        return Work(0.0, moved, max(each * moving, memory_ns) + OP_OVERHEAD_NS)
    if name in CUMULATIVE_NS:
        along, shape = params["axis"], ins[0].shape
        strided = along != len(shape) - 1 or math.prod(shape[:along]) == 1
        each = CUMULATIVE_NS[name] * (CUMULATIVE_STRIDED if strided else 1.0)
        return Work(float(in_size), moved, max(each * in_size, memory_ns) + OP_OVERHEAD_NS)
    if name.startswith("reduce_window") and "window_dimensions" in params:
        reduced = float(out_size) * math.prod(params["window_dimensions"])
        return Work(reduced, moved, max(WINDOW_NS * reduced, memory_ns) + OP_OVERHEAD_NS)
    if name.startswith(("arg", "reduce_window", "select_and")):
        return Work(float(in_size), moved, max(4.5 * in_size, memory_ns) + OP_OVERHEAD_NS)
    if name.startswith("reduce_"):
        each, by_row = _reducing(ins[0].shape if ins else (), params.get("axes", ()))
        ns = max(each * in_size + by_row * out_size, memory_ns)
        return Work(float(in_size), moved, ns + OP_OVERHEAD_NS)
    scalar = _scalar_ns(name, outs)
    if name in TRANSCENDENTAL or scalar is not None:
        flops = 10.0 if name in TRANSCENDENTAL else 1.0
        each = TRANSCENDENTAL[name] if scalar is None else scalar
        return Work(flops * out_size, moved, max(each * out_size, memory_ns) + OP_OVERHEAD_NS)
    if name in ("broadcast_in_dim", "iota", "slice", "concatenate", "pad", "transpose", "rev",
                "convert_element_type", "copy", "select_n"):  # fmt: skip
        return Work(0.0, moved, memory_ns + OP_OVERHEAD_NS)
    return Work(float(out_size), moved, max(0.05 * out_size, memory_ns) + OP_OVERHEAD_NS)
