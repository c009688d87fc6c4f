"""Small graphs in one line each; time that passes when a test says so."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from dynaflow_xla.ir.graph import Graph, Operator, Value
from dynaflow_xla.tuning import autotune, quiet


def make_graph(
    text: str, outputs: str, *, inputs: str = "x", cost_ns: float = 1e6, **fields: Any
) -> Graph:
    """A graph from ``"a = sort x; b = add a y"``: every value is float32[8].

    Args:
        text: Operators, one for each name.
        outputs: Names of the outputs.
        inputs: Names of the inputs.
        cost_ns: Of each operator that ``fields`` gives none.
        fields: Name -> fields of its operator.
    """
    names = {name: number for number, name in enumerate(inputs.split())}
    values = [Value(number, (8,), "float32", 32, -1) for number in names.values()]
    ops = []
    for index, statement in enumerate(s for s in text.split(";") if s.strip()):
        name, _, right = statement.partition("=")
        kind, *reads = right.split()
        names[name.strip()] = number = len(values)
        values.append(Value(number, (8,), "float32", 32, index))
        given = {"cost_ns": cost_ns, "bytes_moved": 64, **fields.get(name.strip(), {})}
        ops.append(Operator(index, kind, tuple(names[r] for r in reads), (number,), **given))
    made = tuple(names[name] for name in outputs.split())
    return Graph("f", tuple(values), tuple(ops), tuple(range(len(inputs.split()))), made)


@pytest.fixture(scope="session")
def make() -> Callable[..., Graph]:
    """See :func:`make_graph`."""
    return make_graph


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What makes time pass for measurements: on a busy machine real seconds would say something else."""
    now = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(autotune, "time", clock)
    monkeypatch.setattr(autotune, "WARM_S", -1.0)
    monkeypatch.setattr(quiet, "PATIENCE_S", 60.0)
    return pass_by
