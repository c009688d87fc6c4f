"""What a region raised, as the caller gets it."""

from __future__ import annotations

import copy
import pickle
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
