"""Rows of operators that go element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_cases.table import Row
from batch_cases.values import (
    BOOL,
    COMPLEX,
    COUNT,
    INT,
    LARGE,
    POSITIVE,
    REAL,
    UNIT,
    Domain,
    Operand,
)


def jax_ops(names: str, **params: Any) -> dict[str, Callable[..., Any]]:
    """Primitives whose public function in ``jax.lax`` has their name."""

    def of(name: str) -> Callable[..., Any]:
        return lambda lax, *xs: getattr(lax, name)(*xs, **params)

    return {name: of(name) for name in names.split()}


def bound(names: str, **params: Any) -> dict[str, Callable[..., Any]]:
    """Primitives without a public function, bound as they are."""

    def of(name: str) -> Callable[..., Any]:
        def bind(lax: Any, *xs: Any) -> Any:
            from batch_cases import on_jax

            return on_jax.primitive(name).bind(*xs, **params)

        return bind

    return {name: of(name) for name in names.split()}


def aten(names: str, *more: Any, overload: str = "default", **kwargs: Any) -> dict[str, Any]:
    """Operators that are called with the operands, then ``more``."""

    def of(name: str) -> Callable[..., Any]:
        return lambda t, *xs: getattr(getattr(t, name), overload)(*xs, *more, **kwargs)

    return {name: of(name) for name in names.split()}


def like(domain: Domain = REAL, count: int = 1, broadcast: bool = False) -> tuple[Operand, ...]:
    """Operands of one shape; with ``broadcast`` the later ones may be smaller."""
    also = ((3,), ()) if broadcast else ()
    return (Operand((4, 3), domain), *[Operand((4, 3), domain, also)] * (count - 1))


def scalars(domain: Domain, count: int) -> tuple[Operand, ...]:
    """Operands of one shape, or none (as JAX broadcasts)."""
    return (Operand((4, 3), domain), *[Operand((4, 3), domain, ((),))] * (count - 1))


def _jnp(name: str) -> Callable[..., Any]:
    def apply(lax: Any, *xs: Any) -> Any:
        import jax.numpy as jnp

        return getattr(jnp, name)(*xs)

    return apply


ROWS = [
    Row(
        "a function of each real number",
        like(UNIT),
        jax=jax_ops(
            "acos asin atan cos digamma erf erfc erf_inv exp exp2 expm1 lgamma log log1p "
            "log2 logistic rsqrt sin sinh cosh sqrt tan tanh asinh atanh cbrt ceil floor "
            "bessel_i0e bessel_i1e is_finite round"
        )
        | bound("one_minus_square")
        | jax_ops("acosh"),
        torch=aten("isnan isinf") | {"pointwise": lambda t, x: t.sigmoid.default(x)},
    ),
    Row("a function that grows without bound", like(LARGE), jax=jax_ops("acosh digamma lgamma")),
    Row(
        "a function of two real numbers",
        scalars(POSITIVE, 2),
        jax=jax_ops("atan2 nextafter pow polygamma rem zeta"),
    ),
    Row(
        "a function of two real numbers that takes long to compile",
        scalars(POSITIVE, 2),
        jax=jax_ops("igamma igammac")
        | {"igamma_grad_a": lambda lax, x, y: lax.igamma_grad_a(x, y)},
        few=2,
    ),
    Row(
        "a polynomial of the first, the others its coefficients",
        like(count=3),
        jax={"polynomial": lambda lax, x, a, b: lax.polynomial(x, (a, b))},
    ),
    Row(
        "a function of three real numbers",
        scalars(UNIT, 3),
        jax={"regularized_incomplete_beta": lambda lax, a, b, x: lax.betainc(a, b, x)}
        | jax_ops("clamp"),
    ),
    Row(
        "bits of two numbers",
        scalars(INT, 2),
        jax=jax_ops("shift_left shift_right_arithmetic shift_right_logical")
        | {
            "and": lambda lax, x, y: lax.bitwise_and(x, y),
            "or": lambda lax, x, y: lax.bitwise_or(x, y),
            "xor": lambda lax, x, y: lax.bitwise_xor(x, y),
            "rem": lambda lax, x, y: lax.rem(x, y),
            "mulhi": lambda lax, x, y: lax.mulhi(x, y),
        },
    ),
    Row(
        "bits of a number",
        like(INT),
        jax=jax_ops("clz population_count") | {"not": lambda lax, x: lax.bitwise_not(x)},
    ),
    Row(
        "a value as it is",
        like(),
        jax={
            "copy": lambda lax, x: _jnp("copy")(lax, x),
            "stop_gradient": lambda lax, x: lax.stop_gradient(x),
            "optimization_barrier": lambda lax, x: lax.optimization_barrier(x),
            "reduce_precision": lambda lax, x: lax.reduce_precision(x, 11, 52),
        },
        torch=aten(
            "clone alias detach lift_fresh lift_fresh_copy positive neg real conj "
            "_conj_physical contiguous _neg_view resolve_conj resolve_neg"
        ),
    ),
    Row(
        "a part of a complex number",
        like(COMPLEX),
        jax=jax_ops("real imag conj"),
        torch=aten("real imag conj _conj _conj_physical resolve_conj"),
    ),
    Row("a complex number", like(count=2), jax=jax_ops("complex")),
    Row(
        "the sign and size of a number",
        like(),
        jax=jax_ops("neg abs sign square") | {"integer_pow": lambda lax, x: lax.integer_pow(x, 3)},
        torch=aten("neg abs sgn sign relu leaky_relu") | aten("leaky_relu", 0.2),
    ),
    Row(
        "a whole power", like(POSITIVE), jax={"integer_pow": lambda lax, x: lax.integer_pow(x, -2)}
    ),
    Row(
        "a whole power that changes nothing",
        like(),
        jax={"integer_pow": lambda lax, x: lax.integer_pow(x, 1)},
    ),
    Row(
        "a whole power of integers",
        like(COUNT),
        jax={"integer_pow": lambda lax, x: lax.integer_pow(x, 2)},
    ),
    Row(
        "a sum or difference",
        like(count=2, broadcast=True),
        jax={"add_any": lambda lax, x, y: bound("add_any")["add_any"](lax, x, y)}
        | jax_ops("add sub"),
        torch=aten("add sub rsub", overload="Tensor"),
    ),
    Row(
        "a sum of integers",
        like(INT, 2),
        jax=jax_ops("add sub"),
        torch=aten("add sub", overload="Tensor"),
    ),
    Row(
        "a sum with a factor",
        like(count=2, broadcast=True),
        torch={
            "add": lambda t, x, y: t.add.Tensor(x, y, alpha=0.5),
            "sub": lambda t, x, y: t.sub.Tensor(x, y, alpha=-2),
        },
    ),
    Row(
        "a sum with a factor of the batch size",
        like(count=2, broadcast=True),
        torch={"add": lambda t, x, y, n: t.add.Tensor(x, y, alpha=n)},
        never=True,
    ),
    Row(
        "a sum with a number",
        like(),
        torch={
            "add": lambda t, x: t.add.Scalar(x, 2.0),
            "sub": lambda t, x: t.sub.Scalar(x, 2.0),
            "rsub": lambda t, x: t.rsub.Scalar(x, 2.0),
        },
    ),
    Row(
        "a sum with the batch size",
        like(),
        torch={
            "add": lambda t, x, n: t.add.Scalar(x, n),
            "sub": lambda t, x, n: t.sub.Tensor(x, n),
            "rsub": lambda t, x, n: t.rsub.Scalar(x, n),
        },
    ),
    Row(
        "a product",
        like(count=2, broadcast=True),
        jax=jax_ops("mul"),
        torch=aten("mul", overload="Tensor"),
    ),
    Row(
        "a product of integers",
        like(INT, 2, broadcast=True),
        jax=jax_ops("mul"),
        torch=aten("mul", overload="Tensor"),
    ),
    Row(
        "a product with the batch size",
        like(),
        jax={"mul": lambda lax, x, n: lax.mul(x, float(n))},
        torch={"mul": lambda t, x, n: t.mul.Tensor(x, n)},
    ),
    Row(
        "a quotient",
        (Operand((4, 3)), Operand((4, 3), POSITIVE, ((3,), ()))),
        jax=jax_ops("div"),
        torch=aten("div true_divide", overload="Tensor"),
    ),
    Row(
        "a quotient of integers",
        like(COUNT, 2),
        jax=jax_ops("div"),
        torch=aten("div", overload="Tensor")
        | {"div": lambda t, x, y: t.div.Tensor_mode(x, y, rounding_mode="floor")},
    ),
    Row(
        "a quotient by the batch size",
        like(),
        jax={"div": lambda lax, x, n: lax.div(x, float(n))},
        torch={
            "div": lambda t, x, n: t.div.Tensor(x, n),
            "true_divide": lambda t, x, n: t.true_divide.Tensor(x, n),
        },
    ),
    Row(
        "a quotient rounded",
        (Operand((4, 3)), Operand((4, 3), POSITIVE, ((3,), ()))),
        torch={"div": lambda t, x, y: t.div.Tensor_mode(x, y, rounding_mode="trunc")},
    ),
    Row(
        "the larger or smaller of two",
        like(count=2, broadcast=True),
        jax=jax_ops("max min"),
        torch=aten("maximum minimum fmax fmin") | aten("max min", overload="other"),
    ),
    Row(
        "the larger of a value and a number",
        like(),
        jax={"max": lambda lax, x: lax.max(x, 0.5), "min": lambda lax, x: lax.min(x, 0.0)},
    ),
    Row(
        "a comparison",
        scalars(REAL, 2),
        jax=jax_ops("lt le gt ge eq ne") | bound("lt_to le_to eq_to"),
    ),
    Row("a comparison of integers", scalars(INT, 2), jax=jax_ops("lt le gt ge eq ne")),
    Row(
        "a choice",
        (Operand((4, 3), BOOL, ((),)), *like(count=2)),
        jax={"select_n": lambda lax, c, x, y: lax.select_n(c, x, y)},
    ),
    Row(
        "a choice, broadcast",
        (Operand((4, 3), BOOL, ((3,), ())), *like(count=2, broadcast=True)),
        torch={"where": lambda t, c, x, y: t.where.self(c, x, y)},
    ),
    Row(
        "a choice by a number",
        (Operand((4, 3), INT, ((),)), *like(count=2)),
        torch={"where": lambda t, c, x, y: t.where.self(c, x, y)},
        never=True,
    ),
    Row(
        "another type",
        like(LARGE),
        jax={"convert_element_type": lambda lax, x: lax.convert_element_type(x, "int32")},
        torch={"_to_copy": lambda t, x: t._to_copy.default(x, dtype=_dtype("int64"))},
    ),
    Row(
        "a narrower type",
        like(LARGE),
        jax={"convert_element_type": lambda lax, x: lax.convert_element_type(x, "float32")},
        torch={"_to_copy": lambda t, x: t._to_copy.default(x, dtype=_dtype("float32"))},
    ),
    Row(
        "a truth value",
        like(),
        torch={"_to_copy": lambda t, x: t._to_copy.default(x, dtype=_dtype("bool"))},
        jax={"convert_element_type": lambda lax, x: lax.convert_element_type(x, "bool")},
    ),
    Row(
        "floats of integers",
        like(INT),
        jax={"convert_element_type": lambda lax, x: lax.convert_element_type(x, "float64")},
        torch={"_to_copy": lambda t, x: t._to_copy.default(x, dtype=_dtype("float64"))},
    ),
    Row(
        "narrow integers",
        like(INT),
        torch={"_to_copy": lambda t, x: t._to_copy.default(x, dtype=_dtype("int8"))},
        jax={"convert_element_type": lambda lax, x: lax.convert_element_type(x, "int8")},
    ),
    Row(
        "a product added",
        (*like(), *like(count=2)),
        torch={"addcmul": lambda t, x, y, z: t.addcmul.default(x, y, z, value=0.5)},
    ),
    Row(
        "a quotient added",
        (*like(), *like(), *like(POSITIVE)),
        torch={"addcdiv": lambda t, x, y, z: t.addcdiv.default(x, y, z)},
    ),
    Row(
        "a dropout outside of training",
        like(),
        torch={"native_dropout": lambda t, x: t.native_dropout.default(x, 0.5, False)},
    ),
    Row(
        "a gradient through a mask",
        (*like(), Operand((4, 3), BOOL)),
        torch={
            "native_dropout_backward": lambda t, g, m: t.native_dropout_backward.default(g, m, 2.0)
        },
    ),
]


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
