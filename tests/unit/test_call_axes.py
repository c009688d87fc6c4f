"""``in_axes`` by place, by name, and as a pair; ``out_axes`` by name."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.batch.arguments import CallAxes, call_axes, named_results


def model(input_ids: Any, attention_mask: Any = None, *, labels: Any = None) -> None: ...


def open_ended(x: Any, *args: Any, scale: Any = 1, **kwargs: Any) -> None: ...


def positional_only(x: Any, /, **kwargs: Any) -> None: ...


def axes(in_axes: Any, *args: Any, function: Any = model, **kwargs: Any) -> CallAxes:
    return call_axes("model", in_axes, function, args, kwargs)


def test_names_hold_however_an_argument_is_passed() -> None:
    named = {"input_ids": 0, "attention_mask": 1}
    assert axes(named, 1, 2) == CallAxes((0, 1), {})
    assert axes(named, 1, attention_mask=2) == CallAxes((0,), {"attention_mask": 1})
    assert axes(named, attention_mask=2, input_ids=1).keyword == {
        "attention_mask": 1,
        "input_ids": 0,
    }
    assert axes(named, 1) == CallAxes((0,), {}), "an argument with a default may be left out"
    assert axes({"labels": 0}, 1, 2, labels=3) == CallAxes((None, None), {"labels": 0})
    assert axes({}, 1) == CallAxes((None,), {})
    bound = functools.partial(model, attention_mask=3)
    assert axes({"input_ids": 0}, 1, function=bound) == CallAxes((0,), {})


def test_names_of_open_ended_functions() -> None:
    assert axes({"x": 0, "mask": 1}, 1, mask=2, function=open_ended) == CallAxes((0,), {"mask": 1})
    assert axes({"args": 1}, 1, 2, 3, function=open_ended).positional == (None, 1, 1)
    assert axes({"args": (None, 2)}, 1, 2, 3, function=open_ended).positional == (None, None, 2)
    made = axes({"kwargs": 1}, 1, mask=2, scale=3, function=open_ended)
    assert made.keyword == {"mask": 1, "scale": None}
    assert axes({"kwargs": {"mask": 1}}, mask=2, other=3, x=1, function=open_ended).keyword == {
        "mask": 1, "other": None, "x": None,
    }  # fmt: skip
    with pytest.raises(dfx.PlanError, match=r"entry for each of 2 arguments; got \(0,\)"):
        axes({"args": (0,)}, 1, 2, 3, function=open_ended)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        dfx.PlanError, match="names 'ids'; the function has attention_mask, input_ids"
    ):
        axes({"ids": 0}, 1)
    with pytest.raises(
        dfx.PlanError, match=r"names 'mask'; the function has args, kwargs, scale, x"
    ):
        axes({"mask": 0}, 1, function=open_ended)
    with pytest.raises(dfx.PlanError, match="names 'ids'"):
        axes(((0,), {"ids": 0}), 1)
    with pytest.raises(dfx.PlanError, match=r"names 0; the function has"):
        axes({0: 0}, 1)


def test_a_pair_is_for_positional_and_keyword_arguments() -> None:
    assert axes(((), {"input_ids": 0}), input_ids=1, labels=2).keyword == {
        "input_ids": 0, "labels": None,
    }  # fmt: skip
    assert axes(((0,), {"labels": 1}), 1, labels=2) == CallAxes((0,), {"labels": 1})
    assert axes(((0, None), {"labels": 1}), 1, 2, labels=2) == CallAxes((0, None), {"labels": 1})
    assert axes([[0], {}], 1, labels=2) == CallAxes((0,), {"labels": None})
    with pytest.raises(dfx.PlanError, match="entry for each of 1 positional arguments"):
        axes(((0, 0), {"labels": 1}), 1, labels=2)


def test_a_tuple_is_for_positional_arguments() -> None:
    assert axes((0, None), 1, 2) == CallAxes((0, None), {})
    assert axes((0,), 1, labels=2) == CallAxes((0,), {"labels": 0}), "as jax.vmap"
    assert axes(np.int64(1), 1, 2, labels=3) == CallAxes((1, 1), {"labels": 0})
    assert call_axes("f", 1, model, (1, 2), {}, static={1}) == CallAxes((1, None), {})
    with pytest.raises(dfx.PlanError, match="entry for each of 2 positional arguments"):
        axes((0,), 1, 2)
    for wrong in (True, "x", 1.0, None):
        with pytest.raises(dfx.PlanError, match="in_axes must be an integer or a tuple"):
            axes(wrong, 1)


def test_a_tuple_and_a_mapping_are_what_fits_the_call() -> None:
    """The first argument may be a tuple, the second a mapping."""
    given = ((0, None), {"labels": 1})
    trees = ((1, 2), {"labels": 3})
    with pytest.raises(dfx.PlanError, match="may be a pair.*Give a mapping by parameter name"):
        axes(given, *trees)
    other = ((0, None), {"a": 1})  # no parameter's name: entries of the second argument
    assert axes(other, (1, 2), {"a": 3, "b": 4}) == CallAxes(other, {})
    assert axes(given, 1, {"labels": 3}) == CallAxes((0, None), {})
    assert axes(given, 1, 2, labels=3) == CallAxes((0, None), {"labels": 1})
    three = ((0, None, 0), {"a": 1})
    assert axes(three, (1, 2, 3), {"a": 3}) == CallAxes(three, {})
    by_name = {"input_ids": (0, None), "attention_mask": {"labels": 1}}
    assert axes(by_name, *trees) == CallAxes(given, {})


def test_a_name_that_means_two_arguments_is_refused() -> None:
    with pytest.raises(
        dfx.PlanError, match="'x', which is a positional argument and one by keyword"
    ):
        axes({"x": 0}, 1, x=2, function=positional_only)
    assert axes(((0,), {"x": 1}), 1, x=2, function=positional_only) == CallAxes((0,), {"x": 1})


def test_a_function_without_a_signature() -> None:
    class Hidden:
        __signature__ = 3

        def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    hidden = Hidden()
    assert axes({"x": 0}, x=1, function=hidden).keyword == {"x": 0}
    with pytest.raises(dfx.PlanError, match="nothing is known of its parameters"):
        axes({"x": 0}, 1, function=hidden)


def test_a_functions_parameters_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes half a millisecond for it, and ``select`` may ask for the batch at every call."""

    class Owner:
        def method(self, x: Any, *, mask: Any = None) -> None: ...

    asked: list[Any] = []
    real = inspect.signature
    monkeypatch.setattr(
        inspect, "signature", lambda f, *a, **k: (asked.append(f), real(f, *a, **k))[1]
    )
    first, second = Owner(), Owner()

    def fresh(x: Any, *, mask: Any = None) -> None: ...

    for function in (fresh, functools.partial(fresh, mask=3), lambda x, mask=None: None):
        asked.clear()
        for _ in range(3):
            assert axes({"x": 0, "mask": 1}, 1, mask=2, function=function) == CallAxes(
                (0,), {"mask": 1}
            )
        assert len(asked) == 1
    asked.clear()
    for owner in (first, second, first):
        assert axes({"x": 0}, 1, function=owner.method) == CallAxes((0,), {})
    assert len(asked) == 1, "bound methods are objects of one moment"
    assert axes({"self": 0, "x": 1}, owner, 2, function=Owner.method) == CallAxes((0, 1), {})
    with pytest.raises(dfx.PlanError, match="names 'self'"):
        axes({"self": 0}, 1, function=first.method)


def test_results_by_name() -> None:
    made = named_results("f", {"loss": dfx.Mean()}, ["loss", "logits"])
    assert made == {"loss": dfx.Mean(), "logits": 0}
    with pytest.raises(
        dfx.PlanError, match="out_axes names 'los'; the result has 'loss', 'logits'"
    ):
        named_results("f", {"los": dfx.Mean()}, ["loss", "logits"])
