"""What of programs more cores share: as costs have it, and as compiled programs hand it out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.frontends.jax.capture.costs import estimates
from dynaflow_xla.ir.work import Spread, spread_over


def spread_of_graph(f: Any, *shapes: Any) -> Spread:
    """Of all regions."""
    fast = dfx.schedule(jax.jit(f), dfx.Sequential(), backend="ffi")
    graph = dfx.graph(fast, *(jnp.zeros(s.shape, s.dtype) for s in shapes))
    return spread_over(region.spread for region in graph.regions)


def forks(f: Any, *shapes: Any) -> float:
    """Of the graph; cores save the same by it as by the function as a whole."""
    spread = spread_of_graph(f, *shapes)
    jaxpr = jax.make_jaxpr(f)(*shapes)
    whole = costs.original_ns(jaxpr, 1) - costs.original_ns(jaxpr, 2)
    assert whole == pytest.approx(spread.saved_ns(2), rel=1e-6)
    return spread.forks


def spread_of(f: Any, *shapes: Any) -> Any:
    return estimates._inner(jax.make_jaxpr(f)(*shapes), estimates._spreading).spread


def loops_handed_out(f: Any, *shapes: Any) -> int:
    """Loops over elements that XLA:CPU gives to several threads in the program that it compiles."""
    text = jax.jit(f).lower(*shapes).compile().as_text()
    return text.count('"outer_dimension_partitions":["')


def products_with_reductions(f: Any, *shapes: Any) -> int:
    """Products in computations that have reductions, in the program that XLA compiles."""
    parts = jax.jit(f).lower(*shapes).compile().as_text().split("\n\n")
    return sum(part.count(" dot(") for part in parts if " reduce(" in part)
