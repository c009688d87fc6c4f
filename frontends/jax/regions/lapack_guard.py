"""One batched LAPACK call at a time in a CPU program.

Jaxlib's batched LAPACK kernels hand their work to the thread pool that they run on, and wait for it. As
many of them at once as the pool has threads, and none is left for the work: the program hangs, with or
without a schedule. Nano-batches bring such calls into one program, so here each waits for the one before:
its matrix passes a custom call that reads the other's result. On other platforms that is nothing.

Not covered: several devices of one process that are in such a call together, as under shard_map on host
devices.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend import core as jcore
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import _compat

# Not triangular_solve: batched it is a loop of XLA's own.
_CALLS = frozenset(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd "
    "tridiagonal".split()
)

_state = threading.local()

lapack_order_p = Primitive("dfx_lapack_order")
lapack_order_p.multiple_results = True


class Chain:
    """The result of the last call, None before the first one."""

    last: Any = None


@contextlib.contextmanager
def _within(chain: Chain | None) -> Iterator[None]:
    outer = getattr(_state, "chain", None)
    _state.chain = chain
    try:
        yield
    finally:
        _state.chain = outer


def one_at_a_time(chain: Chain | None = None) -> contextlib.AbstractContextManager[None]:
    """A block in which functions made by ``ordered`` put their LAPACK calls into one order.

    Args:
        chain: What several blocks of one program have in common, if they are in one order together.
    """
    return _within(Chain() if chain is None else chain)


def as_they_come() -> contextlib.AbstractContextManager[None]:
    """A block in which they do not: of another program than the one around it."""
    return _within(None)


def ordered(closed: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function; inside ``one_at_a_time`` its LAPACK calls are in one order."""
    plain: Callable[..., list[Any]] = jcore.jaxpr_as_fun(closed)
    if not any(_calls(eqn) for eqn in closed.jaxpr.eqns):
        return plain

    def run(*args: Any) -> list[Any]:
        chain = getattr(_state, "chain", None)
        return plain(*args) if chain is None else _evaluate(closed, args, chain)

    return run


def ordered_function(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same for a function that is not traced yet."""

    def run(*args: Any) -> list[Any]:
        if getattr(_state, "chain", None) is None:
            return fn(*args)
        return ordered(jax.make_jaxpr(fn)(*args))(*args)

    return run


def _calls(eqn: Any) -> int:
    """LAPACK calls of an equation and of what is inside it."""
    inner = sum(_calls(e) for j in jcore.jaxprs_in_params(eqn.params) for e in j.eqns)
    return inner + (eqn.primitive.name in _CALLS)


def _evaluate(closed: Any, args: Sequence[Any], chain: Chain) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jcore.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        call = _calls(eqn)
        if call and chain.last is not None:
            # Of a loop or branch all inputs wait: any of them may be what its first call reads.
            inside = eqn.primitive.name not in _CALLS
            waiting = range(len(given)) if inside else [0]
            passed = lapack_order_p.bind(*(given[n] for n in waiting), chain.last, always=inside)
            for n, x in zip(waiting, passed, strict=True):
                given[n] = x
        if call > 1:
            eqn = eqn.replace(params={k: _inside(p) for k, p in eqn.params.items()})
        outs = _bind(eqn, given, jaxpr)
        if call:
            chain.last = outs[0]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: Any, given: Sequence[Any], like: Any) -> list[Any]:
    ins = [_compat.new_var(atom.aval) for atom in eqn.invars]
    outs = [_compat.new_var(var.aval) for var in eqn.outvars]
    closed = _compat.make_jaxpr_of([eqn.replace(invars=ins, outvars=outs)], ins, outs, like)
    return list(jcore.jaxpr_as_fun(closed)(*given))


def _inside(param: Any) -> Any:
    """A parameter with the LAPACK calls of every jaxpr in it in one order."""
    if isinstance(param, jcore.ClosedJaxpr):
        if sum(map(_calls, param.jaxpr.eqns)) < 2:
            return param

        def run(*args: Any) -> list[Any]:
            with one_at_a_time():
                return ordered(param)(*args)

        return jax.make_jaxpr(run)(*param.in_avals)
    if type(param) in (tuple, list):
        return type(param)(map(_inside, param))
    return param


def _keep(*operands: Any, always: bool) -> list[Any]:
    return list(operands[:-1])


lapack_order_p.def_impl(_keep)
lapack_order_p.def_abstract_eval(_keep)


def _pass_outside(values: Sequence[Any], others: Sequence[Any], *, always: bool) -> Any:
    """The rule for values and what is beside each: a tangent, a series, the axis of a batch."""
    return lapack_order_p.bind(*values, always=always), list(others[:-1])


def _lower(ctx: Any, *operands: Any, always: bool) -> Any:
    return operands[:-1]


def _lower_cpu(ctx: Any, *operands: Any, always: bool) -> Any:
    if not always and all(len(aval.shape) < 3 for aval in ctx.avals_in):
        return operands[:-1]  # not batched
    xla.ensure_order_gate()

    def call(*xs: Any) -> list[Any]:
        return list(
            jax.ffi.ffi_call(
                xla.ORDER_TARGET,
                [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs[:-1]],
                input_output_aliases={n: n for n in range(len(xs) - 1)},
            )(*xs)
        )

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


ad.primitive_jvps[lapack_order_p] = _pass_outside
jet.jet_rules[lapack_order_p] = _pass_outside
batching.primitive_batchers[lapack_order_p] = _pass_outside
mlir.register_lowering(lapack_order_p, _lower)
mlir.register_lowering(lapack_order_p, _lower_cpu, platform="cpu")
