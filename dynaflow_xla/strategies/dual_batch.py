"""Two nano-batches: one communicates while the other computes."""

from __future__ import annotations

from dataclasses import dataclass

from dynaflow_xla.strategies.base import Context, Handle, Recorder, Split
from dynaflow_xla.strategies.splits.splitting import Splitting, width_of_lanes


@dataclass(frozen=True, repr=False)
class DualBatch(Splitting):
    """Two nano-batches whose communication runs beside the other's compute.

    Network regions go to the last lane. Without any, each nano-batch has a lane, as in ``NanoBatch(2)``.

    Args:
        assume_separable: Skip the proof that rows are independent; the caller vouches for it.
        only: Rules of what is split; all else runs once, on the rows put together again.
        join: Rules of what runs once although it could be split.
        joins: Whether an operator that mixes rows runs once; False: it refuses the split.
        weights, align, boundaries, uneven: Where the batch is cut, as for ``NanoBatch``.
    """

    def split(self, ctx: Context) -> Split:
        """Two nano-batches; a batch of one row stays whole."""
        if ctx.batch_size is not None and ctx.batch_size < 2:
            return Split.none()
        return self.cut(Split.even(2, assume_separable=self.assume_separable), ctx)

    def schedule(self, s: Recorder) -> None:
        """Communication on the last lane, as soon as it can start; without any, a lane a nano-batch."""
        network = any(h.resource == "network" for h in s.handles)
        width = None if network else width_of_lanes(s)
        turn = 0

        def order(op: Handle) -> tuple[bool, bool, float, int]:
            # Communication starts as soon as it can; then the nano-batch whose turn it is goes on.
            return op.resource == "network", op.nano == turn, op.priority, -op.region.id

        while ready := s.ready():
            op = max(ready, key=order)
            if not network:
                s.execute(op, lane=op.nano % s.lanes, width=width)
                continue
            talks = op.resource == "network"
            s.execute(op, lane=s.lanes - 1 if talks else 0)
            if talks:
                turn = 1 - op.nano

    def __repr__(self) -> str:
        return f"DualBatch({', '.join(self.options_text())})"
