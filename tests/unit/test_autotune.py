"""Decisions on disk: read back, broken files reported and made again, many writers; and the choice."""

from __future__ import annotations

import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import FallbackWarning, PlanError
from dynaflow_xla.tuning import autotune

DECISION: dict[str, Any] = {
    "choice": "Branches()",
    "reason": "it was faster",
    "medians_ms": {"original": 2.0, "b": 1.5},
    "predicted_ms": {"b": 1.25},
    "left_out": {"c": "far behind"},
    "seconds": 0.5,
    "costs": autotune.RegionCosts({"sort": 1500.0, "dot": 20.5}, 1.25),
    "memory": "a call takes 4 MiB of fresh memory",
    "far": False,
    "unsure": False,
}
WRITTEN = DECISION | {"costs": {"region_ns": {"sort": 1500.0, "dot": 20.5}, "scale": 1.25}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    yield tmp_path / "deep" / "cache"


def test_the_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DYNAFLOW_XLA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    at_home = tmp_path / ".cache" / "dynaflow_xla"
    assert private_files.cache_folder() == at_home
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert private_files.cache_folder() == at_home
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert private_files.cache_folder() == tmp_path / "caches" / "dynaflow_xla"
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "mine"))
    assert private_files.cache_folder() == tmp_path / "mine"


def test_what_is_stored_is_read_back(folder: Path) -> None:
    assert autotune.load("k") is None  # nothing there: no warning (warnings are errors here)
    autotune.store("k", DECISION)
    assert autotune.load("k") == DECISION
    autotune.store("k", DECISION | {"choice": "original"})
    assert autotune.load("k") == DECISION | {"choice": "original"}
    assert [p.name for p in folder.iterdir()] == ["k.json"], "no temporary files stay behind"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b"{}",
        json.dumps(WRITTEN | {"medians_ms": 3}).encode(),
        json.dumps(WRITTEN | {"medians_ms": {"original": "fast"}}).encode(),
        json.dumps({k: v for k, v in WRITTEN.items() if k != "choice"}).encode(),
        json.dumps(WRITTEN).encode()[:-9],
        json.dumps(WRITTEN | {"costs": 3}).encode(),
        json.dumps(WRITTEN | {"costs": {"region_ns": {"sort": -1.0}, "scale": 1.0}}).encode(),
        json.dumps(WRITTEN | {"costs": {"region_ns": {}, "scale": float("nan")}}).encode(),
    ],
)  # fmt: skip
def test_a_corrupt_file_is_said_removed_and_made_again(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    path = folder / "k.json"
    path.write_bytes(content)
    with pytest.warns(FallbackWarning, match=r"k\.json cannot be read .* it is made again") as said:
        assert autotune.load("k") is None
    assert len(said) == 1 and not path.exists()
    assert autotune.load("k") is None  # said once
    autotune.store("k", DECISION)
    assert autotune.load("k") == DECISION


def test_a_file_that_cannot_be_removed_is_no_error(folder: Path) -> None:
    (folder / "k.json" / "inside").mkdir(parents=True)
    with pytest.warns(FallbackWarning, match="cannot be read"):
        assert autotune.load("k") is None
    with pytest.warns(FallbackWarning, match="cannot be kept"):
        autotune.store("k", DECISION)
    assert [p.name for p in folder.iterdir()] == ["k.json"], "no temporary files stay behind"


def test_a_cache_folder_that_is_a_file_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "file"))
    assert autotune.load("k") is None  # it is told once, by whoever stores a decision
    with pytest.warns(FallbackWarning, match="cannot be kept"):
        autotune.store("k", DECISION)


def test_a_cache_folder_may_begin_with_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", "~/kept")
    assert private_files.cache_folder() == tmp_path / "kept"


def test_another_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = autotune.cache_key("graph", "jax 0.10")
    assert key == autotune.cache_key("graph", "jax 0.10") and len(key) == 32
    others = {
        autotune.cache_key("graph", "jax 0.11"),
        autotune.cache_key("graphjax 0.10"),
        autotune.cache_key("graph", "jax 0.10", ""),
    }
    monkeypatch.setattr(autotune, "CACHE_VERSION", autotune.CACHE_VERSION + 1)
    others.add(autotune.cache_key("graph", "jax 0.10"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(999)))
    others.add(autotune.cache_key("graph", "jax 0.10"))
    assert len(others) == 5 and key not in others


def test_a_decision_of_another_version_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autotune.store(autotune.cache_key("graph"), DECISION)
    monkeypatch.setattr(autotune, "CACHE_VERSION", autotune.CACHE_VERSION + 1)
    assert autotune.load(autotune.cache_key("graph")) is None


def test_many_writers_and_readers(folder: Path) -> None:
    """A reader sees one whole decision or none, never a mixture, never an error."""
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        mine = DECISION | {"choice": f"s{number}", "reason": f"r{number}" * 500}
        start.wait()
        for _ in range(60):
            if number % 2 == 0:
                autotune.store("k", mine)
            found = autotune.load("k")
            if found is not None and found["reason"] != f"r{found['choice'][1:]}" * 500:
                wrong.append(found)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and not said
    assert autotune.load("k") is not None
    assert [p.name for p in folder.iterdir()] == ["k.json"]


def test_a_decision_that_is_no_json_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(TypeError):
        autotune.store("k", {"choice": object()})
    assert not folder.exists() or not list(folder.iterdir())


def test_close_candidates_are_measured_on(sleep: Callable[[float], None]) -> None:
    calls: dict[str, int] = {"a": 0, "b": 0, "slow": 0}
    order: list[str] = []

    def run(name: str) -> None:
        calls[name] += 1
        order.append(name)
        sleep(0.05 if name == "slow" else 0.005)

    runs = {name: (lambda name=name: run(name)) for name in calls}  # type: ignore[misc]
    medians = autotune.measure(runs, budget_s=60.0, rounds=4, sample_s=0.0)
    assert set(medians) == set(calls) and medians["slow"] == pytest.approx(50.0)
    # Two untimed calls of each, then rounds of two calls of each.
    rounds = [order[6 + 6 * r : 12 + 6 * r : 2] for r in range(4)]
    assert all(sorted(names) == ["a", "b", "slow"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1, "the order is drawn anew"
    assert calls["slow"] == 2 + 4 * 2
    assert {calls["a"], calls["b"]} == {2 + 8 * 2}


@pytest.mark.parametrize("plain", [(), ("slow",)])
def test_what_is_plain_runs_for_a_while_before_the_first_sample(
    sleep: Callable[[float], None], plain: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "WARM_S", 0.1)
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        sleep(0.02)

    runs = {name: (lambda name=name: run(name)) for name in ("a", "slow")}  # type: ignore[misc]
    autotune.measure(runs, budget_s=60.0, rounds=1, sample_s=0.0, plain=plain)
    warm = order[2:8]  # after a call of each
    assert warm == (["slow"] * 6 if plain else ["a", "slow"] * 3)


@dataclass
class Region:
    id: int
    name: str
    cost_ns: float


@dataclass
class Partition:
    regions: tuple[Region, ...]


def test_measured_costs_of_other_partitions() -> None:
    costs = autotune.RegionCosts({"sort": 900.0, "dot": 60.0}, 3.0)
    pg: Any = Partition((Region(0, "sort", 5.0), Region(1, "new", 7.0)))
    assert costs.apply(pg) == {0: 900.0, 1: 21.0}
    names = ["sort@0", "sort@1", "dot@0+1", "merge_0", "new@1"]
    split: Any = Partition(tuple(Region(i, name, 10.0) for i, name in enumerate(names)))
    assert costs.apply(split, (1, 2)) == {0: 300.0, 1: 600.0, 2: 60.0, 3: 30.0, 4: 30.0}


def test_a_budget_that_is_spent_still_gives_three_rounds(sleep: Callable[[float], None]) -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        sleep(0.2 if calls > 2 else 1e-6)  # slower than the calls by which the budget was judged

    autotune.measure({"a": run}, budget_s=0.2, rounds=15, sample_s=0.0)
    assert calls == 2 + 3 * 2


def test_a_budget_that_cannot_suffice_is_an_error(sleep: Callable[[float], None]) -> None:
    with pytest.raises(PlanError, match=r"0 s do not suffice to measure 1 candidates 3 times"):
        autotune.measure({"a": lambda: sleep(0.001)}, budget_s=0.0)


@pytest.mark.parametrize(
    ("medians", "choice", "words"),
    [
        ({"original": 1.0}, "original", "only candidate"),
        ({"original": 1.0, "b": 1.0}, "original", "not beaten by b"),
        ({"original": 1.0, "b": 0.98, "c": 2.0}, "original", "not beaten by b"),
        ({"original": 1.0, "b": 0.9, "c": 0.8}, "c", "c took 0.8 ms, the original 1 ms"),
        ({"original": 0.5, "b": 0.9}, "original", "not beaten by b"),
    ],
)
def test_the_original_wins_unless_it_is_beaten(
    medians: dict[str, float], choice: str, words: str
) -> None:
    measured = autotune.Medians({name: [ms] * 11 for name, ms in medians.items()})
    picked, reason = autotune.pick(measured, baseline="original", margin=0.03)
    assert picked == choice and words in reason


@pytest.mark.parametrize(("won", "of", "choice"), [(3, 3, "b"), (4, 4, "b"), (2, 3, "original")])
def test_a_few_rounds_have_to_be_won_all(won: int, of: int, choice: str) -> None:
    measured = autotune.Medians({"b": [0.7] * won + [1.3] * (of - won), "original": [1.0] * of})
    picked, reason = autotune.pick(measured, baseline="original", margin=0.03)
    assert picked == choice
    assert reason.endswith(f"which was faster in {won} of {of} rounds only") or picked == "b"


@pytest.mark.parametrize(
    ("won", "of", "choice"),
    [(4, 5, "original"), (5, 6, "b"), (7, 11, "original"), (8, 11, "b"), (14, 22, "original"),
     (15, 22, "b")],
)  # fmt: skip
def test_what_chance_explains_does_not_beat_the_original(won: int, of: int, choice: str) -> None:
    """It takes 10% less each time, or 30%."""
    measured = autotune.Medians({"b": [0.7] * won + [1.1] * (of - won), "original": [1.0] * of})
    assert measured["b"] <= 0.901
    picked, reason = autotune.pick(measured, baseline="original", margin=0.03)
    chance = measured.chance("b", "original")
    assert picked == choice and (chance <= autotune.CHANCE) == (choice == "b")
    told = f"which was faster in {won} of {of} rounds; of two that are equally fast, one looks so "
    assert picked == "b" or (told in reason and f"with probability {chance:.2g} (" in reason)


def test_both_speeds_of_a_program_count() -> None:
    """A median tells the commoner one alone: 10.7 of what takes 12.4 on average."""
    steady, jumping = [10.8] * 22, [10.7, 10.7, 15.5] * 7 + [10.7]
    measured = autotune.Medians({"original": jumping, "steady": steady})
    assert 12.0 < measured["original"] < 13.2
    assert autotune.pick(measured, baseline="original", margin=0.03)[0] == "original"
    assert measured.doubt("steady", "original")  # it is faster in a third of the rounds only
    jumping = [10.9, 15.5, 10.9, 10.7, 15.5] * 4 + [10.9, 15.5]
    measured = autotune.Medians({"original": jumping, "steady": steady})
    assert autotune.pick(measured, baseline="original", margin=0.03)[0] == "steady"


def test_by_how_much_a_round_is_won_counts() -> None:
    """Of two that are equal, one is faster in 13 of 20 rounds 13% of the time."""
    times = [18.9 + k / 50 for k in range(13)] + [25.5 + k / 50 for k in range(7)]
    measured = autotune.Medians(
        {"original": [24 + (7 * k) % 20 / 20 for k in range(20)], "b": times}
    )
    assert measured.rounds_won("b", "original") == (13, 20)
    assert autotune.pick(measured, baseline="original", margin=0.03)[0] == "b"


def test_the_next_candidate_may_beat_the_original_surely() -> None:
    measured = autotune.Medians(
        {"original": [1.0] * 11, "wild": [0.3] * 6 + [1.4] * 5, "steady": [0.9] * 11}
    )
    assert autotune.pick(measured, baseline="original", margin=0.03)[0] == "steady"


@pytest.mark.parametrize("regardless", [True, False])
@pytest.mark.parametrize("better", [True, False])
def test_a_gain_in_doubt_is_measured_on(
    sleep: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, regardless: bool, better: bool
) -> None:
    """Of long calls a row is one call.

    The original takes 4 or 8 ms by chance: seven rounds do not show whether 5 ms are less.
    """
    monkeypatch.setattr(autotune, "ROW_S", 0.0)
    counts = {"original": 0, "b": 0, "slow": 0}
    drawn = random.Random(3)

    def run(name: str) -> None:
        counts[name] += 1
        often = 0.8 if better else 0.15
        seconds = {"b": 0.005, "slow": 0.05, "original": 0.008 if drawn.random() < often else 0.004}
        # The first rounds look alike in both.
        if name == "original" and counts[name] < 20:
            seconds[name] = 0.004 if counts[name] // 2 % 4 == 2 else 0.008
        sleep(seconds[name])

    runs = {name: (lambda name=name: run(name)) for name in counts}  # type: ignore[misc]
    medians = autotune.measure(
        runs, budget_s=0.65, rounds=11, sample_s=0.0, regardless=regardless, plain=["original"], margin=0.03
    )  # fmt: skip
    assert len(medians.samples["slow"]) < 10
    if not regardless:  # the seconds are the user's
        assert len(medians.samples["b"]) < 10
        assert medians.in_doubt(["original"], 0.03) == ["original", "b"]
        return
    assert len(medians.samples["b"]) == len(medians.samples["original"]) > 25
    assert autotune.pick(medians, "original", 0.03)[0] == ("b" if better else "original")


@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize("budget_s", [60.0, 0.05])
def test_what_is_close_is_compared_in_rows(
    sleep: Callable[[float], None], gains: bool, budget_s: float
) -> None:
    """Lanes gain, or lose, only after some calls in a row."""
    last, since = "", 0
    counts = {"original": 0, "lanes": 0, "slow": 0}

    def run(name: str) -> None:
        nonlocal last, since
        since = since + 1 if name == last else 0
        last = name
        counts[name] += 1
        soon, then = (1.0e-3, 0.9e-3) if gains else (0.95e-3, 1.05e-3)
        seconds = {"original": 1e-3, "slow": 1.5e-3, "lanes": soon if since < 5 else then}
        sleep(seconds[name])

    runs = {name: (lambda name=name: run(name)) for name in counts}  # type: ignore[misc]
    made = autotune.measure(runs, budget_s=budget_s, rounds=7, plain=["original"], margin=0.03)
    picked, reason = autotune.pick(made, "original", 0.03)
    if budget_s < 1.0:  # no time for rows: what was known before counts
        assert not made.in_rows and picked == ("original" if gains else "lanes")
        return
    assert made.in_rows == ("original", "lanes") and "in rows of calls" in reason
    assert len(made.samples["lanes"]) == len(made.samples["original"]) == 7
    assert picked == ("lanes" if gains else "original")


def test_what_is_close() -> None:
    def close(**ms: float) -> list[str]:
        made = autotune.Medians({name: [value] * 11 for name, value in ms.items()})
        return made.close(["plain", "other"], 0.03)

    assert close(plain=1.0, other=1.3, a=0.95) == ["plain", "a"]
    assert close(plain=1.0, other=1.3, a=1.05, slow=1.2) == ["plain", "a"]
    assert close(plain=1.0, other=1.02, a=1.05, b=1.06, c=1.07) == ["plain", "other", "a", "b"]
    assert close(plain=1.0, other=0.5, a=0.51) == ["other", "a"]
    assert not close(plain=1.0, other=1.3, a=0.8), "a gain that rows do not undo"
    assert not close(plain=1.0, other=1.3, a=1.2)
    assert not close(plain=1.0, other=1.3)


def test_only_what_was_compared_in_rows_is_chosen() -> None:
    samples = {"original": [2.0] * 7, "a": [1.9] * 7, "b": [1.0] * 11, "whole": [1.5] * 11}
    made = autotune.Medians(samples, in_rows=["original", "a"])
    assert made.fastest(["original", "whole"]) == "original"
    assert autotune.pick(made, "original", 0.03)[0] == "a"
    assert not made.beats("b", "original", 0.03)


def test_what_is_in_doubt() -> None:
    def doubted(**samples: list[float]) -> list[str]:
        return autotune.Medians(samples).in_doubt(["plain", "other"], 0.03)

    wild = [0.3] * 6 + [1.4] * 5
    alike = {"plain": [1.0] * 11, "other": [1.1] * 11}
    assert doubted(**alike, wild=wild) == ["plain", "wild"]
    assert not doubted(**alike, wild=wild, steady=[0.9] * 11), "one is sure"
    assert not doubted(**alike, slow=[1.2] * 11)
    assert not doubted(**alike, same=[0.98] * 11), "less than the margin"
    assert doubted(plain=[2.0] * 11, other=[1.0] * 11, wild=wild) == ["other", "wild"]


def _samples(center: float, spread: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [center * (1 + spread * (2 * rng.random() - 1)) for _ in range(9)]


def test_the_model_decides_between_what_rounds_do_not_tell_apart() -> None:
    measured = autotune.Medians(
        {
            "original": _samples(4.0, 0.02, 0),
            "a": [1.96, 2.06] * 4 + [1.98],
            "b": [2.05, 1.95] * 4 + [2.0],
        }
    )
    fast, slow = sorted(["a", "b"], key=lambda name: measured[name])
    assert measured.doubt(fast, slow), "the test needs two that are not told apart"
    assert autotune.pick(measured, "original", 0.03)[0] == fast
    picked, reason = autotune.pick(
        measured, "original", 0.03, predicted={fast: 2.2, slow: 2.0, "original": 1.0}
    )
    assert picked == slow
    assert (
        reason.startswith(f"{slow} took")
        and f"{fast} {measured[fast]:.3g} ms, which is not surely" in reason
    )
    for predicted in (
        {fast: 2.0, slow: 2.2},
        {fast: 2.0, slow: 1.99},
        {fast: 2.0},
        {slow: 1.0},
        {},
    ):
        assert autotune.pick(measured, "original", 0.03, predicted=predicted)[0] == fast
    clear = autotune.Medians(
        {
            "original": _samples(4.0, 0.02, 0),
            "a": _samples(1.9, 0.01, 1),
            "b": _samples(2.0, 0.01, 2),
        }
    )
    assert autotune.pick(clear, "original", 0.03, predicted={"a": 2.2, "b": 2.0})[0] == "a"
    far = autotune.Medians(
        {"original": _samples(4.0, 0.02, 0), "a": _samples(1.9, 0.4, 1), "b": _samples(2.4, 0.4, 2)}
    )
    assert autotune.pick(far, "original", 0.03, predicted={"a": 2.2, "b": 2.0})[0] == min(
        "ab", key=lambda name: far[name]
    )


def test_what_has_to_gain_more_is_told() -> None:
    measured = autotune.Medians({"original": [2.0] * 9, "other way": [1.9] * 9})
    picked, reason = autotune.pick(measured, "original", 0.03, {"other way": 0.1})
    assert picked == "original" and "which has to gain 10%" in reason
    assert autotune.pick(measured, "original", 0.03)[0] == "other way"


class Device:
    """Takes what calls enqueue, and needs its time for it once somebody waits."""

    def __init__(self) -> None:
        self.now, self.enqueued, self.most = 0.0, 0, 0

    def clock(self) -> float:
        return self.now

    def run(self, given: Any) -> None:
        self.now += 1e-6
        self.enqueued += 1
        self.most = max(self.most, self.enqueued)

    def wait(self) -> None:
        self.now += 1e-3 * self.enqueued
        self.enqueued = 0


@pytest.mark.parametrize("in_a_row", [False, True])
def test_what_a_device_does_later_counts(monkeypatch: pytest.MonkeyPatch, in_a_row: bool) -> None:
    device = Device()
    monkeypatch.setattr(autotune.time, "perf_counter", device.clock)
    run = autotune.Fresh(lambda: None, device.run, device.wait, lambda: in_a_row)
    seconds = autotune._timed(run, 50)
    assert seconds == pytest.approx(50 * 1.001e-3) and not device.enqueued
    assert device.most == (autotune._IN_A_ROW if in_a_row else 1)
    run()
    assert not device.enqueued
