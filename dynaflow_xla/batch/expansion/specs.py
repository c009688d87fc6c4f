"""How inputs of a split function are cut, its outputs put together, and where its regions come from."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dynaflow_xla.batch.proof import OutAxis


class Parts(enum.Enum):
    """For inputs and outputs that stay in parts, one for each nano-batch (residuals of a backward)."""

    PARTS = "parts"


PARTS = Parts.PARTS


class AsProved(enum.Enum):
    """For outputs of a graph with joins: the whole batch's value, put together by what is proved of it."""

    AS_PROVED = "as proved"


AS_PROVED = AsProved.AS_PROVED

WHOLE = -1
"""In place of a nano-batch's number: the graph at full size."""

InSpec: TypeAlias = int | None | Parts
OutSpec: TypeAlias = OutAxis | Parts | AsProved
"""How an output is put together: an axis, a sum, a weighted mean, None (equal in all), not at all, or as
is proved of it."""


@dataclass(frozen=True)
class Cut:
    """A region input that is rows ``start:stop`` along ``axis`` of a whole value."""

    axis: int
    start: int
    stop: int


Reads: TypeAlias = tuple[tuple[int, Cut | None], ...]


@dataclass(frozen=True)
class MergeSpec:
    """What a merge region computes: its inputs along ``axis``, or their sum weighted by ``weights``.

    Attributes:
        how: Of a concatenation the weights, if any, are for each input.
        axis: Of a concatenation.
        weights: One for each input.
        runs: Runs of the batch that lie one after the other along the axis.
        offsets: Of a concatenation, if any: what is added to each input.
    """

    how: Literal["concat", "sum", "mean"]
    axis: int
    weights: tuple[float, ...]
    runs: int = 1
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class CutSpec:
    """What a region takes of a value that was made once: the rows of each nano-batch."""

    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class RegionOrigin:
    """Where a region of the expanded graph comes from.

    Attributes:
        nanos: Its nano-batch; several if it runs them as one batch; ``WHOLE`` if it runs once, on all rows.
        region: Number of the region in the nano-batch's graph, or the whole one.
        reads: For each of that region's inputs (nano-batch by nano-batch): a value and how it is cut.
    """

    nanos: tuple[int, ...]
    region: int
    reads: tuple[Reads, ...]


def even_sizes(batch: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that differ by one at most, larger ones first."""
    small, more = divmod(batch, count)
    return tuple(small + (k < more) for k in range(count))
