"""Operators that compute what another one computed already: a plan computes it once, as XLA does.

XLA sees the whole of a program and keeps one of several equal instructions (a matrix of distances under
three kernels, the forward pass of two losses). A plan gives XLA regions, in which it cannot see what others
compute. What takes less time than handing its results to another lane stays as often as it is written.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core as jcore

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax.capture import costs

_LEAST_NS = 10_000.0
"""Shorter ones are repeated: a cut between lanes costs regions, too."""

_OWN = frozenset("optimization_barrier rng_uniform ffi_call pallas_call tpu_custom_call".split())
"""Equal ones are not one: barriers are there to keep things apart, generators with a state give other
numbers each time, and nobody knows what a foreign function does."""

_Key: TypeAlias = tuple[Hashable, ...]


class Equal:
    """Numbers for values, equal ones for what is the same for certain.

    Values are told apart by their ids in a capture. Equations come in program order: ``key``, then either
    ``found`` or, once its results have ids, ``made``.
    """

    def __init__(self) -> None:
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
        given = tuple(
            _literal(a) if isinstance(a, jcore.Literal) else self._number(a) for a in atoms
        )
        key = (given, _told(eqn), place)
        try:
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
        worth = max(_LEAST_NS, machine.numbers().hand_over(size))
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

    def _number(self, value: int) -> int:
        return self._same_as.get(value, value)

    def _repeated(self, atoms: Sequence[Any]) -> float:
        """Nanoseconds in which what an equation reads was computed once more."""
        return sum(self._spent.get(a, 0.0) for a in {a for a in atoms if isinstance(a, int)})


def _told(eqn: Any) -> Hashable:
    """What an equation is besides what it reads; functions among its parameters by what they compute."""
    params = tuple((name, _parameter(value)) for name, value in sorted(eqn.params.items()))
    # JAX has one object for equal contexts (metadata for XLA, how random bits are made).
    return eqn.primitive, params, tuple(var.aval for var in eqn.outvars), id(eqn.ctx)


def _parameter(value: Any) -> Any:
    if isinstance(value, jcore.ClosedJaxpr):
        return _body(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, jcore.Jaxpr):
        return _body(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_parameter, value))
    if isinstance(value, (int, float, complex, np.generic)):  # 0.0 == -0.0, 1 == True
        return type(value), str(value)
    return value


def _body(jaxpr: Any) -> Hashable:
    """All that a function computes, without names."""
    numbers: dict[Any, int] = {}

    def number(atom: Any) -> Hashable:
        if isinstance(atom, jcore.Literal):
            return _literal(atom)
        return numbers.setdefault(atom, len(numbers))

    given = tuple((number(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    steps: list[Hashable] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _OWN:
            return object()  # like no other
        steps.append((*map(number, eqn.invars), _told(eqn), *(number(var) for var in eqn.outvars)))
    return given, tuple(steps), tuple(map(number, jaxpr.outvars))


def _literal(atom: Any) -> Hashable:
    """A literal's bits: 0.0 is not -0.0, nor is 1 True. Of an array, which one it is."""
    if np.ndim(atom.val):
        return "array", id(atom.val)
    return "number", str(atom.aval), np.asarray(atom.val).tobytes()
