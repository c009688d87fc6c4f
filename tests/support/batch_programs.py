"""Random programs on batches of rows, which mix the rows or do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynaflow_xla.frontends.jax.capture import capture

BATCH, SIZES = 5, (2, 3)
DIMS = (2, 3, 4, 5)  # some coincide with the batch and nano-batch sizes, on purpose

Draw = tuple[int, ...]  # random numbers that an operator interprets


def _axis(x: Any, n: int) -> int:
    return n % x.ndim


def _at(x: Any, axis: int, index: Any) -> Any:
    return x[(slice(None),) * axis + (index,)]


def _scan(x: Any, axis: int, f: Callable[[Any, Any], Any]) -> Any:
    moved = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(lax.scan(f, jnp.zeros(moved.shape[1:], x.dtype), moved)[1], 0, axis)


def _bucket(x: Any, n: int) -> Any:
    return (jnp.abs(x) * 10).astype(int) % n


def _own(x: Any) -> Any:
    """x[arange(n), i] with i from the row itself."""
    return x[jnp.arange(x.shape[0]), _bucket(x.reshape(x.shape[0], -1)[:, 0], x.shape[1])]


def _segment(x: Any, a: int) -> Any:
    rows = jnp.moveaxis(x, a, 0)
    which = _bucket(rows.reshape(rows.shape[0], -1)[:, 0], 3)
    return jnp.zeros((3, *rows.shape[1:]), x.dtype).at[which].add(rows)


def _top(x: Any, a: int, values: bool) -> Any:
    found = lax.top_k(jnp.moveaxis(x, a, -1), 2)
    return jnp.moveaxis(found[0] if values else found[1].astype(x.dtype), -1, a)


def _halve(x: Any, a: int) -> Any:
    return x.reshape(*x.shape[:a], 2, x.shape[a] // 2, *x.shape[a + 1 :])


def _merge(x: Any, a: int) -> Any:
    return x.reshape(*x.shape[:a], -1, *x.shape[a + 2 :])


def _rounds(x: Any, goes_on: Callable[[Any], Any], step: Callable[[Any], Any]) -> Any:
    """A while loop of six rounds at most."""
    return lax.while_loop(
        lambda c: (c[0] < 6) & goes_on(c[1]), lambda c: (c[0] + 1, step(c[1])), (0, x)
    )[1]


def _while(x: Any) -> Any:
    """Each row for itself."""
    return jax.vmap(lambda r: _rounds(r, lambda c: jnp.sum(c) < 4, lambda c: c * 0.5 + 1))(x)


def _loop(x: Any) -> Any:
    """All rows, until the largest is small."""
    return _rounds(x, lambda c: jnp.max(jnp.abs(c)) > 1, lambda c: c * 0.5)


def _iota(x: Any, a: int) -> Any:
    return lax.broadcasted_iota(x.dtype, x.shape, a)


def _gram(x: Any) -> Any:
    flat = x.reshape(x.shape[0], -1)
    return flat @ flat.T


def _spd(x: Any) -> Any:
    m = jnp.einsum("...i,...j->...ij", x, x) + jnp.eye(x.shape[-1])
    return jnp.linalg.cholesky(m)[..., 0]


def _lookup(x: Any) -> Any:
    return jnp.sin(jnp.arange(12.0).reshape(4, 3))[_bucket(x, 4)].astype(x.dtype)


def _layer_norm(x: Any, a: int) -> Any:
    mean = x.mean(a, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(a, keepdims=True) + 0.1)


def _window(x: Any, a: int) -> Any:
    window = tuple(2 if d == a else 1 for d in range(x.ndim))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, (1,) * x.ndim, "SAME")


def _set_own(x: Any) -> Any:
    return x.at[jnp.arange(x.shape[0]), _bucket(x.reshape(x.shape[0], -1)[:, 0], x.shape[1])].add(
        1.0
    )


def _accumulate(x: Any, a: int) -> Any:
    moved = jnp.moveaxis(x, a, 0)
    return lax.scan(lambda c, r: (c + r.sum(0), None), jnp.zeros(moved.shape[2:], x.dtype), moved)[
        0
    ]


UNARY: dict[str, Callable[[Any, Draw], Any]] = {
    "tanh": lambda x, n: jnp.tanh(x),
    "neg": lambda x, n: -x,
    "abs": lambda x, n: jnp.abs(x),
    "relu": lambda x, n: jax.nn.relu(x),
    "square": lambda x, n: x * x / 4,
    "half": lambda x, n: x * 0.5,
    "plus_one": lambda x, n: x + 1,
    "gelu": lambda x, n: jax.nn.gelu(x),
    "sign": lambda x, n: jnp.sign(x),
    "round": lambda x, n: jnp.round(x),
    "clip": lambda x, n: jnp.clip(x, -1, 1),
    "where": lambda x, n: jnp.where(x > 0, x, -1),
    "to_int": lambda x, n: (x * 3).astype(jnp.int32).astype(x.dtype),
    "sum": lambda x, n: x.sum(_axis(x, n[0])),
    "sum_keep": lambda x, n: x.sum(_axis(x, n[0]), keepdims=True),
    "sum_all": lambda x, n: x.sum(),
    "mean": lambda x, n: x.mean(_axis(x, n[0])),
    "mean_all": lambda x, n: x.mean(),
    "max": lambda x, n: x.max(_axis(x, n[0])),
    "prod": lambda x, n: x.prod(_axis(x, n[0])),
    "var": lambda x, n: x.var(_axis(x, n[0])),
    "logsumexp": lambda x, n: jax.nn.logsumexp(x, axis=_axis(x, n[0])),
    "softmax": lambda x, n: jax.nn.softmax(x, axis=_axis(x, n[0])),
    "layer_norm": lambda x, n: _layer_norm(x, _axis(x, n[0])),
    "center": lambda x, n: x - x.mean(_axis(x, n[0]), keepdims=True),
    "minus_first": lambda x, n: x - lax.slice_in_dim(x, 0, 1, axis=_axis(x, n[0])),
    "cumsum": lambda x, n: jnp.cumsum(x, _axis(x, n[0])),
    "cummax": lambda x, n: lax.cummax(x, _axis(x, n[0])),
    "sort": lambda x, n: jnp.sort(x, _axis(x, n[0])),
    "argsort": lambda x, n: jnp.argsort(x, _axis(x, n[0])).astype(x.dtype),
    "argmax": lambda x, n: jnp.argmax(x, _axis(x, n[0])).astype(x.dtype),
    "top_k": lambda x, n: _top(x, _axis(x, n[0]), n[1] % 2 == 0),
    "flip": lambda x, n: jnp.flip(x, _axis(x, n[0])),
    "roll": lambda x, n: jnp.roll(x, 1, _axis(x, n[0])),
    "take": lambda x, n: _at(x, _axis(x, n[0]), n[1] % 2),
    "tail": lambda x, n: _at(x, _axis(x, n[0]), slice(1, None)),
    "stride": lambda x, n: _at(x, _axis(x, n[0]), slice(None, None, 2)),
    "upto": lambda x, n: _at(x, _axis(x, n[0]), slice(0, x.shape[_axis(x, n[0])] // 2)),
    "take_many": lambda x, n: jnp.take(x, jnp.array([1, 0, 1]), axis=_axis(x, n[0])),
    "take_sorted": lambda x, n: jnp.take_along_axis(
        x, jnp.argsort(-x, axis=_axis(x, n[0])), axis=_axis(x, n[0])
    ),
    "dynamic_slice": lambda x, n: lax.dynamic_slice_in_dim(
        x, jnp.int32(n[1] % 2), 2, _axis(x, n[0])
    ),
    "double": lambda x, n: jnp.concatenate([x, 2 * x], _axis(x, n[0])),
    "tile": lambda x, n: jnp.tile(x, [2 if d == _axis(x, n[0]) else 1 for d in range(x.ndim)]),
    "repeat": lambda x, n: jnp.repeat(x, 2, _axis(x, n[0])),
    "pad": lambda x, n: jnp.pad(x, [(d == _axis(x, n[0]), 0) for d in range(x.ndim)]),
    "expand": lambda x, n: jnp.expand_dims(x, n[0] % (x.ndim + 1)),
    "squeeze": lambda x, n: jnp.squeeze(x, _axis(x, n[0])),
    "transpose": lambda x, n: jnp.transpose(x),
    "swap": lambda x, n: jnp.swapaxes(x, _axis(x, n[0]), _axis(x, n[1])),
    "flatten": lambda x, n: x.reshape(-1),
    "merge": lambda x, n: _merge(x, n[0] % (x.ndim - 1)),
    "halve": lambda x, n: _halve(x, _axis(x, n[0])),
    "turn": lambda x, n: x.reshape(x.shape[::-1]),
    "rows_again": lambda x, n: x.reshape(DIMS[n[0] % 4], -1),
    "columns_again": lambda x, n: x.reshape(-1, DIMS[n[0] % 4]),
    "per_size": lambda x, n: x / x.shape[_axis(x, n[0])],
    "times_size": lambda x, n: x * x.shape[_axis(x, n[0])],
    "plus_size": lambda x, n: x + x.shape[_axis(x, n[0])],
    "plus_iota": lambda x, n: x + _iota(x, _axis(x, n[0])),
    "mask_iota": lambda x, n: jnp.where(_iota(x, _axis(x, n[0])) < 2, x, 0.0),
    "plus_numpy": lambda x, n: x + np.arange(float(x.shape[-1])),
    "times_ones": lambda x, n: x * jnp.ones(x.shape, x.dtype).sum(_axis(x, n[0]), keepdims=True),
    "own": lambda x, n: _own(x),
    "set_own": lambda x, n: _set_own(x),
    "set_first": lambda x, n: x.at[0].set(1.0),
    "set_column": lambda x, n: x.at[..., 0].set(2.0),
    "segment": lambda x, n: _segment(x, _axis(x, n[0])),
    "lookup": lambda x, n: _lookup(x),
    "one_hot": lambda x, n: jax.nn.one_hot(_bucket(x, 3), 3, dtype=x.dtype),
    "scan": lambda x, n: _scan(x, _axis(x, n[0]), lambda c, r: (c * 0.5 + r, c - r)),
    "scan_map": lambda x, n: _scan(x, _axis(x, n[0]), lambda c, r: (c, jnp.sin(r))),
    "accumulate": lambda x, n: _accumulate(x, _axis(x, n[0])),
    "lax_map": lambda x, n: lax.map(lambda r: r - r.mean(), x),
    "vmap": lambda x, n: jax.vmap(lambda r: r - r.max(), _axis(x, n[0]), _axis(x, n[0]))(x),
    "fori": lambda x, n: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c + i), x),
    "vmap_while": lambda x, n: _while(x),
    "while": lambda x, n: _loop(x),
    "cond": lambda x, n: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "cond_zero": lambda x, n: lax.cond(x.size > 3, lambda y: y * 2, lambda y: y * 0, x),
    "gram": lambda x, n: _gram(x),
    "cholesky": lambda x, n: _spd(x),
    "fft": lambda x, n: jnp.fft.fft(x, axis=_axis(x, n[0])).real,
    "window": lambda x, n: _window(x, _axis(x, n[0])),
    "noise": lambda x, n: x * jax.random.uniform(jax.random.key(0), x.shape, x.dtype),
    "grad": lambda x, n: jax.grad(lambda y: jnp.sum(jnp.sin(y) * y))(x),
    "grad_mean": lambda x, n: jax.grad(lambda y: jnp.mean(jnp.sin(y) * y))(x),
    "grad_softmax": lambda x, n: jax.grad(
        lambda y: (jax.nn.softmax(y, _axis(y, n[0])) ** 2).sum()
    )(x),
    "remat": lambda x, n: jax.checkpoint(lambda y: jnp.sin(y) * y)(x),
    "bf16_free": lambda x, n: x.astype(jnp.complex128).real,
}  # fmt: skip


def _contract(x: Any, y: Any, n: Draw) -> Any:
    return jnp.tensordot(x, y, axes=((_axis(x, n[0]),), (_axis(y, n[1]),))) / 4


def _batched(x: Any, y: Any, n: Draw) -> Any:
    """dot_general with one batch dimension."""
    a, b = jnp.moveaxis(x, _axis(x, n[0]), 0), jnp.moveaxis(y, _axis(y, n[1]), 0)
    return jax.vmap(lambda p, q: jnp.tensordot(p, q, axes=1))(a, b) / 4


def _param_grad(x: Any, y: Any, f: Callable[[Any], Any]) -> Any:
    return jax.grad(lambda w: f(jnp.tanh(x * w)))(y)


def _conv(x: Any, y: Any) -> Any:
    return lax.conv_general_dilated(x, y, (1,), "SAME")


BINARY: dict[str, Callable[[Any, Any, Draw], Any]] = {
    "add": lambda x, y, n: x + y,
    "subtract": lambda x, y, n: x - y,
    "multiply": lambda x, y, n: x * y,
    "divide": lambda x, y, n: x / (1 + jnp.abs(y)),
    "maximum": lambda x, y, n: jnp.maximum(x, y),
    "select": lambda x, y, n: jnp.where(x > y, x, 0.5 * y),
    "expanded": lambda x, y, n: x[..., None] + y,
    "outer": lambda x, y, n: jnp.multiply.outer(x, y),
    "tensordot": _contract,
    "batched_dot": _batched,
    "matmul": lambda x, y, n: x @ y / 4,
    "concatenate": lambda x, y, n: jnp.concatenate([x, y], _axis(x, n[0])),
    "stack": lambda x, y, n: jnp.stack([x, y], n[0] % (x.ndim + 1)),
    "plus_total": lambda x, y, n: x + y.sum(),
    "times_total": lambda x, y, n: x * y.mean(),
    "put_slice": lambda x, y, n: lax.dynamic_update_slice(x, y, (jnp.int32(n[0] % 2),) * x.ndim),
    "grad_of_sum": lambda x, y, n: _param_grad(x, y, jnp.sum),
    "grad_of_mean": lambda x, y, n: _param_grad(x, y, jnp.mean),
    "conv": lambda x, y, n: _conv(x, y),
    "gather": lambda x, y, n: x[_bucket(y, x.shape[0])],
    "along": lambda x, y, n: jnp.take_along_axis(
        x, _bucket(y, x.shape[_axis(x, n[0])]), axis=_axis(x, n[0])
    ),
    "ratio": lambda x, y, n: x.sum() / (5 + y.sum() ** 2),
    "mean_ratio": lambda x, y, n: x.sum() / y.size,
}  # fmt: skip


@dataclass
class Program:
    """Inputs (shape without batch, batch axis or None) and steps on numbered values."""

    inputs: list[tuple[tuple[int, ...], int | None]]
    steps: list[tuple[str, tuple[int, ...], Draw]] = field(default_factory=list)
    outputs: tuple[int, ...] = ()

    @property
    def axes(self) -> list[int | None]:
        return [axis for _, axis in self.inputs]

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        return [s if a is None else (*s[:a], batch, *s[a:]) for s, a in self.inputs]

    def apply(self, step: tuple[str, tuple[int, ...], Draw], values: list[Any]) -> Any:
        name, operands, numbers = step
        args = [values[i] for i in operands]
        return UNARY[name](*args, numbers) if len(args) == 1 else BINARY[name](*args, numbers)

    def __call__(self, *args: Any) -> list[Any]:
        values = list(args)
        for step in self.steps:
            values.append(self.apply(step, values))
        return [values[i] for i in self.outputs]


def generate(rng: np.random.Generator) -> Program:
    def shape() -> tuple[int, ...]:
        return tuple(int(d) for d in rng.choice(DIMS, rng.integers(0, 3)))

    inputs: list[tuple[tuple[int, ...], int | None]] = []
    for _ in range(rng.integers(1, 3)):
        rest = shape()
        inputs.append((rest, int(rng.integers(0, len(rest) + 1))))
    inputs += [(shape(), None) for _ in range(rng.integers(0, 3))]
    program = Program(inputs)
    values = [
        [jax.ShapeDtypeStruct(s, jnp.float64) for s in program.shapes(n)] for n in (BATCH, *SIZES)
    ]
    names = [*UNARY, *BINARY, *BINARY]  # as often again: they are fewer
    wanted = int(rng.integers(1, 8))
    for _ in range(6 * wanted):
        if len(program.steps) == wanted:
            break
        name = names[rng.integers(len(names))]
        count = len(values[0])
        # Later values are likelier, so that programs are deep.
        pick = [int(count - 1 - min(rng.geometric(0.4) - 1, count - 1)) for _ in range(2)]
        operands = tuple(pick[:1] if name in UNARY else pick)
        step = (name, operands, tuple(int(n) for n in rng.integers(0, 12, 3)))
        try:
            made = [
                jax.eval_shape(lambda *v, s=step: program.apply(s, list(v)), *v) for v in values
            ]
        except Exception:  # whatever the operator says of operands that do not fit it
            continue
        if any(m.ndim > 3 or m.size > 600 or m.size == 0 or m.dtype != jnp.float64 for m in made):
            continue
        program.steps.append(step)
        for known, value in zip(values, made, strict=True):
            known.append(value)
    last = len(values[0]) - 1
    extra = {int(i) for i in rng.integers(0, last + 1, rng.integers(0, 3))}
    program.outputs = (last, *sorted(extra - {last}))
    return program


def traced(program: Program, batch: int) -> tuple[capture.Captured, list[Any]]:
    specs = [jax.ShapeDtypeStruct(s, jnp.float64) for s in program.shapes(batch)]
    closed = jax.make_jaxpr(lambda *a: program(*a))(*specs)
    return capture.capture(closed, 0, "program"), closed.consts
