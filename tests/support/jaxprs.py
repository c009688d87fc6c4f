"""What a traced function is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jcore


def walked(jaxpr: Any) -> Iterator[Any]:
    """Equations, each before those of the functions in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jcore.jaxprs_in_params(eqn.params):
            yield from walked(inner)
