"""What strategies that split the batch have in common: what is cut, where, and what is joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynaflow_xla.errors import PlanTypeError, checks
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.strategies.base import Context, Recorder, Split, Strategy
from dynaflow_xla.strategies.splits.conditions import (
    checked_boundaries,
    checked_work,
    conditions,
    from_context,
)
from dynaflow_xla.strategies.splits.split import joining_text


def width_of_lanes(s: Recorder) -> int | None:
    """Cores of each lane, where nano-batches are fewer than lanes; None: what lanes have anyway."""
    used = len({h.nano for h in s.handles})
    return s.context.share(used) if 1 < used < s.lanes else None


@dataclass(frozen=True, repr=False)
class Splitting(Strategy):
    """A strategy that splits the batch.

    Args:
        assume_separable: Skip the proof that rows are independent; the caller vouches for it.
        only: Rules of what is split; all else runs once, on the rows put together again.
        join: Rules of what runs once although it could be split.
        joins: Whether an operator that mixes rows runs once; False: it refuses the split.
        weights: What each row costs (its tokens, say): one number a row, or the key of the context under
            which these are. Nano-batches then have equal work instead of equal sizes.
        align: Nano-batches begin at multiples of so many rows.
        boundaries: The rows at which requests begin, or the key of the context under which these are:
            no nano-batch cuts a request.
        uneven: The cost model chooses among even and uneven sizes.
    """

    assume_separable: bool = field(default=False, kw_only=True)
    only: Any = field(default=None, kw_only=True)
    join: Any = field(default=(), kw_only=True)
    joins: bool = field(default=True, kw_only=True)
    weights: Any = field(default=None, kw_only=True)
    align: int = field(default=1, kw_only=True)
    boundaries: Any = field(default=None, kw_only=True)
    uneven: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        only = None if self.only is None else as_rules(self.only, "only")
        object.__setattr__(self, "only", only)
        object.__setattr__(self, "join", as_rules(self.join, "join"))
        object.__setattr__(self, "align", conditions(self.align, uneven=self.uneven).align)
        for name, check in (("weights", checked_work), ("boundaries", checked_boundaries)):
            given = getattr(self, name)
            if given is None or isinstance(given, str):
                continue
            if checks.items(given) is None:
                raise PlanTypeError(
                    f"{name} must be numbers, or the key of the context under which these are; got {given!r}"
                )
            object.__setattr__(self, name, check(given))
        self._said(Split.even(2, assume_separable=self.assume_separable))

    def cut(self, split: Split, ctx: Context) -> Split:
        """A split with the conditions and joins that were asked for."""
        rows = ctx.batch_size
        weights = from_context(repr(self), "weights", self.weights, ctx.user, rows)
        boundaries = from_context(repr(self), "boundaries", self.boundaries, ctx.user, None)
        if rows is not None or weights is None:
            split = split.under(
                align=self.align, boundaries=boundaries, work=weights, uneven=self.uneven
            )
        return self._said(split)

    def _said(self, split: Split) -> Split:
        return split.joining(only=self.only, join=self.join, joins=self.joins)

    def options_text(self) -> list[str]:
        """What of these options differs from the default, for the strategy's text."""
        made = []
        for name in ("weights", "boundaries"):
            given = getattr(self, name)
            if given is not None:
                shown = (
                    repr(given) if isinstance(given, str) or len(given) < 9 else f"<{len(given)}>"
                )
                made.append(f"{name}={shown}")
        if self.align > 1:
            made.append(f"align={self.align}")
        if self.uneven:
            made.append("uneven=True")
        if self.assume_separable:
            made.append("assume_separable=True")
        return [*made, *joining_text(self.only, self.join, self.joins)]
