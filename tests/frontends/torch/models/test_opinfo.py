"""PyTorch's own samples of its operators and modules, scheduled: no other values, no raw errors, no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moduleinfo_sweep  # noqa: E402  (needs torch)
import opinfo_sweep  # noqa: E402  (needs torch)

SHARDS = 24


@pytest.fixture(scope="module")
def sweep() -> Iterator[opinfo_sweep.Sweep]:
    made = opinfo_sweep.Sweep(limit=120)
    yield made
    made.close()


@pytest.fixture(scope="module")
def modules() -> Iterator[opinfo_sweep.Sweep]:
    made = opinfo_sweep.Sweep(limit=120, of="module", script=moduleinfo_sweep.__file__)
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


@pytest.mark.timeout(300)
def test_some_modules(modules: opinfo_sweep.Sweep) -> None:
    _fine(modules, range(3, len(modules.names), 28), ways=["beside", "halves"], most=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(4))
def test_all_modules(modules: opinfo_sweep.Sweep, shard: int) -> None:
    _fine(modules, range(shard, len(modules.names), 4), ways=["alone", "beside", "halves"], most=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("table", opinfo_sweep.TABLES[1:])
def test_other_operators(table: str, training: bool) -> None:
    sweep = opinfo_sweep.Sweep(limit=120, of=table)
    try:
        _fine(sweep, range(len(sweep.names)), training=training, most=2)
    finally:
        sweep.close()
