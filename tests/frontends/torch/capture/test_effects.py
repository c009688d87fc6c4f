"""What a function changes beside its arguments: it is measured all the same, and changed as by one call."""

from __future__ import annotations

import copy
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.tuning import autotune
from dynaflow_xla.tuning.put_back import Saved

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("timeless")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Every candidate runs twice, and lanes are taken for the fastest."""
    found: list[set[str]] = []

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        found.append(set(runs))
        for run in (*runs.values(), *runs.values()):
            run()
        return autotune.Medians(
            {name: [1.0 if name == "Branches(lanes=2)" else 2.0] for name in runs}
        )

    monkeypatch.setattr(autotune, "measure", measure)
    return found


class Lanes(dfx.Auto):
    """With one candidate: the others would take their time, too."""

    def __init__(self) -> None:
        super().__init__(min_cost_ns=0.0)

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        return [dfx.Branches(lanes=lanes)]


def sorts(x: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values
    with dfx.mark("right"):
        b = torch.sort(-x).values
    return a + b


class Numbers(list):  # type: ignore[type-arg]
    pass


class Settings:
    total = 0

    def __init__(self) -> None:
        self.active: Any = None
        self.turns = 0


class Slotted:
    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns = 0


heard: list[int] = []
turns = 0
collector = Settings()


class Changing(nn.Module):
    """Changes something at each call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.count, self.calls, self.deque = 0, [], deque()
        self.numbers, self.known = Numbers(), {"calls": 0}
        self.settings, self.slotted = Settings(), Slotted()
        self.total = torch.zeros(8)
        self.register_buffer("moved", torch.zeros(8))
        self.inner = nn.Module()
        self.inner.count = 0

    def forward(self, x: Any) -> Any:
        global turns
        if self.what == "attribute":
            self.count += 1
        elif self.what == "attribute of a module inside":
            self.inner.count += 1
        elif self.what == "attribute of an object":
            self.settings.turns += 1
        elif self.what == "new attribute":
            self.latest = x.shape[0] + getattr(self, "latest", 0)
        elif self.what == "attribute that goes":
            if hasattr(self, "calls"):
                del self.calls
        elif self.what == "list":
            self.calls.append(1)
        elif self.what == "derived list":
            self.numbers.append(1)
        elif self.what == "dict":
            self.known["calls"] += 1
        elif self.what == "deque":
            self.deque.append(1)
        elif self.what == "tensor":
            self.total.add_(1)
        elif self.what == "tensor in an attribute":
            self.total = self.total + 1
        elif self.what == "buffer":
            self.moved.add_(1)
        elif self.what == "another buffer":
            self.moved = self.moved + 1
        elif self.what == "list of a global":
            heard.append(1)
        elif self.what == "global":
            turns += 1
        return sorts(x)

    def state(self) -> Any:
        """All of it, to compare."""
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        own |= {"settings": self.settings.turns, "slotted": self.slotted.turns}
        own |= {"total": self.total.tolist(), "moved": self.moved.tolist()}
        own |= {"inner": self.inner.count}
        return copy.deepcopy({**own, "heard": heard, "turns": turns})


WHATS = [
    "attribute", "attribute of a module inside", "attribute of an object", "new attribute",
    "attribute that goes", "list", "derived list", "dict", "deque", "tensor", "tensor in an attribute",
    "buffer", "another buffer", "list of a global", "global",
]  # fmt: skip
LOOKED_AT = ("attribute of an object", "list of a global", "tensor")
"""With these the functions that look at a call are tried as well."""


@pytest.mark.parametrize("what", WHATS)
def test_changes_are_those_of_one_call(what: str, seen: list[set[str]]) -> None:
    global turns
    x, states = torch.randn(8, 16), []
    for scheduled in (False, True):
        heard.clear()
        turns = 0
        model = Changing(what)
        call = dfx.schedule(model, Lanes(), lanes=2) if scheduled else model
        states.append([])
        with torch.no_grad():
            for turn in range(2):
                states[-1].append((call(x).tolist(), model.state()))
                if scheduled and turn:
                    assert "auto: Branches(lanes=2) runs" in dfx.explain(call, x)
                    if what in LOOKED_AT:
                        dfx.verify(call, x)
                        dfx.profile(call, x)
                    assert model.state() == states[-1][-1][1]
    assert states[0] == states[1]
    assert len(seen) == 1 and "Branches(lanes=2)" in seen[0]


def closed_over() -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    count, model = 0, nn.Sequential(nn.BatchNorm1d(16))

    def f(x: Any) -> Any:
        nonlocal count
        count += 1
        return sorts(model(x))

    return f, lambda: (count, [b.tolist() for b in model.buffers()])


def of_a_class() -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    class Counted:
        turns = 0

    def f(x: Any) -> Any:
        Counted.turns += 1
        return sorts(x)

    return f, lambda: Counted.turns


def in_and_out() -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """As in transformers: set while the function runs, and as before after it."""

    def f(x: Any) -> Any:
        collector.active = {"outputs": []}
        try:
            return sorts(x)
        finally:
            collector.active = None

    return f, lambda: collector.active


@pytest.mark.parametrize("make", [closed_over, of_a_class, in_and_out])
def test_what_functions_close_over(make: Any, seen: list[set[str]]) -> None:
    f, state = make()
    g, want_state = make()
    fast, x = dfx.schedule(f, Lanes(), lanes=2), torch.randn(8, 16)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), g(x))
            assert state() == want_state()
        dfx.explain(fast, x)
        assert state() == want_state()
    assert seen


class Base:
    kept = 0


class Derived(Base):
    pass


class Owner(nn.Module):
    kept = 1

    def forward(self, x: Any) -> Any:
        type(self).kept += 1
        return sorts(x) * self.kept


def through_derived(x: Any) -> Any:
    Base.kept += 1
    return sorts(x) * Derived.kept


def through_an_object(x: Any) -> Any:
    Base.kept += 1
    return sorts(x) + Derived().kept


def asked_for(x: Any) -> Any:
    Base.new = 2.0  # type: ignore[attr-defined]
    return sorts(x) + (2.0 if hasattr(collected, "new") else 1.0)


collected = Derived()


def by_name(x: Any) -> Any:
    Base.kept += 1
    return sorts(x) * getattr(Derived, "kept", 7)


def new_by_name(x: Any) -> Any:
    Base.new = 2.0  # type: ignore[attr-defined]
    return sorts(x) * getattr(Derived, "new", 7.0) + (1.0 if hasattr(Base, "new") else 0.0)


def in_its_dictionary(x: Any) -> Any:
    Base.kept += 1
    return sorts(x) * Base.__dict__["kept"] + vars(Base).get("kept", 0)


class Emptied(Base):
    pass


class BelowEmptied(Emptied):
    pass


def deleted(x: Any) -> Any:
    Emptied.kept = 3
    del Emptied.kept
    return sorts(x) * BelowEmptied.kept + (1.0 if hasattr(Emptied, "kept") else 0.0)


class Shadowed:
    kept = 0


own = Shadowed()
own.kept = 5


def beside_its_own(x: Any) -> Any:
    Shadowed.kept = 1
    return sorts(x) * own.kept


WRITERS = [
    through_derived, through_an_object, asked_for, Owner(), by_name, new_by_name, in_its_dictionary,
    deleted, beside_its_own,
]  # fmt: skip


@pytest.mark.parametrize("f", WRITERS)
@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
def test_written_to_a_class_and_read_elsewhere(f: Any) -> None:
    """Through an object or a derived class, in the same call."""
    kind, fast = Owner if isinstance(f, Owner) else Base, dfx.schedule(f, "branches", lanes=2)
    with torch.no_grad():
        for _ in range(3):
            x, before = torch.randn(8, 16), kind.kept
            want, after = f(x), kind.kept
            kind.kept = before
            if "new" in vars(Base):
                del Base.new  # type: ignore[attr-defined]
            torch.testing.assert_close(fast(x), want)
            assert kind.kept == after


@pytest.mark.parametrize("f", [through_derived, by_name, new_by_name, beside_its_own])
def test_whole_graphs_of_functions_that_write_a_class(f: Any) -> None:
    """Somebody's own ``torch.compile`` may ask for one graph."""
    from dynaflow_xla.frontends.torch._compat import class_attributes

    class_attributes.mend()
    torch._dynamo.reset()  # what a schedule gave up is given up for all
    x, before = torch.randn(8, 16), Base.kept
    want, after = f(x), Base.kept
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    Base.kept = before
    if "new" in vars(Base):
        del Base.new  # type: ignore[attr-defined]
    torch.testing.assert_close(compiled(x), want)
    assert Base.kept == after


def test_numbers_of_a_class_change() -> None:
    """Somebody else writes them: what was captured with others does not run."""

    class Kept:
        times, text = 2, "a"

        @classmethod
        def read(cls) -> int:
            return cls.times

    def f(x: Any) -> Any:
        return sorts(x) * Kept.times + Kept.read() + (Kept.text == "a")

    fast = dfx.schedule(f, "branches", lanes=2)
    with torch.no_grad():
        for times, text in ((2, "a"), (3, "a"), (3, "b"), (5, "b")):
            Kept.times, Kept.text = times, text
            x = torch.randn(8, 16)
            torch.testing.assert_close(fast(x), f(x))


def test_modules_among_the_arguments(seen: list[set[str]]) -> None:
    def f(model: Any, x: Any) -> Any:
        return sorts(model(x))

    fast, x = dfx.schedule(f, Lanes(), lanes=2), torch.randn(8, 16)
    model = nn.BatchNorm1d(16)
    other = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(fast(model, x), f(other, x))
        for got, want in zip(model.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(got, want)
    assert seen


@pytest.mark.parametrize("library", [random, np.random])
def test_numbers_of_other_generators(library: Any, seen: list[set[str]]) -> None:
    """Drawn by code that only the original runs, which is measured beside the lanes."""

    def f(x: Any) -> Any:
        if not torch.compiler.is_compiling():
            library.normalvariate(0, 1) if library is random else library.rand()
        return sorts(x)

    library.seed(3)
    fast, x = dfx.schedule(f, Lanes(), lanes=2), torch.randn(8, 16)
    with torch.no_grad():
        fast(x)
    got = library.uniform(0, 1)
    library.seed(3)
    assert seen and got == library.uniform(0, 1)  # the call itself ran on lanes


# -- the helper ------------------------------------------------------------------------------------


class Held(Numbers):
    def __init__(self, *values: int) -> None:
        super().__init__(values)
        self.name = "held"


@pytest.mark.parametrize(
    "container",
    [[1, 2], {"a": 1, "b": 2}, {1, 2}, deque([1, 2]), OrderedDict(a=1, b=2), Held(1, 2)],
    ids=lambda c: type(c).__name__,
)
def test_contents_are_put_back_any_number_of_times(container: Any) -> None:
    before, saved = copy.deepcopy(container), Saved()
    assert saved.contents(container)
    for _ in range(2):
        value = container.pop("a") if isinstance(container, dict) else container.pop()
        saved.put_back()
        assert container == before and list(container) == list(before)
        if isinstance(container, dict):
            container["a"], container["c"] = 7, value
        elif isinstance(container, set):
            container.add(9)
        else:
            container.append(9)
        saved.put_back()
        assert container == before and list(container) == list(before)


def test_attributes_are_put_back() -> None:
    class Owner:
        shared = 1
        __slots__ = ("slot", "__dict__")

    def cells() -> Any:
        n = 1

        def f() -> int:
            return n

        return f.__closure__[0]

    owner, cell, saved = Owner(), cells(), Saved()
    owner.a = 1
    module = types.ModuleType("made")
    places = [(owner, "a"), (owner, "b"), (owner, "slot"), (Owner, "shared"), (Owner, "other"),
              (module, "x"), (cell, "cell_contents")]  # fmt: skip
    for place, name in places:
        assert saved.attribute(place, name)
    for place, name in places:
        setattr(place, name, 5)
    saved.put_back()
    assert (owner.a, Owner.shared, cell.cell_contents) == (1, 1, 1)
    for place, name in ((owner, "b"), (owner, "slot"), (Owner, "other"), (module, "x")):
        assert not hasattr(place, name)
    assert not saved.attribute(5, "a") and not saved.contents(iter([]))
