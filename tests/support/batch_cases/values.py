"""Operands that carry a state, and whether a result is what a state says; in NumPy.

The whole batch has 4 rows, its nano-batches 3 and 1. A value is three arrays: of the whole batch and of
each nano-batch. Its state is a statement about these three, and everything here is that statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaflow_xla.batch.states import (
    InOrder,
    Inverse,
    ItemNumbers,
    Keyed,
    Partial,
    Position,
    Rows,
    Same,
    Sizes,
    State,
)

BATCH, PARTS = 4, (3, 1)
SIZES = (BATCH, *PARTS)
Triple = list[np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Domain:
    """Which values an operand may have.

    Attributes:
        name: For messages.
        sample: Draws an array of a shape.
        dtype: Its element type.
        fills: Known values that all elements may have.
        scales: Powers of the batch size that its values may scale with.
        adds: It may be a sum over the batch.
        core: Its last dimensions that mean something together: no rows there.
    """

    name: str
    sample: Callable[[np.random.Generator, Shape], np.ndarray]
    dtype: str = "float64"
    fills: tuple[Any, ...] = (0.0, 1.0, 2.5)
    scales: tuple[int, ...] = (1, -1, 2)
    adds: bool = True
    core: int = 0


def _spd(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    a = rng.normal(size=shape)
    return a @ np.swapaxes(a, -1, -2) + 3 * np.eye(shape[-1])


def index(count: int) -> Domain:
    """Numbers of ``count`` elements; scaled or added up they stay below it."""
    top = max(1, count // BATCH)
    return Domain(
        f"index below {count}", lambda rng, s: rng.integers(0, top, s), "int64", (0, 1), (1,)
    )


REAL = Domain("real", lambda rng, s: rng.normal(size=s))
POSITIVE = Domain("positive", lambda rng, s: 0.5 + rng.random(s))
UNIT = Domain("small", lambda rng, s: rng.uniform(0.02, 0.2, s))
LARGE = Domain("above 1", lambda rng, s: rng.uniform(20, 30, s))
SPD = Domain("positive definite", _spd, fills=(), core=2)
MATRIX = Domain("matrix", lambda rng, s: rng.normal(size=s), core=2)
VECTOR = Domain("vector", lambda rng, s: rng.normal(size=s), core=1)
INT = Domain("integer", lambda rng, s: rng.integers(-5, 6, s), "int64", (0, 1, 2), (1, 2))
COUNT = Domain("count", lambda rng, s: rng.integers(1, 6, s), "int64", (0, 1, 2), (1, 2))
BITS = Domain("unsigned", lambda rng, s: rng.integers(1, 6, s), "uint32", (0, 1, 2), (1, 2))
BOOL = Domain("boolean", lambda rng, s: rng.random(s) < 0.5, "bool", (False, True), (), False)
COMPLEX = Domain(
    "complex", lambda rng, s: rng.normal(size=s) + 1j * rng.normal(size=s), "complex128"
)


@dataclass(frozen=True)
class Operand:
    """An operand of a row of the table.

    Attributes:
        shape: Its shape without a batch; rows take the place of one of these dimensions.
        domain: Its values.
        also: Other shapes that it may have.
        axes: Where rows may be; None: anywhere.
        always: It always has rows: the operator does not check.
    """

    shape: Shape
    domain: Domain = REAL
    also: tuple[Shape, ...] = ()
    axes: tuple[int, ...] | None = None
    always: bool = False


@dataclass(frozen=True)
class Layout:
    """Where an operand has rows: ``outer * n * inner`` elements along ``axis``; or nowhere."""

    base: Shape
    axis: int | None = None
    outer: int = 1
    inner: int = 1

    def shape(self, rows: int) -> Shape:
        if self.axis is None:
            return self.base
        made = list(self.base)
        made[self.axis] = self.outer * rows * self.inner
        return tuple(made)


def states_of(layout: Layout, domain: Domain) -> list[State]:
    """All states that an operand of this layout may carry; the plain one first."""
    if layout.axis is None:
        made: list[State] = [Same()]
        made += [Same(p) for p in domain.scales]
        made += [Same(0, f) for f in domain.fills]
        if domain.adds:
            made += [Partial(0)] if domain.dtype[0] in "iu" else [Partial(0), Partial(-1)]
        return made
    axis, outer, inner = layout.axis, layout.outer, layout.inner
    made = [Rows(axis, outer, inner)]
    made += [Rows(axis, outer, inner, p) for p in domain.scales]
    made += [Rows(axis, outer, inner, 0, f) for f in domain.fills]
    if outer * inner == 1 and domain.dtype != "bool" and not domain.core:
        made.append(Position(axis))
    return made


def _scaled(value: np.ndarray, rows: int, power: int) -> np.ndarray:
    """What a nano-batch has where the whole batch has ``value``, which scales with the rows."""
    if not power:
        return value
    if value.dtype.kind in "iu":
        return value // BATCH**power * rows**power
    return value * (rows / BATCH) ** power


def triple(state: State, layout: Layout, domain: Domain, rng: np.random.Generator) -> Triple:
    """Random arrays of which the state is true."""

    def draw(rows: int) -> np.ndarray:
        return np.asarray(domain.sample(rng, layout.shape(rows))).astype(domain.dtype)

    if isinstance(state, Position):
        return [_numbered(layout.shape(n), state.axis).astype(domain.dtype) for n in SIZES]
    if isinstance(state, Partial):
        parts = [draw(n) for n in PARTS]
        weights = [(n / BATCH) ** -state.power for n in PARTS]
        total = sum(p * (w if state.power else 1) for p, w in zip(parts, weights, strict=True))
        return [np.asarray(total), *parts]
    assert isinstance(state, Same | Rows)
    if state.fill is not None:
        return [np.full(layout.shape(n), state.fill, domain.dtype) for n in SIZES]
    whole = draw(BATCH)
    if state.power and whole.dtype.kind in "iu":
        whole = whole * BATCH**state.power
    if isinstance(state, Same):
        return [whole, *(_scaled(whole, n, state.power) for n in PARTS)]
    parts = [_scaled(p, n, state.power) for p, n in zip(cut(whole, state), PARTS, strict=True)]
    return [whole, *parts]


def _numbered(shape: Shape, axis: int) -> np.ndarray:
    along = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return np.broadcast_to(along, shape)


def cut(whole: np.ndarray, state: Rows) -> list[np.ndarray]:
    """The rows of each nano-batch."""
    size = state.outer * BATCH * state.inner
    if whole.shape[state.axis] != size:
        raise AssertionError(f"{whole.shape} has no {size} elements along axis {state.axis}")
    before, after = whole.shape[: state.axis], whole.shape[state.axis + 1 :]
    runs = whole.reshape(*before, state.outer, BATCH, state.inner, *after)
    made, start = [], 0
    for rows in PARTS:
        part = np.take(runs, range(start, start + rows), state.axis + 1)
        made.append(part.reshape(*before, state.outer * rows * state.inner, *after))
        start += rows
    return made


def is_true(state: State, value: Sequence[np.ndarray]) -> bool:
    """Whether the arrays of the whole batch and of the nano-batches are as the state says."""
    whole, *parts = value
    if isinstance(state, Same | Rows) and state.fill is not None:
        if not all(_close(np.full(x.shape, state.fill), x) for x in value):
            return False
    if isinstance(state, Same):
        return all(
            _close(whole, p * (BATCH / n) ** state.power if state.power else p)
            for p, n in zip(parts, PARTS, strict=True)
        )
    if isinstance(state, Partial):
        weights = [(n / BATCH) ** -state.power if state.power else 1 for n in PARTS]
        if not all(np.isfinite(x).all() for x in value):
            return True  # infinities of parts may cancel
        return _close(whole, sum(p * w for p, w in zip(parts, weights, strict=True)))
    if isinstance(state, Rows):
        want = cut(whole, state)
        return all(
            _close(w, p * (BATCH / n) ** state.power if state.power else p)
            for w, p, n in zip(want, parts, PARTS, strict=True)
        )
    if isinstance(state, Position):
        if state.dim is None:
            return all(_close(_numbered(x.shape, state.axis), x) for x in value)
        chosen = sorted(state.coordinates)
        picked = [np.take(x, chosen, state.dim) for x in value]
        rest = [np.delete(x, chosen, state.dim) for x in value]
        plain = is_true(Rows(state.axis), rest) if rest[0].size else True
        return plain and is_true(Position(state.axis), picked)
    return _is_ordered(state, value)


def _is_ordered(state: State, value: Sequence[np.ndarray]) -> bool:
    """The same of states about orders, as far as it can be told without the order itself."""
    if isinstance(state, Keyed):
        low = -np.inf if state.key.low is None else state.key.low
        high = np.inf if state.key.high is None else state.key.high
        return is_true(state.rows, value) and all(((low <= x) & (x <= high)).all() for x in value)
    if isinstance(state, Sizes):
        return is_true(Partial(0), value)
    if isinstance(state, ItemNumbers) and state.order is None:
        shapes = [[-1 if d == state.axis else 1 for d in range(x.ndim)] for x in value]
        return all(
            _close(np.broadcast_to(t.reshape(s), x.shape), x)
            for t, s, x in zip(state.tables, shapes, value, strict=True)
        )
    if isinstance(state, InOrder | ItemNumbers):
        # Some permutation brings the elements of the nano-batches to those of the whole.
        whole, *parts = (np.sort(x, None) for x in value)
        if isinstance(state, ItemNumbers):
            return all(
                _close(np.sort(t), np.unique(x)) for t, x in zip(state.tables, value, strict=True)
            )
        power = state.rows.power
        scaled = [
            p * (BATCH / n) ** power if power else p for p, n in zip(parts, PARTS, strict=True)
        ]
        return _close(whole, np.sort(np.concatenate(scaled)))
    if isinstance(state, Inverse):
        return all(_close(np.sort(x, None), np.arange(x.size)) for x in value)
    raise TypeError(f"{state} says nothing about values")


def _close(want: Any, got: Any) -> bool:
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape:
        return False
    if want.dtype == bool and got.dtype == bool:
        return bool((want == got).all())
    wide = np.complex128 if "c" in (want.dtype.kind, got.dtype.kind) else np.float64
    want, got = want.astype(wide), got.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    scale = float(finite.max(initial=1.0))
    return bool(np.allclose(got, want, rtol=1e-6, atol=1e-8 * scale, equal_nan=True))
