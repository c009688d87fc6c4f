"""What more cores share of operators as parts of their program, where XLA:CPU fuses and overlaps them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dynaflow_xla.frontends.jax.capture.costs import library
from dynaflow_xla.frontends.jax.capture.costs.fused import Applied, forks, kind_of
from dynaflow_xla.ir.work import Spread


def applied(eqn: Any, reads: Sequence[Hashable], makes: Sequence[Hashable]) -> Applied:
    """An equation as a step of its program; see ``Applied``."""
    return Applied(kind_of(eqn), reads, makes, library.role(eqn))


def as_parts(
    steps: Sequence[Applied], each: Sequence[Spread], results: Sequence[Hashable]
) -> list[Spread]:
    """What more cores share of each step, as a part of its program.

    Args:
        steps: In program order.
        each: What they would share of each by itself.
        results: What leaves the program.
    """
    handed = forks(steps, [spread.forks for spread in each], results)
    made = [spread._replace(forks=n) for spread, n in zip(each, handed, strict=True)]
    called: set[int] = set()
    for product, reduction in library.with_reductions(steps, results).items():
        spread = made[product]
        if spread.tiles:
            # The reduction's loops are handed out; where they are too short for that, the call is.
            own = float(not made[reduction].forks and reduction not in called)
            called.add(reduction)
            products = spread.products + spread.tiles
            made[product] = spread._replace(
                products=products, tiles=0.0, forks=max(spread.forks, own)
            )
    return made
