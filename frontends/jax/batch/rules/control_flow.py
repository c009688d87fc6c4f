"""Rules of primitives that hold programs: nested calls, cond, while, scan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaflow_xla.batch.algebra import join, nonlinear
from dynaflow_xla.batch.states import (
    Mixed,
    NoRule,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    Unknown,
    batch_axis,
    cotangent,
    first_failure,
    is_zero,
    moved,
    unfilled,
)
from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.rules import equality
from dynaflow_xla.frontends.jax.batch.rules.walk import Body, Site, failed, plain, rule
from dynaflow_xla.frontends.jax.capture import capture

# Each carry can fall a few steps only (known value, plain, scaled or partial, failed).
_MAX_ROUNDS = 64

_CALLS = {**capture.INLINE, "custom_vmap_call": "call", "composite": "jaxpr"}


def _inner(site: Site, jaxprs: Sequence[Any], ins: Sequence[State]) -> list[State]:
    """States of the results of an inner program."""
    consts = [list(getattr(j, "consts", ())) for j in jaxprs]
    if len({len(c) for c in consts}) != 1:
        raise NoRule("closes over other constants at another batch size")
    known = [equality.constant_state(c, site.sizes) for c in zip(*consts, strict=True)]
    return site.walker.run([Body.of(j) for j in jaxprs], [*known, *ins])


@rule(*_CALLS)
def _call(site: Site) -> list[State]:
    key = _CALLS[site.name]
    if site.name == "composite" and key not in site.params:
        key = "call_jaxpr"  # since JAX 0.12
    if key not in site.params:
        raise NoRule("is a call of an unknown form")
    return _inner(site, [e.params[key] for e in site.eqns], site.ins)


@rule(capture.HI_CALL)
def _hi_call(site: Site) -> list[State]:
    """Since JAX 0.11, ``custom_root`` and others: a program that is known by what it expands to."""
    try:
        inner = [_compat.expanded(eqn) for eqn in site.eqns]
    except DynaflowError:
        raise  # a built-in error, too, but not one of those meant here
    except (NotImplementedError, TypeError) as error:
        raise NoRule(f"has no program to look into ({error})") from error
    return _inner(site, inner, site.ins)


@rule("custom_linear_solve")
def _linear_solve(site: Site) -> list[State]:
    site.same_params("jaxprs")
    lengths = site.params["const_lengths"]
    ends = list(itertools.accumulate(lengths))
    consts = {
        part: site.ins[end - count : end]
        for part, count, end in zip(lengths._fields, lengths, ends, strict=True)
    }
    rights = site.ins[ends[-1] :]

    def of(part: str, given: Sequence[State]) -> list[State]:
        bodies = [getattr(e.params["jaxprs"], part) for e in site.eqns]
        return _inner(site, bodies, [*consts[part], *given])

    found = of("solve", rights)
    if first_failure(found) is not None:
        return found
    # Derivatives follow the other programs, which the user may have written, too: each has to map rows to
    # rows as the solution and its transpose do.
    read, made = plain(rights, site), plain(found, site)
    for part, given, wanted in (
        ("matvec", made, read),
        ("vecmat", map(cotangent, read), map(cotangent, made)),
        ("transpose_solve", map(cotangent, made), map(cotangent, read)),
    ):
        if getattr(site.params["jaxprs"], part) is None:
            continue
        states = plain(of(part, list(given)), site)
        for state, want in zip(states, wanted, strict=True):
            if not is_zero(state) and unfilled(state) != unfilled(want):
                raise Refuse(
                    f"its {part}, which derivatives follow, is not proved to keep rows apart"
                )
    return found


@rule("linear_call")
def _linear_call(site: Site) -> list[State]:
    raise Refuse("has a transpose of its own, which derivatives follow and nobody looks into")


@rule("cond")
def _cond(site: Site) -> list[State]:
    which, *operands = site.ins
    if isinstance(which, Mixed | Unknown):
        return site.each_result(which)
    if not isinstance(nonlinear([which]), Same):
        raise Refuse("chooses a branch by the rows of the batch")
    branches = [e.params["branches"] for e in site.eqns]
    if len({len(b) for b in branches}) != 1:
        raise NoRule("has other branches at another batch size")
    results = [plain(_inner(site, list(b), operands), site) for b in zip(*branches, strict=True)]
    outs = results[0]
    for other in results[1:]:
        outs = [_joined(site, a, b) for a, b in zip(outs, other, strict=True)]
    return outs


def _joined(site: Site, left: State, right: State) -> State:
    try:
        return join(left, right)
    except Refuse as error:
        return failed(site, error)


def _fixpoint(site: Site, carry: list[State], step: Any) -> list[State]:
    """The states that a loop's carries keep, whatever the number of rounds."""
    for _ in range(_MAX_ROUNDS):
        after = step(carry)
        joined = [_joined(site, a, b) for a, b in zip(carry, after, strict=True)]
        if joined == carry:
            return carry
        carry = joined
    raise NoRule("has carries whose states do not settle")


@rule("while")
def _while(site: Site) -> list[State]:
    site.same_params("cond_jaxpr", "body_jaxpr")
    n_cond, n_body = site.params["cond_nconsts"], site.params["body_nconsts"]
    cond_consts, body_consts = site.ins[:n_cond], site.ins[n_cond : n_cond + n_body]
    conds = [e.params["cond_jaxpr"] for e in site.eqns]
    bodies = [e.params["body_jaxpr"] for e in site.eqns]
    rank = len(conds[0].out_avals[0].shape)

    def step(carry: list[State]) -> list[State]:
        after = plain(_inner(site, bodies, [*body_consts, *carry]), site)
        (goes_on,) = plain(_inner(site, conds, [*cond_consts, *carry]), site)
        if isinstance(goes_on, Mixed | Unknown):
            return site.each_result(goes_on)
        goes_on = nonlinear([goes_on])
        if not isinstance(goes_on, Rows):
            return after
        # vmap of a loop: each row stops by itself, and keeps its values while others go on. The
        # condition's dimensions are the leading ones of every carry.
        kept = [*carry, *after]
        if goes_on.axis >= rank or any(
            not isinstance(s, Rows) or s.axis != goes_on.axis for s in kept if not _is_failed(s)
        ):
            raise Refuse("goes on for as long as any row of the batch needs")
        layout = replace(goes_on, power=0, fill=None)
        return [s if _is_failed(s) else _in_layout(s, layout) for s in after]

    return _fixpoint(site, site.ins[n_cond + n_body :], step)


def _is_failed(state: State) -> bool:
    return isinstance(state, Mixed | Unknown)


def _in_layout(state: State, layout: Rows) -> State:
    assert isinstance(state, Rows)
    made = nonlinear([layout, replace(state, power=0)])
    assert isinstance(made, Rows)
    return replace(made, power=state.power)


@rule("scan")
def _scan(site: Site) -> list[State]:
    # _split_transpose and linear say how to differentiate, not what to compute.
    site.same_params("jaxpr", "length", "linear", "_split_transpose", "ft_in", "ft_out")
    n_consts, n_carry = _compat.scan_counts(site.params)
    consts = site.ins[:n_consts]
    carry, xs = site.ins[n_consts : n_consts + n_carry], site.ins[n_consts + n_carry :]
    bodies = [e.params["jaxpr"] for e in site.eqns]
    n_ys = len(site.eqns[0].outvars) - n_carry
    along = [s for s in xs if batch_axis(s) == 0]
    if along or len({e.params["length"] for e in site.eqns}) != 1:
        return _mapped(site, bodies, consts, carry, xs, n_ys)
    elements = [moved(s, s.axis - 1) if isinstance(s, Rows | Position) else s for s in xs]
    last: list[State] = []

    def step(now: list[State]) -> list[State]:
        nonlocal last
        # An order that a body finds is another one in each round: it does not leave the loop.
        last = plain(_inner(site, bodies, [*consts, *now, *elements]), site)
        return last[:n_carry]

    carry = _fixpoint(site, carry, step) if n_carry else (step([]) and [])
    ys = last[n_carry:]
    stacked = [moved(s, s.axis + 1) if isinstance(s, Rows | Position) else s for s in ys]
    return [*carry, *stacked]


def _mapped(
    site: Site,
    bodies: Sequence[Any],
    consts: Sequence[State],
    carry: Sequence[State],
    xs: Sequence[State],
    n_ys: int,
) -> list[State]:
    """``lax.map`` over the rows: without a carry, each row is computed for itself."""
    failure = first_failure([*consts, *carry, *xs])
    if failure is not None:
        return site.each_result(failure)
    if carry:
        raise Refuse("scans along the batch: each row depends on the rows before it")
    rows = [s for s in xs if isinstance(s, Rows) and s.axis == 0]
    if len(rows) != len(xs) or not rows:
        raise Refuse("scans along the batch together with something that does not have its rows")
    layouts = {(s.outer, s.inner) for s in rows if s.fill is None}
    if len(layouts) > 1:
        raise Refuse("combines rows of the batch that are laid out in different orders")
    outer, inner = layouts.pop() if layouts else (rows[0].outer, rows[0].inner)
    elements = [Same(s.power, s.fill) for s in rows]
    states = plain(_inner(site, bodies, [*consts, *elements]), site)
    outs: list[State] = []
    for state in states[-n_ys:] if n_ys else []:
        if isinstance(state, Mixed | Unknown):
            outs.append(state)
        elif isinstance(state, Same):
            outs.append(Rows(0, outer, inner, state.power, state.fill))
        elif isinstance(state, Partial):
            raise Refuse("uses a total over the batch for each row", state.origin)
        else:
            raise Refuse("combines every row of the batch with every other row")
    return outs
