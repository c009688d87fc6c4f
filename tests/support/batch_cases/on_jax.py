"""Asks the rules of JAX's primitives, and carries out what they accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cheap
import jax
import numpy as np

from batch_cases.table import Row, Stand, Tally, called, combinations, layouts
from batch_cases.values import SIZES, Triple, is_true, states_of, triple
from dynaflow_xla.batch.states import Mixed, State, Unknown, is_plain_same
from dynaflow_xla.frontends.jax.batch import separability  # noqa: F401  (it registers the rules)
from dynaflow_xla.frontends.jax.batch.rules.walk import RULES, Body, Walker

DEVICES = 2
"""Size of the axis "i", for collectives."""


@dataclass
class _Use:
    """One layout of a row: its traces, and the states that were accepted with inputs of these."""

    layout: Sequence[Any]
    bodies: Sequence[Body]
    accepted: list[tuple[tuple[State, ...], list[State], list[Triple]]] = field(
        default_factory=list
    )


def _traced(function: Any, layout: Sequence[Any], row: Row) -> list[Any] | None:
    """The program at each size; None if the operands do not fit each other."""
    made = function.function if isinstance(function, Stand) else function
    axes = [("i", DEVICES)] if isinstance(function, Stand) else None
    traces = []
    for rows in SIZES:
        specs = [
            jax.ShapeDtypeStruct(x.shape(rows), o.domain.dtype)
            for x, o in zip(layout, row.operands, strict=True)
        ]
        try:
            closed = jax.make_jaxpr(
                lambda *xs, n=rows: called(made, jax.lax, xs, n), axis_env=axes
            )(*specs)
        except (AssertionError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
        traces.append(closed)
    return traces


def check(name: str, row: Row, function: Any, rng: np.random.Generator, tally: Tally,
          most: int = 6, more: int = 4) -> None:  # fmt: skip
    """Tries a rule on operands of all states."""
    uses: list[_Use] = []
    enough = row.enough(tally, most)
    for layout in layouts(row, rng):
        if enough(len(uses)):
            break
        traces = _traced(function, layout, row)
        if traces is None:
            continue
        use = _Use(layout, [Body.of(t) for t in traces])
        uses.append(use)
        choices = [states_of(x, o.domain) for x, o in zip(layout, row.operands, strict=True)]
        for states in combinations(choices, rng, more):
            made, of_rule = _asked(traces, states, name)
            if all(isinstance(s, Mixed | Unknown) for s in made):
                tally.refused += isinstance(made[0], Mixed)
                tally.unknown += isinstance(made[0], Unknown)
                continue
            tally.accepted += of_rule
            inputs = [
                triple(s, x, o.domain, rng)
                for s, x, o in zip(states, layout, row.operands, strict=True)
            ]
            use.accepted.append((states, made, inputs))
    _carry_out(name, function, [u for u in uses if u.accepted], tally)


def _asked(traces: Sequence[Any], states: Sequence[State], name: str) -> tuple[list[State], bool]:
    """States of the results, and whether it was the rule that gave them."""
    found = RULES[name]
    asked = 0

    def counted(site: Any) -> Any:
        nonlocal asked
        asked += not site.ins or not all(map(is_plain_same, site.ins))
        return found(site)

    RULES[name] = counted
    try:
        walker = Walker(SIZES)
        consts = [list(t.consts) for t in traces]
        from dynaflow_xla.frontends.jax.batch.rules import equality

        known = [equality.constant_state(c, SIZES) for c in zip(*consts, strict=True)]
        made = walker.run([Body.of(t) for t in traces], [*known, *states])
    finally:
        RULES[name] = found
    return made, bool(asked)


def _carry_out(name: str, function: Any, uses: Sequence[_Use], tally: Tally) -> None:
    """Runs all accepted uses, at all sizes, compiled as one program."""
    if not uses:
        return
    run = function.run if isinstance(function, Stand) else function

    def everything(inputs: Any) -> Any:
        return [
            [
                _leaves(called(run, jax.lax, given, rows))
                for given, rows in zip(use, SIZES, strict=True)
            ]
            for use in inputs
        ]

    compiled = jax.jit(everything, compiler_options=cheap.options())
    for number in range(max(len(u.accepted) for u in uses)):
        chosen = [u.accepted[min(number, len(u.accepted) - 1)] for u in uses]
        inputs = [
            [[value[size] for value in given] for size in range(len(SIZES))]
            for _, _, given in chosen
        ]
        results = compiled(inputs)
        for use, (states, made, _), result in zip(uses, chosen, results, strict=True):
            if number >= len(use.accepted):
                continue
            for state, *value in zip(made, *result, strict=True):
                if isinstance(state, Mixed | Unknown):
                    continue
                if not is_true(state, [np.asarray(x) for x in value]):
                    tally.note(name, states, use.layout, state)


def _leaves(made: Any) -> list[Any]:
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(made)
    ]


def primitive(name: str) -> Any:
    """A primitive that has no public function."""
    from dynaflow_xla.frontends.jax import _compat

    return _compat.primitive(name)


CALLS = {"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "cond",
         "while", "scan", "custom_linear_solve"}  # fmt: skip
"""Operators that hold programs, some of which JAX takes apart before it lowers them."""


def is_here(name: str) -> bool:
    """Whether the installed JAX has a primitive of this name."""
    from dynaflow_xla.frontends.jax import _compat

    return name in CALLS or name in _compat.registered_primitives()
