"""Control flow, custom rules, nested transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from function_table.registry import ROWS, case

D = 6


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1))
def scan_with_outputs(x: Any, w: Any) -> Any:
    """The rows are in the carry; what each step gives is stacked in front of them."""

    def step(h: Any, t: Any) -> Any:
        h = jnp.tanh(h @ w + t)
        return h, h.sum(-1)

    last, sums = lax.scan(step, x, jnp.arange(4.0))
    return last, jnp.moveaxis(sums, 1, 0)


@case(lambda d: (d.uniform(ROWS, D),), wrt=())
def while_each_row(x: Any) -> Any:
    """Each row goes on as long as it has to; reverse mode does not know while."""

    def one(row: Any) -> Any:
        return lax.while_loop(
            lambda c: (c[1].sum() > 0.5) & (c[0] < 20), lambda c: (c[0] + 1, c[1] * 0.7), (0, row)
        )

    return jax.vmap(one)(x)


@case(lambda d: (d.normal(ROWS, D), d.ints(2, 5)), in_axes=(0, None), wrt=())
def while_with_a_given_count(x: Any, count: Any) -> Any:
    return lax.fori_loop(0, count, lambda i, c: jnp.sin(c) + i, x)


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1))
def fori(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: jnp.cos(c @ w) * (i + 1), x)


@case(lambda d: (jnp.bool_(True), d.normal(ROWS, D), d.normal(D)), in_axes=(None, 0, None),
      wrt=(1, 2))  # fmt: skip
def cond(flag: Any, x: Any, w: Any) -> Any:
    return lax.cond(flag, lambda a: jnp.sin(a) * w, lambda a: a - w, x)


@case(lambda d: (d.ints(0, 3), d.normal(ROWS, D)), in_axes=(None, 0), wrt=(1,))
def switch(which: Any, x: Any) -> Any:
    return lax.switch(which, [jnp.sin, jnp.cos, lambda a: a**2], x)


@case(lambda d: (d.ints(0, 3, ROWS), d.normal(ROWS, D)), wrt=(1,))
def switch_each_row(which: Any, x: Any) -> Any:
    branches = [jnp.sin, lambda a: jnp.flip(a), lambda a: a**2]
    return jax.vmap(lambda w, a: lax.switch(w, branches, a))(which, x)


@jax.custom_jvp
def _log1pexp(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


@_log1pexp.defjvp
def _log1pexp_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _log1pexp(x), t * jax.nn.sigmoid(x) * 0.5  # half of the true one, to be seen


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1))
def custom_jvp(x: Any, w: Any) -> Any:
    return _log1pexp(x @ w) * 2


@jax.custom_vjp
def _clipped(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


def _clipped_fwd(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w), (x, w)


def _clipped_bwd(kept: Any, ct: Any) -> Any:
    x, w = kept
    ct = jnp.clip(ct, -0.3, 0.3)  # not the true derivative, to be seen
    return ct @ w.T, x.T @ ct


_clipped.defvjp(_clipped_fwd, _clipped_bwd)


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1), once=True)
def custom_vjp(x: Any, w: Any) -> Any:
    return _clipped(x, w) + x


_TABLE = np.linspace(-1, 1, D).astype(np.float32)


@jax.custom_vjp
def _by_table(x: Any) -> Any:
    return jnp.sin(x)


_by_table.defvjp(
    lambda x: (jnp.sin(x) + jnp.asarray(_TABLE) * 0, x),
    lambda x, ct: (ct * jnp.asarray(_TABLE) + x * np.arange(D, dtype=np.float32),),
)


@case(lambda d: (d.normal(ROWS, D),), wrt=(0,))
def custom_vjp_with_tables(x: Any) -> Any:
    return _by_table(x) * _TABLE + jnp.sort(x)


@case(lambda d: (d.normal(ROWS, D), d.weight(3, D, D)), in_axes=(0, None), wrt=(0, 1))
def remat(x: Any, ws: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: jnp.sin(h @ w))
    for n in range(3):
        x = layer(x, ws[n])
    return x


@case(lambda d: (d.normal(ROWS, D), d.weight(3, D, D)), in_axes=(0, None), wrt=(0, 1))
def remat_of_a_scan(x: Any, ws: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    step = jax.checkpoint(lambda h, w: (jnp.sin(h @ w), None), policy=policy, prevent_cse=False)
    return lax.scan(step, x, ws)[0]


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1))
def nested_calls(x: Any, w: Any) -> Any:
    block = jax.jit(lambda a, b: jnp.tanh(a @ b))
    return block(block(x, w), w) + jax.jit(jnp.sort)(x)


@case(lambda d: (d.normal(ROWS, D), d.weight(D, D), d.normal(D)), in_axes=(0, None, None),
      wrt=(0, 1))  # fmt: skip
def gradient_of_each_row(x: Any, w: Any, target: Any) -> Any:
    """A step of gradient descent for each row, as in meta-learning."""

    def loss(row: Any) -> Any:
        return jnp.sum((jnp.tanh(row @ w) - target) ** 2)

    return x - 0.1 * jax.vmap(jax.grad(loss))(x)


@case(lambda d: (d.normal(ROWS, 3), d.normal(3)), in_axes=(0, None), wrt=(0,), once=True)
def jacobian_of_each_row(x: Any, w: Any) -> Any:
    return jax.vmap(jax.jacfwd(lambda r: jnp.sin(r) * (r @ w)))(x)


@case(lambda d: (d.normal(ROWS, D), d.normal(ROWS, D)), wrt=(0, 1))
def newton_by_custom_root(x: Any, y: Any) -> Any:
    """A solver whose derivative is an implicit one."""

    def one(a: Any, b: Any) -> Any:
        def f(z: Any) -> Any:
            return z**3 + 3 * z - a * b

        def solve(g: Any, start: Any) -> Any:
            return lax.fori_loop(
                0, 12, lambda _, z: z - g(z) / jax.grad(lambda q: g(q).sum())(z), start
            )

        return lax.custom_root(f, jnp.zeros_like(a), solve, lambda g, q: q / g(jnp.ones_like(q)))

    return jax.vmap(one)(x, y)


@case(lambda d: (d.normal(ROWS, D), d.normal(ROWS, D)), wrt=(0,))
def stopped_gradient(x: Any, y: Any) -> Any:
    return lax.stop_gradient(jnp.sin(x)) * x * y


@case(lambda d: (d.normal(4, ROWS, D),), in_axes=1, out_axes=(1, 0), wrt=(0,))
def mapped_over_time(x: Any) -> Any:
    """lax.map over another axis than the batch."""
    y = lax.map(lambda step: jnp.sort(step, -1) * 2, x)
    return y, jnp.moveaxis(y, 1, 0).sum(1)
