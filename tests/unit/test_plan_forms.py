"""Text and JSON forms of plans, and the golden file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaflow_xla.errors import PlanError
from dynaflow_xla.planning.instructions import Launch, PlanBuffer, Record, Wait
from dynaflow_xla.planning.plan import Plan

GOLDEN = Path(__file__).parent / "golden"


def example() -> Plan:
    buffers = (
        PlanBuffer(0, "arg", 0, (8,), "float32", 32, 0),
        PlanBuffer(1, "scratch", 1, (8,), "float32", 32, -1, 0),
        PlanBuffer(2, "result", 2, (8,), "float32", 32, 0),
        PlanBuffer(3, "stage", 2, (8,), "float32", 32),
        PlanBuffer(4, "result", 3, (8,), "float32", 32, 1),
    )
    instructions = (
        Launch(0, "sort", 1, 0, (0,), (1,)),
        Record(0, 1),
        Wait(0, 0),
        Launch(1, "add", 0, 0, (1,), (2, 3), "my_add"),
        Launch(2, "dot", -1, 0, (3,), (4,), width=0),
    )
    return Plan(4, "f", "Branches()", 2, 1, buffers, instructions, 64, 96, ("a note",), 2)


def test_golden_text_and_json() -> None:
    plan = example()
    assert plan.to_text() == (GOLDEN / "plan.txt").read_text()
    assert plan.to_json() + "\n" == (GOLDEN / "plan.json").read_text()
    assert Plan.from_text((GOLDEN / "plan.txt").read_text()) == plan
    assert Plan.from_json((GOLDEN / "plan.json").read_text()) == plan


def test_hash_is_of_the_content() -> None:
    assert example().content_hash() == example().content_hash()
    other = Plan.from_json(example().to_json().replace("my_add", "your_add"))
    assert other.content_hash() != example().content_hash()


def test_plans_are_immutable() -> None:
    with pytest.raises(AttributeError):
        example().lanes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "JSON"),
        ('{"version": 2}', "reads plan version 4; got version 2"),
        ("[]", "version"),
        ('{"version": 4, "graph": 3}', "malformed"),
    ],
)
def test_bad_json(text: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("launch ", "lunch "), "line 8: unknown"),
        (('"sort"', "sort"), "line 8: the value"),
        (("plan version=4", "plan version=7"), "version 7"),
        (("lane=0\n", "lane=null\n"), "line"),
    ],
)
def test_bad_text(change: tuple[str, str], what: str) -> None:
    text = example().to_text()
    assert change[0] in text
    with pytest.raises(PlanError, match=what):
        Plan.from_text(text.replace(*change))


def test_text_without_a_head() -> None:
    with pytest.raises(PlanError, match="must begin"):
        Plan.from_text("")


def test_a_plan_is_read_from_text_or_bytes() -> None:
    text = (GOLDEN / "plan.txt").read_text()
    assert Plan.from_text(text.encode()) == Plan.from_text(text)
    with pytest.raises(PlanError, match="malformed plan"):
        Plan.from_text(b"{\xff" + text.encode())
    for read in (Plan.from_text, Plan.from_json):
        with pytest.raises(PlanError, match="read from text or bytes; got None") as found:
            read(None)  # type: ignore[arg-type]
        assert isinstance(found.value, TypeError)


def test_a_long_line_is_repeated_in_part() -> None:
    for text in ("plan " + "x" * 10_000, "y" * 10_000):
        with pytest.raises(PlanError) as caught:
            Plan.from_text(text)
        assert len(str(caught.value)) < 200 and str(caught.value).endswith("...")
