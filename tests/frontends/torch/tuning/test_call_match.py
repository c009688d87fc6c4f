"""The look of a call that ran the original, which is read instead of its signature."""

from __future__ import annotations

import enum
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import dynaflow_xla as dfx
from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch.tuning import call_signature

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def plans_run() -> None:
    """Here the original runs in the place of plans that are the original program."""


class Side(enum.Enum):
    LEFT = 1


def tensors() -> st.SearchStrategy[Any]:
    shapes = st.sampled_from([(), (2,), (2, 3), (3, 2), (0, 2)])
    dtypes = st.sampled_from([torch.float32, torch.float64])
    made = st.builds(
        lambda shape, dtype, grad: torch.zeros(shape, dtype=dtype, requires_grad=grad),
        shapes, dtypes, st.booleans(),
    )  # fmt: skip
    return made | st.just(torch.nn.Parameter(torch.zeros(2, 3)))


plain = st.sampled_from(
    [
        0,
        1,
        -(2**70),
        2**70,
        True,
        False,
        None,
        0.5,
        1.0,
        1j,
        "",
        "a",
        "b",
        torch.float32,
        torch.int8,
    ]
)
odd = st.sampled_from([Side.LEFT, slice(1, 2), range(3), torch.device("cpu"), b"x", {1}, (1 << 9,)])
values = st.recursive(
    tensors() | plain | odd,
    lambda x: (
        st.lists(x, max_size=3)
        | st.lists(x, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", 1]), x, max_size=3)
    ),
    max_leaves=5,
)
calls = st.tuples(
    st.lists(values, max_size=2).map(tuple),
    st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(calls, calls)
def test_calls_look_the_same_where_their_signatures_are(first: Any, second: Any) -> None:
    known = call_signature.Known(None, *first, 0, False)
    same = call_signature.of(None, *first) == call_signature.of(None, *second)
    assert known.again(*second, 0) <= same
    copied = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, first)
    for args, kwargs in (first, copied):
        if known.again(args, kwargs, 0):
            assert call_signature.of(None, *first) == call_signature.of(None, args, kwargs)
    assert not known.again(*first, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x, [1, 2.0, "a"]), {"d": {"k": torch.zeros(2)}}),
        lambda x: ((x, [1, 9.5, "a"]), {"d": {"k": torch.ones(2)}}),
    ],
)
def test_the_same_with_other_data(other: Any) -> None:
    known = call_signature.Known(
        None, (torch.ones(3, 4), [1, 2.0, "a"]), {"d": {"k": torch.zeros(2)}}, 0, False
    )
    args, kwargs = other(torch.zeros(3, 4))
    assert known.again(args, kwargs, 0)
    with torch.no_grad():
        assert not known.again(args, kwargs, 0)


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(4, 3), [1, "a"]),
        (torch.ones(3, 4, dtype=torch.float64), [1, "a"]),
        (torch.ones(3, 4, requires_grad=True), [1, "a"]),
        (torch.nn.Parameter(torch.ones(3, 4), requires_grad=False), [1, "a"]),
        (torch.ones(3, 4), [2, "a"]),
        (torch.ones(3, 4), [True, "a"]),
        (torch.ones(3, 4), [1, "b"]),
        (torch.ones(3, 4), (1, "a")),
        (torch.ones(3, 4), [1, "a", None]),
        (torch.ones(3, 4),),
    ],
)
def test_another_call(args: Any) -> None:
    known = call_signature.Known(None, (torch.ones(3, 4), [1, "a"]), {}, 0, False)
    assert not known.again(args, {}, 0) and not known.again(
        (torch.ones(3, 4), [1, "a"]), {"k": 1}, 0
    )


def test_arguments_are_not_kept() -> None:
    x = torch.ones(3)
    gone = weakref.ref(x)
    known = call_signature.Known(None, (x, [x]), {"k": {"x": x}}, 0, False)
    assert known.again((x, [x]), {"k": {"x": x}}, 0)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("count", [1, 12])
def test_what_changes_between_calls_is_seen(count: int) -> None:
    def f(xs: Any, scale: Any) -> Any:
        return sum((x.sin() * scale).sum() for x in xs)

    fast = dfx.schedule(f, strategy=dfx.Sequential())
    for size in (3, 4, 3):
        xs = [torch.randn(size) for _ in range(count)]
        for scale in (1, 2, 2.5, torch.tensor(3.0)):
            for _ in range(3):
                torch.testing.assert_close(fast(xs, scale), f(xs, scale))
            for x in xs:
                x.resize_(size + 1).normal_()  # the same object
            torch.testing.assert_close(fast(xs, scale), f(xs, scale))


def test_tensors_at_the_addresses_of_others_are_others() -> None:
    """A list frees its items last to first: the next one's tensors lie where the last one's lay."""
    known = call_signature.Known(None, ([torch.ones(2) for _ in range(40)],), {}, 0, False)
    narrow = call_signature.Known(None, ([torch.ones(2) for _ in range(40)],), {}, 0, True)
    for size in (2, 3, 2, 5):
        for one in (known, narrow):
            assert one.again(([torch.ones(size) for _ in range(40)],), {}, 0) == (size == 2)


def test_a_call_is_looked_at_after_it_came_twice_in_a_row() -> None:
    layer = torch.nn.Linear(8, 8)
    fast = dfx.schedule(layer, dfx.Sequential())
    core = fast._dfx_core
    with torch.no_grad():
        for size in (3, 4, 3, 4):
            fast(torch.ones(size, 8))
        assert core._known is None
        fast(torch.ones(4, 8)), fast(torch.ones(4, 8))
        assert core._known is not None
        fast(torch.ones(3, 8))
        assert core._known is None


def test_a_device_and_a_layout_are_another_call() -> None:
    fn, x = torch.sin, torch.randn(4, 4)
    others = [x.to("meta"), x.to_sparse()]
    known = call_signature.of(fn, (x,), {})
    assert known == call_signature.of(fn, (torch.randn(4, 4),), {})
    for other in others:
        assert call_signature.of(fn, (other,), {}) != known
        assert call_signature.of_magnitude(call_signature.of(fn, (other,), {})) != (
            call_signature.of_magnitude(known)
        )
    look = _engine.CallMatch.of((x,), {}, (torch.Tensor,), (int,), False)
    assert look.matches((torch.randn(4, 4),), {})
    assert not any(look.matches((other,), {}) for other in others)
