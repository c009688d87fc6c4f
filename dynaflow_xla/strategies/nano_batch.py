"""The batch in pieces, each on a lane of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from dynaflow_xla.errors import PlanError, bad_argument, checks
from dynaflow_xla.strategies.base import Context, Recorder, Split
from dynaflow_xla.strategies.splits.splitting import Splitting, width_of_lanes


@dataclass(frozen=True, repr=False)
class NanoBatch(Splitting):
    """Splits the batch into nano-batches and deals these out to the lanes, one after the other.

    What a nano-batch needs stays on its lane, so lanes seldom wait for each other. A batch with
    fewer rows than nano-batches is split into single rows.

    Args:
        n: Number of nano-batches, as even as possible; or the rows of each, as a sequence.
        weights: One number for each row (its tokens, say), or the key of the context under which the
            caller keeps these; nano-batches then have equal sums of them instead of equal sizes.
        align: Nano-batches begin at multiples of so many rows.
        boundaries: The rows at which requests begin (``[0, 3, 7]``; the number of rows may end them), or
            the key of the context under which these are: no nano-batch cuts a request.
        uneven: The cost model chooses among even and uneven sizes: each is planned and simulated.
        assume_separable: Skip the proof that rows are independent; the caller vouches for it.
        only: Rules (``dfx.Scope``, ``Op``, ``Module``, ...) of what is split. All else runs once, on the
            rows put together again.
        join: Rules of what runs once although it could be split.
        joins: Whether an operator that mixes rows runs once, on the rows put together again. With
            False it refuses the split.
    """

    n: int | Sequence[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        count = checks.integer(self.n)
        text = isinstance(self.n, str | bytes)
        sizes = None if count is not None or text else checks.items(self.n)
        if (count is None and sizes is None) or (count is not None and count < 1):
            raise bad_argument(
                self.n,
                Integral,
                "NanoBatch takes the count of nano-batches, an integer >= 1, or the sizes of each, its rows, "
                f"as a sequence; got {self.n!r}",
            )
        if sizes is None:
            object.__setattr__(self, "n", count)
            return
        object.__setattr__(self, "n", Split.of_sizes(sizes).sizes)
        if self.weights is not None or self.uneven:
            what = "weights" if self.weights is not None else "uneven=True"
            raise PlanError(f"NanoBatch takes sizes or {what}, not both")

    def split(self, ctx: Context) -> Split:
        """The number of nano-batches, or their sizes, under the conditions."""
        assume = self.assume_separable
        if not isinstance(self.n, int):
            return self.cut(Split.of_sizes(self.n, assume_separable=assume), ctx)
        count = self.n if ctx.batch_size is None else max(1, min(self.n, ctx.batch_size))
        return self.cut(Split.even(count, assume_separable=assume), ctx)

    def schedule(self, s: Recorder) -> None:
        """Each nano-batch on a lane of its own, as far as there are lanes; these share all cores."""
        width = width_of_lanes(s)
        while ready := s.ready():
            op = max(ready, key=lambda h: (h.priority, -h.region.id))
            s.execute(op, lane=op.nano % s.lanes, width=width)

    def __repr__(self) -> str:
        sizes = repr(self.n if isinstance(self.n, int) else list(self.n))
        return f"NanoBatch({', '.join([sizes, *self.options_text()])})"
