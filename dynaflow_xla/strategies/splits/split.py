"""How a strategy wants the batch cut, and what it wants to run once all the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from dynaflow_xla.batch.expansion.specs import even_sizes
from dynaflow_xla.batch.joins import AUTOMATIC, Wanted
from dynaflow_xla.errors import PlanError, PlanTypeError, bad_argument, checks
from dynaflow_xla.ir.rules import Rule, as_rules
from dynaflow_xla.strategies.splits.conditions import Conditions, checked_work, conditions


@dataclass(frozen=True)
class Split:
    """How the batch is cut into nano-batches.

    Attributes:
        count: Number of nano-batches; 1 does not split.
        sizes: Rows of each, or () for as even as possible.
        assume_separable: The user vouches that rows are independent; nothing is proved or compared.
        joins: What may run once, on the rows put together again.
        conditions: Where nano-batches may begin, and what decides on their sizes, if these are not given.
    """

    count: int = 1
    sizes: tuple[int, ...] = ()
    assume_separable: bool = False
    joins: Wanted = AUTOMATIC
    conditions: Conditions = Conditions()

    def __post_init__(self) -> None:
        if not isinstance(self.assume_separable, bool):
            raise PlanTypeError(
                f"assume_separable must be True or False; got {self.assume_separable!r}"
            )
        if self.assume_separable and self.joins.chosen:
            raise PlanError(
                "assume_separable skips the proof, and only the proof tells how nano-batches are put "
                "together: only= and join= cannot go with it"
            )
        object.__setattr__(self, "count", _checked_count("dfx.Split", self.count))
        given = checks.items(self.sizes)
        sizes = () if given == () else _row_counts(self.sizes if given is None else given)
        object.__setattr__(self, "sizes", sizes)
        if sizes and len(sizes) != self.count:
            raise PlanError(f"dfx.Split: {self.count} nano-batches need as many sizes; got {sizes}")

    @staticmethod
    def none() -> Split:
        """Do not split."""
        return Split()

    @staticmethod
    def even(count: int, *, assume_separable: bool = False) -> Split:
        """``count`` nano-batches of (nearly) the same size.

        Args:
            count: How many.
            assume_separable: Skip the proof that rows are independent; the caller vouches for it.
        """
        return Split(_checked_count("Split.even", count), (), assume_separable)

    @staticmethod
    def of_sizes(sizes: Iterable[int], *, assume_separable: bool = False) -> Split:
        """Nano-batches of the given numbers of rows.

        Args:
            sizes: Rows of each nano-batch; together they are the batch.
            assume_separable: As in ``even``.
        """
        checked = _row_counts(sizes)
        return Split(len(checked), checked, assume_separable)

    def joining(self, *, only: Any = None, join: Any = (), joins: bool = True) -> Split:
        """The same split with a say in what runs once, on the rows put together again.

        Args:
            only: Rules (``dfx.Scope``, ``Op``, ...) of what is split; all else runs once.
            join: Rules of what runs once although it could be split.
            joins: Whether operators that mix rows may run once; False: they refuse the split.
        """
        if not isinstance(joins, bool):
            raise PlanTypeError(f"joins must be True or False; got {joins!r}")
        chosen = None if only is None else as_rules(only, "only")
        wanted = Wanted(joins, chosen, as_rules(join, "join"))
        if wanted.chosen and not joins:
            raise PlanError("only= and join= join what they say; joins=False allows no join")
        return replace(self, joins=wanted)

    def under(
        self, *, align: int = 1, boundaries: Any = None, work: Any = None, uneven: bool = False
    ) -> Split:
        """The same split under conditions: sizes follow them, and sizes that are given must keep to them.

        Args:
            align: Nano-batches begin at multiples of so many rows.
            boundaries: The rows at which requests begin, in order; no nano-batch cuts a request.
            work: What each row costs, for nano-batches of (nearly) equal work.
            uneven: The cost model chooses among even and uneven sizes: each is planned and simulated.
        """
        if self.sizes and (work is not None or uneven):
            raise PlanError("a split has its sizes, or work and uneven= decide on them; not both")
        return replace(self, conditions=conditions(align, boundaries, work, uneven))

    def of_batch(self, batch: int) -> tuple[int, ...]:
        """Rows of each nano-batch of a batch.

        Raises:
            PlanError: no sizes, or not those given, keep to the conditions.
        """
        if self.sizes:
            self.conditions.check(self.sizes)
            return self.sizes
        return (
            self.conditions.sizes(batch, self.count)
            if self.conditions
            else even_sizes(batch, self.count)
        )

    def tried(self, batch: int) -> list[tuple[int, ...]]:
        """Sizes among which the cost model chooses; none if it does not."""
        return self.conditions.tried(batch, self.count) if self.conditions.uneven else []

    @staticmethod
    def balanced(weights: Sequence[float], count: int, *, assume_separable: bool = False) -> Split:
        """``count`` nano-batches of consecutive rows with (nearly) equal sums of ``weights``.

        Args:
            weights: One for each row, e.g. its number of tokens; not negative.
            count: Number of nano-batches, at most the number of rows.
            assume_separable: As above.
        """
        rows = checked_work(weights)
        count = _checked_count("Split.balanced", count)
        if count > len(rows):
            raise PlanError(
                f"Split.balanced takes a count from 1 to the number of rows, {len(rows)}; got {count}"
            )
        sizes = Conditions(work=rows).sizes(len(rows), count)
        return Split(count, sizes, assume_separable)


def joining_text(only: Sequence[Rule] | None, join: Sequence[Rule], joins: bool) -> list[str]:
    """What a strategy's text says of joins."""
    made = []
    if only is not None:
        made.append(f"only=[{', '.join(rule.text() for rule in only)}]")
    if join:
        made.append(f"join=[{', '.join(rule.text() for rule in join)}]")
    return made if joins else [*made, "joins=False"]


def _checked_count(who: str, count: Any) -> int:
    made = checks.integer(count)
    if made is None or made < 1:
        raise bad_argument(
            count, Integral, f"{who} takes a count of nano-batches >= 1; got {count!r}"
        )
    return made


def _row_counts(sizes: Any) -> tuple[int, ...]:
    given = checks.items(sizes)
    made = tuple(n for n in map(checks.integer, given or ()) if n is not None and n > 0)
    if not given or len(made) != len(given):
        integers = bool(given) and None not in map(checks.integer, given or ())
        kind = PlanError if integers or given == () else PlanTypeError
        raise kind(f"sizes must be positive integers; got {sizes!r}")
    return made
