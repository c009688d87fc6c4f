"""A small gain is measured a second time, at another moment, in this process or in a later one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.tuning import autotune, budget

LANES = "Branches(lanes=2)"


class Lanes(dfx.Auto):
    """With one candidate."""

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        return [dfx.Branches(lanes=2)]


def _with_jax() -> tuple[Any, Any]:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = np.random.default_rng().normal(size=(4096,)).astype("float32")
    return jax.jit(lambda x: jax.numpy.sort(x) + jax.numpy.sort(-x)), (jax.numpy.asarray(x),)


def _with_torch() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return lambda x: torch.sort(x).values + torch.sort(-x).values, (torch.randn(1 << 15),)


class Measured:
    """What is measured, in milliseconds, each candidate called once for that."""

    def __init__(self, patch: pytest.MonkeyPatch, make: Callable[[], tuple[Any, Any]]) -> None:
        self.ms: dict[str, float] | None = {"original": 10.0, LANES: 9.0}
        self.times = 0
        unhurried(patch)
        self._real = budget.to_check
        patch.setattr(autotune, "measure", self._measure)
        patch.setattr(budget, "to_check", self._to_check)
        self.f, self.args = make()
        self.want = np.asarray(self.f(*self.args))

    def _measure(self, runs: Any, **_: Any) -> autotune.Medians:
        self.times += 1
        for run in runs.values():
            run()
        if self.ms is None:
            raise autotune.BudgetTooSmall("there are no seconds")
        return autotune.Medians({name: [self.ms.get(name, 12.0)] * 12 for name in runs})

    def _to_check(self, took_s: float, call_s: float) -> budget.Later | None:
        assert took_s > 0
        made = self._real(took_s, call_s)  # how long it takes depends on what runs beside it
        return made and budget.Later(40, made.more_s, made.first_s, made.checks)

    def scheduled(self, **options: Any) -> Any:
        return dfx.schedule(self.f, Lanes(min_cost_ns=0.0, **options), lanes=2)

    def call(self, fast: Any, times: int = 1) -> str:
        """What is explained after so many calls, each of which is right."""
        for _ in range(times):
            np.testing.assert_array_equal(np.asarray(fast(*self.args)), self.want)
        return str(dfx.explain(fast, *self.args))


@pytest.fixture(params=[_with_jax, _with_torch], ids=["jax", "torch"])
def measured(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Measured:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    return Measured(monkeypatch, request.param)


def test_the_second_measurement_decides(measured: Measured) -> None:
    fast = measured.scheduled()
    text = measured.call(fast)
    assert f"auto: {LANES} runs" in text and "measured a second time" in text
    assert "after 40 calls like this" in text
    measured.ms = {"original": 10.0, LANES: 10.1}
    measured.call(fast, 30)
    assert measured.times == 1
    text = measured.call(fast, 20)
    assert measured.times == 2 and "auto: the original runs" in text
    assert "like this" not in text
    measured.call(fast, 100)
    assert measured.times == 2
    again = measured.call(measured.scheduled())
    assert "auto: the original runs; cached" in again and "like this" not in again


def test_a_gain_that_is_there_again_stays(measured: Measured) -> None:
    fast = measured.scheduled()
    measured.call(fast, 50)
    text = measured.call(fast, 100)
    assert measured.times == 2 and f"auto: {LANES} runs" in text and "like this" not in text
    again = measured.call(measured.scheduled(), 100)
    assert measured.times == 2 and f"{LANES} runs; cached" in again and "like this" not in again


def test_a_later_process_measures_what_an_earlier_one_decided(measured: Measured) -> None:
    measured.call(measured.scheduled())
    fast = measured.scheduled()
    text = measured.call(fast)
    assert f"{LANES} runs; cached" in text and "after 40 calls like this" in text
    measured.ms = {"original": 10.0, LANES: 10.1}
    text = measured.call(fast, 50)
    assert measured.times == 2 and "auto: the original runs" in text


def test_what_the_second_one_has_no_time_for_stays(measured: Measured) -> None:
    fast = measured.scheduled()
    measured.call(fast)
    measured.ms = None
    text = measured.call(fast, 100)
    assert measured.times == 2 and f"auto: {LANES} runs" in text and "like this" not in text


@pytest.mark.parametrize(
    ("ms", "options"), [((10.0, 7.0), {}), ((1.0, 0.9), {}), ((10.0, 9.0), {"budget_s": 60.0})]
)
def test_what_is_final(measured: Measured, ms: tuple[float, float], options: Any) -> None:
    """A large gain, one of short calls, and where the user said how long a decision may take."""
    measured.ms = dict(zip(("original", LANES), ms, strict=True))
    fast = measured.scheduled(**options)
    text = measured.call(fast, 100)
    assert measured.times == 1 and f"auto: {LANES} runs" in text and "like this" not in text
