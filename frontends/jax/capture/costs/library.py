"""Products that YNNPACK computes together with reductions: it shares out the whole, whatever the tiles.

XLA:CPU gives its library a reduction with what surrounds it (``ynn_support.cc`` and the library's fusions in
github.com/openxla/xla): an attention becomes one call, from the product with the keys to that with the
values. By themselves these products, of some hundred rows each, are tiles that run one after another. (Heads
of 128 x 32, 32 of them: 966 us, on two cores 558; both products without the softmax 678 and 727.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from dynaflow_xla.frontends.jax.capture.costs.fused import BATCHED, PRODUCTS, REDUCTIONS, Applied

_ELEMENTS = frozenset(
    "abs add add_any convert_element_type div exp integer_pow log max min mul neg rsqrt sqrt square sub "
    "tanh".split()
)
_SHAPES = frozenset("broadcast_in_dim expand_dims reshape squeeze stop_gradient".split())
_BETWEEN = _ELEMENTS | _SHAPES
"""What the library computes between products and reductions; choices (``where``) it does not."""


def with_reductions(steps: Sequence[Applied], results: Iterable[Hashable]) -> set[int]:
    """Positions of products that become parts of a reduction's call.

    Args:
        steps: In program order.
        results: What leaves the program.
    """
    return _Chains(steps, results).joined()


class _Chains:
    """Who makes and who reads each value."""

    def __init__(self, steps: Sequence[Applied], results: Iterable[Hashable]) -> None:
        self.steps = steps
        self.maker: dict[Hashable, int] = {}
        self.readers: dict[Hashable, list[int]] = {}
        for number, step in enumerate(steps):
            for value in dict.fromkeys(step.reads):
                self.readers.setdefault(value, []).append(number)
            self.maker.update(dict.fromkeys(step.makes, number))
        for value in results:
            self.readers.setdefault(value, []).append(len(steps))

    def joined(self) -> set[int]:
        """As ``with_reductions``."""
        found: set[int] = set()
        for number, (kind, reads, _) in enumerate(self.steps):
            if kind not in REDUCTIONS:
                continue
            value = reads[0]
            others = [n for n in self.readers[value] if n != number]
            if not others:
                found |= self._above(value)
            elif kind == "reduce_max" and len(others) == 1:
                found |= self._of_softmax(value, others[0])
        return found

    def _of_softmax(self, value: Hashable, shifted: int) -> set[int]:
        """Products before and behind ``exp(value - its maximum)``, if that is what is computed."""
        exponentials = self._next(shifted)
        if self.steps[shifted].kind != "sub" or exponentials is None:
            return set()
        if self.steps[exponentials].kind != "exp":
            return set()
        found = self._above(value)
        for number in self.readers.get(self.steps[exponentials].makes[0], ()):
            if number < len(self.steps) and self.steps[number].kind == "div":
                found |= self._below(number)
        return found

    def _above(self, value: Hashable) -> set[int]:
        """The product that a value is made of, element by element; nobody else reads what is between."""
        number = self.maker.get(value)
        if number is None:
            return set()
        kind, reads, _ = self.steps[number]
        if kind in PRODUCTS:
            return {number}
        if kind not in _BETWEEN:
            return set()
        alone = [v for v in reads if len(self.readers[v]) == 1]
        return set().union(*map(self._above, alone))

    def _below(self, number: int) -> set[int]:
        """The product of several matrices that alone reads, element by element, what a step makes."""
        following = self._next(number)
        while following is not None and self.steps[following].kind in _BETWEEN:
            following = self._next(following)
        is_product = following is not None and self.steps[following].kind == BATCHED
        return {following} if is_product and following is not None else set()

    def _next(self, number: int) -> int | None:
        """The only reader of what a step makes."""
        makes = self.steps[number].makes
        readers = self.readers.get(makes[0], []) if len(makes) == 1 else []
        return readers[0] if len(readers) == 1 and readers[0] < len(self.steps) else None
