"""Copies of scheduled modules that hold themselves: hooks and callbacks that are methods of theirs."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x: Any) -> Any:
        return self.l(x)

    def count(self, *_: Any) -> None:
        self.seen += 1

    def twice(self, x: Any) -> Any:
        return self.l(x) * 2


def thrice(self: Any, x: Any) -> Any:
    return self.l(x) * 3


def noted(module: Any, *_: Any) -> None:
    module.seen += 1


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def is_hooked(fast: Any) -> None:
    fast.l.register_forward_hook(fast.count)


def is_hooked_by_a_function(fast: Any) -> None:
    fast.l.register_forward_hook(functools.partial(noted, fast))


def holds_a_method(fast: Any) -> None:
    fast.callback = fast.twice


def holds_itself(fast: Any) -> None:
    fast.me = (fast,)


def is_held_by_a_part(fast: Any) -> None:
    object.__setattr__(fast.l, "parent", fast)


def has_its_own_forward(fast: Any) -> None:
    fast.old = fast.forward


def holds_a_scheduled_method(fast: Any) -> None:
    fast.fast = dfx.schedule(fast.twice, "branches")


HOLDS = (
    is_hooked,
    is_hooked_by_a_function,
    holds_a_method,
    holds_itself,
    is_held_by_a_part,
    has_its_own_forward,
    holds_a_scheduled_method,
)
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "save": saved,
    "average": lambda fast: torch.optim.swa_utils.AveragedModel(fast).module,
    "beside its original": lambda fast: copy.deepcopy([fast.original, fast])[1],
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("holds", HOLDS)
def test_what_holds_itself_is_copied(
    holds: Callable[[Any], None], copied: Callable[[Any], Any]
) -> None:
    fast, x = dfx.schedule(Net(), "branches"), torch.randn(3, 4)
    holds(fast)
    want = fast(x)
    seen = fast.seen
    made = copied(fast)
    assert torch.equal(made(x), want)
    assert fast.seen == seen
    assert made.seen == (seen + 1 if fast.l._forward_hooks else 0)
    assert made.original is not fast.original and made.l.weight is not fast.l.weight
    assert made.__dict__ is made.original.__dict__
    assert dfx.plan(made, x).strategy == "Branches()"
    for other in (*getattr(made, "me", ()), getattr(made.l, "parent", made)):
        assert other is made
    if holds is holds_a_method:
        assert made.callback.__self__ is made
    if holds is holds_a_scheduled_method:
        with torch.no_grad():
            made.l.weight.zero_()
        assert torch.equal(made.fast(x), made.twice(x))
        assert not torch.equal(fast.fast(x), made.fast(x))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_inlined_by_the_users_compile(copied: Callable[[Any], Any]) -> None:
    fast, x = dfx.schedule(Net(), "branches"), torch.randn(3, 4)
    made = torch.compile(copied(fast), fullgraph=True, backend="eager")
    assert torch.equal(made(x), fast(x))


class Refilled(Net):
    """Takes another dictionary for its attributes when it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = dict(state)


@pytest.mark.parametrize("holds", [holds_itself, is_hooked])
def test_a_copy_has_the_attributes_that_its_original_is_given_late(
    holds: Callable[[Any], None],
) -> None:
    fast = dfx.schedule(Refilled(), "branches")
    holds(fast)

    def again() -> Any:
        return pickle.loads(pickle.dumps(fast))

    assert again().l.weight.shape == (4, 4)
    assert len(again().state_dict()) == 2
    made = again()
    made.note = 3
    assert made.original.note == 3 and not made.eval().original.training


def test_threads_that_call_a_copy_first_share_its_captures() -> None:
    made = copy.deepcopy(dfx.schedule(Net(), "branches"))
    found: list[Any] = []
    start = threading.Barrier(4)

    def core() -> None:
        start.wait()
        found.append(made._dfx_core)

    threads = [threading.Thread(target=core) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(map(id, found))) == 1


@pytest.mark.parametrize("copied", (copy.deepcopy, saved))
def test_the_original_of_what_holds_itself_is_copied(copied: Callable[[Any], Any]) -> None:
    model, x = Net(), torch.randn(3, 4)
    fast = dfx.schedule(model, "branches")
    is_hooked(fast)
    made = copied(model)
    assert type(made) is Net and torch.equal(made(x), model(x))
    (hook,) = made.l._forward_hooks.values()
    assert hook.__self__.original is made
    assert torch.equal(hook.__self__(x), made(x)) and made.seen == 3


def test_a_forward_of_its_own_is_copied() -> None:
    fast, x = dfx.schedule(Net(), "branches"), torch.randn(3, 4)
    fast.forward = types.MethodType(thrice, fast)
    made = copy.deepcopy(fast)
    assert made.forward.__self__ is made and torch.equal(made(x), made.l(x) * 3)
