"""Proves that derivative rules of a function's own keep nano-batches apart, as the function itself does.

A derivative of ``merge_k f_k(cut_k x)`` follows by the chain rule: tangents are cut and merged as the values
that they belong to, cotangents as the results were merged. That is so of operators, whose derivatives follow
from what they compute. The rule of a ``custom_jvp`` or ``custom_vjp`` function need not: one that clips a
gradient by its norm combines all rows, though what it is a rule of is the identity. So each such rule is
traced at each size, and walked with its tangents or cotangents in the states that the chain rule needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jcore

from dynaflow_xla.batch.states import (
    Partial,
    Refuse,
    Rows,
    Same,
    State,
    as_rows,
    cotangent,
    is_zero,
    unfilled,
)
from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.rules import equality
from dynaflow_xla.frontends.jax.batch.rules.walk import Body, Site, Walker
from dynaflow_xla.frontends.jax.batch.split import SplitCapture
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.frontends.jax.capture.tracing import Capturing, exact_types
from dynaflow_xla.ir.graph import placed

_MOST_ZEROS = 4
"""A rule may ask which tangents are zero: of so many values all combinations are tried."""


class OwnRules:
    """The derivative rules of a split function.

    Args:
        split: The function; what of it is proved is known for each of its values.
    """

    def __init__(self, split: SplitCapture):
        self._resolved = split.resolved
        self._sizes = tuple(dict.fromkeys((sum(split.sizes), *split.sizes)))
        self._found: dict[int, str] = {}

    def mixing(self, order: int) -> str:
        """Which rule combines rows in a derivative of this order, or a lower one; "" if none does."""
        for lower in range(1, order):  # what could not be traced is not traced again
            if why := self._found.get(lower):
                return why
        if order not in self._found:
            parts = [self._resolved.at[size] for size in self._sizes]
            with exact_types(parts[0]):
                self._found[order] = self._walked(parts, order)
        return self._found[order]

    def _walked(self, parts: Sequence[capture.Captured], order: int) -> str:
        check = _RuleCheck(self._sizes, order)
        states = [self._resolved.states[v] for v in parts[0].graph.inputs]
        check.walk([Body.of(part.jaxpr) for part in parts], states)
        return check.why


def of_split(split: SplitCapture | None, jaxpr: Any) -> OwnRules | None:
    """The rules of a function in nano-batches, if it has such and they matter.

    Where something runs once, each pass is proved for itself, rules and all; and who vouches for a function
    vouches for its rules.
    """
    if split is None or split.resolved.joining is not None or not split.resolved.states:
        return None
    return OwnRules(split) if capture.has_own_rules(jaxpr) else None


class _RuleCheck:
    """Looks at the rules that a walk meets.

    Args:
        sizes: Rows of the whole batch, and of each trace of a nano-batch.
        order: Of the derivatives that rules are looked at for.

    Attributes:
        why: A sentence about the first rule that combines rows; "" if none does.
    """

    def __init__(self, sizes: tuple[int, ...], order: int):
        self._sizes, self._order = sizes, order
        self.why = ""
        self._seen: dict[Any, Any] = {}

    def walk(self, bodies: Sequence[Body], ins: Sequence[State]) -> list[State]:
        """States of the results of a program, all of whose rules are looked at."""
        walker = Walker(self._sizes, own_rules=self)
        outs = walker.run(bodies, ins)
        met = {id(eqns[0]) for eqns in self._seen.values()}
        for eqn in capture.outermost_own_rules(bodies[0].eqns):
            if id(eqn) not in met:
                self.missed(eqn)
        return outs

    def missed(self, eqn: Any) -> None:
        """A walk went by an operator with rules inside, since what it reads is not proved."""
        self._tell(eqn, "is not proved to keep rows apart itself")

    def look(self, site: Site, outs: Sequence[State]) -> None:
        """A walk has the states of a call with a rule of its own."""
        key = tuple(map(id, site.eqns)), repr(site.ins), repr(outs)
        if key in self._seen:
            return
        self._seen[key] = site.eqns
        if self.why:
            return
        try:
            self._of_site(site, [as_rows(state) for state in outs])
        except _Mixes as error:
            self._tell(site.eqns[0], str(error))
        except DynaflowError:
            raise
        except Exception as error:  # of the user's rule: its pass raises it again
            self._tell(site.eqns[0], f"cannot be traced alone ({type(error).__name__}: {error})")

    def _tell(self, eqn: Any, what: str) -> None:
        where = placed(_compat.user_source(eqn))
        self.why = self.why or f"the derivative rule of {capture.rule_name(eqn)}{where} {what}"

    def _of_site(self, site: Site, outs: list[State]) -> None:
        ins = [as_rows(state) for state in site.ins]
        moved = _inexact(site.eqns[0].invars)
        moving = _inexact(site.eqns[0].outvars)
        for i in moved:
            _require(ins[i], "reads something whose rows are in no order of their own")
        for i in moving:
            _require(outs[i], "makes something whose rows are in no order of their own")
        apart = bool(site.params.get("symbolic_zeros"))
        reverse = site.name in capture.REVERSE_ONLY
        for some in _choices(moved, apart):
            if reverse:
                for given in _choices(moving, apart):
                    self._backward(site, ins, outs, some, given)
            else:
                self._forward(site, ins, outs, some, moving)

    def _forward(
        self,
        site: Site,
        ins: list[State],
        outs: list[State],
        moved: Sequence[int],
        moving: Sequence[int],
    ) -> None:
        """A tangent follows from tangents as the value from the values."""

        def traced(eqn: Any) -> Any:
            call = _alone(eqn)

            def forward(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
                made, tangents, every = jax.jvp(
                    lambda *some: _of_some(call, xs, moved, some, moving),
                    tuple(xs[i] for i in moved), tuple(tangents), has_aux=True,
                )  # fmt: skip
                return [*every, *tangents]

            return _trace(forward, eqn.invars, [eqn.invars[i] for i in moved])

        states = self._inside(site, traced, [*site.ins, *(unfilled(ins[i]) for i in moved)])
        self._same_results(outs, states)
        # Of what is filled in a result, nothing is said by its tangent.
        wanted = [None if _filled(outs[i]) is not None else outs[i] for i in moving]
        _same_rows("tangents", states[len(outs) :], wanted)

    def _backward(
        self,
        site: Site,
        ins: list[State],
        outs: list[State],
        moved: Sequence[int],
        given: Sequence[int],
    ) -> None:
        """Cotangents of the inputs follow from those of the results as the chain rule says."""

        def traced(eqn: Any) -> Any:
            call = _alone(eqn)

            def backward(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
                _, pull, every = jax.vjp(
                    lambda *some: _of_some(call, xs, moved, some, given),
                    *(xs[i] for i in moved), has_aux=True,
                )  # fmt: skip
                return [*every, *pull(list(cotangents))]

            return _trace(backward, eqn.invars, [eqn.outvars[i] for i in given])

        states = self._inside(site, traced, [*site.ins, *(cotangent(outs[i]) for i in given)])
        self._same_results(outs, states)
        # What is known of a value may have been of use behind it, where derivatives follow the value itself.
        known = any(_filled(outs[i]) is not None for i in given)
        wanted = [None if known else cotangent(ins[i]) for i in moved]
        _same_rows("cotangents", states[len(outs) :], wanted)

    def _inside(self, site: Site, traced: Any, ins: Sequence[State]) -> list[State]:
        """States of the results of a rule, at each size."""
        with Capturing():
            closed = [traced(eqn) for eqn in site.eqns]
        if len({len(one.consts) for one in closed}) > 1:
            raise _Mixes("closes over other values when the batch size is another")
        try:
            consts = [
                equality.constant_state(values, self._sizes)
                for values in zip(*(one.consts for one in closed), strict=True)
            ]
        except Refuse as error:
            raise _Mixes("closes over a value that depends on the batch size") from error
        bodies, ins = [Body.of(one) for one in closed], [*consts, *ins]
        if self._order == 1:
            return [as_rows(s) for s in Walker(self._sizes).run(bodies, ins)]
        deeper = _RuleCheck(self._sizes, self._order - 1)
        states = deeper.walk(bodies, ins)
        self.why = self.why or deeper.why
        return [as_rows(s) for s in states]

    @staticmethod
    def _same_results(outs: Sequence[State], found: Sequence[State]) -> None:
        """What a rule makes of the function's results is known as the results are."""
        for state, other in zip(outs, found, strict=False):
            # What is known of a value may be of use behind it, where the rule's value stands.
            if not (state == other or (is_zero(other) and _filled(state) is None)):
                raise _Mixes("makes results of other rows than the function")


class _Mixes(Exception):
    """A rule is not proved to keep rows apart."""


def _same_rows(what: str, states: Sequence[State], wanted: Sequence[State | None]) -> None:
    """Derivatives are zero, or have their rows as wanted; where that is None, only zero will do."""
    for state, other in zip(states, wanted, strict=True):
        if not (is_zero(state) or (other is not None and unfilled(state) == other)):
            raise _Mixes(f"combines rows of the batch in its {what}, which the function does not")


def _require(state: State, what: str) -> None:
    if not isinstance(state, Same | Rows | Partial) or state.power:
        raise _Mixes(what)


def _filled(state: State) -> Any:
    return state.fill if isinstance(state, Same | Rows) else None


def _inexact(variables: Sequence[Any]) -> list[int]:
    return [
        i
        for i, v in enumerate(variables)
        if jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)
    ]


def _choices(numbers: Sequence[int], apart: bool) -> Iterator[tuple[int, ...]]:
    """All of them; of a rule that sees zeros, all that may be other than zero."""
    if not apart:
        return iter([tuple(numbers)] if numbers else [])
    if len(numbers) > _MOST_ZEROS:
        raise _Mixes("sees which of many tangents are zero, which nobody tried")
    counts = range(1, len(numbers) + 1)
    return itertools.chain.from_iterable(itertools.combinations(numbers, n) for n in counts)


def _alone(eqn: Any) -> Any:
    """An equation as a function."""
    invars = [_compat.new_var(v.aval) for v in eqn.invars]
    outvars = [_compat.new_var(v.aval) for v in eqn.outvars]
    only = eqn.replace(invars=invars, outvars=outvars)
    hi = eqn.primitive.name == capture.HI_CALL
    called = _compat.expanded(eqn) if hi else eqn.params[capture.INLINE[eqn.primitive.name]]
    like = getattr(called, "jaxpr", called)
    return jcore.jaxpr_as_fun(_compat.make_jaxpr_of([only], invars, outvars, like))


def _of_some(
    call: Any, xs: Sequence[Any], moved: Sequence[int], some: Sequence[Any], wanted: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """The wanted results at some other operands, with all of them beside."""
    full = list(xs)
    for i, x in zip(moved, some, strict=True):
        full[i] = x
    outs = call(*full)
    return [outs[i] for i in wanted], outs


def _trace(fn: Any, xs: Sequence[Any], more: Sequence[Any]) -> Any:
    avals = [[spec(v.aval) for v in variables] for variables in (xs, more)]
    return jax.make_jaxpr(fn)(*avals)
