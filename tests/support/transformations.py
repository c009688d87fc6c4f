"""Each transformation of JAX as a function of a function: original and scheduled must give the same.

``SETTINGS`` are the ways a function is made before it is scheduled, ``TRANSFORMATIONS`` what is then done
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from function_table import Case
from jax import lax

Fn = Callable[..., Any]
COPIES = 2  # rows that vmap and scan add


def inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def values(tree: Any) -> list[Any]:
    """Floating point and complex leaves."""
    return [x for x in jax.tree_util.tree_leaves(tree) if inexact(x)]


def total(tree: Any) -> Any:
    """A number that depends on every value and its place."""
    terms = [jnp.float32(0)]
    for x in values(tree):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        weights = jnp.cos(jnp.arange(x.size) * 0.7 + len(terms)).reshape(x.shape)
        terms.append(jnp.sum(jnp.real(x * weights)))
    return sum(terms)


def with_these(args: tuple[Any, ...], wrt: tuple[int, ...], given: Any) -> list[Any]:
    full = list(args)
    for n, x in zip(wrt, given, strict=True):
        full[n] = x
    return full


def stacked(case: Case) -> tuple[Any, ...]:
    """Several arguments, along a new first axis."""
    several = [case.arguments(seed) for seed in range(COPIES)]
    return jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *several)


def gradient(f: Fn, wrt: tuple[int, ...]) -> Fn:
    return jax.grad(lambda *a: total(f(*a)), wrt)


# -- what is done with a function ------------------------------------------------------------------


def call(f: Fn, case: Case) -> Any:
    first, second = case.arguments(0), case.arguments(1)
    return f(*first), f(*second), f(*first)


def jit(f: Fn, case: Case) -> Any:
    def around(*args: Any) -> Any:
        args = jax.tree_util.tree_map(lambda x: x * 2 if inexact(x) else x, args)
        out = f(*args)
        return out, total(out)

    return jax.jit(around)(*case.arguments())


def grad(f: Fn, case: Case) -> Any:
    return gradient(f, case.wrt)(*case.arguments())


def value_and_grad(f: Fn, case: Case) -> Any:
    def loss(*args: Any) -> Any:
        out = f(*args)
        return total(out), out

    return jax.jit(jax.value_and_grad(loss, case.wrt, has_aux=True))(*case.arguments())


def vjp(f: Fn, case: Case) -> Any:
    args = case.arguments()
    given = [args[n] for n in case.wrt]
    out, back = jax.vjp(lambda *z: values(f(*with_these(args, case.wrt, z))), *given)
    return out, back([jnp.cos(x) for x in out]), back([jnp.ones_like(x) for x in out])


def vmap_of_vjp(f: Fn, case: Case) -> Any:
    args = case.arguments()
    given = [args[n] for n in case.wrt]
    out, back = jax.vjp(lambda *z: values(f(*with_these(args, case.wrt, z))), *given)
    return jax.vmap(back)([jnp.stack([jnp.cos(x), jnp.ones_like(x)]) for x in out])


def linearize(f: Fn, case: Case) -> Any:
    args = case.arguments()
    given = [args[n] for n in case.wrt]
    out, tangents = jax.linearize(lambda *z: values(f(*with_these(args, case.wrt, z))), *given)
    return out, jax.linear_transpose(tangents, *given)([jnp.cos(x) for x in out])


def vmap(f: Fn, case: Case) -> Any:
    """Along the first axis; the last of several arguments is the same for all."""
    args = stacked(case)
    dims = [0] * len(args)
    if len(args) > 1:
        args, dims[-1] = (*args[:-1], case.arguments()[-1]), None
    return jax.vmap(f, tuple(dims))(*args)


def vmap_of_grad(f: Fn, case: Case) -> Any:
    return jax.vmap(gradient(f, case.wrt))(*stacked(case))


def grad_of_vmap(f: Fn, case: Case) -> Any:
    return gradient(jax.vmap(f), case.wrt)(*stacked(case))


def checkpoint_outside(f: Fn, case: Case) -> Any:
    return gradient(jax.checkpoint(f), case.wrt)(*case.arguments())


def scan(f: Fn, case: Case) -> Any:
    """Values of a scan whose body is the function, and gradients through it."""

    def run(*args: Any) -> Any:
        def step(carry: Any, item: Any) -> Any:
            out = f(*item)
            return carry + total(out), out

        return lax.scan(step, jnp.float32(0), args)

    args = stacked(case)
    if not case.wrt:
        return jax.jit(run)(*args)
    return jax.jit(jax.value_and_grad(run, case.wrt, has_aux=True))(*args)


def scheduled_scan(f: Fn, case: Case) -> Any:
    args = stacked(case)
    out = f(*args)
    return (out, gradient(f, case.wrt)(*args)) if case.wrt else out


def second_derivative(f: Fn, case: Case) -> Any:
    def first(*args: Any) -> Any:
        return total(gradient(f, case.wrt)(*args))

    return jax.grad(first, case.wrt)(*case.arguments())


def donate(f: Fn, case: Case) -> Any:
    def copies() -> Any:
        return jax.tree_util.tree_map(jnp.copy, case.arguments())

    return f(*copies()), f(*copies())


def ahead_of_time(f: Any, case: Case) -> Any:
    args = case.arguments()
    return f.lower(*args).compile()(*args), jax.jit(f).trace(*args).lower().compile()(*args)


# -- how a function is made ------------------------------------------------------------------------


def _as_it_is(case: Case) -> tuple[Fn, Case]:
    return jax.jit(case.fn), case


def _remat(case: Case) -> tuple[Fn, Case]:
    return jax.jit(jax.checkpoint(case.fn)), case


def _donated(case: Case) -> tuple[Fn, Case]:
    numbers = tuple(range(len(case.axes)))
    return jax.jit(case.fn, donate_argnums=numbers), case


def _later(axis: Any) -> Any:
    return axis + 1 if isinstance(axis, int) and axis >= 0 else axis


def _scanned(case: Case) -> tuple[Fn, Case]:
    """A scan over what is stacked in front of every argument."""

    def run(*args: Any) -> Any:
        return lax.scan(lambda c, item: (c, case.fn(*item)), 0, args)[1]

    def shift(axes: Any) -> Any:
        return jax.tree_util.tree_map(_later, axes, is_leaf=lambda a: a is None)

    return jax.jit(run), replace(case, in_axes=shift(case.axes), out_axes=shift(case.out_axes))


@dataclass(frozen=True)
class Transformation:
    """What is done, with a function made how; ``derivative``: it needs something to differentiate."""

    run: Callable[[Any, Case], Any]
    make: Callable[[Case], tuple[Fn, Case]] = _as_it_is
    derivative: bool = True
    second: bool = False

    def applies(self, case: Case) -> bool:
        return bool(case.wrt or not self.derivative) and not (self.second and case.once)


TRANSFORMATIONS = {
    "call": Transformation(call, derivative=False),
    "grad": Transformation(grad),
    "jit": Transformation(jit, derivative=False),
    "value_and_grad": Transformation(value_and_grad),
    "vmap": Transformation(vmap, derivative=False),
    "vjp": Transformation(vjp),
    "scan": Transformation(scan, derivative=False),
    "linearize": Transformation(linearize),
    "ahead_of_time": Transformation(ahead_of_time, derivative=False),
    "vmap_of_grad": Transformation(vmap_of_grad),
    "donate": Transformation(donate, _donated, derivative=False),
    "checkpoint_outside": Transformation(checkpoint_outside),
    "grad_of_vmap": Transformation(grad_of_vmap),
    "scheduled_scan": Transformation(scheduled_scan, _scanned, derivative=False),
    "checkpoint_inside": Transformation(grad, _remat),
    "vmap_of_vjp": Transformation(vmap_of_vjp),
    "second_derivative": Transformation(second_derivative, second=True),
}
