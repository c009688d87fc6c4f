"""What the table of functions is made of: a case, its random arguments, how it is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 6
"""Rows of every case's batch."""


class Draw:
    """Random arguments, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: Any = jnp.float32, scale: float = 1.0) -> Any:
        values = self.rng.normal(size=shape) * scale
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * self.rng.normal(size=shape) * scale
        return jnp.asarray(values, dtype)

    def weight(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        """Normal numbers that keep the scale of what they are multiplied with."""
        return self.normal(*shape, dtype=dtype, scale=shape[-2] ** -0.5 if len(shape) > 1 else 1.0)

    def uniform(self, *shape: int, low: float = 0.1, high: float = 0.9) -> Any:
        return jnp.asarray(self.rng.uniform(low, high, shape), jnp.float32)

    def ints(self, low: int, high: int, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jnp.asarray(self.rng.integers(low, high, shape), dtype)

    def distinct(self, *shape: int) -> Any:
        """No two numbers are close, so that an order does not depend on rounding."""
        count = int(np.prod(shape))
        return jnp.asarray(self.rng.permutation(count).reshape(shape) / count, jnp.float32)

    def keys(self, *shape: int) -> Any:
        return jax.random.split(jax.random.key(int(self.rng.integers(2**31))), shape)


@dataclass(frozen=True)
class Case:
    """A function with arguments for it.

    Attributes:
        name: Of the case.
        fn: The function.
        make: Random arguments.
        in_axes, out_axes: As for ``dfx.schedule``.
        wrt: Positional arguments to differentiate for; () if it has no derivative.
        refused: What a split's SeparabilityError says, if splitting would change the values.
        once: Its derivative has no reverse derivative (or it is not worth having).
        tolerance: Relative to the largest element, where rounding inside makes it larger than the
            result's type says.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[Draw], tuple[Any, ...]]
    in_axes: Any
    out_axes: Any
    wrt: tuple[int, ...]
    refused: str = ""
    once: bool = False
    tolerance: float = 0.0

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        return self.make(Draw(seed))

    @property
    def axes(self) -> tuple[Any, ...]:
        """``in_axes`` with an entry for each argument."""
        if isinstance(self.in_axes, tuple):
            return self.in_axes
        return (self.in_axes,) * len(self.arguments())


CASES: dict[str, Case] = {}


def case(
    make: Callable[[Draw], tuple[Any, ...]],
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    wrt: tuple[int, ...] = (0,),
    **more: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function under its name."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__
        if name in CASES:
            raise ValueError(f"two cases are named {name}")
        CASES[name] = Case(name, fn, make, in_axes, out_axes, wrt, **more)
        return fn

    return register
