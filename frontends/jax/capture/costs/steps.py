"""Operators in the steps of loops: one step follows another, and finds what it reads in a cache.

XLA:CPU makes a single function of a loop whose step touches few bytes (``SmallWhileLoopHoistingPass`` of
github.com/openxla/xla): no operator is started any more. In other steps it starts one compiled loop after
another, and writes into what the loop carries where that lies.

Fitted to XLA:CPU of jaxlib 0.10 on one core; ``benchmarks/studies/loops.py`` says how near that comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jcore

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.costs import sharing
from dynaflow_xla.frontends.jax.capture.costs.avals import aval_bytes, size
from dynaflow_xla.frontends.jax.capture.costs.fused import PRODUCTS
from dynaflow_xla.frontends.jax.capture.costs.kinds import ELEMENTWISE, TRANSCENDENTAL
from dynaflow_xla.ir.work import Work

SMALL_BYTES = 1024
"""``xla_cpu_small_while_loop_byte_threshold``: what a step reads and writes at most that is compiled with
its loop."""

TURN_NS = 3.0
"""To begin a step, in any loop."""

_SMALL_OP_NS = 0.5
_SMALL_FLOP_NS = 0.25
_SMALL_ELEMENT_NS = 0.4
_SMALL_FUNCTION_NS = 2.0
"""In such a loop: an operator, at least; a multiplication or addition of a product; an element, mostly
without the processor's vectors; one of an exponential function and the like."""

_DRAWS = frozenset("random_bits threefry2x32 rng_bit_generator".split())
_DRAWN_WITHOUT_VECTORS = 10.0
"""How much longer these take there; sorts, running sums and factorizations take as long as elsewhere."""

_LOOP_NS = 30.0
"""To start a compiled loop over elements, in other steps."""

BYTES_PER_NS, _CACHED_BYTES = (50.0, 33.0), 1 << 19
"""Of the matrix of a product with a vector, up to that size and above it."""

_LOOPS = frozenset({"scan", "while"})
_MOVES = frozenset(
    "gather dynamic_slice dynamic_update_slice concatenate pad split stack unstack".split()
)


class InLoop(NamedTuple):
    """The loop in whose step an operator is.

    Attributes:
        small: XLA:CPU compiles the loop as one function.
    """

    small: bool

    @staticmethod
    def of(parts: Sequence[Any]) -> InLoop:
        """Of the loop with these jaxprs: a body, and perhaps a condition."""
        return InLoop(sum(map(_touched, parts)) <= SMALL_BYTES)


def _touched(jaxpr: Any) -> int:
    """Bytes that a step reads and writes; loops over elements are computed where they are read."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    # What is carried and updated is written where it lies, however often.
    updated = {v: eqn for eqn in jaxpr.eqns if is_update(eqn.primitive.name) for v in eqn.outvars}

    def before_updates(variable: Any) -> Any:
        while _compat.is_var(variable) and variable in updated:
            variable = updated[variable].invars[0]
        return variable

    carried = set(filter(_compat.is_var, map(before_updates, updated))).intersection(jaxpr.invars)

    def in_place(result: Any) -> bool:
        begun = before_updates(result)
        return _compat.is_var(begun) and begun in carried  # a literal has no hash

    met = _bytes(v for v in jaxpr.invars if v not in carried)
    met += _bytes(v for v in jaxpr.outvars if not in_place(v))
    return met + _inside(jaxpr)


def _inside(jaxpr: Any) -> int:
    """Of these the bytes that operators read which are no loops over elements, and updates write."""
    met = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        called = list(jcore.jaxprs_in_params(eqn.params)) if name not in _LOOPS else []
        if is_update(name):
            met += _bytes(eqn.invars[1:])
        elif called:
            met += sum(map(_inside, called))
        elif name not in ELEMENTWISE and name not in _MOVES:
            met += _bytes(eqn.invars)
    return met


def is_update(name: str) -> bool:
    """Whether a primitive writes some elements of its first operand, in place where it may."""
    return name == "dynamic_update_slice" or name.startswith("scatter")


def _bytes(variables: Iterable[Any]) -> int:
    return sum(aval_bytes(v.aval) for v in variables if hasattr(v.aval, "shape"))


def _elements(variables: Iterable[Any]) -> int:
    return sum(size(v.aval) for v in variables if hasattr(v.aval, "shape"))


def small_ns(made: Work, eqn: Any, name: str, started_ns: float) -> float:
    """Nanoseconds of an operator in a small loop.

    Args:
        made: What it takes elsewhere.
        eqn: The operator.
        name: Its primitive's.
        started_ns: What of this is to start it.
    """
    if name in PRODUCTS:
        ns = _SMALL_FLOP_NS * made.flops
    elif name in TRANSCENDENTAL:
        ns = max(_SMALL_FUNCTION_NS, TRANSCENDENTAL[name]) * _elements(eqn.outvars)
    elif is_update(name):
        ns = _SMALL_ELEMENT_NS * _elements(eqn.invars[1:])
    elif name in ELEMENTWISE or name in _MOVES:
        ns = _SMALL_ELEMENT_NS * _elements(eqn.outvars)
    elif name.startswith(("reduce_", "arg")):
        ns = _SMALL_ELEMENT_NS * _elements(eqn.invars)
    else:
        ns = (_DRAWN_WITHOUT_VECTORS if name in _DRAWS else 1.0) * (made.ns - started_ns)
    return max(ns, _SMALL_OP_NS)


def in_step(made: Work, eqn: Any, name: str, started_ns: float) -> Work:
    """The work of an operator in a step of any other loop.

    Args:
        made: Its work elsewhere.
        eqn: The operator.
        name: Its primitive's.
        started_ns: What of this is to start it.
    """
    if is_update(name):
        # In place: what is written, and where.
        written = 2 * _bytes(eqn.invars[1:])
        ns = written / BYTES_PER_NS[0] + _LOOP_NS
        return made._replace(bytes_moved=written, ns=min(made.ns, ns))
    if name in ELEMENTWISE or name in _MOVES or name.startswith("reduce_"):
        # Indices and the like are computed in whatever reads them.
        scalars = name in ELEMENTWISE and _elements(eqn.outvars) <= 1
        return made._replace(
            ns=made.ns - started_ns + (_SMALL_FUNCTION_NS if scalars else _LOOP_NS)
        )
    if name == "dot_general" and is_with_vector(eqn):
        rate = BYTES_PER_NS[max(aval_bytes(v.aval) for v in eqn.invars) > _CACHED_BYTES]
        return made._replace(ns=made.bytes_moved / rate + _LOOP_NS)
    return made


def is_with_vector(eqn: Any) -> bool:
    """Whether a factor of a ``dot_general`` has no rows of its own: it is a vector."""
    sizes = sharing.Matrices.of([v.aval for v in eqn.invars], eqn.params["dimension_numbers"])
    return min(sizes.rows, sizes.columns) <= 1


def rows_ns(params: Mapping[str, Any]) -> float:
    """Nanoseconds to read a step's rows of what a ``scan`` goes over, and to write its own."""
    consts, carried = _compat.scan_counts(params)
    jaxpr = params["jaxpr"].jaxpr
    rows = [*jaxpr.invars[consts + carried :], *jaxpr.outvars[carried:]]
    each = _SMALL_OP_NS if InLoop.of([jaxpr]).small else _LOOP_NS
    return each * len(rows) + 2 * _bytes(rows) / BYTES_PER_NS[0]
