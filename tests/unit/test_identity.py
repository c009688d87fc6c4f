"""When two strategies are one, what they are called, and what a key on disk holds of them."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.strategies import identity


class Plain(dfx.Strategy):
    """With a parameter that its text leaves out."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclasses.dataclass(frozen=True)
class Frozen(dfx.Strategy):
    number: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Silent(dfx.Strategy):
    number: int

    def __repr__(self) -> str:
        return "Silent()"


@dataclasses.dataclass
class Open(dfx.Strategy):
    number: int


class Derived(Frozen):
    """Holds more than the fields that its base compares."""

    def __init__(self, number: int, more: int) -> None:
        super().__init__(number)
        object.__setattr__(self, "more", more)


class Deeper(dfx.NanoBatch):
    def __init__(self, more: int) -> None:
        super().__init__(2)
        self.more = more


class Mode(enum.Enum):
    FAST = 1
    SMALL = 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (dfx.Branches(), dfx.Branches()),
        (dfx.Branches(lanes=2), dfx.Branches(2)),
        (dfx.Branches(margin=0), dfx.Branches(margin=0.0)),
        (dfx.NanoBatch([3, 5]), dfx.NanoBatch((3, 5))),
        (dfx.NanoBatch(2, weights="w"), dfx.NanoBatch(2, weights="w")),
        (dfx.DualBatch(), dfx.DualBatch()),
        (dfx.Sequential(), dfx.Sequential()),
        (Frozen(3), Frozen(3)),
        (Silent(3), Silent(3)),
    ],
)
def test_equal_frozen_dataclasses_are_one_strategy(a: dfx.Strategy, b: dfx.Strategy) -> None:
    assert identity.identity(a) == identity.identity(b)
    assert hash(identity.identity(a)) == hash(identity.identity(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Plain(0), Plain(1)),
        (Plain(0), Plain(0)),
        (Silent(0), Silent(1)),
        (Open(0), Open(0)),
        (Frozen([1]), Frozen([1])),
        (Derived(0, 1), Derived(0, 2)),
        (Deeper(1), Deeper(2)),
        (dfx.NanoBatch(2), Deeper(2)),
        (dfx.NanoBatch(2), dfx.NanoBatch(2, weights="w")),
        (dfx.Branches(), dfx.Branches(1)),
        (dfx.Branches(), dfx.Sequential()),
    ],
)
def test_other_strategies_are_others(a: dfx.Strategy, b: dfx.Strategy) -> None:
    assert identity.identity(a) != identity.identity(b)
    assert identity.identity(a) == identity.identity(a)


def test_a_strategy_that_went_away_is_never_taken_for_a_new_one() -> None:
    kept: dict[Any, int] = {}
    for number in range(50):  # new objects get old addresses
        key = identity.identity(Plain(number))
        assert key not in kept
        kept[key] = number


def test_names_are_unique_and_none_is_taken() -> None:
    class Original(dfx.Strategy):
        def __repr__(self) -> str:
            return "original"

    a, b = Plain(0), Plain(1)
    made = identity.named([a, b, a, Frozen(1), Frozen(1), Original()], ["original"])
    assert list(made) == ["Plain()", "Plain() #2", "Frozen(number=1, other=None)", "original #2"]
    assert made["Plain()"] is a and made["Plain() #2"] is b


@pytest.mark.parametrize("given", [[], None, 3, ["branches"], [dfx.Branches], [dfx.Auto()]])
def test_candidates_that_cannot_be(given: Any) -> None:
    with pytest.raises(dfx.PlanError, match="candidates"):
        identity.candidates(given)


def test_a_key_on_disk_holds_classes_and_values() -> None:
    def key(*strategies: dfx.Strategy, **user: Any) -> Any:
        return identity.on_disk(strategies, user)

    different = [
        key(dfx.Branches()), key(dfx.Branches(1)), key(dfx.Sequential()), key(dfx.NanoBatch(2)),
        key(dfx.NanoBatch([2])), key(dfx.NanoBatch([1, 1])), key(dfx.NanoBatch(2, weights="w")),
        key(Frozen(1)), key(Frozen(1.0)), key(Frozen("1")), key(Frozen(True)), key(Frozen(None)),
        key(Frozen((1, 2))), key(Frozen(((1,), 2))), key(Frozen(Mode.FAST)), key(Frozen(Mode.SMALL)),
        key(Frozen("a, 1 b")), key(Frozen("a", "b")), key(Silent(1)), key(Silent(2)),
        key(Frozen(Frozen(1))), key(Frozen(int)), key(Frozen(frozenset({1, 2}))),
        key(Frozen(1), phase="decode"), key(Frozen(1), phase="prefill"),
        key(Silent(1), Silent(2)), key(Silent(2), Silent(1)), key(),
    ]  # fmt: skip
    assert None not in different and len(set(different)) == len(different)
    assert key(Frozen((1, "x"))) == key(Frozen((1, "x")))
    # What the package brings looks at the context by its parameters only.
    assert key(dfx.Branches(), weights=object()) == key(dfx.Branches())


@pytest.mark.parametrize(
    "strategy", [dfx.NanoBatch(2, weights="k"), dfx.DualBatch(weights="k"), dfx.NanoBatch(2, boundaries="k")]
)  # fmt: skip
def test_a_key_on_disk_holds_what_a_split_reads_from_the_context(strategy: dfx.Strategy) -> None:
    key = identity.on_disk([strategy], {"k": [1, 2, 9]})
    assert key is not None and key != identity.on_disk([strategy], {"k": [1, 2, 3]})
    assert key == identity.on_disk([strategy], {"k": [1, 2, 9], "another": object()})
    assert identity.on_disk([strategy], {"k": object()}) is None


def test_what_has_no_lasting_text_is_in_no_key_on_disk() -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(dfx.Strategy):
        number: int = 0

    for strategy in (
        Plain(0), Open(0), Derived(0, 1), Deeper(1), Local(), Frozen([1]), Frozen(lambda: 0),
        Frozen(object()), Frozen(Plain(0)), Frozen((1, object())), Frozen(Local),
    ):  # fmt: skip
        assert identity.on_disk([dfx.Branches(), strategy], {}) is None, strategy
    assert identity.on_disk([Frozen(1)], {"phase": object()}) is None


def test_a_class_with_other_code_has_another_key(tmp_path: Path) -> None:
    text = """
import dataclasses, sys
import dynaflow_xla as dfx
from dynaflow_xla.strategies import identity

@dataclasses.dataclass(frozen=True)
class Mine(dfx.Strategy):
    number: int = 0
    def schedule(self, s):
        {body}

print(identity.on_disk([Mine()], {{}}))
"""
    keys = []
    for body in ("pass", "pass", "return None"):
        script = tmp_path / "script.py"
        script.write_text(text.format(body=body))
        done = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        keys.append(done.stdout)
    assert keys[0] == keys[1] != keys[2] and "Mine" in keys[0]
