"""Bytes that were changed or cut anywhere are refused by errors of ours, or read: never anything else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from decoders import Decoder, crash, decoders, mutated
from hypothesis import HealthCheck, given, settings, strategies as st

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator, Region, Value
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.timelines.simulator import simulate


def _example() -> tuple[PartitionedGraph, Plan, Any]:
    values = [Value(0, (4,), "float32", 16, -1)]
    values += [Value(i + 1, (4,), "float32", 16, i) for i in range(4)]
    reads = ((0,), (1,), (1,), (2, 3))
    ops = [Operator(i, "add", read, (i + 1,)) for i, read in enumerate(reads)]
    regions = [Region(i, f"r{i}", (i,), read, (i + 1,)) for i, read in enumerate(reads)]
    pg = PartitionedGraph(Graph("g", tuple(values), tuple(ops), (0,), (4,)), tuple(regions))
    made = Recording(tuple(Decision(i, i % 2) for i in range(4)))
    plan = build_plan(pg, made, lanes=2, strategy_text="test")
    return pg, plan, simulate(plan, pg)


PG, PLAN, TIMELINE = _example()
ALL = decoders(PLAN, TIMELINE, PG)


@pytest.mark.parametrize("decoder", ALL, ids=lambda d: d.name)
def test_the_examples_are_read(decoder: Decoder, tmp_path: Path) -> None:
    for example in decoder.examples:
        assert decoder.decode(example, tmp_path) is not None


@pytest.mark.parametrize("decoder", ALL, ids=lambda d: d.name)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 32), many=st.binary(max_size=64))
def test_changed_and_cut_bytes_never_crash(
    decoder: Decoder, tmp_path: Path, seed: int, many: bytes
) -> None:
    draw = random.Random(seed)
    for data in (mutated(draw.choice(decoder.examples), draw), many):
        assert not crash(decoder, data, tmp_path)


LONG = [
    (Plan.from_json, '"\ud800"'), (Plan.from_json, "[" * 100_000), (Plan.from_json, b"\xff"),
    (Plan.from_text, "plan version=" + "9" * 5000),
    (Plan.from_text, "plan version=3 graph=" + "[" * 100_000),
    (Plan.from_text, 'plan version=3 graph="\\ud800" strategy="" lanes=1 events=0 scratch_bytes=0'),
    (type(TIMELINE).from_json, "[" * 100_000), (type(TIMELINE).from_json, '"\ud800"'),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text"), LONG)
def test_what_once_raised_something_else_is_refused(read: Any, text: Any) -> None:
    with pytest.raises(PlanError):
        read(text)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_plan_with_any_numbers_in_it_is_proved_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    words = json.loads(PLAN.to_json())
    for _ in range(draw.choice((1, 1, 2, 5))):
        item: Any = draw.choice((words, *words["buffers"], *words["instructions"]))
        key = draw.choice([k for k in item if k not in ("type", "version")])
        if isinstance(item[key], int):
            item[key] = draw.choice((-1, 0, 1, 2, 3, 7, 1 << 40, -(1 << 40)))
        elif isinstance(item[key], list):
            length = draw.randrange(4)
            if key not in ("buffers", "instructions"):
                item[key] = [draw.choice((-1, 0, 1, 5, 99)) for _ in range(length)]
            else:
                draw.shuffle(item[key])
                del item[key][length + 4 :]
    try:
        validate(Plan.from_json(json.dumps(words)), PG)
    except PlanError:
        pass


def test_a_saved_plan_is_read_back_and_a_changed_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    PLAN.save(path)
    assert Plan.load(path) == PLAN and path.stat().st_mode & 0o077 == 0
    data = path.read_bytes()
    for changed in (data[:-10], data.replace(b'"lanes": 2', b'"lanes": 3'), b""):
        assert changed != data
        path.write_bytes(changed)
        with pytest.raises(PlanError, match=r"a\.plan holds no plan that this build reads"):
            Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none")
