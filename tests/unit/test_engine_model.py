"""All interleavings of small programs on the engine's model: none waits for ever or runs too early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine_model import Explored, Fault, Instr, Model, Program, Wrong, explore

ROOT = Path(__file__).resolve().parents[2]


def program(*lanes: str) -> Program:
    """From words: ``0`` launches step 0, ``r0`` and ``w0`` record and await event 0."""
    kinds = {"r": "record", "w": "wait"}
    return tuple(
        tuple(
            Instr(kinds[word[0]], int(word[1:])) if word[0] in kinds else Instr("launch", int(word))  # type: ignore[arg-type]
            for word in lane.split()
        )
        for lane in lanes
    )


FORTH = program("0 w0 1", "2 r0 3")
BACK = program("0 r0 w1 1", "w0 2 r1")
THREE = program("0 r0 w1 1", "w0 2 r1", "w0 3")
ASIDE = program("0", "w0 1", "2 r0")
ACROSS = program("0", "1 r0", "w0 2")
SHORT = program("0", "1")
FIRST_HALF = program("w0 0 r1", "1 r0 w1 2")
"""Lane 0 needs the first half of lane 1, which then needs lane 0: nobody may run lane 1 in its stead."""

MODELS = {
    "one call of three lanes": Model((THREE,), frozenset({0, 2, 3}), shuts_down=True),
    "two calls": Model((FORTH, BACK), frozenset({2}), shuts_down=True),
    "two calls of three lanes": Model((ASIDE, ACROSS), frozenset({1}), shuts_down=True),
    "a lane that needs half of another": Model(
        (FIRST_HALF, FORTH), frozenset({1}), shuts_down=True
    ),
    "three calls": Model((SHORT, SHORT, SHORT), frozenset({1})),
}
EVERYWHERE = {"Enqueue", "TakeTurn", "Take", "Launch", "Abort", "Leave", "Return"}


@pytest.mark.parametrize("name", MODELS)
def test_every_interleaving_ends_as_it_should(name: str) -> None:
    names: set[str] = set()
    found = explore(MODELS[name], names.add)
    assert found.interleavings > found.transitions > found.states > 100
    assert names >= EVERYWHERE
    assert names >= {"Close", "Join"} or not MODELS[name].shuts_down


@pytest.mark.parametrize(
    ("fault", "model", "what"),
    [
        ("queues one by one", Model((ASIDE, ACROSS)), "deadlock"),
        ("no abort", Model((FORTH,), frozenset({2})), "deadlock"),
        ("close does not wait", Model((SHORT,), shuts_down=True), "the lanes ended, and call 0 is"),
        ("no wait", Model((FORTH,)), "ran before"),
        ("helps any", Model((FIRST_HALF,)), "deadlock: call 0 is running"),
    ],
)
def test_a_broken_engine_is_noticed(fault: Fault, model: Model, what: str) -> None:
    broken = Model(model.programs, model.may_fail, model.shuts_down, fault)
    with pytest.raises(Wrong, match=what):
        explore(broken)


def test_a_program_that_waits_for_itself_is_a_deadlock_here_too() -> None:
    with pytest.raises(Wrong, match=r"deadlock: call 0 is .*; after Enqueue"):
        explore(Model((program("w0 0 r1", "w1 1 r0"),)))


def test_the_code_names_the_actions() -> None:
    import engine_model

    assert engine_model.__doc__ is not None
    named = set(re.findall(r"^    ([A-Z][A-Za-z]+)  ", engine_model.__doc__, re.MULTILINE))
    files = ("host/engine.cc", "host/host_lane.h", "host/stand_in.h", "call.cc")
    code = "".join((ROOT / "csrc/src" / file).read_text() for file in files)
    assert len(named) == 12
    assert named == set(re.findall(r"// \[([A-Z][A-Za-z]+)\]", code))


def test_the_numbers_are_of_all_ways() -> None:
    """Two steps on two lanes: known by hand."""
    found = explore(Model((program("0"),)))
    assert found == Explored(states=6, transitions=5, interleavings=1)
