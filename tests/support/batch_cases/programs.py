"""Rows of JAX's own: programs in operators, random numbers, collectives, matrices."""

from __future__ import annotations

from typing import Any

from batch_cases.elementwise import bound
from batch_cases.table import Row, Stand
from batch_cases.values import BITS, BOOL, INT, MATRIX, POSITIVE, SPD, Domain, Operand

X = Operand((4, 3))
KEYS = Operand((4, 2), Domain("keys", BITS.sample, "uint32", (), (), False, core=1))
SQUARE = Operand((2, 3, 3), SPD)
LINE = Domain("line", lambda rng, s: rng.normal(size=s), core=1)


def _jax(path: str) -> Any:
    """A public function by its path, looked up when it is called."""

    def apply(lax: Any, *xs: Any) -> Any:
        import jax

        found: Any = jax
        for part in path.split("."):
            found = getattr(found, part)
        return found(*xs)

    return apply


def _named(lax: Any, x: Any) -> Any:
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, "x")


def _solve(lax: Any, a: Any, b: Any) -> Any:
    return lax.custom_linear_solve(lambda x: a * x, b, solve=lambda _, y: y / a, symmetric=True)


def _linear(lax: Any, x: Any, y: Any) -> Any:
    import jax

    return jax.custom_derivatives.linear_call(lambda r, v: r * v, lambda r, ct: r * ct, x, y)


def _with_rule(kind: str) -> Any:
    def apply(lax: Any, x: Any, y: Any) -> Any:
        import jax

        def f(a: Any, b: Any) -> Any:
            return a * b

        made = getattr(jax, kind)(f)
        if kind == "custom_jvp":
            made.defjvp(lambda xs, ts: (f(*xs), ts[0]))
        elif kind == "custom_vjp":
            made.defvjp(lambda a, b: (f(a, b), a), lambda r, g: (g, r))
        return made(x, y)

    return apply


def _vmapped(lax: Any, x: Any, y: Any) -> Any:
    import jax

    made = jax.custom_batching.custom_vmap(lambda a, b: a * b)
    made.def_vmap(lambda n, batched, a, b: (a * b, True))
    return made(x, y)


def _composite(lax: Any, x: Any, y: Any) -> Any:
    return lax.composite(lambda a, b: a * b, "of.test")(x, y)


def _by_rows(path: str) -> Any:
    def apply(lax: Any, x: Any, *more: Any) -> Any:
        import jax

        return jax.vmap(lambda *xs: _jax(path)(lax, *xs))(x, *more)

    return apply


def _keyed(use: Any) -> Any:
    """Applies to typed keys; gives bits back."""

    def apply(lax: Any, x: Any, *more: Any) -> Any:
        import jax

        made = use(jax, jax.random.wrap_key_data(x), *more)
        typed = jax.dtypes.issubdtype(made.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(made) if typed else made

    return apply


def _linalg(name: str, *more: Any, **params: Any) -> Any:
    return lambda lax, *xs: getattr(lax.linalg, name)(*xs, *more, **params)


def _window(which: str) -> Any:
    """Reads or writes at the largest of each window."""
    params = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    both = {"base_dilation": (1, 1), "window_dilation": (1, 1)}

    def apply(lax: Any, x: Any, y: Any) -> Any:
        from batch_cases import on_jax

        return on_jax.primitive(which).bind(x, y, select_prim=lax.ge_p, **params, **both)

    return apply


def _placed(lax: Any, x: Any, y: Any, start: Any) -> Any:
    import jax

    select = jax.make_jaxpr(lambda a, b: a >= b)(0.0, 0.0)
    scatter = jax.make_jaxpr(lambda a, b: a * b + a)(0.0, 0.0)
    from batch_cases import on_jax

    return on_jax.primitive("select_and_scatter").bind(
        x, y, start, select_jaxpr=select.jaxpr, select_consts=(), scatter_jaxpr=scatter.jaxpr,
        scatter_consts=(), window_dimensions=(1, 2), window_strides=(1, 2),
        padding=((0, 0), (0, 0)),
    )  # fmt: skip


def _scan(lax: Any, c: Any, x: Any, w: Any) -> Any:
    return lax.scan(lambda a, b: (a * 0.5 + b @ w, a + 1), c, x)


def _while(lax: Any, x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + y), (0, x))[1]


def _until(lax: Any, x: Any) -> Any:
    import jax

    def row(r: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() > 1, lambda c: c * 0.5, r)

    return jax.vmap(row)(x)


COLLECTIVES = {
    "psum": Stand(lambda lax, x: lax.psum(x, "i"), lambda lax, x: x + 2 * x),
    "pmax": Stand(lambda lax, x: lax.pmax(x, "i"), lambda lax, x: lax.max(x, 2 * x)),
    "pmin": Stand(lambda lax, x: lax.pmin(x, "i"), lambda lax, x: lax.min(x, 2 * x)),
    "ppermute": Stand(lambda lax, x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), lambda lax, x: 2 * x),
}


def _cat(lax: Any, x: Any, axis: int) -> Any:
    return lax.concatenate([x, 2 * x], axis)


ROWS = [
    Row(
        "a call",
        (X, X),
        jax={
            "jit": lambda lax, x, y: _called("jit", x, y),
            "remat2": lambda lax, x, y: _called("checkpoint", x, y),
            "custom_jvp_call": _with_rule("custom_jvp"),
            "custom_vjp_call": _with_rule("custom_vjp"),
            "custom_vmap_call": _vmapped,
            "composite": _composite,
        },
    ),
    Row(
        "a value as it is, for JAX's own ends",
        (X,),
        jax={
            "name": _named,
            "device_put": lambda lax, x: _jax("device_put")(lax, x),
        },
    ),
    Row(
        "one of two programs",
        (Operand((), BOOL), X, X),
        jax={
            "cond": lambda lax, p, x, y: lax.cond(p, lambda a, b: a * 2, lambda a, b: a + b, x, y)
        },
    ),
    Row("a loop", (X, X), jax={"while": _while}),
    Row("a loop for each row", (X,), jax={"while": _until}),
    Row("a scan", (Operand((2, 3)), Operand((4, 2, 3)), Operand((3, 3))), jax={"scan": _scan}),
    Row(
        "a program for each row",
        (X, Operand((3,))),
        jax={"scan": lambda lax, x, y: lax.map(lambda r: r * r.sum() + y, x)},
    ),
    Row(
        "a linear system with its own solver",
        (Operand((3,), POSITIVE), Operand((3,))),
        jax={"custom_linear_solve": _solve},
    ),
    Row("a linear call with its own transpose", (X, X), jax={"linear_call": _linear}, never=True),
    Row(
        "keys of bits",
        (KEYS,),
        jax={
            "random_wrap": _keyed(lambda jax, k: k),
            "random_unwrap": _keyed(lambda jax, k: k),
            "random_clone": _keyed(lambda jax, k: jax.random.clone(k)),
            "random_split": _keyed(lambda jax, k: jax.vmap(jax.random.split)(k)),
            "random_bits": _keyed(
                lambda jax, k: jax.vmap(lambda one: jax.random.bits(one, (3,)))(k)
            ),
        },
    ),
    Row(
        "keys of numbers",
        (Operand((4,), INT),),
        jax={"random_seed": lambda lax, x: _key_data(_by_rows("random.key")(lax, x))},
    ),
    Row(
        "keys and numbers",
        (KEYS, Operand((4,), Domain("folded", BITS.sample, "uint32", (), ()))),
        jax={"random_fold_in": _keyed(lambda jax, k, d: jax.vmap(jax.random.fold_in)(k, d))},
    ),
    Row(
        "a distribution for each key",
        (KEYS, Operand((4,), POSITIVE)),
        jax={"random_gamma": _keyed(lambda jax, k, a: jax.vmap(jax.random.gamma)(k, a))},
        few=2,
    ),
    Row(
        "bits from bits",
        (Operand((4,), BITS),) * 4,
        jax={"threefry2x32": lambda lax, *x: _primitive("threefry2x32").bind(*x)},
    ),
    Row(
        "random bits of the whole batch",
        (Operand((2,), BITS), X),
        jax={
            "rng_bit_generator": lambda lax, k, x, n: lax.rng_bit_generator(
                lax.concatenate([k, k], 0), (n, 2)
            )[1],
            "iota_2x32_shape": lambda lax, k, x, n: _primitive("iota_2x32_shape").bind(
                shape=(n, 3)
            )[1],
        },
        never=True,
    ),
    Row("between devices", (X,), jax=COLLECTIVES),
    Row(
        "values of all devices",
        (X,),
        jax={
            "all_gather": Stand(
                lambda lax, x: lax.all_gather(x, "i", tiled=True), lambda lax, x: _cat(lax, x, 0)
            ),
            "reduce_scatter": Stand(
                lambda lax, x: lax.psum_scatter(x, "i", tiled=True),
                lambda lax, x: (x + 2 * x)[: x.shape[0] // 2],
            ),
            "all_to_all": Stand(
                lambda lax, x: lax.all_to_all(x, "i", 0, 0, tiled=True),
                lambda lax, x: lax.concatenate([x[: x.shape[0] // 2], 2 * x[: x.shape[0] // 2]], 0),
            ),
        },
    ),
    Row(
        "the number of the device",
        (X,),
        jax={
            "axis_index": Stand(
                lambda lax, x, n: lax.axis_index("i") + 0 * n,
                lambda lax, x, n: lax.iota("int32", 1)[0],
            )
        },
        never=True,
    ),
    Row(
        "matrices, each for itself",
        (SQUARE,),
        jax={
            "cholesky": _linalg("cholesky"),
            "eig": _linalg("eig"),
            "eigh": _linalg("eigh"),
            "lu": _linalg("lu"),
            "qr": _linalg("qr"),
            "svd": _linalg("svd"),
            "schur": _linalg("schur"),
            "hessenberg": _linalg("hessenberg"),
            "tridiagonal": _linalg("tridiagonal"),
            "geqrf": lambda lax, x: bound("geqrf")["geqrf"](lax, x),
            "householder_product": lambda lax, x: lax.linalg.householder_product(x, x[..., 0]),
        },
    ),
    Row(
        "matrices and right-hand sides",
        (SQUARE, Operand((2, 3, 2), MATRIX)),
        together=(0, 1),
        jax={"triangular_solve": _linalg("triangular_solve", left_side=True, lower=True)},
    ),
    Row(
        "one matrix and right-hand sides",
        (Operand((3, 3), SPD), Operand((3, 4))),
        jax={"triangular_solve": _linalg("triangular_solve", left_side=True, lower=True)},
    ),
    Row(
        "a matrix and a vector",
        (Operand((3, 3), SPD), Operand((3,), LINE)),
        jax={"cholesky_update": _linalg("cholesky_update")},
        never=True,
    ),
    Row(
        "products of matrices with themselves",
        (SQUARE, SQUARE),
        together=(0, 1),
        jax={"symmetric_product": lambda lax, x, y: lax.linalg.symmetric_product(x, y)},
    ),
    Row(
        "systems of three diagonals",
        (
            *[Operand((2, 3), Domain("line", POSITIVE.sample, core=1))] * 3,
            Operand((2, 3, 1), MATRIX),
        ),
        jax={"tridiagonal_solve": _linalg("tridiagonal_solve")},
        together=(0, 1, 2, 3),
    ),
    Row(
        "permutations of pivots",
        (
            Operand(
                (2, 3),
                Domain(
                    "pivots", lambda rng, s: rng.integers(0, 3, s), "int32", (0,), (), False, core=1
                ),
            ),
        ),
        jax={"lu_pivots_to_permutation": _linalg("lu_pivots_to_permutation", 3)},
    ),
    Row(
        "groups of rows",
        (
            X,
            Operand((2, 3, 5)),
            Operand(
                (2,), Domain("groups", lambda rng, s: rng.integers(1, 2, s), "int32", (1,), ())
            ),
        ),
        jax={"ragged_dot_general": lambda lax, x, w, g: lax.ragged_dot(x, w, g)},
        never=True,
    ),
    Row(
        "what lies at the largest of a window",
        (Operand((3, 6)), Operand((3, 6))),
        jax={"select_and_gather_add": _window("select_and_gather_add")},
    ),
    Row(
        "written to the largest of a window",
        (Operand((3, 6), axes=(0,)), Operand((3, 3), axes=(0,)), Operand(())),
        together=(0, 1),
        jax={"select_and_scatter": _placed},
    ),
]


def _primitive(name: str) -> Any:
    from batch_cases import on_jax

    return on_jax.primitive(name)


def _called(how: str, x: Any, y: Any) -> Any:
    import jax

    return getattr(jax, how)(lambda a, b: a * b)(x, y)


def _key_data(keys: Any) -> Any:
    import jax

    return jax.random.key_data(keys)


UNTRIED = {
    "all_gather_invariant", "all_gather_reduced", "closed_call", "custom_lin", "eval_jaxpr",
    "from_edtype", "geqp3", "layout_constraint", "ormqr", "pbroadcast", "philox2x32",
    "philox4x32", "platform_index", "preduced", "psum_invariant", "pvary",
    "reduced_vary_cast", "reduced_vary_cast_p", "reshard",
    "sharding_constraint", "threefry4x32", "to_edtype", "unreduced_psum",
    "unreduced_reduce_scatter", "vary_unreduced_cast", "vary_unreduced_cast_p",
}  # fmt: skip
"""Rules of primitives that JAX makes for itself only (on explicit meshes, for other devices, inside
of other primitives): each shares the function of its rule with a primitive that has a case."""
