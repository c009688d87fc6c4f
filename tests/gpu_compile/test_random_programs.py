"""Random programs on random lanes, compiled for a GPU: no order edge of any plan is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

ROWS, WIDTH, WEIGHTS = 512, 256, 4


def share(h: Any, g: Any, choice: Any) -> Any:
    s = jax.nn.softmax(h @ choice)
    return g * s[:, :1] + s[:, 1:2]


OPERATORS: dict[str, Callable[..., Any]] = {
    "product": lambda h, g, w, few, many: h @ w,
    "mlp": lambda h, g, w, few, many: jax.nn.gelu(h @ w) @ w.T,
    "norm": lambda h, g, w, few, many: jax.nn.standardize(h, axis=-1),
    "act": lambda h, g, w, few, many: jnp.tanh(h) * 2 + g,
    "few": lambda h, g, w, few, many: share(h, g, few),
    "many": lambda h, g, w, few, many: share(h, g, many),
    "add": lambda h, g, w, few, many: h + g,
    "cumsum": lambda h, g, w, few, many: jnp.cumsum(h, axis=0) / 8,
    "rows": lambda h, g, w, few, many: h * jnp.sum(g * g, axis=1, keepdims=True),
    "attend": lambda h, g, w, few, many: jax.nn.softmax(h @ g.T / 16) @ g,
    "sort": lambda h, g, w, few, many: jnp.sort(h, axis=-1),
}


def program(chance: random.Random) -> tuple[Callable[..., Any], int]:
    """A function of arrays, weights and two routers, in 3 to 7 marked parts; how many arrays."""
    arrays = chance.randint(1, 3)
    parts = [
        (
            [
                (chance.choice(sorted(OPERATORS)), chance.randrange(WEIGHTS))
                for _ in range(chance.randint(1, 3))
            ],
            chance.randrange(arrays + number),
            chance.randrange(arrays + number),
        )
        for number in range(chance.randint(3, 7))
    ]

    def f(xs: Any, weights: Any, few: Any, many: Any) -> Any:
        values = list(xs)
        for number, (operators, first, second) in enumerate(parts):
            with dfx.mark(f"part_{number}"):
                h = values[first]
                for name, w in operators:
                    h = OPERATORS[name](h, values[second], weights[w], few, many)
                values.append(h)
        return sum(values[arrays:])

    return f, arrays


class AnyLane(dfx.Strategy):
    """Any region that is ready, on any lane."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.used = chance, chance.randint(1, 3)

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(self.chance.choice(ready), lane=self.chance.randrange(self.used))


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]
)
def test_every_edge_is_held(seed: int) -> None:
    chance = random.Random(seed)
    f, arrays = program(chance)
    dtype = chance.choice([jnp.bfloat16, jnp.float32])

    def spec(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    strategy = chance.choice([AnyLane(chance), dfx.Branches()])
    fast = dfx.schedule(jax.jit(f), strategy, target="nvidia-h200")
    report = dfx.compile(
        fast,
        [spec(ROWS, WIDTH)] * arrays,
        [spec(WIDTH, WIDTH)] * WEIGHTS,
        spec(WIDTH, 4),
        spec(WIDTH, 64),
    )
    assert not report.order.broken, report
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured, report
