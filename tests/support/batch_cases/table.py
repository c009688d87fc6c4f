"""The form of the table: one row says how an idea is written in JAX and in PyTorch.

To add a rule to the table, add its name to the row of its idea, or a row: operands, and for each
framework ``name of the rule -> function``. The function gets the framework's operators (``jax.lax``;
``torch.ops.aten``, whose calls are noted and not carried out) and the operands; where it has a
parameter ``n``, the number of rows.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batch_cases.values import Layout, Operand

Function = Callable[..., Any]


@dataclass(frozen=True)
class Stand:
    """A function whose operator does not run here: ``run`` computes the same in its place."""

    function: Function
    run: Function


@dataclass(frozen=True)
class Row:
    """One idea.

    Attributes:
        idea: In a few words.
        operands: What it takes.
        jax: Primitive -> how to apply it.
        torch: Operator -> how to call it.
        never: The rules accept no rows, scaled values or totals at all.
        together: Numbers of operands of which all have the same rows or none has any: the operator
            relies on it without a check.
        few: At most so many layouts, for what takes long to compile; 0: as many as for all.
    """

    idea: str
    operands: tuple[Operand, ...]
    jax: Mapping[str, Function | Stand] = field(default_factory=dict)
    torch: Mapping[str, Function | Stand] = field(default_factory=dict)
    never: bool = False
    together: tuple[int, ...] = ()
    few: int = 0

    def enough(self, tally: Tally, most: int) -> Callable[[int], bool]:
        """Whether so many layouts suffice: ``most``, or more while the rule accepted none, by chance."""
        before, least = tally.accepted, min(most, self.few or most)

        def enough(tried: int) -> bool:
            if self.never or tally.accepted > before:
                return tried >= least
            return tried >= 8 * most

        return enough


def functions(rows: Sequence[Row], framework: str) -> list[tuple[str, Row, Function | Stand]]:
    """Every (rule, row, function) of a framework."""
    return [
        (name, row, function)
        for row in rows
        for name, function in (row.jax if framework == "jax" else row.torch).items()
    ]


def called(function: Function, space: Any, operands: Sequence[Any], rows: int) -> Any:
    """The function applied, with the number of rows if it wants it."""
    if "n" in inspect.signature(function).parameters:
        return function(space, *operands, n=rows)
    return function(space, *operands)


def layouts(row: Row, rng: np.random.Generator) -> Iterator[tuple[Layout, ...]]:
    """Ways to lay rows out in the operands: none, those that fit each other, others at random."""
    operands = row.operands
    seen: set[tuple[Layout, ...]] = set()
    bases = list(itertools.product(*((o.shape, *o.also) for o in operands)))

    def options(operand: Operand, base: tuple[int, ...]) -> list[int]:
        free = len(base) - operand.domain.core
        axes = range(free) if operand.axes is None else operand.axes
        return [a for a in axes if a < len(base)]

    def new(made: tuple[Layout, ...]) -> bool:
        fresh = made not in seen
        seen.add(made)
        if any(o.always and x.axis is None for o, x in zip(operands, made, strict=True)):
            return False
        return (
            fresh
            and len({(x.axis, x.outer, x.inner) for x in map(made.__getitem__, row.together)}) < 2
        )

    nowhere = tuple(map(Layout, bases[0]))
    if new(nowhere):
        yield nowhere
    # Shorter operands are lined up with the longest one, from the end or from the start.
    for base, back in itertools.product(bases, (True, False)):
        rank = max((len(b) for b in base), default=0)
        for (outer, inner), axis in itertools.product(((1, 1), (2, 1), (1, 2)), range(rank)):
            at = [axis - (rank - len(b)) if back else axis for b in base]
            can = [a in options(o, b) for a, o, b in zip(at, operands, base, strict=True)]
            for chosen in itertools.product(*((True, False) if c else (False,) for c in can)):
                if not any(chosen):
                    continue
                made = tuple(
                    Layout(b, a, outer, inner) if use else Layout(b)
                    for b, a, use in zip(base, at, chosen, strict=True)
                )
                if new(made):
                    yield made
    for _ in range(60):
        base = bases[rng.integers(len(bases))]
        picked = []
        for operand, b in zip(operands, base, strict=True):
            axes = [None, *options(operand, b)]
            outer, inner = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))[rng.integers(5)]
            axis = axes[rng.integers(len(axes))]
            picked.append(Layout(b) if axis is None else Layout(b, axis, outer, inner))
        if new(tuple(picked)):
            yield tuple(picked)


def combinations(
    choices: Sequence[Sequence[Any]], rng: np.random.Generator, more: int
) -> list[tuple[Any, ...]]:
    """One of each choice: the first ones, every other one alone and in all at once, and some at random."""
    plain = tuple(c[0] for c in choices)
    made = {plain: None}
    for position, choice in enumerate(choices):
        for other in choice[1:]:
            made[(*plain[:position], other, *plain[position + 1 :])] = None
    for n in range(max((len(c) for c in choices), default=0)):
        made[tuple(c[min(n, len(c) - 1)] for c in choices)] = None
    for _ in range(more if len(choices) > 1 else 0):
        made[tuple(c[rng.integers(len(c))] for c in choices)] = None
    return list(made)


@dataclass
class Tally:
    """What came of the cases of one rule.

    Attributes:
        accepted: Uses to which the rule gave a state, each carried out and compared.
        refused: Uses that it refused.
        unknown: Uses that it says nothing about.
        wrong: Accepted uses whose values are not as the state says.
    """

    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, operands: Sequence[Any], layout: Sequence[Any], state: Any) -> None:
        shapes = ", ".join(f"{s} of {x.shape(4)}" for s, x in zip(operands, layout, strict=True))
        self.wrong.append(f"{name}({shapes}) is not {state}")


DONE: dict[str, dict[str, Tally]] = {}
"""Framework -> rule -> what came of its cases in this run, for the report at its end."""
