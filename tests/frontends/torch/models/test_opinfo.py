"""PyTorch's own samples of its operators, scheduled: no other values, no errors of another kind, no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import opinfo_sweep  # noqa: E402  (needs torch)

SHARDS = 24


@pytest.fixture(scope="module")
def sweep() -> Iterator[opinfo_sweep.Sweep]:
    made = opinfo_sweep.Sweep(limit=120)
    yield made
    made.close()


def _fine(sweep: opinfo_sweep.Sweep, numbers: range, **how: Any) -> None:
    tried = [t for number in numbers for t in sweep.run(number, **how)]
    assert tried
    bad = [t for t in tried if t.outcome not in opinfo_sweep.GOOD]
    assert not bad, "\n".join(map(str, bad))
    assert any(t.outcome == "equal" for t in tried)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_some_operators(sweep: opinfo_sweep.Sweep, training: bool) -> None:
    numbers = range(7, len(sweep.names), 80)
    _fine(sweep, numbers, training=training, ways=["branches", "nano"], most=1)


@pytest.mark.timeout(300)
def test_some_wrong_calls(sweep: opinfo_sweep.Sweep) -> None:
    _fine(sweep, range(5, len(sweep.names), 50), errors=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_operators(sweep: opinfo_sweep.Sweep, shard: int, training: bool) -> None:
    _fine(sweep, range(shard, len(sweep.names), SHARDS), training=training, most=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_wrong_calls(sweep: opinfo_sweep.Sweep) -> None:
    _fine(sweep, range(len(sweep.names)), errors=True)
