"""Operators that compute what another one computed already: a plan computes it once, as XLA does.

XLA sees the whole of a program and keeps one of several equal instructions (a matrix of distances under
three kernels, the forward pass of two losses). A plan gives XLA regions, in which it cannot see what others
compute. What takes little more time than handing its results to another lane stays as often as it is
written.

Numbers are compared by their bits, other constants by identity: nothing is read from a device. (Two traces
of one function have constants of their own; ``batch/rules/equality.py`` compares these by their bytes.)

Nothing is merged where operators are named or counted: under rules and strategies of the user's own, which
may want a region a call, and with batch axes, since a proof compares programs of several sizes one operator
with another (and costs differ with size).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import Strategy

_WORTH = 4.0
"""How many times the time of handing the results over an operator has to take: where a lane has nothing else
to do, it computes them anew for nothing."""

_LEAST_NS = 10_000.0
"""Shorter ones are repeated: a cut between lanes costs regions, too."""

_OWN = frozenset("optimization_barrier rng_uniform ffi_call pallas_call tpu_custom_call".split())
"""Equal ones are not one: barriers are there to keep things apart, generators with a state give other
numbers each time, and nobody knows what a foreign function does."""

_Key: TypeAlias = tuple[Hashable, ...]


def merges(options: Settings) -> bool:
    """Whether equal operators of a function that is scheduled so are computed once."""
    strategy = type(options.strategy)
    ours = strategy.__module__.startswith("dynaflow_xla.strategies.")
    named = options.rules is not None or strategy.rules is not Strategy.rules
    return ours and not named and options.in_axes is None


class Equal:
    """Numbers for values, equal ones for what is the same for certain.

    Values are told apart by their ids in a capture. Equations come in program order: ``key``, then either
    ``found`` or, once its results have ids, ``made``.
    """

    def __init__(self) -> None:
        self._bodies: dict[int, int | None] = {}  # by the id of a jaxpr, which the program holds
        self._numbers: dict[Hashable, int] = {}
        self._first: dict[_Key, tuple[int, ...]] = {}
        self._same_as: dict[int, int] = {}
        self._spent: dict[int, float] = {}
        self.merged = 0

    def key(self, eqn: Any, atoms: Sequence[Any], place: Hashable) -> _Key | None:
        """What equal equations have in common; None for one that is like no other.

        Args:
            eqn: The equation, one that does nothing but compute.
            atoms: What it reads: ids of values, or literals.
            place: Where equations have to be so that one may stand for another.
        """
        name = eqn.primitive.name
        if name in _OWN or eqn.effects or not (atoms or name in costs.GENERATORS):
            return None
        try:
            key = (tuple(map(self._atom, atoms)), self._told(eqn), place)
            hash(key)
        except TypeError:  # an array among the parameters
            return None
        return key

    def found(
        self, key: _Key | None, eqn: Any, atoms: Sequence[Any], cost_ns: float
    ) -> tuple[int, ...] | None:
        """Results of an equal equation that are to be read instead, or None.

        Args:
            key: Of the equation.
            eqn: The equation.
            atoms: What it reads.
            cost_ns: What it takes.
        """
        if key is None or (first := self._first.get(key)) is None:
            return None
        size = sum(costs.aval_bytes(var.aval) for var in eqn.outvars)
        worth = max(_LEAST_NS, _WORTH * machine.numbers().hand_over(size))
        if self._repeated(atoms) + cost_ns < worth:
            return None
        self.merged += 1
        return first

    def made(
        self, key: _Key | None, outputs: tuple[int, ...], atoms: Sequence[Any], cost_ns: float
    ) -> None:
        """Remembers an equation that is computed, with its results' ids."""
        if key is None:
            return
        first = self._first.setdefault(key, outputs)
        if first is not outputs:
            self._same_as.update(zip(outputs, first, strict=True))
            self._spent.update(dict.fromkeys(outputs, self._repeated(atoms) + cost_ns))

    def _told(self, eqn: Any) -> Hashable:
        """What an equation is besides what it reads; functions among its parameters by what they compute."""
        params = tuple((name, self._parameter(value)) for name, value in sorted(eqn.params.items()))
        # JAX has one object for equal contexts (metadata for XLA, how random bits are made).
        return eqn.primitive, params, tuple(var.aval for var in eqn.outvars), id(eqn.ctx)

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, jcore.ClosedJaxpr):
            return self._body(value.jaxpr), tuple(map(id, value.consts))
        if isinstance(value, jcore.Jaxpr):
            return self._body(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._parameter, value))
        if isinstance(value, (int, float, complex, np.generic)):  # 0.0 == -0.0, 1 == True
            return type(value), str(value)
        return value

    def _body(self, jaxpr: Any) -> Hashable:
        """All that a function computes, without names; a number that equal ones share."""
        if id(jaxpr) not in self._bodies:
            made = self._written(jaxpr)
            number = None if made is None else self._numbers.setdefault(made, len(self._numbers))
            self._bodies[id(jaxpr)] = number
        known = self._bodies[id(jaxpr)]
        return object() if known is None else known  # like no other, each time it is asked

    def _written(self, jaxpr: Any) -> Hashable | None:
        """The same in full; None for one with operators of their own."""
        numbers: dict[Any, int] = {}

        def number(atom: Any) -> Hashable:
            if isinstance(atom, jcore.Literal):
                return _literal(atom)
            return numbers.setdefault(atom, len(numbers))

        given = tuple((number(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
        steps: list[Hashable] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _OWN:
                return None
            outs = (number(var) for var in eqn.outvars)
            steps.append((*map(number, eqn.invars), self._told(eqn), *outs))
        return given, tuple(steps), tuple(map(number, jaxpr.outvars))

    def _atom(self, atom: Any) -> Hashable:
        return self._same_as.get(atom, atom) if isinstance(atom, int) else _literal(atom)

    def _repeated(self, atoms: Sequence[Any]) -> float:
        """Nanoseconds in which what an equation reads was computed once more."""
        return sum(self._spent.get(a, 0.0) for a in {a for a in atoms if isinstance(a, int)})


def _literal(atom: Any) -> Hashable:
    """A number's bits: 0.0 is not -0.0, nor is 1 True. Of an array, a key or a tracer, which one it is."""
    value = atom.val
    if isinstance(value, jax.Array) or np.ndim(value):
        return "object", id(value)
    return "number", str(atom.aval), np.asarray(value).tobytes()
