"""Asks the rules of PyTorch's operators, and carries out what they accept."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from batch_cases.table import Row, Stand, Tally, called, combinations, layouts
from batch_cases.values import SIZES, is_true, states_of, triple
from dynaflow_xla.batch.states import Mixed, State, Unknown, is_plain_same
from dynaflow_xla.frontends.torch.batch import proof as proof  # its import registers the rules
from dynaflow_xla.frontends.torch.batch.walking.probes import PROBES
from dynaflow_xla.frontends.torch.batch.walking.registry import RULES
from dynaflow_xla.frontends.torch.batch.walking.walk import Walker
from dynaflow_xla.frontends.torch.capture.capture import _kind
from dynaflow_xla.frontends.torch.capture.captured import Payload, Ref
from dynaflow_xla.frontends.torch.rewrite import recurrent  # noqa: F401  (they register rules, operators)
from dynaflow_xla.ir.graph import Operator, Value

NOT_IN_ALL = frozenset({"_upsample_lanczos2d_aa", "cholesky"})
"""Operators with rules that torch 2.11 does not have yet, or 2.15 no more."""


def is_here(name: str) -> bool:
    """Whether the installed PyTorch has an operator that not all versions have."""
    return name not in NOT_IN_ALL or hasattr(torch.ops.aten, name)


@dataclass(frozen=True)
class Call:
    """A noted call of an operator."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Operators:
    """``torch.ops.aten``, whose operators note how they are called; ``space.ns("name")`` for others."""

    def __init__(self, space: Any = torch.ops.aten) -> None:
        self._space = space

    def ns(self, name: str) -> Operators:
        return Operators(getattr(torch.ops, name))

    def __getattr__(self, name: str) -> Any:
        packet = getattr(self._space, name)

        def of(overload: Any) -> Callable[..., Call]:
            return lambda *args, **kwargs: Call(overload, args, kwargs)

        made = types.SimpleNamespace(**{o: of(getattr(packet, o)) for o in packet.overloads()})
        return made


def _leaves(given: Any) -> list[Any]:
    return [leaf for x in given for leaf in (_leaves(x) if isinstance(x, (list, tuple)) else [x])]


class Unfit(Exception):
    """The operator does not take operands of these shapes."""


@dataclass
class Site:
    """One call at all sizes: as a graph for the rules, and to be carried out."""

    function: Any
    layout: Sequence[Any]
    operands: Sequence[Any]

    def call(self, rows: int) -> Call:
        function = self.function.function if isinstance(self.function, Stand) else self.function
        refs = [Ref(n) for n in range(len(self.operands))]
        made = called(function, Operators(), refs, rows)
        assert isinstance(made, Call), "a row's function must be one call of an operator"
        return made

    def run(self, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
        """The tensors that come out at each size (None for what is no tensor)."""
        made = []
        for n, rows in enumerate(SIZES):
            given = [torch.from_numpy(np.array(x[n])) for x in inputs]
            try:
                if isinstance(self.function, Stand):
                    out = called(self.function.run, torch, given, rows)
                else:
                    call = self.call(rows)
                    payload = Payload(call.target, call.args, call.kwargs, (), False)
                    args, kwargs = payload.mapped(lambda ref, x=given: x[ref.value])  # type: ignore[misc]
                    out = call.target(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError, NotImplementedError, TypeError) as error:
                raise Unfit(str(error)) from error
            outs = out if isinstance(out, (list, tuple)) else [out]
            made.append([x if isinstance(x, torch.Tensor) else None for x in outs])
        if len({tuple(x is None for x in outs) for outs in made}) != 1:
            raise Unfit("has other results at another size")
        return made


def _at(rows: int, sizes: Sequence[int]) -> int:
    """A size that is a polynomial in the number of rows, at another number of them."""
    total = Fraction(0)
    for n, size in zip(SIZES, sizes, strict=True):
        term = Fraction(size)
        for other in SIZES:
            if other != n:
                term *= Fraction(rows - other, n - other)
        total += term
    if total.denominator != 1 or total < 0:
        raise Unfit("has sizes that are no polynomials in the number of rows")
    return int(total)


def _shapes(outs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len({x.ndim for x in outs}) != 1:
        raise Unfit("has another rank at another size")
    first, second = (
        tuple(_at(p, sizes) for sizes in zip(*(x.shape for x in outs), strict=True)) for p in PROBES
    )
    return first, second


def walker_of(site: Site, outs: Sequence[Sequence[Any]]) -> tuple[Walker, list[int]]:
    """The graph of the one call, and the ids of its results."""
    calls = [site.call(p) for p in PROBES]
    leaves = [_leaves((*c.args, *c.kwargs.values())) for c in calls]
    numbers: dict[int, tuple[Any, Any]] = {}
    values = [Value(n, (), o.domain.dtype, 8, -1) for n, o in enumerate(site.operands)]
    pairs = iter(zip(*leaves, strict=True))

    def put(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [put(x) for x in given]
        first, second = next(pairs)
        if isinstance(first, Ref) or first == second:
            return first
        number = len(values)
        values.append(Value(number, (), "int64", 8, -1))
        numbers[number] = (first, second)
        return Ref(number)

    args = tuple(put(a) for a in calls[0].args)
    kwargs = {k: put(a) for k, a in calls[0].kwargs.items()}
    shapes = {n: (x.shape(PROBES[0]), x.shape(PROBES[1])) for n, x in enumerate(site.layout)}
    results: list[int] = []
    outputs: list[int | None] = []
    for each in zip(*outs, strict=True):
        if each[0] is None:
            outputs.append(None)
            continue
        made = _shapes(each)
        number = len(values)
        values.append(Value(number, (), str(each[0].dtype).removeprefix("torch."), 8, 0))
        shapes[number] = made
        results.append(number)
        outputs.append(number)
    target = calls[0].target
    payload = Payload(target, args, kwargs, tuple(outputs), len(outputs) != 1)
    op = Operator(0, _kind(target), payload.reads(), tuple(results), payload=payload)
    graph: Any = types.SimpleNamespace(values=values, ops=[op])
    captured: Any = types.SimpleNamespace(graph=graph)
    return Walker(captured, shapes, numbers), results


def _array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().resolve_conj().resolve_neg()
    return x.to(torch.float64).numpy() if x.dtype in (torch.bfloat16, torch.float16) else x.numpy()


def check(name: str, row: Row, function: Any, rng: np.random.Generator, tally: Tally,
          most: int = 10, more: int = 4) -> None:  # fmt: skip
    """Tries a rule on operands of all states."""
    fits, enough = 0, row.enough(tally, most)
    for layout in layouts(row, rng):
        if enough(fits):
            return
        site = Site(function, layout, row.operands)
        plain = [
            triple(states_of(x, o.domain)[0], x, o.domain, rng)
            for x, o in zip(layout, row.operands, strict=True)
        ]
        try:
            outs = site.run(plain)
            walker, results = walker_of(site, outs)
        except Unfit:
            continue
        kind = walker.captured.graph.ops[0].kind
        assert name == kind or (name == "pointwise" and kind not in RULES), f"{name} is {kind}"
        fits += 1
        choices = [states_of(x, o.domain) for x, o in zip(layout, row.operands, strict=True)]
        for states in combinations(choices, rng, more):
            made, of_rule = _asked(walker, results, states, kind)
            failed = [isinstance(s, Mixed | Unknown) for s in made]
            if all(failed):
                tally.refused += isinstance(made[0], Mixed) if made else 0
                tally.unknown += isinstance(made[0], Unknown) if made else 0
                continue
            inputs = [
                triple(s, x, o.domain, rng)
                for s, x, o in zip(states, layout, row.operands, strict=True)
            ]
            try:
                got = site.run(inputs)
            except Unfit:
                continue
            tally.accepted += of_rule
            columns = [c for c in zip(*got, strict=True) if c[0] is not None]
            for state, value in zip(made, columns, strict=True):
                if isinstance(state, Mixed | Unknown):
                    continue
                if not is_true(state, [_array(x) for x in value]):
                    tally.note(name, states, layout, state)


def _asked(
    walker: Walker, results: Sequence[int], states: Sequence[State], kind: str
) -> tuple[list[State], bool]:
    """States of the results, and whether it was the rule that gave them."""
    kind = kind if kind in RULES else "pointwise"
    found = RULES[kind]
    asked = 0

    def counted(site: Any) -> Any:
        nonlocal asked
        asked += 1
        return found(site)

    fresh = Walker(walker.captured, walker.shapes, walker.numbers)
    RULES[kind] = counted
    try:
        made = fresh.run(dict(enumerate(states)))
    finally:
        RULES[kind] = found
    interesting = any(not is_plain_same(s) for s in states)
    return [made[r] for r in results], bool(asked) and interesting
