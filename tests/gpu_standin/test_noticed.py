"""What counts as noticing that kernels wait for nothing: wrong values, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import standin_plugin
from standin_plugin import TOTAL, heedless


def test_wrong_values_are_noticed_and_nothing_is_counted() -> None:
    def compares() -> None:
        TOTAL.update(plans=7)
        np.testing.assert_allclose([1.0], [2.0])

    before = TOTAL.copy()
    assert "Not equal to tolerance" in heedless(compares)
    assert before == TOTAL

    def says() -> None:
        raise AssertionError("plan 3: wrong values")

    assert "plan 3" in heedless(says)
    assert heedless(lambda: None) == ""


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("nothing was a part of a CUDA graph"),
        RuntimeError("the driver has no function cuStreamBatchMemOp"),
        TimeoutError("a thread hangs"),
        ValueError("Not equal to tolerance"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_failure_is_a_failure(error: Exception) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)):
        heedless(fails)
    driver = standin_plugin.DRIVER
    assert driver is not None and driver.least_delay_us == 0
