"""Whether strided views overlap, against the sets of their bytes."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from dynaflow_xla.frontends.torch.capture.mutation.shared_memory import MemoryLayout, overlapping


def bytes_of(view: MemoryLayout) -> set[int]:
    steps = [[i * s for i in range(n)] for n, s in zip(view.shape, view.strides, strict=True)]
    starts = [view.address + sum(at) for at in itertools.product(*steps)]
    return {start + k for start in starts for k in range(view.itemsize)}


@st.composite
def views(draw: st.DrawFn) -> MemoryLayout:
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides = tuple(draw(st.integers(-7, 24)) for _ in range(rank))
    return MemoryLayout(
        draw(st.integers(200, 240)), shape, strides, draw(st.sampled_from([1, 2, 4, 8]))
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), min_size=2, max_size=5))
def test_exactly_the_pairs_with_a_common_byte(made: list[MemoryLayout]) -> None:
    sets = [bytes_of(view) for view in made]
    want = [(i, j) for j in range(len(made)) for i in range(j) if sets[i] & sets[j]]
    assert overlapping(made) == sorted(want)
    for view, found in zip(made, sets, strict=True):
        low, high = view.span()
        assert (low, high - 1) == (min(found), max(found))
        assert not view.is_dense() or len(found) == high - low


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=2, max_size=6))
def test_columns_of_one_matrix(columns: list[tuple[int, int]]) -> None:
    """Aligned views, as frameworks make them: their spans meet, and most have nothing in common."""
    made = [MemoryLayout(4096 + 4 * at, (50, n), (24, 4), 4) for at, n in columns]
    want = [
        (i, j)
        for (j, (b, m)), (i, (a, n)) in itertools.product(enumerate(columns), repeat=2)
        if i < j and a < b + m and b < a + n
    ]
    assert overlapping(made) == sorted(want)


def test_nothing_in_proportion_to_the_memory() -> None:
    """Views of terabytes: whoever looked at each byte would not come back."""
    huge = 1 << 40
    even, odd = (MemoryLayout(huge + at, (huge // 2,), (2,), 1) for at in (0, 1))
    rows = [MemoryLayout(huge + 64 * n, (1 << 20, 64), (64 * 40, 1), 1) for n in range(40)]
    assert overlapping([even, odd]) == []
    assert overlapping([even, even]) == [(0, 1)]
    assert overlapping([even, odd, MemoryLayout(huge + 5, (1,), (0,), 1)]) == [(1, 2)]
    assert overlapping(rows) == []
    assert overlapping([*rows, MemoryLayout(huge, (100,), (64 * 40,), 1)]) == [(0, 40)]


def test_what_is_too_hard_is_taken_to_overlap() -> None:
    """Many odd strides: an exact answer could take any time."""
    shape, sizes = (
        (30,) * 8,
        (101_807, 100_003, 103_001, 107_101, 109_103, 113_111, 127_031, 131_101),
    )
    a = MemoryLayout(1 << 40, shape, sizes, 1)
    b = MemoryLayout((1 << 40) + 1, shape, tuple(n + 2 * i for i, n in enumerate(sizes)), 1)
    assert overlapping([a, b]) == [(0, 1)]
