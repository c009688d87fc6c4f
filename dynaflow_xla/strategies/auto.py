"""Choice by measurement, with the original as a candidate that wins ties."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from dynaflow_xla.errors import PlanError, bad_argument, checks
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.nano_batch import NanoBatch
from dynaflow_xla.strategies.search import Search
from dynaflow_xla.strategies.sequential import Sequential

_HOPE = -0.15
"""What ``Branches`` keeps on lanes as a candidate although the model sees a loss: it errs by some 10 %."""

_BEGINNINGS = 100
"""So many beginnings of plans ``Search`` looks at as a candidate: some tenths of a second at most."""


class Auto(Strategy):
    """Measures candidates once a signature at a top-level call and keeps the fastest.

    Candidates are planned and simulated first; those that the simulator puts far behind are not compiled.
    Among these are regions on lanes only, where the model would give some all cores; lanes of JAX functions
    that are predicted to take up to 15 % longer than the original, as the model errs by some 10 %; and one
    lane alone: a pool of one thread runs small programs faster, and PyTorch's operators run on a lane without
    Python between them. On graphs of at most 12 regions the best plan that ``Search`` finds among its first
    hundred beginnings of plans is another. A JAX program of up to about 0.3 ms on a CPU is also measured as
    it is, but on the thread that calls it: XLA's hand-over to threads of its own takes longer than some
    programs. One of up to about 4 ms is measured with that thread beginning it and waiting for it, and has to
    gain a tenth. A PyTorch function is also measured with one intra-op thread, where more gain little.
    Inside a trace without a decision the original runs. Functions with effects are never measured.
    Decisions are kept on disk (``DYNAFLOW_XLA_CACHE_DIR``, default ``dynaflow_xla`` in ``XDG_CACHE_HOME``
    or ``~/.cache``).

    Args:
        budget_s: Seconds that a decision may take beside the original's own first call, compiling
            included (PyTorch: that is the first capture and one run; captures of candidates count).
            Default: as long as that first call took, plus a second that all signatures of the
            function share; and half a second for a gain that is likely, but not sure. Candidates that would
            take longer are left out, which ``explain`` tells; ``dfx.tune`` spends more. If the original is
            kept so, and no seconds were given, they are tried once calls of 3 ms and more took 40 times as
            long as that will.
        margin: A candidate must take less than the original by this share, and it must be faster more
            surely than chance explains (exact rank test over the rounds, 5%), to be chosen. Compared are
            medians of the means of all pairs of rounds, which count both speeds of a program that has
            two. While a hypervisor has the two cores of its machine far from each other, a candidate
            must take a quarter less; where one took less, but not by that, it is measured again once they
            are near, and the original runs until then.
        min_cost_ns: Functions with less estimated work than this get no lanes.
    """

    def __init__(
        self,
        budget_s: float | None = None,
        margin: float = 0.02,
        min_cost_ns: float = 20_000.0,
    ) -> None:
        self.budget_s = None if budget_s is None else _number("budget_s", budget_s)
        self.margin = _number("margin", margin)
        if self.margin >= 1.0:
            raise PlanError(f"Auto(margin=...) is a share of the time, less than 1; got {margin!r}")
        self.min_cost_ns = _number("min_cost_ns", min_cost_ns)

    def candidates(self, lanes: int, *, batched: bool = False) -> list[Strategy]:
        """Strategies to measure beside the original.

        Args:
            lanes: Number of lanes.
            batched: Whether batch axes are known, so that nano-batches are possible.
        """
        made: list[Strategy] = [
            Branches(lanes=lanes), Branches(lanes=lanes, wide=False), Sequential(wide=False)
        ]  # fmt: skip
        if batched and lanes > 1:
            # Fewer nano-batches than lanes have more cores each.
            made += [NanoBatch(n) for n in dict.fromkeys((lanes, 2 * lanes, 2))]
        if lanes > 1:
            made += [Search(nodes=_BEGINNINGS), Branches(lanes=lanes, margin=_HOPE)]
        return made

    def schedule(self, s: Any) -> None:
        """As ``Branches``; a frontend replaces Auto by what it chose."""
        Branches().schedule(s)

    def __repr__(self) -> str:
        options = inspect.signature(Auto).parameters.items()
        given = {name: (getattr(self, name, p.default), p.default) for name, p in options}
        other = [
            f"{name}={value!r}" for name, (value, default) in given.items() if value != default
        ]
        return f"{type(self).__name__}({', '.join(other)})"


def too_large(candidate: Strategy, regions: int) -> str:
    """Why a candidate would decide nothing itself on a graph of so many regions, or ""."""
    if not isinstance(candidate, Search) or regions <= candidate.regions:
        return ""
    return f"{regions} regions are more than Search looks at ({candidate.regions})"


def on_lanes_only(candidates: Sequence[Strategy]) -> list[Strategy]:
    """The candidates where no region can have all cores: those that differ in that become equal."""
    made: list[Strategy] = []
    for candidate in candidates:
        alike = candidate
        if type(candidate) is Branches:
            alike = Branches(lanes=candidate.lanes)
        elif type(candidate) is Sequential:
            alike = replace(candidate, wide=True)
        made.append(alike)
    return made


class OneOf(Auto):
    """One strategy, of which several forms are measured: those that several compilers make.

    Args:
        strategy: It runs in any case.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(min_cost_ns=0.0)
        self.strategy = strategy

    def candidates(self, lanes: int, *, batched: bool = False) -> list[Strategy]:
        """The one."""
        return [self.strategy]

    def __repr__(self) -> str:
        return repr(self.strategy)


def _number(name: str, value: Any) -> float:
    made = checks.real(value)
    if made is None or made < 0:
        raise bad_argument(value, Real, f"Auto({name}=...) must be a number >= 0; got {value!r}")
    return made
