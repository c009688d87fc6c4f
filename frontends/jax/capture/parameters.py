"""What an equation does besides its inputs, as a text: parameters, numbers among its inputs, bodies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jcore

from dynaflow_xla.ir import told


def text(eqn: Any) -> str:
    """For the plan's text and for hashes; see ``told.in_words``."""
    bodies: list[Any] = []
    shown = []
    for key, value in sorted(eqn.params.items()):
        if inner := list(jcore.jaxprs_in_params({key: value})):
            bodies += [(key, *_body(jaxpr)) for jaxpr in inner]
        elif value is not None:
            shown.append((key, value))
    numbers = [
        (n, str(atom.aval), str(atom.val))
        for n, atom in enumerate(eqn.invars)
        if isinstance(atom, jcore.Literal)
    ]
    return told.in_words(shown, [*numbers, *bodies])


def _body(jaxpr: Any) -> Iterator[Any]:
    """All that a function computes, without names."""
    known: dict[Any, int] = {}

    def number(var: Any) -> Any:
        if isinstance(var, jcore.Literal):
            return str(var.aval), str(var.val)
        return known.setdefault(var, len(known))

    for var in (*jaxpr.constvars, *jaxpr.invars):
        yield number(var), str(var.aval)
    for eqn in jaxpr.eqns:
        ins = [number(var) for var in eqn.invars]
        outs = [(number(var), str(var.aval)) for var in eqn.outvars]
        yield eqn.primitive.name, text(eqn), ins, outs
    yield [number(var) for var in jaxpr.outvars]
