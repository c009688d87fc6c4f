"""Derivatives of a scheduled function that is one XLA program: JAX makes them of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.mutation import sharing
from dynaflow_xla.frontends.jax.signature.entry import build_entry
from dynaflow_xla.frontends.jax.xla import collectives
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry


class XlaProgram:
    """A scheduled flat function with derivatives in both modes.

    JAX differentiates the scheduled program itself. Only where the function holds rules of its own
    (``custom_jvp``, ``custom_vjp``, ``remat``), which a capture looks through, is the differentiated
    program made from a second plan that keeps the operators with such rules whole.

    Attributes:
        entry: The plan.
    """

    def __init__(self, made: XlaEntry, traced: Any):
        self.entry, self.split = made, made.split
        closed = traced.jaxpr
        self._call: Callable[..., Any] = made
        if made.order.chained and any(r.resource == "network" for r in made.pg.regions):
            self._call = jax.custom_jvp(lambda *flat: made(*flat))
            self._call.defjvp(  # type: ignore[attr-defined]
                functools.partial(collectives.refuse_derivative, made.options.name)
            )
            return
        # The loop bodies of a split keep the operators with such rules whole anyway.
        in_loops = made.split is None
        if not capture.holds_custom_rules(closed.jaxpr, in_loops=in_loops):
            return

        @functools.cache
        def whole() -> XlaEntry:
            captured = capture.capture(
                closed, len(traced._consts), made.options.name, keep_rules=True
            )
            try:
                planned = build_entry(captured, made.options)
            except RuleError:  # a rule for an operator that is now inside a whole one
                planned = build_entry(captured, replace(made.options, rules=None, default_cut=True))
            assert isinstance(planned, XlaEntry)
            return planned

        by_reference = any(sharing.is_reference(aval) for aval in closed.in_avals)
        if by_reference or capture.ordering_effects(closed.effects):
            self._call = whole()  # custom_jvp and custom_vjp take neither effects nor references
            return
        if capture.has_reverse_rules(closed.jaxpr):
            self._call = jax.custom_vjp(lambda *flat: made(*flat))
            self._call.defvjp(  # type: ignore[attr-defined]
                lambda *flat: jax.vjp(whole(), *flat), lambda vjp, cotangents: vjp(cotangents)
            )
            return
        self._call = jax.custom_jvp(lambda *flat: made(*flat))

        @self._call.defjvp  # type: ignore[attr-defined]
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return jax.jvp(whole(), tuple(primals), tuple(tangents))

    def __call__(self, *flat: Any) -> list[Any]:
        """Flat inputs (closed-over values first) to flat outputs."""
        return list(self._call(*flat))

    def pairs(self) -> list[Any]:
        """Scheduled derivatives: none, JAX makes them of the program."""
        return []
