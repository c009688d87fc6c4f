"""The forms in which a strategy can run: operator by operator, or compiled by one of PyTorch's compilers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.splits.splitting import Splitting
from dynaflow_xla.timelines.simulator import simulate, where_it_runs

WHOLE = "torch.compile"
"""The original under PyTorch's compiler, among what is measured."""

_COMPILERS = {"auto": ("eager", "aoti", "inductor")}

COSTS = {"aoti": 1.5, "inductor": 1.3}
"""Compiling a plan's programs is taken for so many times what ``torch.compile`` of the whole took."""


JOINED = " with joins"
"""How the name of a candidate ends that runs once what mixes rows."""


def joins_apart(candidates: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """The candidates, those that split without joins first, and at the end once more with them.

    A decision holds for calls whose graphs are others (a module in the original is in training mode now):
    where nothing was joined when it was measured, nothing is joined later without having been measured.
    """
    made: dict[str, Strategy] = {}
    joined: dict[str, Strategy] = {}
    for name, candidate in candidates.items():
        if isinstance(candidate, Splitting) and candidate.joins and not _chosen(candidate):
            made[name] = replace(candidate, joins=False)
            joined[name + JOINED] = candidate
        else:
            made[name] = candidate
    return {**made, **joined}


def _chosen(candidate: Splitting) -> bool:
    """Whether it says itself what is joined, or skips the proof, which finds what to join."""
    return candidate.assume_separable or candidate.only is not None or bool(candidate.join)


@dataclass(frozen=True)
class Variant:
    """A strategy in one form.

    Attributes:
        name: Of the form.
        of: Name of the strategy among the candidates.
        strategy: The strategy.
        compiler: "eager", "inductor" or "aoti".
    """

    name: str
    of: str
    strategy: Strategy
    compiler: str

    @property
    def without_joins(self) -> str:
        """The name of the same without joins; its own for what may join nothing."""
        if not self.of.endswith(JOINED):
            return self.name
        return self.of.removesuffix(JOINED) + self.name.removeprefix(self.of)


def of(
    options: Settings, candidates: Mapping[str, Strategy], on_gpu: bool = False
) -> dict[str, Variant]:
    """All forms of candidates, by name; those that compile nothing first.

    Only where there is a choice of compilers do names tell which it is.

    Args:
        options: What the user asked for.
        candidates: By name.
        on_gpu: Whether arguments or parameters are on one.
    """
    compilers: tuple[str, ...] = _COMPILERS.get(options.compiler, (options.compiler,))
    if on_gpu and options.compiler == "auto":
        compilers = tuple(c for c in compilers if c != "aoti")  # it compiles regions for the CPU
    several = len(compilers) > 1
    made = [
        Variant(
            f"{name} by {compiler}" if several and compiler != "eager" else name,
            name, strategy, compiler,
        )
        for compiler in compilers
        for name, strategy in candidates.items()
    ]  # fmt: skip
    return {variant.name: variant for variant in made}


def in_order(
    forms: Mapping[str, Variant], predicted: Mapping[str, float]
) -> Iterator[tuple[str, Variant]]:
    """Those that compile nothing, then the others: first those whose plan is the most promising.

    Args:
        forms: By name.
        predicted: Milliseconds of plans, read when the first ones are through.
    """
    yield from ((name, form) for name, form in forms.items() if form.compiler == "eager")
    rest = [(name, form) for name, form in forms.items() if form.compiler != "eager"]
    yield from sorted(rest, key=lambda item: predicted.get(item[1].of, math.inf))


def predicted_ns(entries: Iterable[Any]) -> float:
    """What the simulator expects of planned graphs, one after another."""
    return sum(simulate(e.plan, e.pg, **where_it_runs(e)).total_ns for e in entries)


def joins_cost(made: list[Any], whole: list[Any]) -> str:
    """Why a plan with joins is not measured, or "": what is put together again costs more than is gained.

    Args:
        made: The plans of a candidate.
        whole: Those of the first candidate, which splits nothing.
    """
    joins = sum("joined" in region.tags for entry in made for region in entry.pg.regions)
    if not joins or made is whole:
        return ""
    mine, other = map(predicted_ns, (made, whole))
    if mine < other:
        return ""
    return f"{joins} regions are joined where rows meet: predicted to take {mine / other:.2f} times the whole"
