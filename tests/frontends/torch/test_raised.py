"""What a region raised, as the caller gets it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import EngineError, step_failed

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

BOTH = [dfx.Op("*")]


def test_what_the_original_raises_is_caught() -> None:
    fast = dfx.schedule(lambda a: torch.linalg.cholesky(a).sin(), dfx.NanoBatch(2), in_axes=0)
    good = torch.eye(5).repeat(4, 1, 1)
    fast(good)
    with pytest.raises(torch.linalg.LinAlgError, match="region .* failed: .*LinAlgError") as caught:
        fast(-good)
    assert isinstance(caught.value, EngineError)
    assert type(caught.value.__cause__) is torch.linalg.LinAlgError


def test_an_index_out_of_range_is_caught() -> None:
    fast = dfx.schedule(lambda x, i: torch.sin(x[i]), dfx.NanoBatch(2), in_axes=(None, 0))
    x = torch.randn(5, 3)
    fast(x, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(IndexError) as caught:
        fast(x, torch.tensor([0, 1, 2, 9]))
    assert isinstance(caught.value, EngineError)


class Told(Exception):
    """Of its own arguments and text."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.code = code

    def __str__(self) -> str:
        return f"told {self.args[1]}"


@pytest.mark.parametrize("cause", [
    Told(3, "why"), KeyError("k"), FileNotFoundError(2, "no", "file"), RuntimeError("r"),
    UnicodeDecodeError("utf8", b"a", 0, 1, "why"), NotImplementedError("n"), AssertionError("a"),
], ids=lambda cause: type(cause).__name__)  # fmt: skip
def test_errors_of_a_steps_own_kind(cause: Exception) -> None:
    made = step_failed("region failed", cause)
    for error in (made, copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(error, EngineError) and isinstance(error, type(cause))
        assert type(error) is type(made) and str(error) == "region failed"
        assert vars(error) == vars(cause)
    assert type(step_failed("another", cause)) is type(made)


@pytest.mark.parametrize(
    "cause", [StopIteration(), KeyboardInterrupt(), ExceptionGroup("g", [ValueError()])]
)
def test_errors_that_are_the_engines_alone(cause: BaseException) -> None:
    assert type(step_failed("region failed", cause)) is EngineError


def test_no_line_is_named_where_there_is_none() -> None:
    fast: Any = dfx.schedule(torch.nn.Linear(8, 8), "branches", rules=BOTH)
    with pytest.raises(EngineError, match=r"of 'Linear' failed: RuntimeError"):
        fast(torch.randn(6, 8).double())


class Computes(dfx.Strategy):
    """Calls a function of its own, and puts all on one lane."""

    def __init__(self, where: str, call: Any) -> None:
        self.where, self.call = where, call

    def rules(self, graph: Any) -> Any:
        if self.where == "rules":
            self.call()

    def split(self, context: Any) -> Any:
        if self.where == "split":
            self.call()
        return super().split(context)

    def schedule(self, s: Any) -> None:
        if self.where == "schedule":
            self.call()
        while ready := s.ready():
            for op in ready:
                s.execute(op)


@pytest.mark.parametrize("in_axes", [None, 0])
@pytest.mark.parametrize("where", ["rules", "split", "schedule"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_the_code_of_a_strategy_raises_comes_as_it_is(
    where: str, grad: bool, in_axes: Any
) -> None:
    def fails() -> None:
        try:
            raise ValueError("because")
        except ValueError as cause:
            raise KeyError("mine") from cause

    x = torch.randn(6, 4, requires_grad=grad)
    fast = dfx.schedule(lambda x: x.sin() + x.cos(), Computes(where, fails), in_axes=in_axes)
    for call in (fast, lambda x: dfx.plan(fast, x)):
        with pytest.raises(KeyError, match="mine") as caught:
            call(x)
        assert type(caught.value) is KeyError and isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("backend", ["torch", "ffi", "xla"])
@pytest.mark.parametrize("in_axes", [None, 0])
@pytest.mark.parametrize("where", ["rules", "split", "schedule"])
def test_a_strategy_computes_with_tensors_of_its_own(
    where: str, in_axes: Any, backend: str
) -> None:
    """They have data, though the graph that it plans has none."""
    if backend != "torch":
        pytest.importorskip("jax", reason="JAX is not installed")
    held, found = torch.arange(4.0), []
    strategy = Computes(where, lambda: found.append((held * 2 + torch.ones(4)).sum().item()))
    fast = dfx.schedule(lambda x: x.sin() + x.cos(), strategy, in_axes=in_axes, backend=backend)
    x = torch.randn(6, 4)
    torch.testing.assert_close(fast(x), x.sin() + x.cos())
    assert found and set(found) == {16.0}
    assert "strategy" in dfx.explain(fast, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dfx.FallbackWarning)
        one = x[:1]  # a row, which is not split
        torch.testing.assert_close(fast(one), one.sin() + one.cos())
    assert set(found) == {16.0}
