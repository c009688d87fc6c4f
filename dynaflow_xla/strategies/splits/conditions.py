"""Where a batch may be cut, what each of its rows costs, and the sizes of nano-batches that follow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dynaflow_xla.errors import PlanError, PlanTypeError, checks

SHARES = (1.0, 2.0, 0.5, 4.0, 0.25)
"""Work of a nano-batch for that of the one before, as tried where the cost model chooses sizes."""


@dataclass(frozen=True)
class Conditions:
    """What nano-batches must keep to.

    Attributes:
        align: Nano-batches begin at multiples of so many rows.
        boundaries: Rows at which a nano-batch may begin; None: at any.
        work: What each row costs, for nano-batches of equal work; () for rows that cost the same.
        uneven: Whether the cost model chooses the sizes.
    """

    align: int = 1
    boundaries: tuple[int, ...] | None = None
    work: tuple[float, ...] = ()
    uneven: bool = False

    def __bool__(self) -> bool:
        return self != Conditions()

    def sizes(self, batch: int, count: int, share: float = 1.0) -> tuple[int, ...]:
        """Rows of ``count`` nano-batches whose work is as near to its share as cuts allow.

        Args:
            batch: Rows of the batch.
            count: How many.
            share: Work of a nano-batch for that of the one before.

        Raises:
            PlanError: there are too few rows at which a nano-batch may begin.
        """
        places = self.places(batch)
        if len(places) < count - 1:
            shown = f"{', '.join(map(str, places[:8]))}{', ...' if len(places) > 8 else ''}"
            at = f"only at row {shown}" if places else "at no row but the first"
            raise PlanError(
                f"{count} nano-batches of {batch} rows need {count - 1} cuts, and a nano-batch may begin "
                f"{at} ({self.text()}): at most {len(places) + 1} nano-batches"
            )
        # Rows that cost nothing at all cost the same.
        ends = list(accumulate(self.work if any(self.work) else [1.0] * batch))
        # Of the largest one: of many, the largest for that of the first is no float any more.
        largest = count - 1 if share > 1 else 0
        shares = [share ** (k - largest) for k in range(count)]
        goals = [ends[-1] * part / sum(shares) for part in accumulate(shares)]
        cuts: list[int] = []
        first = 0
        for k in range(1, count):
            # The place nearest to the k-th goal that leaves one for each of the others.
            most = len(places) - (count - 1 - k)
            far = [abs(ends[n - 1] - goals[k - 1]) for n in places[first:most]]
            found = first + far.index(min(far))
            cuts.append(places[found])
            first = found + 1
        return tuple(b - a for a, b in zip((0, *cuts), (*cuts, batch), strict=True))

    def places(self, batch: int) -> list[int]:
        """The rows but the first at which a nano-batch may begin.

        Raises:
            PlanError: work or boundaries are not those of so many rows.
        """
        if self.work and len(self.work) != batch:
            raise PlanError(f"work is given for {len(self.work)} rows, and the batch has {batch}")
        if self.boundaries is None:
            return list(range(self.align, batch, self.align))
        if self.boundaries and self.boundaries[-1] > batch:
            raise PlanError(
                f"boundaries go to row {self.boundaries[-1]}, and the batch has {batch} rows"
            )
        return [n for n in self.boundaries if 0 < n < batch and n % self.align == 0]

    def check(self, sizes: Sequence[int]) -> None:
        """That nano-batches of given sizes keep to what is asked.

        Raises:
            PlanError: one begins where none may.
        """
        allowed = self.places(sum(sizes))
        for number, start in enumerate(accumulate(sizes[:-1]), 1):
            where = bisect_left(allowed, start)
            if where == len(allowed) or allowed[where] != start:
                near = [str(n) for n in allowed[max(where - 1, 0) : where + 1]]
                way = f"; the nearest rows that may: {', '.join(near)}" if near else ""
                raise PlanError(
                    f"nano-batch {number} of {list(sizes)} rows begins at row {start}, where none may "
                    f"begin ({self.text()}){way}"
                )

    def tried(self, batch: int, count: int) -> list[tuple[int, ...]]:
        """Sizes among which the cost model chooses; even ones first."""
        return list(dict.fromkeys(self.sizes(batch, count, share) for share in SHARES))

    def text(self) -> str:
        """For messages and ``explain``; "" if there are none."""
        made = []
        if self.align > 1:
            made.append(f"beginning at multiples of {self.align} rows")
        if self.boundaries is not None:
            made.append(f"beginning at {len(self.boundaries)} given boundaries only")
        if self.work:
            made.append("balanced by the work of each row")
        if self.uneven:
            made.append("sizes chosen by the cost model")
        return ", ".join(made)


def conditions(
    align: Any = 1, boundaries: Any = None, work: Any = None, uneven: Any = False
) -> Conditions:
    """Checked conditions.

    Raises:
        PlanError: something in them cannot be.
    """
    unit = checks.integer(align)
    if unit is None or unit < 1:
        kind = PlanTypeError if unit is None else PlanError
        raise kind(f"align must be an integer >= 1, a number of rows; got {align!r}")
    if not isinstance(uneven, bool):
        raise PlanTypeError(f"uneven must be True or False; got {uneven!r}")
    return Conditions(
        unit,
        None if boundaries is None else checked_boundaries(boundaries),
        () if work is None else checked_work(work),
        uneven,
    )


def checked_work(work: Any) -> tuple[float, ...]:
    """Numbers, one for each row."""
    try:
        rows = tuple(float(w) for w in work)
    except (TypeError, ValueError) as error:
        raise PlanTypeError(f"weights must be numbers, one for each row; got {work!r}") from error
    if any(not 0 <= w < float("inf") for w in rows):
        raise PlanError("weights of rows must be finite and not negative")
    return rows


def checked_boundaries(boundaries: Any) -> tuple[int, ...]:
    """Rows, each after the one before."""
    given = checks.items(boundaries)
    rows = tuple(map(checks.integer, given or ()))
    if given is None or None in rows:
        raise PlanTypeError(
            f"boundaries must be integers, the rows at which requests begin; got {boundaries!r}"
        )
    made = tuple(n for n in rows if n is not None)
    if any(n < 0 for n in made) or any(b <= a for a, b in zip(made, made[1:], strict=False)):
        raise PlanError(
            f"boundaries must be rows from 0 on, each after the one before; got {list(made)}"
        )
    return made


def from_context(who: str, what: str, key: Any, user: Mapping[str, Any], rows: int | None) -> Any:
    """What a strategy was given as, or under a key of the context.

    Args:
        who: The strategy.
        what: Of its arguments.
        key: The argument: a key of the context, or the numbers themselves.
        user: The context.
        rows: How many numbers there must be; None: any number of these.
    """
    if not isinstance(key, str):
        return key
    if key not in user:
        raise PlanError(
            f"{who} reads {what} from context[{key!r}]; the context has {sorted(user) or 'nothing'}. Pass "
            f"schedule(..., context={{{key!r}: ...}})"
        )
    given = user[key]
    if not isinstance(given, Iterable):
        raise PlanTypeError(
            f"context[{key!r}] must be numbers, one for each "
            f"{'row' if rows is not None or what == 'weights' else 'boundary'}; got {given!r}"
        )
    made = list(given)
    if rows is not None and len(made) != rows:
        raise PlanError(
            f"context[{key!r}] must have a number for each of {rows} rows; got {len(made)}"
        )
    return made
