"""Which loops over elements XLA:CPU computes inside of those that read them: a chain is handed out once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

_THROUGH = frozenset("reshape squeeze expand_dims copy convert_element_type stop_gradient".split())
"""Who reads these reads, so to say, what they read."""

_LOOPS = _THROUGH.union(
    (
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
        "broadcast_in_dim cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 "
        "floor ge gt imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne "
        "neg not or pow real rem round rsqrt select_n shift_left shift_right_arithmetic "
        "shift_right_logical sign sin sinh sqrt square sub tan tanh transpose xor"
    ).split()
)

_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


class Step(NamedTuple):
    """An operator: its primitive's name, what it reads, and what it makes."""

    kind: str
    reads: Sequence[Hashable]
    makes: Sequence[Hashable]


def in_their_readers(steps: Sequence[Step], results: Iterable[Hashable]) -> set[int]:
    """Positions of loops over elements whose readers are all such loops or reductions.

    Args:
        steps: In program order.
        results: What leaves the program: it is made in any case.
    """
    inside: set[int] = set()
    elsewhere = {v for v in results if isinstance(v, Hashable)}  # values that have to be in memory
    for number in range(len(steps) - 1, -1, -1):
        kind, reads, makes = steps[number]
        stays = kind in _LOOPS and elsewhere.isdisjoint(makes)
        if stays:
            inside.add(number)
        if not (stays or kind in _LOOPS - _THROUGH or kind in _REDUCTIONS):
            elsewhere.update(reads)
    return inside
