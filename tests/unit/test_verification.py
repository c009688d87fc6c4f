"""When results count as equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynaflow_xla.errors import VerificationError
from dynaflow_xla.verification import Report, compare


def row(want: Any, got: Any, dtype: str | None = None) -> Any:
    return compare("result", str(want.dtype), dtype or str(want.dtype), want, got)


def test_small_elements_beside_large_ones() -> None:
    want = np.random.default_rng(0).uniform(1, 2, 100_000).astype(np.float32)
    want[0] = 1e3
    got = want.copy()
    assert row(want, got)[2] == 0.0
    got[5] *= 1.001
    with pytest.raises(VerificationError, match=r"at \(5,\)"):
        row(want, got)


MASKS = [-1e9, -1e4, -1e30, float(np.finfo(np.float32).min), -np.finfo(np.float32).max / 2, 1e10]


@pytest.mark.parametrize("fill", MASKS)
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_what_a_mask_fills_in_hides_nothing(fill: float, kind: str) -> None:
    rng = np.random.default_rng(0)
    dtype = np.float64 if kind == "float64" else np.float32
    want = rng.normal(size=(20, 20)).astype(dtype)
    mask = rng.random((20, 20)) < 0.6
    if kind == "bfloat16":  # as rounding to it leaves them
        fill = float(np.float32(fill)) * 0.998
    want[mask] = fill
    got = want * (1 + 1e-7 * rng.normal(size=want.shape) * ~mask).astype(dtype)
    if kind != "float64":
        row(want, got, kind)
    place = tuple(np.argwhere(~mask)[3])
    got = want.copy()
    got[place] += dtype(0.2)
    with pytest.raises(VerificationError):
        row(want, got, kind)


def _noise(*shape: int, size: float) -> Any:
    return (np.random.default_rng(len(shape)).normal(size=shape) * size).astype(np.float32)


@pytest.mark.parametrize("large", [
    np.eye(64), np.concatenate([np.zeros(200), [50.0, 50.01]]), np.fft.fft(np.ones(1 << 16)),
    np.eye(512, 64)[:, :1] * np.ones(64), np.concatenate([[1e6], np.zeros(99)]),
    np.concatenate([np.ones(1000), [0.0]]),
], ids=["unit matrix", "norms", "transform", "gradient", "count", "one zero"])  # fmt: skip
def test_rounding_where_terms_cancel(large: Any) -> None:
    """It is of the terms' size, also where none of the large ones differs."""
    dtype = np.complex64 if np.iscomplexobj(large) else np.float32
    size = 1e-8 * np.abs(large).max()
    rest = large == 0 if large.shape != (1 << 16,) else np.abs(large) < 1
    want, got = large.astype(dtype), large.astype(dtype)
    want[rest] += _noise(*large.shape, size=size)[rest]
    got[rest] += _noise(1, *large.shape, size=size)[0][rest]
    row(want, got)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_not_finite(value: float) -> None:
    want = np.array([1.0, value, 2.0])
    assert row(want, want.copy())[4]
    for other in (0.0, -np.inf):
        with pytest.raises(VerificationError, match="NaN or infinite"):
            row(want, np.array([1.0, other, 2.0]))


def test_types_without_rounding_are_equal() -> None:
    want = np.arange(6).reshape(2, 3)
    assert row(want, want.copy()) == ("result", "int64", 0.0, 0.0, True)
    got = want.copy()
    got[1, 2] += 1
    with pytest.raises(VerificationError, match=r"first difference at \(1, 2\): 5 != 6"):
        row(want, got)


def test_narrow_types_may_differ_more() -> None:
    want = np.ones(4, np.float32)
    got = want + np.float32(0.01)
    assert row(want, got, "bfloat16")[2] == pytest.approx(0.01, rel=1e-5)
    with pytest.raises(VerificationError):
        row(want, got, "float32")


def test_empty_results() -> None:
    assert row(np.zeros((0, 3)), np.zeros((0, 3)))[2:] == (0.0, 0.0, True)


def test_report() -> None:
    report = Report((row(np.ones(2), np.ones(2)), row(np.ones(1), np.ones(1) + 1e-13)))
    assert report.max_abs == pytest.approx(1e-13, rel=0.01) and not report.bit_equal
    assert [line.endswith("bit-equal") for line in str(report).splitlines()] == [True, False]
