"""Which inputs of a program its results, or derivatives of these, depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend import core as jcore

from dynaflow_xla.frontends.jax.capture.capture import INLINE, OWN_DERIVATIVES

Reads: TypeAlias = frozenset[int]


def of_results(jaxpr: Any, ins: Sequence[Reads]) -> list[Reads]:
    """What each result depends on, given what the inputs do.

    A call with a derivative rule of its own depends on all that it is given: the rule may have a gradient for
    what the value does not depend on (a loss that is added backwards only).

    Args:
        jaxpr: A jaxpr, or a closed one.
        ins: Of its constants, if it is no closed one, and of its inputs.
    """
    closed = hasattr(jaxpr, "jaxpr")
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, Reads] = dict.fromkeys(jaxpr.constvars, frozenset())
    inputs = jaxpr.invars if closed else (*jaxpr.constvars, *jaxpr.invars)
    known.update(zip(inputs, ins, strict=True))

    def read(atom: Any) -> Reads:
        return frozenset() if isinstance(atom, jcore.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        called = None if name in OWN_DERIVATIVES else eqn.params.get(INLINE.get(name, ""))
        if called is not None:
            made = of_results(called, given)
        else:
            made = [frozenset[int]().union(*given)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
