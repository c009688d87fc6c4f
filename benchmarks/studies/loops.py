"""How near the estimated costs of loops are to what they take: ``scan`` and ``fori_loop`` of JAX on one core.

    python benchmarks/studies/loops.py [--rounds 15] [--only mv,gru] [--out FILE]

Small steps matter most: what one operator of them is thought to take, a loop takes a thousand times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import jax
import jax.numpy as jnp
from common import estimated
from common.estimated import Case, normal
from jax import lax


def repeated(times: int, step: Any) -> Any:
    """A loop with ``step(carried, *constants)``."""
    return lambda h, *constants: lax.fori_loop(0, times, lambda _, h: step(h, *constants), h)


def gru(x: Any, w: Any, u: Any) -> Any:
    """Hidden states of a GRU over the first axis."""

    def step(h: Any, row: Any) -> Any:
        z, r, q = jnp.split(row @ w + h @ u, 3, -1)
        z = jax.nn.sigmoid(z)
        h = (1 - z) * h + z * jnp.tanh(q * jax.nn.sigmoid(r))
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], u.shape[0])), x)[1]


def levenshtein(a: Any, b: Any) -> Any:
    """Edits between two sequences, by two nested loops over scalars."""

    def row(above: Any, letter: Any) -> Any:
        def column(left: Any, given: Any) -> Any:
            up, corner, other = given
            now = jnp.minimum(jnp.minimum(left, up) + 1, corner + (letter != other))
            return now, now

        made = lax.scan(column, above[0] + 1, (above[1:], above[:-1], b))[1]
        return jnp.concatenate([above[:1] + 1, made]), None

    return lax.scan(row, jnp.arange(len(b) + 1), a)[0][-1]


def lorenz(y: Any) -> Any:
    """An orbit of three numbers, by a fourth-order Runge-Kutta method."""

    def slope(y: Any) -> Any:
        a, b, c = y
        return jnp.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])

    def step(y: Any, _: Any) -> Any:
        h = 0.01
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        k4 = slope(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    return lax.scan(step, y, length=2000)[1]


def viterbi(scores: Any, moves: Any) -> Any:
    """The best path through a trellis, and back."""

    def step(best: Any, score: Any) -> Any:
        through = best[:, None] + moves
        return through.max(0) + score, through.argmax(0)

    last, back = lax.scan(step, scores[0], scores[1:])
    return lax.scan(lambda at, row: (row[at], at), last.argmax(), back, reverse=True)[1]


def forward(rows: Any, moves: Any) -> Any:
    """The likelihood of a hidden Markov model."""

    def step(a: Any, row: Any) -> Any:
        a = a @ moves * row
        return a / a.sum(), jnp.log(a.sum())

    size = moves.shape[0]
    return lax.scan(step, jnp.full(size, 1 / size), rows)[1].sum()


def drawing(key: Any) -> Any:
    """A key that is split in each step, and draws."""

    def step(key: Any, _: Any) -> Any:
        key, now = jax.random.split(key)
        return key, jax.random.normal(now, (64,)).sum()

    return lax.scan(step, key, length=200)


def attending(q: Any, keys: Any) -> Any:
    """Attention to the same rows, again and again."""
    return jax.nn.softmax(q @ keys.T) @ keys


def either(h: Any, x: Any) -> Any:
    """A condition in a step."""
    return lax.cond(x.sum() > 0, lambda h: h * 0.5 + x, lambda h: h - x, h), None


def loops() -> Iterator[Case]:
    """Name, function and arguments."""
    for n in (8, 32, 64, 128, 512, 2048, 8192):
        yield f"elements {n}", repeated(2000, lambda h: jnp.tanh(h * 0.99 + 0.01)), (normal(n),)
        norm = repeated(2000, lambda h: h / (1 + jnp.sqrt((h * h).sum())))
        yield f"norm {n}", norm, (normal(n),)
        rows = lambda h, x: lax.scan(lambda h, x: (h * 0.9 + x, h - x), h, x)[1]  # noqa: E731
        yield f"rows out {n}", rows, (normal(n), normal(1000, n))
    for n in (4, 8, 16, 32, 64, 128, 256):
        w = normal(n, n) * 0.1
        yield f"matrix, vector {n}", repeated(1000, lambda h, w: jnp.tanh(w @ h)), (normal(n), w)
        yield f"4 rows, matrix {n}", repeated(1000, lambda h, w: jnp.tanh(h @ w)), (normal(4, n), w)
        yield f"two matrices {n}", repeated(200, lambda h, w: jnp.tanh(h @ w)), (normal(n, n), w)
    for n in (16, 64, 256):
        w, u = normal(32, 3 * n) * 0.1, normal(n, 3 * n) * 0.1
        for batch in (1, 8, 32):
            yield f"GRU {n}, batch {batch}", gru, (normal(200, batch, 32), w, u)
        slope = jax.grad(lambda w, x, u: gru(x, w, u).sum())
        yield f"GRU {n}, batch 8, gradient", slope, (w, normal(200, 8, 32), u)
    letters = jnp.arange(100) % 7
    yield "Levenshtein 100", levenshtein, (letters, letters[::-1])
    yield "scalar", repeated(20_000, lambda x: x * 0.99 + 0.01), (jnp.float32(1.0),)
    yield "Lorenz", lorenz, (jnp.array([1.0, 1.0, 1.0]),)
    yield "Viterbi 8", viterbi, (normal(3000, 8), normal(8, 8))
    moves = jnp.abs(normal(16, 16))
    yield "forward 16", forward, (jnp.abs(normal(500, 16)), moves)
    yield "forward 16, gradient", jax.grad(forward), (jnp.abs(normal(500, 16)), moves)
    yield "draws", drawing, (jax.random.key(0),)
    sorting = repeated(300, lambda h: jnp.sort(h)[::-1] + 1)
    yield "sort 64", sorting, (normal(64),)
    summing = repeated(300, lambda h: jnp.cumsum(h) * 0.1)
    yield "cumsum 256", summing, (normal(256),)
    looking = lambda c, i: lax.scan(lambda c, i: (c.at[i].add(1.0), c[i].sum()), c, i)  # noqa: E731
    at = jnp.arange(4800).reshape(300, 16) * 7 % 1000
    yield "gather, scatter 16 of 1000", looking, (normal(1000), at)
    writing = lambda x: lax.fori_loop(1, 1000, lambda i, x: x.at[i].set(x[i - 1] / 2), x)  # noqa: E731
    yield "row of 1000 x 32", writing, (normal(1000, 32),)
    yield "condition 512", lambda h, x: lax.scan(either, h, x)[0], (normal(512), normal(1000, 512))
    yield "attention 4 x 64", repeated(200, attending), (normal(4, 32), normal(64, 32))


if __name__ == "__main__":
    estimated.main("loops", loops(), __doc__)
