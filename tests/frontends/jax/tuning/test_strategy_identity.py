"""A strategy is known by its values or its object, never by its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.tuning import autotune


class OnLane(dfx.Strategy):
    """Everything on one lane, and the lane is not in its text."""

    def __init__(self, lane: int) -> None:
        self.lane = lane

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=self.lane)


@dataclasses.dataclass(frozen=True)
class ByValue(OnLane):
    lane: int = 0

    def __repr__(self) -> str:
        return "ByValue()"


class Scaled(dfx.Strategy):
    """Puts another function in a region's place: what it does is in no text."""

    def __init__(self, by: float) -> None:
        self.by = by

    def schedule(self, s: Any) -> None:
        by = self.by
        while ready := s.ready():
            for op in ready:
                s.execute(op, replace=lambda x: jnp.sort(x) * by)

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("sort")]


def two_sorts(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sort(x) + jnp.sort(y)


@pytest.fixture
def args() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(0), (512,)), jax.random.normal(
        jax.random.key(1), (512,)
    )


def lanes_of(made: Any, args: Any) -> set[int]:
    plan = dfx.plan(made, *args)
    return {i.lane for i in plan.instructions if hasattr(i, "region")}


def test_each_object_has_a_schedule_of_its_own(args: Any, lanes: int) -> None:
    if lanes < 2:
        pytest.skip("needs two lanes")
    fast = dfx.schedule(jax.jit(two_sorts), OnLane(0), lanes=2)
    zero, one = OnLane(0), OnLane(1)
    assert fast.with_strategy(zero) is fast.with_strategy(zero)
    assert fast.with_strategy(zero) is not fast.with_strategy(one)
    assert lanes_of(fast.with_strategy(zero), args) == {0}
    assert lanes_of(fast.with_strategy(one), args) == {1}
    assert fast.with_strategy(ByValue(1)) is fast.with_strategy(ByValue(1))
    assert lanes_of(fast.with_strategy(ByValue(0)), args) == {0}
    assert lanes_of(fast.with_strategy(ByValue(1)), args) == {1}
    assert fast.with_strategy(dfx.Branches()) is fast.with_strategy(dfx.Branches())


def test_replacements_of_two_objects_of_one_class(args: Any) -> None:
    def sort(x: jax.Array) -> jax.Array:
        return jnp.sort(x)

    fast = dfx.schedule(jax.jit(sort), Scaled(1.0))
    x = args[0]
    for by in (1.0, 2.0, 3.0):
        assert jnp.allclose(fast.with_strategy(Scaled(by))(x), jnp.sort(x) * by), by


class Choosing(dfx.Auto):
    """Candidates that have one text, made anew at each question."""

    def __init__(self, make: Callable[[], list[dfx.Strategy]]) -> None:
        super().__init__(budget_s=20.0, min_cost_ns=0.0)
        self.make = make

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        return self.make()


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Name of the candidate that measures as the fastest, and the names that were measured."""
    unhurried(monkeypatch)
    state: dict[str, Any] = {"name": "", "measured": []}

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        state["measured"].append(list(runs))
        return autotune.Medians({name: [1.0 if name == state["name"] else 9.0] for name in runs})

    monkeypatch.setattr(autotune, "measure", measure)
    return state


@pytest.mark.parametrize(("name", "lane"), [("OnLane()", 0), ("OnLane() #2", 1)])
def test_candidates_with_one_text_do_not_collide(
    args: Any, lanes: int, fastest: Any, name: str, lane: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    if lanes < 2:
        pytest.skip("needs two lanes")

    def sorts(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sort(x), jnp.sort(y)

    class OneAside(OnLane):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=self.lane if op.name.endswith("_1") else 1 - self.lane)

        def __repr__(self) -> str:
            return "OnLane()"

    asked = []

    def make() -> list[dfx.Strategy]:
        asked.append(1)
        return [OneAside(0), OneAside(1)]

    fast = dfx.schedule(jax.jit(sorts), Choosing(make), rules=[dfx.Op("sort")], lanes=2)
    fastest["name"] = name
    got = fast(*args)
    assert all((g == w).all() for g, w in zip(got, sorts(*args), strict=True))
    assert [n for n in fastest["measured"][0] if not n.startswith("original")] == [
        "OnLane()",
        "OnLane() #2",
    ]
    chosen = fast.decision(args, {})
    assert chosen.name == name and chosen.child._options.strategy.lane == lane
    assert f"auto: {name} runs" in dfx.explain(fast, *args)
    for _ in range(3):
        dfx.plan(fast, *args)
    assert len(asked) == 1 and len(fast._children) == 2
    assert not list(tmp_path.iterdir()), "objects without values have no key on disk"


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize(("name", "by"), [("Scaled()", 1.0), ("Scaled() #2", 2.0)])
def test_candidates_whose_plans_look_alike_are_all_measured(
    args: Any, fastest: Any, name: str, by: float, wide: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a replacement a plan holds a name alone, whether its region is on a lane or has all cores."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))

    class Somewhere(Scaled):
        def schedule(self, s: Any) -> None:
            by = self.by
            while ready := s.ready():
                for op in ready:
                    how = {"width": "all"} if wide else {"lane": 0}
                    fn = (lambda x: jnp.sort(x) * by) if op.name.startswith("sort") else None
                    s.execute(op, replace=fn, **how)

        def __repr__(self) -> str:
            return "Scaled()"

    fast = dfx.schedule(
        jax.jit(two_sorts), Choosing(lambda: [Somewhere(1.0), Somewhere(2.0)]), lanes=2
    )
    fastest["name"] = name
    got = fast(*args)
    assert [n for n in fastest["measured"][0] if not n.startswith("original")] == [
        "Scaled()",
        "Scaled() #2",
    ]
    assert jnp.allclose(got if by == 1.0 else fast(*args), by * two_sorts(*args), rtol=1e-5)


def test_candidates_with_values_are_kept_on_disk_by_them(
    args: Any, fastest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))

    def run(*candidates: dfx.Strategy, margin: float = 0.03) -> None:
        auto = Choosing(lambda: list(candidates))
        auto.margin = margin
        dfx.schedule(jax.jit(two_sorts), auto)(*args)

    fastest["name"] = "original"
    run(dfx.Branches(), ByValue(0))
    assert len(fastest["measured"]) == 1
    run(dfx.Branches(), ByValue(0))
    assert len(fastest["measured"]) == 1, "known"
    run(
        dfx.Branches(),
        ByValue(1 if dfx.schedule(jax.jit(two_sorts))._options.lanes > 1 else 0),
        margin=0.5,
    )
    assert len(fastest["measured"]) == 2
    run(dfx.Branches(), ByValue(0), margin=0.5)
    assert len(fastest["measured"]) == 3, "another margin is another decision"
