"""The forms in which a strategy can run: operator by operator, or compiled by one of PyTorch's compilers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import Strategy

WHOLE = "torch.compile"
"""The original under PyTorch's compiler, among what is measured."""

_COMPILERS = {"auto": ("eager", "aoti", "inductor")}

COSTS = {"aoti": 1.5, "inductor": 1.3}
"""Compiling a plan's programs is taken for so many times what ``torch.compile`` of the whole took."""


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


def of(options: Settings, candidates: Mapping[str, Strategy]) -> dict[str, Variant]:
    """All forms of candidates, by name; those that compile nothing first.

    Only where there is a choice of compilers do names tell which it is.
    """
    compilers = _COMPILERS.get(options.compiler, (options.compiler,))
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
