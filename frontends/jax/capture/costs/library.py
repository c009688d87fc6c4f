"""Products that YNNPACK computes together with reductions: it shares out the whole, whatever the tiles.

XLA:CPU gives its library a reduction with what surrounds it (``ynn_support.cc`` and the library's fusions in
github.com/openxla/xla): an attention becomes one call, from the product with the keys to that with the
values. By themselves these products, of some hundred rows each, are tiles that run one after another. (Heads
of 128 x 32, 32 of them: 966 us, on two cores 558; both products without the softmax 678 and 727.) What else
there is in such a call was read off the programs that jaxlib 0.10.2 compiles.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from dynaflow_xla.frontends.jax.capture.costs import sharing
from dynaflow_xla.frontends.jax.capture.costs.fused import Applied, Role

_BETWEEN = frozenset(
    "abs add add_any broadcast_in_dim convert_element_type div exp expand_dims integer_pow log max min mul "
    "neg reshape rsqrt sqrt square squeeze stop_gradient sub tanh".split()
)
"""What the library computes between products and reductions; choices (``where``) it does not."""

_TURNED = _BETWEEN | {"transpose"}

_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())

_DIVIDED = 4096
"""Softmaxes from which on XLA leaves the division to the library, and so what comes behind; of fewer it makes
products with reciprocals, in a loop of their own."""

_REDUCTION, _PRODUCT = "reduction", "product"


def role(eqn: Any) -> Role:
    """What the library has for an equation.

    Products of several matrices may follow a softmax: probabilities whose matrices do not lie one after
    another are copied, and end the call before.
    """
    name = eqn.primitive.name
    if name in _REDUCTIONS:
        return Role(_REDUCTION, many=eqn.outvars[0].aval.size >= _DIVIDED)
    if name != "dot_general":
        return Role()
    left, right = (v.aval for v in eqn.invars[:2])
    if not sharing.is_product_of_ynnpack(left, right, eqn.params):
        return Role()
    batch = eqn.params["dimension_numbers"][1]
    ordered = (n for n, dims in enumerate(batch) if dims and sharing.come_first(dims))
    return Role(_PRODUCT, in_order=tuple(ordered))


def with_reductions(steps: Sequence[Applied], results: Iterable[Hashable]) -> dict[int, int]:
    """Positions of products that become parts of a reduction's call, and those of the reductions.

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
            self.readers.setdefault(value, []).append(len(steps))  # nobody's position
        self._looked_below: set[int] = set()

    def joined(self) -> dict[int, int]:
        """As ``with_reductions``."""
        found: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            if step.library.kind != _REDUCTION or len(step.reads) != 1:
                continue
            (value,) = step.reads
            readers = self.readers[value]
            if readers == [number]:
                products = self._above(value)
            elif step.kind == "reduce_max" and len(readers) == 2:
                products = self._of_softmax(number, value, sum(readers) - number)
            else:
                continue
            for product in products:
                found.setdefault(product, number)
        return found

    def _of_softmax(self, maximum: int, value: Hashable, shifted: int) -> set[int]:
        """Products before and behind ``exp(value - its maximum)``, if that is what is computed.

        Args:
            maximum: Who computes the maximum.
            value: Of what.
            shifted: Who else reads it; ``jax.nn.dot_product_attention`` transposes it first.
        """
        following: int | None = shifted
        scores = value
        if self._kind(shifted) == "transpose":
            scores, following = self.steps[shifted].makes[0], self._next(shifted)
        if following is None or self._kind(following) != "sub":
            return set()
        others = [v for v in self.steps[following].reads if v != scores]
        if not others or not all(self._comes_of(v, maximum) for v in others):
            return set()
        exponentials = self._next(following)
        if exponentials is None or self._kind(exponentials) != "exp":
            return set()
        found = self._above(value)
        if self.steps[maximum].library.many:
            for number in self.readers.get(self.steps[exponentials].makes[0], ()):
                if self._kind(number) == "div":
                    found |= self._below(number)
        return found

    def _comes_of(self, value: Hashable, number: int) -> bool:
        """Whether a value is what a step makes, element by element."""
        values = [value]
        while values:
            maker = self.maker.get(values.pop())
            if maker == number:
                return True
            if maker is not None and self.steps[maker].kind in _TURNED:
                values += dict.fromkeys(self.steps[maker].reads)
        return False

    def _above(self, value: Hashable) -> set[int]:
        """The products that a value is made of, element by element; nobody else reads what is between."""
        found: set[int] = set()
        values = [value]
        while values:
            number = self.maker.get(values.pop())
            if number is None:
                continue
            step = self.steps[number]
            if step.library.kind == _PRODUCT:
                found.add(number)
            elif step.kind in _TURNED:
                values += [v for v in dict.fromkeys(step.reads) if len(self.readers[v]) == 1]
        return found

    def _below(self, number: int) -> set[int]:
        """The product of several matrices that alone reads, element by element, what a step makes."""
        before, following = number, self._next(number)
        while following is not None and self._kind(following) in _BETWEEN:
            if following in self._looked_below:
                return set()
            self._looked_below.add(following)
            before, following = following, self._next(following)
        if following is None:
            return set()
        product = self.steps[following]
        if len(product.reads) != 2:
            return set()
        place = product.reads.index(self.steps[before].makes[0])
        return {following} if place in product.library.in_order else set()

    def _kind(self, number: int) -> str:
        return self.steps[number].kind if number < len(self.steps) else ""

    def _next(self, number: int) -> int | None:
        """The only reader of what a step makes."""
        makes = self.steps[number].makes
        readers = self.readers.get(makes[0], []) if len(makes) == 1 else []
        return readers[0] if len(readers) == 1 and readers[0] < len(self.steps) else None
