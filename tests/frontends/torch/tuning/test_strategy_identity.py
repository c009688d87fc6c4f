"""A strategy is known by its values or its object, never by its text."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.tuning import autotune


class Scaled(dfx.Strategy):
    """Puts another function in a region's place: what it does is in no text."""

    def __init__(self, by: float) -> None:
        self.by = by

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("sort")]

    def schedule(self, s: Any) -> None:
        by, lane = self.by, 0
        while ready := s.ready():
            for op in ready:
                fn = (lambda x: torch.sort(x).values * by) if op.name.startswith("sort") else None
                s.execute(op, lane=lane % s.lanes, replace=fn)
                lane += 1


@dataclasses.dataclass(frozen=True)
class ByValue(Scaled):
    by: float = 1.0

    def __repr__(self) -> str:
        return "ByValue()"


def sorts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sort(x).values + torch.sort(y).values


def scheduled(strategy: dfx.Strategy) -> Any:
    return dfx.schedule(sorts, strategy, backend="torch")._dfx_core


def test_each_object_has_a_schedule_of_its_own() -> None:
    x, y = torch.randn(64), torch.randn(64)
    core = scheduled(Scaled(1.0))
    for make in (Scaled, ByValue):
        for by in (1.0, 2.0):
            got = core.with_strategy(make(by)).call((x, y), {})
            torch.testing.assert_close(got, sorts(x, y) * by)
    one = Scaled(1.0)
    assert core.with_strategy(one) is core.with_strategy(one)
    assert core.with_strategy(one) is not core.with_strategy(Scaled(1.0))
    assert core.with_strategy(ByValue(1.0)) is core.with_strategy(ByValue(1.0))


def test_an_exported_program_too() -> None:
    x, y = torch.randn(64), torch.randn(64)

    class Sorts(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return sorts(x, y)

    program = torch.export.export(Sorts(), (x, y))
    core = dfx.schedule(program, Scaled(1.0), backend="torch")._dfx_core
    with torch.no_grad():
        for by in (1.0, 2.0):
            got = core.with_strategy(Scaled(by)).call((x, y), {})
            torch.testing.assert_close(got, sorts(x, y) * by)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class Choosing(dfx.Auto):
    def __init__(self, *made: dfx.Strategy) -> None:
        super().__init__(budget_s=20.0, min_cost_ns=0.0)
        self.made, self.asked = made, 0

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        self.asked += 1
        return list(self.made)


@pytest.mark.parametrize(("name", "by"), [("Scaled()", 1.0), ("Scaled() #2", 2.0)])
def test_candidates_with_one_text_do_not_collide(
    name: str, by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        measured.append(list(runs))
        return autotune.Medians({n: [1.0 if n == name else 9.0] for n in runs})

    unhurried(monkeypatch)
    monkeypatch.setattr(autotune, "measure", measure)
    x, y = torch.randn(64), torch.randn(64)
    auto = Choosing(Scaled(1.0), Scaled(2.0))
    fast = dfx.schedule(sorts, auto, backend="torch", lanes=min(2, _cores()))
    with torch.no_grad():
        got, told = fast(x, y), dfx.explain(fast, x, y)
    if _cores() < 2:
        pytest.skip("with one lane nothing is measured")
    assert measured == [["original", "Scaled()", "Scaled() #2"]]
    torch.testing.assert_close(got, sorts(x, y) * by)
    assert f"auto: {name} runs" in told
    assert not list(tmp_path.iterdir()), "objects without values have no key on disk"


def test_a_candidate_may_split_without_saying_into_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Halves(dfx.Strategy):
        n = (2, 2)

        def split(self, ctx: Any) -> dfx.Split:
            return dfx.Split.of_sizes(self.n)

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=op.nano % s.lanes)

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        return autotune.Medians({n: [1.0 if n == "Halves()" else 9.0] for n in runs})

    unhurried(monkeypatch)
    monkeypatch.setattr(autotune, "measure", measure)
    model = torch.nn.Linear(8, 8)
    fast = dfx.schedule(model, Choosing(dfx.Branches(), Halves()), in_axes=0, backend="torch")
    x = torch.randn(4, 8)
    torch.testing.assert_close(fast(x), model(x))
    assert "auto: Halves() runs" in dfx.explain(fast, x)
