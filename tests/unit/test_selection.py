"""Choosing among several plans: what may be given, what may be returned, what is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla import settings
from dynaflow_xla.selection import Recipe, Selection, recipe

TWO = {"whole": "sequential", "plain": "original"}
THREE = {**TWO, "split": dfx.NanoBatch(2)}


def made(strategy: Any, select: Any, context: Any = None) -> Recipe | None:
    return recipe(strategy, select, context, settings.resolve_strategy)


def selection(select: Any, strategies: Any = THREE, context: Any = None) -> Selection:
    found = made(strategies, select, context)
    assert found is not None
    return Selection("model", found, lambda args, kwargs: len(args[0]))


def chosen(answer: Any, strategies: Any = THREE) -> str:
    one = selection(lambda call: answer, strategies)
    return one.named(one.answer(([1, 2],), {}))


def test_one_strategy_needs_no_choice() -> None:
    assert made("auto", None) is None and made(dfx.Branches(), None) is None


def test_strategies_are_resolved_and_the_original_has_none() -> None:
    found = made(THREE, len)
    assert found is not None and list(found.strategies) == ["whole", "plain", "split"]
    assert found.strategies["plain"] is None
    assert found.strategies["whole"] == dfx.Sequential()
    assert repr(found) == "select among whole, plain, split"


@pytest.mark.parametrize(
    ("strategy", "select", "words"),
    [
        ("auto", len, "select chooses among several strategies, so strategy must be a mapping.*got 'auto'"),
        (dfx.Branches(), len, "got Branches()"),
        (THREE, None, "strategy is a mapping.*give select=.*'whole', 'plain', 'split'"),
        ({}, None, "strategy is a mapping"),
        (THREE, "whole", "select must be a function of the call; got 'whole'"),
        ({}, len, "at least one strategy"),
        (THREE, lambda: "whole", "select is called with one argument, the call .*takes "),
        (THREE, lambda call, *, phase: "whole", "takes .call, ., phase"),
        ({1: "branches"}, len, "names of strategies for select must be text; got 1"),
        ({"a": "branch"}, len, "strategy must be one of .*got 'branch'"),
        ({"a": dfx.Branches}, len, "pass an instance"),
        ({"a": {"b": "branches"}}, len, "strategy must be one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_schedule(strategy: Any, select: Any, words: str) -> None:
    with pytest.raises(dfx.PlanError, match=words.replace("()", r"\(\)")):
        dfx.schedule(lambda x: x, strategy, select=select)


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("split", "split"), (0, "whole"), (2, "split"), (np.int8(1), "plain"), (np.array(2), "split"),
    ],
)  # fmt: skip
def test_a_name_or_an_index(answer: Any, name: str) -> None:
    assert chosen(answer) == name


@pytest.mark.parametrize("answer", [True, np.True_, np.array(True)])
def test_a_truth_value_chooses_between_two(answer: Any) -> None:
    assert chosen(answer, TWO) == "plain"
    assert chosen(not answer, TWO) == "whole"
    with pytest.raises(dfx.PlanError, match="an index from 0 to 2; got"):
        chosen(answer)


@pytest.mark.parametrize("answer", ["spilt", 3, -1, None, 1.0, np.array([1]), ["whole"]])
def test_an_answer_that_names_nothing(answer: Any) -> None:
    with pytest.raises(
        dfx.PlanError, match=r"must return one of 'whole', 'plain', 'split', an index"
    ) as e:
        chosen(answer)
    assert "test_selection.py:" in str(e.value), "where select is"


def test_an_error_in_select_is_told_and_kept() -> None:
    def broken(call: Any) -> str:
        raise KeyError("phase")

    one = selection(broken)
    with pytest.raises(
        dfx.PlanError, match=r"broken at .*test_selection.py:\d+\) raised KeyError: 'phase'"
    ) as e:
        one.answer(([1],), {})
    assert isinstance(e.value.__cause__, KeyError)


def test_what_select_gets() -> None:
    seen = []
    context = {"phase": "prefill"}
    one = selection(lambda call: seen.append(call) or call.context["phase"], context=context)
    assert one.answer(([1, 2, 3],), {"k": 4}) == "prefill"
    (call,) = seen
    assert call.args == ([1, 2, 3],) and call.kwargs == {"k": 4} and call.batch == 3
    assert call.context is context
    context["phase"] = "decode"
    assert one.answer(([1],), {}) == "decode", "the mapping itself, not a copy"


def test_a_builtin_whose_parameters_nobody_knows_may_choose() -> None:
    assert made(THREE, max) is not None


def test_calls_and_switches_are_counted_for_the_process() -> None:
    one, before = selection(len), dfx.stats()
    for name in ("split", "split", "plain", "split"):
        one.ran(name)
    after = dfx.stats()
    assert after.selected - before.selected == 4 and after.switches - before.switches == 2


def test_calls_are_counted() -> None:
    one = selection(len)
    for name in ("split", "split", "plain"):
        one.ran(name)
    one.ran("whole", traced=True)
    one.lowered()
    assert one.lines("split") == [
        "model: select chooses 'split' for these arguments",
        "select:   whole: Sequential(), 0 calls, traced into 1 program, ran last",
        "select:   plain: the original, 1 call",
        "select:   split: NanoBatch(2), 2 calls",
        "select: in 1 program a value decides when it runs, which is not counted",
    ]
    one.forget()
    assert one.lines("plain")[1:] == [
        "select:   whole: Sequential(), 0 calls",
        "select:   plain: the original, 0 calls",
        "select:   split: NanoBatch(2), 0 calls",
    ]
