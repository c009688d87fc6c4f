"""A lane's executable, launched from Python, whose error is there only when its call has returned."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import numpy as np  # noqa: E402

from dynaflow_xla.errors import EngineError  # noqa: E402
from dynaflow_xla.ffi import _compat  # noqa: E402
from dynaflow_xla.ffi.device_steps import PythonStep  # noqa: E402


@dataclass
class Result:
    """What XLA hands out for one execution on a device."""

    nbytes: int
    over: bool = False
    error: str = ""

    def is_ready(self) -> bool:
        return self.over

    def block_until_ready(self) -> None:
        self.over = True
        if self.error:
            raise RuntimeError(self.error)

    def unsafe_buffer_pointer(self) -> int:
        return 64


class Device:
    """A step of two results on a CUDA lane, and the results of its executions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[list[Result]] = []
        monkeypatch.setattr(_compat, "execute_on_device", self._execute)
        specs = [jax.ShapeDtypeStruct((n,), np.float32) for n in (4, 2)]
        engine = SimpleNamespace(device=0, copy=lambda *_: None)
        self.step: Any = PythonStep("s", None, [], [], specs, [False, False], None, engine)

    def _execute(self, *_: Any) -> list[Result]:
        self.made.append([Result(16), Result(8)])
        return self.made[-1]

    def call(self) -> None:
        self.step((0, 0))


def test_a_late_error_fails_the_next_call_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.call()
    device.call()
    for result in device.made[0]:
        result.over, result.error = True, "the link fell off"
    with pytest.raises(
        EngineError, match="s failed after an earlier call had returned.*link fell off"
    ):
        device.call()
    assert len(device.made) == 2
    for result in device.made[1]:
        result.over = True
    device.call()  # it is told once
    assert device.step.executions == 3


def test_what_is_over_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    for _ in range(5):
        device.call()
        for result in device.made[-1]:
            result.over = True
    assert len(device.step._under_way) == 1


def test_with_a_check_after_each_step_the_call_itself_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CHECK_STEPS", "1")
    device = Device(monkeypatch)
    monkeypatch.setattr(
        _compat, "execute_on_device", lambda *_: [Result(8, error="no link"), Result(8)]
    )
    with pytest.raises(EngineError, match="s failed: no link"):
        device.call()
