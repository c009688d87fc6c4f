"""The benchmark that compares two versions: what it asks of their processes and makes of the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
from cpu import versions  # noqa: E402
from engine import overhead  # noqa: E402

RUNS = (
    "c_1_lane_1_step", "c_1_lane_2_steps", "c_1_lane_1000_steps", "c_2_lanes_2_steps", "c_2_lanes_1000_steps",
    "jit_x_plus_1", "jit_x_plus_1_c_1_lane_1_step", "jit_x_plus_1_c_1_lane_2_steps",
    "jit_x_plus_1_c_2_lanes_2_steps", "xla_plain_top_level", "xla_2_lanes_top_level", "xla_plain_inside_jit",
    "xla_2_lanes_inside_jit",
)  # fmt: skip


class Fake:
    """A version that takes a given time for each way."""

    def __init__(self, took: dict[str, float]) -> None:
        self.took, self.orders = took, []

    def ask(self, what: str, given: Any) -> Any:
        if what == "make":
            return sorted(self.took)
        self.orders.append(given)
        return {way: self.took[way] for way in given}


def test_ratios_are_new_to_old_of_ways_that_both_have() -> None:
    old, new = Fake({"jit": 2.0, "branches": 4.0}), Fake({"jit": 2.0, "branches": 3.0, "nano": 1.0})
    found = versions.compared({"old": old, "new": new}, "case", 4)
    assert found["new_to_old"] == {"branches": 0.75, "jit": 1.0}
    assert found["samples_ms"]["old"]["branches"] == [4.0] * 4
    for version in (old, new):
        assert [sorted(order) for order in version.orders] == [["branches", "jit"]] * 4


def test_a_checkout_that_is_not_what_is_imported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not what its process imports|process ended"):
        versions.Version(tmp_path)


class FakeEngine(Fake):
    """Its calls cost what they are given to cost, in microseconds."""

    def ask(self, what: str, given: Any) -> Any:
        if what == "make":
            return dict.fromkeys(self.took, 7)
        return super().ask(what, given)


def test_costs_of_a_call_are_compared_by_rounds() -> None:
    old = FakeEngine(dict.fromkeys(RUNS, 10.0) | {"c_1_lane_1000_steps": 1009.0})
    new = FakeEngine(dict.fromkeys(RUNS, 10.0) | {"xla_2_lanes_top_level": 14.0})
    found = overhead.compared({"old": old, "new": new}, 5)
    assert found["new_to_old"].pop("xla_2_lanes_top_level") == 1.4
    assert found["new_to_old"].pop("c_1_lane_1000_steps") == pytest.approx(10 / 1009)
    assert set(found["new_to_old"].values()) == {1.0}
    assert found["derived"]["old"]["step_ns"] == pytest.approx(1000)
    assert found["derived"]["new"]["xla_2_lanes_added_top_level_us"] == 4.0
    assert found["samples_us"]["old"]["jit_x_plus_1"] == [10.0] * 5
    for version in (old, new):
        assert sorted(version.orders) == sorted([name] for name in RUNS for _ in range(5))
    assert old.orders == new.orders, "a run is measured in both before the next one"


def test_every_run_is_measured() -> None:
    """The names above are those that a version's process has, and its calls take time."""
    questions = overhead._questions()
    assert set(questions["make"](1.0)) == set(RUNS)
    assert all(took > 0 for took in questions["turn"](sorted(RUNS)).values())
