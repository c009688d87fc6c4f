"""A decision that was measured is replaced by one that was measured only."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.tuning import budget, choice as choosing
from dynaflow_xla.tuning.choice import Choice
from dynaflow_xla.tuning.decisions import Decisions

MEASURED = Choice(None, "measured", {"original": 2.0})
UNMEASURED = Choice(None, "not measured: hooks")


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    "again", [UNMEASURED, Choice(None, "anew", {"original": 1.0}, candidate="")]
)
def test_decided_once_more(checks: bool, again: Any) -> None:
    decisions: Decisions[Choice] = Decisions(lambda reason: Choice(None, reason))
    later = budget.Later(1, 1.0, 0.0, checks=checks)
    first = decisions.put("f", dataclasses.replace(MEASURED, candidate="original", later=later))
    assert decisions.due("f", first)
    decisions.once_more("f", first)
    assert decisions.decided("f") is None
    again = dataclasses.replace(again, candidate="original")
    made = decisions.now("f", lambda _: again, decisions.put, margin=0.02)
    assert made is not None and made.later is None
    assert made.reason == (again.reason if again.medians_ms else "measured")
    assert decisions.decided("f") is made


def test_the_last_decision_that_was_measured() -> None:
    decisions: Decisions[Choice] = Decisions(lambda reason: Choice(None, reason))
    assert decisions.measured("f") is None
    decisions.put("f", UNMEASURED)
    assert decisions.measured("f") is None
    for checks in (True, False):
        later = budget.Later(1, 1.0, 0.0, checks=checks)
        first = decisions.put("f", dataclasses.replace(MEASURED, later=later))
        assert decisions.measured("f") is first
        decisions.once_more("f", first)  # it is being measured once more
        assert decisions.decided("f") is None and decisions.measured("f") is first


def test_tune_replaces_what_was_not_measured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choosing.instead_of(None, UNMEASURED, "f") is UNMEASURED
        assert choosing.instead_of(MEASURED, MEASURED, "f") is MEASURED


def test_tune_keeps_what_was_measured_and_says_so() -> None:
    said = r"tune measured nothing of 'f' \(not measured: hooks\); what was .* the original runs"
    with pytest.warns(dfx.FallbackWarning, match=said):
        assert choosing.instead_of(MEASURED, UNMEASURED, "f") is MEASURED
