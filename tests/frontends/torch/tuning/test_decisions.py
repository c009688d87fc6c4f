"""``Auto``'s decisions for PyTorch: who measures and beside what, ``dfx.tune``, and what ``explain`` says."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from far_cores import check_a_faster_way_waits_for_near_cores, check_whom_decisions_serve

import dynaflow_xla as dfx
from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.torch.native.cuda import devices
from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import autotune, quiet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.usefixtures("timeless")


class Lanes(dfx.Auto):
    """With one candidate."""

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        return [dfx.Branches(lanes=lanes)]


def sorts(x: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values
    with dfx.mark("right"):
        b = torch.sort(-x).values
    return a + b


def scheduled(**options: Any) -> Any:
    return dfx.schedule(sorts, Lanes(min_cost_ns=0.0, **options), lanes=2, backend="torch")


@pytest.fixture
def x() -> Any:
    return torch.randn(8, 256)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of each measurement, in which every candidate runs once and lanes win."""
    found: list[dict[str, Any]] = []

    def measure(runs: Any, **options: Any) -> autotune.Medians:
        found.append(options)
        for run in runs.values():
            run()
        return autotune.Medians({name: [2.0 if name == "original" else 1.0] for name in runs})

    monkeypatch.setattr(autotune, "measure", measure)
    return found


def test_a_decision_of_far_cores_is_for_processes_that_find_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    def decided() -> Any:
        fast = scheduled(budget_s=60.0)
        with torch.no_grad():
            assert torch.equal(fast(x), sorts(x))
            return fast._dfx_core.decision((x,), {})

    check_whom_decisions_serve(monkeypatch, decided)


def test_what_far_cores_leave_open_is_decided_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    fast = scheduled(budget_s=60.0)

    def call() -> Any:
        assert torch.equal(fast(x), sorts(x))
        return fast._dfx_core.decision((x,), {})

    with torch.no_grad():
        check_a_faster_way_waits_for_near_cores(
            monkeypatch, call, lambda: dfx.explain(fast, x), fast._dfx_core.decisions
        )


@pytest.mark.parametrize("on_gpu", [False, True])
def test_far_cores_are_nothing_to_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any, on_gpu: bool
) -> None:
    """A plan on a GPU that gains an eighth is taken, on a machine of two cores, too."""

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        times = {name: 1.0 if name == "original" else 0.87 for name in runs}
        return autotune.Medians({name: [ms] * 12 for name, ms in times.items()}, far=True)

    monkeypatch.setattr(distance, "round_trip_ns", lambda: 320.0)
    monkeypatch.setattr(autotune, "measure", measure)
    if on_gpu:
        monkeypatch.setattr(devices, "of", lambda *_: {torch.device("cuda", 0)})
    fast = scheduled(budget_s=60.0)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), sorts(x))
        made = fast._dfx_core.decision((x,), {})
    assert (made is not None and made.child is not None and not made.far) == on_gpu


def test_new_sizes_while_cores_are_far_take_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    """A cache that grows would pay for a decision at each call."""
    trip = 320.0
    monkeypatch.setattr(distance, "round_trip_ns", lambda: trip)
    measured: list[list[str]] = []

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        measured.append(list(runs))
        for run in runs.values():
            run()
        return autotune.Medians(
            {n: [1.0 if n == "original" else 0.9] * 12 for n in runs}, trip > 200
        )

    monkeypatch.setattr(autotune, "measure", measure)
    fast = scheduled(budget_s=60.0)
    core = fast._dfx_core
    with torch.no_grad():
        for rows in range(1, 9):
            grown = torch.cat([x] * rows)
            assert torch.equal(fast(grown), sorts(grown))
        assert len(measured) == 1 and "came once" in dfx.explain(fast, grown)
        trip = 50.0
        core.decisions._looked = -1e9  # a second later
        grown = torch.cat([x] * 9)
        assert torch.equal(fast(grown), sorts(grown))
        assert len(measured) == 2 and core.decision((grown,), {}).planned
        grown = torch.cat([x] * 10)
        assert torch.equal(fast(grown), sorts(grown))
        assert len(measured) == 2 and core.decision((grown,), {}).planned
        trip = 320.0
        again = torch.cat([x] * 5)  # comes again: measured, and waits
        for _ in range(2):
            assert torch.equal(fast(again), sorts(again))
        assert len(measured) == 3 and "tries again" in dfx.explain(fast, again)
        grown = torch.cat([x] * 11)
        assert torch.equal(fast(grown), sorts(grown))
        assert len(measured) == 3 and core.decision((grown,), {}).planned, "as what was decided"


def test_threads_that_make_the_first_call_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    """One thread measures; that the others called meanwhile is noticed, and nothing is kept."""
    fast, want = scheduled(budget_s=60.0), sorts(x)
    measuring: list[str] = []
    most = 0
    begun, others_called = threading.Event(), threading.Event()
    real = autotune.measure

    def measure(runs: Any, **options: Any) -> Any:
        nonlocal most
        measuring.append(threading.current_thread().name)
        most = max(most, len(measuring))
        measured.add(threading.get_ident())
        begun.set()
        assert others_called.wait(300)
        try:
            return real(runs, **options)
        finally:
            measuring.pop()

    monkeypatch.setattr(autotune, "measure", measure)
    start = threading.Barrier(4)
    results: list[Any] = []
    measured: set[int] = set()
    beside: list[Any] = []

    def first_call() -> None:
        start.wait()
        with torch.no_grad():
            results.append(fast(x))
            if threading.get_ident() not in measured:
                assert begun.wait(300)  # the first call may be over before that
                beside.append(fast(x))
        if len(beside) >= 3 or len(measuring) > 1:
            others_called.set()

    threads = [threading.Thread(target=first_call, name=f"caller {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert most == 1 and len(results) == 4 and all(torch.equal(want, r) for r in results)
    assert not list(tmp_path.glob("*.json")), "a decision that was disturbed is not kept"
    core = fast._dfx_core
    others_called.set()
    with torch.no_grad():
        assert core.decision((x,), {}) is None
        assert "beside it; a later call tries again" in dfx.explain(fast, x)
        until = time.monotonic() + 300
        while core.decision((x,), {}) is None and time.monotonic() < until:
            assert torch.equal(want, fast(x))  # alone now
        assert core.decision((x,), {}) is not None
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_what_is_never_undisturbed_is_the_original_and_says_so(
    monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    fast, now = scheduled(), 0.0
    fast._dfx_core.decisions.put_off = quiet.PutOff(clock=lambda: now)

    def measure(*_: Any, **__: Any) -> Any:
        raise quiet.Disturbed("not measured: the thread 'x' ran beside it")

    monkeypatch.setattr(autotune, "measure", measure)
    with torch.no_grad():
        for _ in range(100):
            assert torch.equal(fast(x), sorts(x))
            if fast._dfx_core.decision((x,), {}) is not None:
                break
            now += 1000.0
        choice = fast._dfx_core.decision((x,), {})
        assert choice is not None and choice.child is None
        assert "dfx.tune measures" in dfx.explain(fast, x)


def test_tune_measures_whatever_is_known(
    tmp_path: Path, measured: list[dict[str, Any]], x: Any
) -> None:
    fast = scheduled(budget_s=3.0)
    strategy = fast._dfx_core.options.strategy
    with torch.no_grad():
        fast(x)
        (file,) = tmp_path.glob("*.json")
        before = file.read_text()
        file.write_text(json.dumps({**json.loads(before), "reason": "of another day"}))
        assert not dfx.tune(fast, x, budget_s=7.0).reason.startswith("cached")
        assert "of another day" not in file.read_text()
        again = scheduled(budget_s=3.0)
        assert dfx.tune(again, x, budget_s=8.0).reason == json.loads(before)["reason"]
    assert [options["budget_s"] for options in measured] == [3.0, 7.0, 8.0]
    assert strategy.budget_s == 3.0


def test_tune_says_that_a_budget_is_too_small(tmp_path: Path, x: Any) -> None:
    fast = scheduled()
    strategy = fast._dfx_core.options.strategy
    before = dict(vars(strategy))
    with torch.no_grad(), pytest.raises(PlanError, match="do not suffice to measure"):
        dfx.tune(fast, x, budget_s=1e-9)
    assert vars(strategy) == before and fast._dfx_core.decision((x,), {}) is None
    assert not list(tmp_path.glob("*.json"))


def test_tune_leaves_the_strategy_alone_while_it_measures(
    monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    """Another function may share it."""
    strategy = Lanes(min_cost_ns=0.0, budget_s=3.0)
    fast, seen = dfx.schedule(sorts, strategy, lanes=2, backend="torch"), []

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        seen.append(strategy.budget_s)
        return autotune.Medians(dict.fromkeys(runs, [1.0]))

    monkeypatch.setattr(autotune, "measure", measure)
    with torch.no_grad():
        dfx.tune(fast, x, budget_s=9.0)
    assert seen == [3.0]
