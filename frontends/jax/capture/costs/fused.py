"""Which loops over elements XLA:CPU computes inside of those that read them: a chain is handed out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from dynaflow_xla.frontends.jax.capture.costs.kinds import ELEMENTWISE, TRANSCENDENTAL

_THROUGH = frozenset("reshape squeeze expand_dims copy stop_gradient".split())
"""Who reads these reads, so to say, what they read."""

_OTHERS = frozenset("bitcast_convert_type copy_p igamma one_minus_square rev slice".split())
"""Of these nothing is known on a CPU: they count as what needs its inputs in memory."""

_LOOPS = ELEMENTWISE - _OTHERS
_COMPUTING = _LOOPS - _THROUGH

_DEAR = _COMPUTING & TRANSCENDENTAL.keys() - {"bessel_i0e", "bessel_i1e"} | {"div", "rem"}
"""XLA computes these once, in memory, if several read them (``CpuInstructionFusion``)."""

_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


class Applied(NamedTuple):
    """An operator: its primitive's name, what it reads, and what it makes."""

    kind: str
    reads: Sequence[Hashable]
    makes: Sequence[Hashable]


def in_their_readers(steps: Sequence[Applied], results: Iterable[Hashable]) -> set[int]:
    """Positions of loops over elements whose readers are all such loops or reductions.

    Args:
        steps: In program order.
        results: What leaves the program: it is made in any case.
    """
    inside: set[int] = set()
    elsewhere = set(results)  # values that have to be in memory
    readers = Counter(v for step in steps for v in dict.fromkeys(step.reads))
    for number in range(len(steps) - 1, -1, -1):
        kind, reads, makes = steps[number]
        stays = kind in _LOOPS and elsewhere.isdisjoint(makes)
        if stays and kind in _DEAR:
            stays = all(readers[v] <= 1 for v in makes)
        if stays:
            inside.add(number)
        if not (stays or kind in _COMPUTING or kind in _REDUCTIONS):
            elsewhere.update(reads)
    return inside


def forks(
    steps: Sequence[Applied], each: Sequence[float], results: Iterable[Hashable]
) -> list[float]:
    """How often each step is handed out: a chain of loops once, at its end.

    Args:
        steps: In program order.
        each: How often each would be by itself.
        results: What leaves the program.
    """
    inside = in_their_readers(steps, results)
    carried: set[Hashable] = set()  # values that a loop makes which is handed out with its reader
    made = list(each)
    for number, (kind, reads, makes) in enumerate(steps):
        behind = not carried.isdisjoint(reads) and (kind in _LOOPS or kind in _REDUCTIONS)
        if number in inside:
            if behind or each[number]:
                carried.update(makes)
            made[number] = 0.0
        elif behind:
            made[number] = max(made[number], 1.0)
    return made
