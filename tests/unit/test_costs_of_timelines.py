"""Costs from a timeline belong to what regions compute, not to their numbers in another cut."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import PlanError  # noqa: E402

X = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


def f(x: Any) -> Any:
    a = jnp.tanh(x @ x)
    b = jnp.sort(x, axis=0)
    return a + jnp.cumsum(b, axis=1)


class Cut(dfx.Strategy):
    """One lane; operators of these kinds are cut out, the first first."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def rules(self, graph: Any) -> Any:
        cut = [dfx.Op(kind) for kind in self.kind.split("+")]
        return cut

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=0)


def _operators(fast: Any) -> dict[int, tuple[str, ...]]:
    pg = dfx.graph(fast, X)
    return {r.id: tuple(pg.graph.ops[i].kind for i in r.ops) for r in pg.regions}


def _known(fast: Any) -> tuple[Any, dict[tuple[str, ...], float]]:
    """A timeline with a time of its own for each region, and these times by operators."""
    operators = _operators(fast)
    times = {number: 1000.0 * (number + 1) for number in operators}
    return dfx.simulate(fast, X, costs=times), {operators[n]: t for n, t in times.items()}


def _check(of: Any, to: Any) -> list[str]:
    timeline, known = _known(of)
    predicted = dfx.simulate(to, X, costs=timeline)
    estimated = dfx.simulate(to, X).region_ns()
    operators, same = _operators(to), 0
    for number, ns in predicted.region_ns().items():
        assert ns == known.get(operators[number], estimated[number]), operators[number]
        same += operators[number] in known
    assert same
    assert bool(predicted.meta.get("notes")) == (same < len(operators))
    return list(predicted.meta.get("notes", ()))


def test_two_cuts_of_one_function() -> None:
    fine, coarse = (dfx.schedule(f, s, lanes=1) for s in (Cut("*"), Cut("sort")))
    assert len(_operators(fine)) > len(_operators(coarse)) > 1
    (note,) = _check(fine, coarse)
    assert "another cut" in note and "estimated" in note
    assert not _check(fine, dfx.schedule(f, Cut("sort+*"), lanes=1))


def test_a_measured_timeline_of_another_strategy() -> None:
    fine, other = (dfx.schedule(f, Cut(kind), lanes=1) for kind in ("*", "sort+*"))
    measured = dfx.profile(fine, X)
    by_operators = {_operators(fine)[n]: ns for n, ns in measured.region_ns().items()}
    predicted = dfx.simulate(other, X, costs=measured).region_ns()
    for number, operators in _operators(other).items():
        assert predicted[number] == round(by_operators[operators])


def test_a_timeline_of_another_function_is_refused() -> None:
    def g(x: Any) -> Any:
        return jnp.sin(x).sum() * jnp.argsort(x, axis=0)

    timeline, _ = _known(dfx.schedule(f, Cut("*"), lanes=1))
    with pytest.raises(PlanError, match=r"has none of its \d+ regions.*Profile this one"):
        dfx.simulate(dfx.schedule(g, Cut("*"), lanes=1), X, costs=timeline)


def test_other_shapes_are_other_regions() -> None:
    fast = dfx.schedule(f, Cut("*"), lanes=1)
    timeline, _ = _known(fast)
    with pytest.raises(PlanError, match="other shapes"):
        dfx.simulate(fast, X[:8, :8], costs=timeline)
