"""What a decision may take: proportion, the purse that all signatures share, predictions that learn."""

from __future__ import annotations

import pytest

from dynaflow_xla.tuning import budget
from dynaflow_xla.tuning.budget import Budget, Purse


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(budget, "clock", made)
    return made


def test_as_long_as_the_original_plus_a_second(clock: Clock) -> None:
    given = Budget(Purse())
    assert given.limit_s == given.left_s == pytest.approx(1.0)
    clock.now += 0.25  # planning
    clock.now += 4.0
    given.original(4.0)
    assert given.limit_s == pytest.approx(5.0) and given.left_s == pytest.approx(4.75)
    assert given.refuses("compiling it", 4.7) == ""
    text = given.refuses("compiling it", 4.8)
    assert "compiling it would take about 4.8 s, and 4.8 s are left of 5 s" in text
    assert "dfx.tune" in text
    clock.now += 10.0
    assert "0 s are left" in given.refuses("it", 0.1)


def test_the_second_is_shared_by_all_signatures(clock: Clock) -> None:
    purse = Purse()
    spent = 0.0
    for _ in range(20):
        given = Budget(purse)
        clock.now += 0.1
        given.original(0.1)
        while not given.refuses("another candidate", 0.15):
            clock.now += 0.15
            spent += 0.15
        given.close()
    assert 1.0 < spent <= 20 * 0.1 + 1.0
    assert purse.left_s < 0.15


def test_long_calls_may_be_measured(clock: Clock) -> None:
    purse = Purse()
    given = Budget(purse)
    given.original(0.2, call_s=0.04)
    assert given.limit_s == pytest.approx(0.2 + 1.0), "a second is more than twenty of these"
    given.original(0.0, call_s=0.1)
    assert given.limit_s == pytest.approx(0.2 + 2.0)
    clock.now += 0.2 + 1.5
    given.close()
    again = Budget(purse)
    again.original(0.1, call_s=0.1)
    assert again.limit_s == pytest.approx(0.1 + 0.7), "all signatures share it"
    again.original(0.0, call_s=30.0)
    assert again.limit_s == pytest.approx(0.1 + 0.7 + 3.0), "five seconds in all"
    asked = Budget(Purse(), 1.0)
    asked.original(2.0, call_s=2.0)
    assert asked.limit_s == 1.0


def test_what_was_lacking_is_earned_by_calls(clock: Clock) -> None:
    purse = Purse()
    given = Budget(purse)
    clock.now += 2.0
    given.original(2.0)
    assert given.later(0.01) is None, "nothing was lacking"
    assert given.refuses("one", 4.0) and given.refuses("another", 3.5)
    later = given.later(0.01)
    assert later is not None and later.calls == budget.SHARE * (3.0 + 7.5) / 0.01
    assert given.later(1e-3) is None, "calls are too short to be counted"
    given.close()
    purse.earned(later)
    again = Budget(purse)
    clock.now += 0.01
    again.original(0.01)
    assert again.anew_s == 2.0, "what compiling candidates will take is told by that"
    assert not again.refuses("one", 4.0)
    clock.now += 4.0
    assert not again.refuses("another", 3.5)
    clock.now += 3.5
    again.close()
    assert purse.first_s == 0.0
    asked = Budget(Purse(), 1.0)
    asked.original(2.0)
    assert asked.refuses("one", 4.0) and asked.later(1.0) is None


def test_what_was_not_spent_stays(clock: Clock) -> None:
    purse = Purse()
    given = Budget(purse)
    clock.now += 3.0
    given.original(3.0)
    clock.now += 2.0
    given.close()
    assert purse.left_s == pytest.approx(1.0)
    given = Budget(purse)
    clock.now += 0.4
    given.close()
    assert purse.left_s == pytest.approx(0.6)
    given = Budget(purse)
    clock.now += 0.4
    given.forget()
    given.close()
    assert purse.left_s == pytest.approx(0.6)


def test_an_original_that_was_compiled_before(clock: Clock) -> None:
    given = Budget(Purse())
    clock.now += 0.01
    given.original(0.01, at_least_s=2.0)
    assert given.limit_s == pytest.approx(3.0) and given.left_s == pytest.approx(3.0)


def test_seconds_that_the_user_gives(clock: Clock) -> None:
    purse = Purse()
    given = Budget(purse, asked_s=7.0)
    clock.now += 4.0
    given.original(4.0)
    assert given.asked and given.left_s == pytest.approx(7.0)
    clock.now += 7.0
    given.close()
    assert purse.left_s == pytest.approx(1.0) and given.refuses("it", 0.1)


def test_predictions_learn(clock: Clock) -> None:
    given = Budget(Purse())
    given.compiled(2.0, 3.0)
    given.compiled(2.0 * given.rate, 3.0)
    assert given.rate == pytest.approx(1.5)
    given.compiled(0.0, 1.0)
    assert given.rate == pytest.approx(1.5)
    purse = Purse()
    Budget(purse).compiled(1.0, 4.0)
    assert Budget(purse).rate == pytest.approx(4.0), "all signatures of a function learn from it"
