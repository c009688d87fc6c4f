"""A proved split of a graph, as a backend gets it to plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.frontends.torch.batch.handed import Handed
from dynaflow_xla.frontends.torch.batch.proof import Fit
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.sizes import Sized


@dataclass(frozen=True)
class NanoBatches:
    """A graph, how its batch is cut, and the graph at each size of a part.

    Attributes:
        captured: The graph with an open batch, its random numbers among the inputs.
        kind: "inference", "forward" or "backward".
        whole: The graph at full size.
        at: The graph by size, for the whole and each of ``sizes``.
        sizes: Rows of each nano-batch.
        fit: How it is cut and put together, and what is proved of each value.
        kept: For each input of ``whole`` its position among the inputs of a call.
        sized: Makes the graph at another size, for several nano-batches that run as one.
        between: What goes from a forward to its backward without being put together.
        draw: Adds the random numbers of the whole batch to the inputs of a call, if there are any.
        began: When work on it began, of ``time.perf_counter``.
    """

    captured: Captured
    kind: str
    whole: Sized
    at: dict[int, Sized]
    sizes: tuple[int, ...]
    fit: Fit
    kept: Sequence[int]
    sized: Callable[[int], Sized]
    between: Handed
    draw: Callable[[Sequence[Any]], Sequence[Any]] | None
    began: float

    def captured_at(self, size: int) -> Captured:
        """The graph at one size, of several nano-batches that run as one, too."""
        if size not in self.at:
            self.at[size] = self.sized(size)
        return self.at[size].captured

    def drawn(self, given: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a call with what is drawn."""
        return given if self.draw is None else self.draw(given)

    def chosen(self, given: Sequence[Any]) -> list[Any]:
        """Those inputs of a call that the graph at full size has."""
        return taken(given, [given[n] for n in self.kept])


def taken(given: Sequence[Any], made: list[Any]) -> list[Any]:
    """``made``, after the list it was taken from was emptied: who runs it owns the inputs."""
    if isinstance(given, list):
        given.clear()
    return made
