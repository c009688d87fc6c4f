"""Which of Python's own errors ours are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import DynaflowError, bad_argument, bad_rule

KINDS: dict[str, type[Exception]] = {
    "PlanError": ValueError,
    "RuleError": ValueError,
    "SeparabilityError": ValueError,
    "UnsupportedError": NotImplementedError,
    "VerificationError": AssertionError,
    "EngineError": RuntimeError,
}


@pytest.mark.parametrize("name", KINDS)
def test_ours_are_errors_that_a_caller_knows(name: str) -> None:
    with pytest.raises(KINDS[name], match="as asked") as caught:
        raise getattr(dfx, name)("as asked")
    assert isinstance(caught.value, dfx.DynaflowError)


def double(x: Any) -> Any:
    return x * 2


class Model:
    def __call__(self, x: Any) -> Any:
        return x * 2


WRONG_TYPES: dict[str, Any] = {
    "strategy": lambda: dfx.schedule(double, 42),  # type: ignore[arg-type]
    "class": lambda: dfx.schedule(double, dfx.Branches),  # type: ignore[arg-type]
    "function": lambda: dfx.schedule(42, "branches"),  # type: ignore[call-overload]
    "context": lambda: dfx.schedule(double, context=3),  # type: ignore[arg-type]
    "lanes": lambda: dfx.schedule(double, lanes="two"),  # type: ignore[arg-type]
    "lanes of a strategy": lambda: dfx.Branches(lanes="two"),  # type: ignore[arg-type]
    "margin of a strategy": lambda: dfx.Branches(margin="5 %"),  # type: ignore[arg-type]
    "batch_size": lambda: dfx.schedule(double, in_axes=0, batch_size="8"),  # type: ignore[arg-type]
    "count": lambda: dfx.Split.even(2.5),  # type: ignore[arg-type]
    "sizes": lambda: dfx.Split.of_sizes(["a"]),  # type: ignore[list-item]
    "no sizes": lambda: dfx.Split.of_sizes(3),  # type: ignore[arg-type]
    "weights": lambda: dfx.Split.balanced(["a", "b"], 2),  # type: ignore[list-item]
    "budget": lambda: dfx.Auto(budget_s="long"),  # type: ignore[arg-type]
    "rules": lambda: dfx.schedule(double, rules=[3]),  # type: ignore[list-item]
    "pattern": lambda: dfx.Op(3),  # type: ignore[arg-type]
    "tags": lambda: dfx.Op("a", tags=3),
    "module": lambda: dfx.Module(3),
    "predicate": lambda: dfx.Where(3),  # type: ignore[arg-type]
    "chain": lambda: dfx.Seq(dfx.Op("a"), 3),  # type: ignore[arg-type]
    "mark": lambda: dfx.mark(3),  # type: ignore[arg-type]
    "options of a compiler": lambda: dfx.schedule(double, compiler_options="fast"),  # type: ignore[arg-type]
    "a compiler that is an array": lambda: dfx.schedule(double, compiler=np.arange(3)),  # type: ignore[arg-type]
    "reset of the counts": lambda: dfx.stats(reset="yes"),  # type: ignore[arg-type]
    "check": lambda: dfx.schedule(double, check="no"),  # type: ignore[arg-type]
    "nano-batches": lambda: dfx.NanoBatch("2"),
    "seconds for the machine": lambda: dfx.measure_machine("long"),  # type: ignore[arg-type]
    "true seconds": lambda: dfx.measure_machine(True),
    "seconds to tune": lambda: dfx.tune(dfx.schedule(double), 1.0, budget_s="10"),  # type: ignore[arg-type]
    "a model's class": lambda: dfx.schedule(Model),
    "not scheduled": lambda: dfx.plan(double, 1.0),
    "not bucketed": lambda: dfx.bucketed(double, [1], in_axes=0),
}
WRONG_VALUES: dict[str, Any] = {
    "nano-batches": lambda: dfx.NanoBatch(0),
    "strategy": lambda: dfx.schedule(double, "fastest"),
    "lanes": lambda: dfx.schedule(double, lanes=0),
    "margin": lambda: dfx.Branches(margin=1.0),
    "no margin": lambda: dfx.Branches(margin=float("nan")),
    "batch_size": lambda: dfx.schedule(double, in_axes=0, batch_size=0),
    "backend": lambda: dfx.schedule(double, backend="tpu"),
    "compiler": lambda: dfx.schedule(double, compiler="gcc"),
    "count": lambda: dfx.Split.even(0),
    "sizes": lambda: dfx.Split.of_sizes([3, 0]),
    "no sizes": lambda: dfx.Split.of_sizes([]),
    "budget": lambda: dfx.Auto(budget_s=-1.0),
    "share": lambda: dfx.Auto(margin=2),
    "pattern": lambda: dfx.Op(""),
    "chain": lambda: dfx.Seq(dfx.Op("a")),
    "mark": lambda: dfx.mark("a/b"),
}


@pytest.mark.parametrize("what", WRONG_TYPES)
def test_a_wrong_type_is_a_type_error(what: str) -> None:
    with pytest.raises(TypeError, match="got|pass an instance") as caught:
        WRONG_TYPES[what]()
    assert isinstance(caught.value, DynaflowError)


@pytest.mark.parametrize("what", WRONG_VALUES)
def test_a_wrong_value_is_a_value_error_and_no_type_error(what: str) -> None:
    with pytest.raises(ValueError, match=r"got|must|takes") as caught:
        WRONG_VALUES[what]()
    assert isinstance(caught.value, DynaflowError)
    assert not isinstance(caught.value, TypeError)


def test_axes_that_are_an_array_are_no_axes() -> None:
    with pytest.raises(dfx.PlanError, match="out_axes is given without in_axes"):
        dfx.schedule(double, out_axes=np.arange(3))
    assert callable(dfx.schedule(double, out_axes=np.int64(0)))


def test_true_is_no_number() -> None:
    assert isinstance(bad_argument(True, int, "text"), TypeError)
    assert not isinstance(bad_argument(3, int, "text"), TypeError)
    assert isinstance(bad_rule(3, str, "text"), TypeError)
