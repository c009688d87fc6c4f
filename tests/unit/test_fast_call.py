"""The base class of scheduled functions: where a call goes, and what it keeps alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dynaflow_xla.ffi import _engine


class Fast(_engine.FastCall):  # type: ignore[misc]
    def __init__(self) -> None:
        self.log: list[Any] = []

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return "call", args, kwargs

    def _recover(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        self.log.append((error, args, kwargs))
        if isinstance(error, KeyError):
            return "recovered"
        raise error


def target(*args: Any, **kwargs: Any) -> Any:
    return "target", args, kwargs


def fallback(*args: Any, **kwargs: Any) -> Any:
    return "fallback", args, kwargs


def fails(*_: Any, **__: Any) -> Any:
    raise (KeyError if __ else ValueError)("as asked")


def test_where_a_call_goes() -> None:
    fast = Fast()
    assert fast(1, a=2) == ("call", (1,), {"a": 2})
    fast._settle(target, None)
    assert fast(1, a=2) == ("target", (1,), {"a": 2})
    assert fast() == ("target", (), {})
    fast._settle(None, None)
    assert fast() == ("call", (), {})


def test_one_of_so_many_calls_is_looked_at() -> None:
    fast = Fast()
    fast._look_every(2)
    assert fast(0)[0] == fast(0)[0] == fast(0)[0] == "call"  # nothing is settled, so none counts
    fast._settle(target, None)
    assert [fast(n)[0] for n in range(5)] == ["target", "call", "target", "call", "target"]
    fast._look_every(3)
    fast._look_every(0)
    assert [fast(n)[0] for n in range(4)] == ["target"] * 4
    with pytest.raises(TypeError):
        fast._look_every("often")


def test_an_exception_is_handed_on_with_its_traceback() -> None:
    fast = Fast()
    fast._settle(fails, None)
    with pytest.raises(ValueError, match="as asked") as caught:
        fast(1)
    assert any(entry.name == "fails" for entry in caught.traceback)
    assert fast(2, a=3) == "recovered"
    assert [(args, kwargs) for _, args, kwargs in fast.log] == [((1,), {}), ((2,), {"a": 3})]


def test_calls_step_back_to_the_fallback() -> None:
    fast = Fast()
    fast._settle(target, fallback)
    assert fast._step_back == 0
    fast._step_back = 2
    assert [fast()[0] for _ in range(4)] == ["fallback", "fallback", "target", "target"]
    fast._settle(target, None)
    fast._step_back = 2
    assert fast()[0] == "target"
    with pytest.raises(TypeError):
        fast._step_back = "many"


def test_a_target_that_must_stand_alone() -> None:
    fast = Fast()
    answers = [True, False, True]
    fast._settle(target, None, lambda: answers.pop(0))
    assert [fast(1)[0] for _ in range(3)] == ["target", "call", "target"]
    with pytest.raises(IndexError):
        fast(1)
    assert not fast.log  # the target did not raise it
    fast._settle(target, None, lambda: fast._settle(None, None) is None)
    assert fast(1)[0] == "call"
    fast._settle(target, None)
    assert fast(1)[0] == "target"


def test_inside_a_capture_nothing_is_settled() -> None:
    fast = Fast()
    fast._settle(target, None)
    _engine.enter_capture()
    try:
        assert _engine.capturing() and fast()[0] == "call"
    finally:
        _engine.leave_capture()
    assert not _engine.capturing() and fast()[0] == "target"


def test_a_target_may_settle_another_one_while_it_runs() -> None:
    fast = Fast()

    def replaces() -> str:
        fast._settle(target, None)
        gc.collect()
        return "first"

    fast._settle(replaces, None)
    del replaces
    assert fast() == "first"
    assert fast()[0] == "target"


def test_a_cycle_through_the_target_is_collected() -> None:
    fast = Fast()
    fast._settle(fast.__repr__, fast.__repr__)
    gone = weakref.ref(fast)
    del fast
    gc.collect()
    assert gone() is None


def test_wrong_use_is_refused() -> None:
    fast = Fast()
    with pytest.raises(TypeError, match="a target and a fallback"):
        fast._settle(target)
    with pytest.raises(AttributeError, match="_call"):
        _engine.FastCall()()
