"""How often XLA:CPU hands work to its threads: a chain of loops once, and products side by side once.

Loops over elements are computed inside of those that read them (``cpu_instruction_fusion.cc`` of
github.com/openxla/xla). Products that read one value, the projections of an attention, say, become ready
together: while one ends, the next one's parts keep the threads at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dynaflow_xla.frontends.jax.capture.costs.kinds import ELEMENTWISE, TRANSCENDENTAL

_THROUGH = frozenset("reshape squeeze expand_dims copy stop_gradient".split())
"""Who reads these reads, so to say, what they read."""

_OTHERS = frozenset("bitcast_convert_type copy_p igamma one_minus_square".split())
"""Of these nothing is known on a CPU: they count as what needs its inputs in memory."""

_PLACED = frozenset("concatenate dynamic_slice dynamic_update_slice gather pad split".split())
"""Loops that give elements other places."""

_LOOPS = ELEMENTWISE - _OTHERS | _PLACED
_COMPUTING = _LOOPS - _THROUGH

_DEAR = _COMPUTING & TRANSCENDENTAL.keys() - {"bessel_i0e", "bessel_i1e"} | {"div", "rem"}
"""XLA computes these once, in memory, if several read them (``CpuInstructionFusion``)."""

_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())

PRODUCTS = frozenset("dot_general conv_general_dilated".split())

_IN_MEMORY = "concatenate in memory"

_ROW, _PARTS = 128, 8
"""From rows of so many elements on, parts that are joined along rows are copied in memory; so are more than
so many parts."""


def kind_of(eqn: Any) -> str:
    """What ``Applied`` calls an equation: its primitive's name, where that always does the same."""
    name: str = eqn.primitive.name
    if name != "concatenate":
        return name
    shape = eqn.outvars[0].aval.shape
    along_rows = len(shape) > 1 and eqn.params["dimension"] == len(shape) - 1
    copied = len(eqn.invars) > _PARTS or (along_rows and shape[-1] >= _ROW)
    return _IN_MEMORY if copied else name


class Role(NamedTuple):
    """What YNNPACK has for an operator, see ``library``.

    Attributes:
        kind: "product", "reduction", or "".
        many: Of a reduction: it has so many results that XLA leaves a division by them to the library.
        in_order: Of products of several matrices: positions of factors whose matrices lie one after another.
    """

    kind: str = ""
    many: bool = False
    in_order: tuple[int, ...] = ()


class Applied(NamedTuple):
    """An operator: its primitive's name (``kind_of``), what it reads, and what it makes.

    Attributes:
        kind: The name.
        reads: Values, without constants.
        makes: Values.
        library: What YNNPACK can do with it beside others.
    """

    kind: str
    reads: Sequence[Hashable]
    makes: Sequence[Hashable]
    library: Role = Role()


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
        kind, reads, makes, _ = steps[number]
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
    """How often each step is handed out: a chain of loops once, at its end, products side by side together.

    Args:
        steps: In program order.
        each: How often each would be by itself.
        results: What leaves the program.
    """
    inside = in_their_readers(steps, results)
    carried: set[Hashable] = set()  # values that a loop makes which is handed out with its reader
    made = list(each)
    for number, (kind, reads, makes, _) in enumerate(steps):
        behind = not carried.isdisjoint(reads) and (kind in _LOOPS or kind in _REDUCTIONS)
        if number in inside:
            if behind or each[number]:
                carried.update(makes)
            made[number] = 0.0
        elif behind:
            made[number] = max(made[number], 1.0)
    for number in _beside(steps, made):
        made[number] = 0.0
    return made


def _beside(steps: Sequence[Applied], each: Sequence[float]) -> Iterator[int]:
    """Positions of products that are handed out beside an earlier one that reads the same value.

    Whoever needs a product has more steps above that are no loops than that has. So of two with as many
    neither needs the other, and they become ready at about the same time.
    """
    # On the longest way to a value, without loops and reductions.
    depth: dict[Hashable, int] = {}
    first: set[tuple[int, Hashable]] = set()
    for number, (kind, reads, makes, _) in enumerate(steps):
        above = max((depth.get(v, 0) for v in reads), default=0)
        depth.update(dict.fromkeys(makes, above + (kind not in _LOOPS and kind not in _REDUCTIONS)))
        if kind in PRODUCTS and each[number]:
            ready = {(above, v) for v in reads}
            if not first.isdisjoint(ready):
                yield number
            first |= ready
