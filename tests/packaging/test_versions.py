"""The benchmark that compares two versions: what it asks of their processes and makes of the answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import versions  # noqa: E402


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
