"""What a decision for a torch callable may take, captures included; on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.native import backend as native
from dynaflow_xla.frontends.torch.signature import open_batch as batch
from dynaflow_xla.tuning import autotune, budget

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Work:
    """A clock on which nothing takes time but what is said to: captures and calls of the original."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.captures = 0.0, 0
        self.capture_s, self.original_s = 0.0, 0.0
        self.measured: list[list[str]] = []
        patch.setattr(budget, "clock", lambda: self.now)
        patch.setattr(native, "capture", self.taking(native.capture))
        patch.setattr(batch, "graph_of", self.taking(batch.graph_of))

        def measure(runs: Any, **_: Any) -> autotune.Medians:
            self.measured.append(list(runs))
            return autotune.Medians({name: [2.0 if name == "original" else 1.0] for name in runs})

        patch.setattr(autotune, "measure", measure)

    def taking(self, real: Any) -> Any:
        def captured(*args: Any, **kwargs: Any) -> Any:
            self.now += self.capture_s
            self.captures += 1
            return real(*args, **kwargs)

        return captured

    def sorts(self, x: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.now += self.original_s
        return sorts(x)


def sorts(x: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values
    with dfx.mark("right"):
        b = torch.sort(-x).values
    return a + b


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def auto_of(work: Work, **options: Any) -> Any:
    return dfx.schedule(work.sorts, dfx.Auto(min_cost_ns=0.0, **options), lanes=2, backend="torch")


ALL = ["original", "Branches(lanes=2)", "Sequential()", "NanoBatch(2)", "NanoBatch(4)"]


def test_a_first_call_takes_at_most_twice_the_originals_time_and_a_second(
    work: Work, tmp_path: Path
) -> None:
    work.capture_s = 4.0
    fast, x = auto_of(work), torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(fast(x), sorts(x))
        assert 4.0 < work.now <= 2 * 4.0 + 1.0
        assert work.measured == [ALL[:3]], "what fits is measured"
        text = dfx.explain(fast, x)
        for candidate in ALL[3:]:
            (line,) = [x for x in text.splitlines() if x.startswith(f"auto:   {candidate}:")]
            assert "not measured: " in line and "are left of" in line and "dfx.tune" in line
        assert len(list(tmp_path.glob("*.json"))) == 1
        dfx.tune(fast, x, budget_s=600.0)
        assert work.measured[1:] == [ALL]
        assert "are left of" not in dfx.explain(fast, x)


@pytest.mark.parametrize(("more", "fits"), [(1.0, 2), (5.0, 2), (13.0, 3)])
def test_the_backward_counts_too(work: Work, more: float, fits: int) -> None:
    """It is planned when the first candidate runs; after that it is known that others have one."""
    work.capture_s = 4.0
    fast, x = auto_of(work), torch.randn(8, 64, requires_grad=True)
    fast._dfx_core.decisions.purse.left_s = more
    (want,) = torch.autograd.grad(sorts(x).sum(), x)
    (got,) = torch.autograd.grad(fast(x).sum(), x)
    assert torch.equal(got, want)
    assert 4.0 < work.now <= 2 * 4.0 + more
    assert work.measured == [ALL[:fits]]


def test_an_original_for_want_of_time_is_not_kept(work: Work, tmp_path: Path) -> None:
    work.original_s = 2.0  # it cannot be called often enough to be measured
    fast, x = auto_of(work), torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(fast(x), sorts(x))
        # two calls to be measured against, and the one that was asked for
        assert work.now <= 3 * 2.0 and not work.measured
        text = dfx.explain(fast, x)
        assert "auto: the original runs" in text
        assert all(f"{name}: not measured: compiling and measuring" in text for name in ALL[1:])
        assert not list(tmp_path.glob("*.json")), "another process may have more time"
        assert dfx.tune(fast, x, budget_s=600.0).medians_ms.keys() == set(ALL)
        assert len(list(tmp_path.glob("*.json"))) == 1


def test_what_there_was_no_time_for_is_measured_once_calls_took_much_longer(
    work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "SHARE", 5)
    work.original_s = 2.0
    fast, x = auto_of(work), torch.randn(8, 64)
    with torch.no_grad():
        fast(x)
        first = dfx.explain(fast, x)
        later = fast._dfx_core.decision((x,), {}).later
        assert f"after {later.calls} calls like this" in first and not work.measured
        for _ in range(later.calls - 1):
            assert torch.equal(fast(x), sorts(x))
        assert not work.measured
        before = work.now
        assert torch.equal(fast(x), sorts(x))
        assert len(work.measured) == 1 and set(work.measured[0]) >= {"original", "Sequential()"}
        assert work.now - before <= later.calls * 2.0 / 5 + later.more_s
        assert "like this" not in dfx.explain(fast, x)
        assert torch.equal(fast(x), sorts(x)) and len(work.measured) == 1


def test_many_signatures_share_one_second(work: Work) -> None:
    work.capture_s = 0.2
    fast = auto_of(work)
    types = [torch.float32, torch.float64, torch.int32, torch.int64, torch.int16, torch.int8]
    with torch.no_grad():
        for dtype in types:
            x = torch.arange(512).reshape(8, 64).to(dtype)
            assert torch.equal(fast(x), sorts(x))
    once = 0.2
    assert work.now <= 2 * len(types) * once + 1.0 + 2 * once, "a prediction may be wrong once"
    assert len(work.measured) == len(types)
    assert len(work.measured[0]) > len(work.measured[-1]), "the second is spent"


def test_seconds_that_the_user_gives(work: Work, tmp_path: Path) -> None:
    work.capture_s = 4.0
    fast, x = auto_of(work, budget_s=600.0), torch.randn(8, 64)
    with torch.no_grad():
        fast(x)
        assert work.measured == [ALL]
        little = auto_of(work, budget_s=1e-9)
        assert torch.equal(little(x.double()), sorts(x.double()))
        assert "are left of 1e-09 s" in dfx.explain(little, x.double())
        with pytest.raises(dfx.PlanError, match="do not suffice to measure any candidate"):
            dfx.tune(auto_of(work), x, budget_s=1e-9)
    assert len(list(tmp_path.glob("*.json"))) == 1
