"""A program without deeply nested calls, to be differentiated: JAX goes down many frames for each of them."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jcore

from dynaflow_xla.frontends.jax import _compat

_CALLS = frozenset({"jit", "pjit"})
_MOST_NESTED = 16
"""Calls inside of calls that stay as they are, for the names that they give to regions.

Transposing takes 15 frames of Python for each, and Python allows a thousand by default.
"""


def unnested(jaxpr: Any) -> Any:
    """A jaxpr of the same meaning, in which calls of jitted functions are nested a few times at most."""
    if not _is_deep(jaxpr):
        return jaxpr
    eqns: list[Any] = []

    def add(inner: Any, env: dict[Any, Any], stack: Any) -> list[Any]:
        """Adds the equations of a call; its results, as variables of the whole."""

        def read(atom: Any) -> Any:
            return env[atom] if _compat.is_var(atom) else atom

        for eqn in inner.eqns:
            around = eqn.source_info.name_stack
            around = around if stack is None else stack + around
            ins = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in _CALLS:
                closed = eqn.params["jaxpr"]
                called = dict(zip(closed.jaxpr.invars, ins, strict=True))
                for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
                    called[var] = jcore.Literal(const, var.aval)
                outs = add(closed.jaxpr, called, around)
            else:
                outs = [_compat.new_var(var.aval) for var in eqn.outvars]
                info = eqn.source_info.replace(name_stack=around)
                eqns.append(eqn.replace(invars=ins, outvars=outs, source_info=info))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in inner.outvars]

    outvars = add(jaxpr, {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}, None)
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _is_deep(jaxpr: Any) -> bool:
    level = [jaxpr]
    for _ in range(_MOST_NESTED):
        calls = (
            e.params["jaxpr"].jaxpr for j in level for e in j.eqns if e.primitive.name in _CALLS
        )
        level = list({id(inner): inner for inner in calls}.values())
    return bool(level)
