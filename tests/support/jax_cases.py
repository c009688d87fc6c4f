"""Functions of JAX with makers of their arguments: trees, types, keys, shapes, control flow, operators."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclass
class Params:
    w: Any
    b: Any
    name: str = field(metadata={"static": True}, default="layer")


@dataclass(frozen=True)
class Case:
    """A function and a maker of fresh arguments from a NumPy generator."""

    fn: Callable[..., Any]
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    jit: dict[str, Any] = field(default_factory=dict)
    kwargs: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}


CASES: dict[str, Case] = {}


def case(*shapes: Any, dtype: Any = jnp.float32, jit: dict[str, Any] | None = None) -> Any:
    """Registers a function of random arrays; a shape may also be a maker of the argument."""

    def one(rng: np.random.Generator, shape: Any) -> Any:
        if callable(shape):
            return shape(rng)
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES[fn.__name__] = Case(fn, lambda rng: tuple(one(rng, s) for s in shapes), jit or {})
        return fn

    return add


def ints(*shape: int, dtype: Any = jnp.int32, low: int = -100, high: int = 100) -> Any:
    return lambda rng: jnp.asarray(rng.integers(low, high, shape), dtype)


def bools(*shape: int) -> Any:
    return lambda rng: jnp.asarray(rng.random(shape) < 0.5)


def key(rng: np.random.Generator) -> Any:
    return jax.random.key(int(rng.integers(1 << 30)))


# -- trees -----------------------------------------------------------------------------------------


@case(lambda rng: {"a": jnp.asarray(rng.random(4)), "b": [jnp.ones(3), None, (jnp.zeros(()),)]})
def tree_of_everything(t):
    a = jnp.sin(t["a"])
    return {"out": Pair(a, jnp.cos(a)), "none": None, "list": [t["b"][0] * 2, t["b"][2][0]]}


@case(lambda rng: Params(jnp.asarray(rng.random((3, 3))), None), (3,))
def tree_registered_dataclass(p, x):
    return Params(jnp.tanh(p.w @ x), jnp.sum(x), p.name)


@case((4,), lambda rng: None, (4,))
def argument_none(x, nothing, y):
    return x * y if nothing is None else x


@case(lambda rng: {}, lambda rng: (), (3,))
def argument_empty_trees(a, b, x):
    return x + 1, a, b


# -- dtypes ----------------------------------------------------------------------------------------


@case(ints(8), ints(8, low=1))
def dtype_int32(x, y):
    return x // y, x % y, x << 2, jnp.sort(x), x @ y, jnp.bitwise_xor(x, y)


@case(ints(8, dtype=jnp.int8), ints(8, dtype=jnp.uint8, low=0))
def dtype_small_ints(x, y):
    return x * x, y + y, x.astype(jnp.uint8) ^ y, jnp.cumsum(x), jnp.max(y)


@case(ints(8, dtype=jnp.uint32, low=0, high=2**32 - 1), ints(8, dtype=jnp.int16))
def dtype_more_ints(x, y):
    return x * x, x >> 3, y * y, lax.population_count(x), lax.clz(x)


@case(bools(8), bools(8))
def dtype_bool(x, y):
    return x & y, ~x | y, jnp.any(x), jnp.all(y), jnp.where(x, 1, 2), jnp.sum(x)


@case((8, 8), (8, 8), dtype=jnp.bfloat16)
def dtype_bfloat16(x, y):
    # No bf16 intermediate that a fusion may keep in f32: rounding would differ by design.
    wide = x.astype(jnp.float32) * y.astype(jnp.float32)
    return jnp.tanh(x) @ y, jnp.sort(y), wide, jnp.max(x)


@case((8, 8), (8, 8), dtype=jnp.float16)
def dtype_float16(x, y):
    return jnp.tanh(x) @ y, jnp.sort(y), x - y, jnp.exp(x)


@case((8,), dtype=jnp.float8_e4m3fn)
def dtype_float8(x):
    y = x.astype(jnp.float32)
    return (jnp.sin(y) * 2).astype(jnp.float8_e4m3fn), y


@case((6, 6), (6, 6))
def dtype_complex64(x, y):
    z = x + 1j * y
    return z @ z, jnp.abs(z), jnp.conj(z), jnp.angle(z), jnp.fft.fft(z), z.real, jnp.exp(z)


@case((5,), ints(5), bools(5))
def dtype_mixed(x, n, b):
    return x + n, n + b, x * b, jnp.where(b, x, n), x.astype(jnp.int32), n.astype(jnp.bfloat16)


@case((6,))
def value_special(x):
    y = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1.0]) * jnp.where(x > 0, 1.0, 1.0)
    return 1 / y, jnp.sqrt(y), jnp.sort(y), jnp.isnan(y), jnp.signbit(y), y + x


# -- random keys -----------------------------------------------------------------------------------


@case(key, (4,))
def key_in(k, x):
    return x + jax.random.normal(k, (4,)), jax.random.uniform(jax.random.fold_in(k, 3), (2,))


@case(key)
def key_out(k):
    a, b = jax.random.split(k)
    return a, b, jax.random.bits(b, (3,))


@case(key, (4,))
def key_crosses_lanes(k, x):
    keys = jax.random.split(k, 3)  # every use below may be on another lane
    draws = [jax.random.normal(keys[i], (4,)) + jnp.sort(x) for i in range(3)]
    return sum(draws), keys, jax.random.key_data(keys[1])


@case(key)
def key_batched(k):
    keys = jax.random.split(k, (2, 3))
    return jax.vmap(jax.vmap(lambda q: jax.random.normal(q, (2,))))(keys), keys[1]


@case(lambda rng: jax.random.key(int(rng.integers(99)), impl="rbg"))
def key_rbg(k):
    a, b = jax.random.split(k)
    return a, jax.random.uniform(b, (5,)), jax.random.uniform(a, (5,))


@case(lambda rng: jax.random.PRNGKey(int(rng.integers(99))))
def key_raw(k):
    a, b = jax.random.split(k)
    return a, jax.random.gumbel(b, (5,))


@case(ints(low=0))
def key_made_inside(seed):
    k = jax.random.key(seed)
    return k, jax.random.permutation(k, 8)


@case(key, (4,))
def key_in_scan(k, x):
    def body(carry, _):
        carry, sub = jax.random.split(carry)
        return carry, jax.random.normal(sub)

    k, ys = lax.scan(body, k, length=3)
    return k, ys, jnp.sin(x)


# -- shapes ----------------------------------------------------------------------------------------


@case((0, 3), (3, 4))
def zero_size_rows(x, y):
    return x @ y, jnp.sum(x, 0), jnp.sin(x), jnp.sort(x)


@case((3, 0), (0, 4))
def zero_size_contracted(x, y):
    return x @ y, jnp.concatenate([x, jnp.ones((3, 2))], 1), jnp.zeros((0,))


@case((0,))
def zero_size_only(x):
    return jnp.sin(x), jnp.cos(x) + 1


@case(ints(0), bools(0))
def zero_size_ints(x, b):
    return jnp.sum(x), jnp.where(b, x, 0), jnp.any(b)


@case((), (), ints())
def scalar_arrays(x, y, n):
    return x * y, jnp.sin(x) + n, n * 2, jnp.stack([x, y])


@case((2, 1, 3, 1, 2), (1, 4, 1, 2, 1))
def many_dimensions(x, y):
    z = x * y
    return z, z.sum((1, 3)), z.transpose(4, 3, 2, 1, 0), z.reshape(-1)


# -- Python values ---------------------------------------------------------------------------------


@case(lambda rng: 2, lambda rng: float(rng.random()), lambda rng: True)
def python_scalars_weak(n, x, b):
    return n * x, n + 1, x * 2, jnp.where(b, n, x), jnp.ones((2,), jnp.bfloat16) * x


@case((4,), dtype=jnp.bfloat16)
def weak_type_kept(x):
    half = lax.cos(0.5 + 0 * jnp.float32(1))  # strong
    return x * 2.0, lax.full((), 3.0) * 1, half, lax.convert_element_type(x[0], float)


@case(lambda rng: rng.random((3, 3)), lambda rng: np.int32(4), lambda rng: np.float32(2.5))
def numpy_arguments(x, n, y):
    return x @ x, x * n, y * n


@case(lambda rng: [1, 2.5, (3,)], (2,))
def python_tree(t, x):
    return x * t[0] + t[1], t[2][0]


# -- closures --------------------------------------------------------------------------------------

_W = jnp.asarray(np.random.default_rng(0).standard_normal((6, 6)), jnp.float32)
_N = np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32)
_SCALAR = jnp.float32(1.5)
_KEY = jax.random.key(7)


@case((6,))
def closes_over_arrays(x):
    return jnp.tanh(_W @ x) @ _N + _SCALAR, jax.random.normal(_KEY, (2,)) + x[:2], _W[0]


@case((6,))
def closes_over_array_in_inner_jit(x):
    return jax.jit(lambda y: _W @ y)(x) + jax.jit(jax.jit(lambda y: _N @ y))(x)


# -- calls inside ----------------------------------------------------------------------------------


@case((4, 4), (4, 4))
def nested_jit(x, y):
    inner = jax.jit(lambda a, b: (jnp.sort(a) @ b, b))
    u, _ = inner(x, y)
    v, same = inner(y, x)
    return u + v, same, jax.jit(lambda: jnp.arange(3))()


@jax.custom_jvp
def _softened(x):
    return jnp.log1p(jnp.exp(x))


@_softened.defjvp
def _softened_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _softened(x), jax.nn.sigmoid(x) * t


@jax.custom_vjp
def _clipped(x):
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


@case((4,))
def custom_jvp(x):
    return _softened(x) + jnp.sort(_softened(-x)), jax.nn.relu(x), jax.nn.silu(x)


@case((4,))
def custom_vjp(x):
    return _clipped(x) + _clipped(jnp.sort(x)), jax.grad(lambda y: _clipped(y).sum())(x)


@case((4,), (4, 4))
def checkpointed(x, w):
    f = jax.checkpoint(lambda y: jnp.tanh(w @ y))
    return f(f(x)), jax.grad(lambda y: f(f(y)).sum())(x)


@case((4, 4), (4,))
def derivatives_inside(w, x):
    f = lambda y: jnp.sum(jnp.tanh(w @ y) ** 2)  # noqa: E731
    return jax.grad(f)(x), jax.jvp(f, (x,), (x,)), jax.hessian(f)(x)


@case((3, 4), (4,))
def vmap_inside(xs, y):
    return jax.vmap(lambda x: jnp.sort(x) @ y)(xs), jax.vmap(jnp.outer, (0, None))(xs, y)


# -- control flow ----------------------------------------------------------------------------------


@case((5, 4), (4,), (4, 4))
def scanned(xs, h, w):
    def body(h, x):
        h = jnp.tanh(w @ h + x)
        return h, (h * 2, jnp.sum(x))

    return lax.scan(body, h, xs), lax.scan(body, h, xs, reverse=True)[1]


@case((4,))
def scan_without_xs(x):
    return lax.scan(lambda c, _: (c * 1.1, c.sum()), x, None, length=4), lax.map(jnp.sin, x)


@case((4,), ints(low=1, high=9))
def while_loop(x, n):
    def body(carry):
        i, y = carry
        return i + 1, jnp.sin(y) + x

    return lax.while_loop(lambda c: c[0] < n, body, (0, x)), jnp.cos(x)


@case((4,), ints(low=0, high=6))
def fori_loop(x, n):
    return lax.fori_loop(0, n, lambda i, y: y * 1.5 + i, x), lax.fori_loop(0, 3, jnp.multiply, x)


@case((4,), bools(), ints(low=-1, high=4))
def cond_and_switch(x, flag, which):
    a = lax.cond(flag, lambda y: (jnp.sort(y), y.sum()), lambda y: (y * 2, y.max()), x)
    b = lax.switch(which, [jnp.sin, jnp.cos, lambda y: y[::-1]], x)
    return a, b


@case((8,))
def associative(x):
    return lax.associative_scan(jnp.add, x), jnp.cumsum(x), lax.cumlogsumexp(x)


# -- outputs ---------------------------------------------------------------------------------------


@case((4,), ints(3))
def output_passes_through(x, n):
    return n, jnp.sin(x), x, n


@case((4,))
def output_is_identity(x):
    return x


@case((4,), key)
def output_is_identity_with_key(x, k):
    return k, x


@case((4,))
def output_literal(x):
    return 1.0, jnp.sin(x), 3, True, np.float32(2.0), jnp.int32(7), jnp.zeros((2,)), None


@case((4,))
def output_twice(x):
    y = jnp.sort(x)
    return y, jnp.sin(x), y, (y, x, x)


@case((4,))
def output_empty(x):
    jnp.sin(x)
    return ()


@case()
def no_arguments():
    return jnp.arange(4) * 2, jnp.sin(jnp.ones(3)), 2


@case((4,), (5,), (6,))
def input_unused(x, y, z):
    jnp.cos(z)
    return jnp.sin(x)


@case((4,))
def output_unused_inside(x):
    q, r = jnp.linalg.qr(jnp.outer(x, x) + jnp.eye(4))
    return jnp.abs(jnp.diag(r))


# -- operators -------------------------------------------------------------------------------------


@case((16, 16), (16, 16))
def linear_algebra(x, y):
    s = x @ x.T + 16 * jnp.eye(16)
    c = jnp.linalg.cholesky(s)
    return c, jnp.linalg.solve(s, y), jnp.linalg.eigvalsh(s), jnp.linalg.svd(y, compute_uv=False)


@case((1, 3, 8, 8), (4, 3, 3, 3))
def convolution(x, w):
    y = lax.conv(x, w, (1, 1), "SAME")
    return y, lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


@case((8, 5), ints(6, low=0, high=8), (6, 5))
def gather_scatter(x, i, v):
    return x[i], x.at[i].add(v), x.at[i[0]].set(0.0), jax.ops.segment_sum(v, i, 8), jnp.take(x, 9)


@case((6, 7), ints(low=-3, high=9))
def slices(x, i):
    return (
        lax.dynamic_slice(x, (i, 0), (2, 7)), lax.dynamic_update_slice(x, x[:2], (0, i)),
        jnp.pad(x, 2), x[::-1, ::2], jnp.roll(x, 3), jnp.tile(x, (2, 1)), jnp.split(x, 3),
    )  # fmt: skip


@case((4, 32))
def sorting(x):
    return (
        jnp.argsort(x),
        lax.top_k(x, 3),
        jnp.argmax(x, 1),
        jnp.unique(x[0], size=8),
        jnp.median(x),
    )


@case((2, 6, 8), (2, 6, 8), (2, 6, 8))
def attention(q, k, v):
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8**0.5
    mask = jnp.tril(jnp.ones((6, 6), bool))
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)


@case((8, 8))
def transforms(x):
    return jnp.fft.rfft(x), jnp.fft.ifft2(x), lax.erf(x), lax.lgamma(jnp.abs(x) + 1), jnp.cbrt(x)


# -- arguments by name, position, static -----------------------------------------------------------


@case((4,), lambda rng: 3, (4,), jit={"static_argnums": 1})
def static_argnums(x, n, y):
    return sum(jnp.sin(x * i) for i in range(n)) + y


@case((4,), lambda rng: "relu", jit={"static_argnums": (-1,)})
def static_negative(x, name):
    return getattr(jax.nn, name)(x) + jnp.sort(x)


@case((4,), lambda rng: ("a", 2), (3,), jit={"static_argnames": ("setting",)})
def static_argnames_by_position(x, setting, y):
    return x * setting[1], y.sum()


def _by_keyword(x, *, scale, mode="sin", extra=None, **rest):
    out = getattr(jnp, mode)(x) * scale + (0 if extra is None else extra)
    return {"out": out, **{name: jnp.sort(value) for name, value in rest.items()}}


CASES["keywords"] = Case(
    _by_keyword,
    lambda rng: (jnp.asarray(rng.random(4)),),
    {"static_argnames": "mode"},
    lambda rng: {"scale": 2.0, "mode": "cos", "z": jnp.asarray(rng.random(5)), "b": jnp.ones(2)},
)
CASES["keyword_defaults"] = Case(
    _by_keyword,
    lambda rng: (jnp.asarray(rng.random(4)),),
    {"static_argnames": "mode"},
    lambda rng: {"scale": jnp.asarray(rng.random(4))},
)


@case((4,), (4,), (4,))
def variadic(x, *rest):
    return [x + jnp.sort(y) for y in rest]
