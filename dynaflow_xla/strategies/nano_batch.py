"""The batch in pieces, each on a lane of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaflow_xla import checks
from dynaflow_xla.errors import PlanError, PlanTypeError
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.strategies.base import Context, Recorder, Split, Strategy
from dynaflow_xla.strategies.split import joining_text


@dataclass(frozen=True, repr=False)
class NanoBatch(Strategy):
    """Splits the batch into nano-batches and deals these out to the lanes, one after the other.

    What a nano-batch needs stays on its lane, so lanes seldom wait for each other. A batch with
    fewer rows than nano-batches is split into single rows.

    Args:
        n: Number of nano-batches, as even as possible; or the rows of each, as a sequence.
        weights: Key of the context under which the caller keeps one number for each row (its tokens,
            say); nano-batches then have equal sums of these instead of equal sizes.
        assume_separable: Skip the proof that rows are independent; the caller vouches for it.
        only: Rules (``dfx.Scope``, ``Op``, ``Module``, ...) of what is split. All else runs once, on the
            rows put together again.
        join: Rules of what runs once although it could be split.
        joins: Whether an operator that mixes rows runs once, on the rows put together again. With
            False it refuses the split.
    """

    n: int | Sequence[int] = 2
    weights: str | None = field(default=None, kw_only=True)
    assume_separable: bool = field(default=False, kw_only=True)
    only: Any = field(default=None, kw_only=True)
    join: Any = field(default=(), kw_only=True)
    joins: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", None if self.only is None else as_rules(self.only))
        object.__setattr__(self, "join", as_rules(self.join))
        self._joining(Split.even(2, assume_separable=self.assume_separable))
        count = checks.integer(self.n)
        sizes = None if count is not None else checks.items(self.n)
        if sizes is None:
            object.__setattr__(self, "n", Split.even(self.n if count is None else count).count)  # type: ignore[arg-type]
            return
        object.__setattr__(self, "n", Split.of_sizes(sizes).sizes)
        if self.weights is not None:
            raise PlanError("NanoBatch takes sizes or weights, not both")

    def _joining(self, split: Split) -> Split:
        return split.joining(only=self.only, join=self.join, joins=self.joins)

    def split(self, ctx: Context) -> Split:
        """The number of nano-batches, their sizes, or equal shares of the weights."""
        return self._joining(self._sized(ctx))

    def _sized(self, ctx: Context) -> Split:
        assume = self.assume_separable
        if not isinstance(self.n, int):
            return Split.of_sizes(self.n, assume_separable=assume)
        count = self.n if ctx.batch_size is None else max(1, min(self.n, ctx.batch_size))
        if self.weights is None:
            return Split.even(count, assume_separable=assume)
        if self.weights not in ctx.user:
            raise PlanError(
                f"{self!r} reads weights from context[{self.weights!r}]; the context has "
                f"{sorted(ctx.user) or 'nothing'}. Pass schedule(..., context={{{self.weights!r}: ...}})"
            )
        weights = ctx.user[self.weights]
        if not isinstance(weights, Iterable):
            raise PlanTypeError(
                f"context[{self.weights!r}] must be numbers, one for each row; got {weights!r}"
            )
        weights = list(weights)
        if ctx.batch_size is not None and len(weights) != ctx.batch_size:
            raise PlanError(
                f"context[{self.weights!r}] must have a number for each of {ctx.batch_size} rows; got "
                f"{len(weights)}"
            )
        return Split.balanced(weights, count, assume_separable=assume)

    def schedule(self, s: Recorder) -> None:
        """Each nano-batch on a lane of its own, as far as there are lanes."""
        while ready := s.ready():
            op = max(ready, key=lambda h: (h.priority, -h.region.id))
            s.execute(op, lane=op.nano % s.lanes)

    def __repr__(self) -> str:
        parts = [repr(self.n if isinstance(self.n, int) else list(self.n))]
        if self.weights is not None:
            parts.append(f"weights={self.weights!r}")
        if self.assume_separable:
            parts.append("assume_separable=True")
        parts += joining_text(self.only, self.join, self.joins)
        return f"NanoBatch({', '.join(parts)})"
