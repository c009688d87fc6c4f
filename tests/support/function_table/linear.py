"""Linear algebra, transforms and special functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from function_table.registry import ROWS, case

N = 4


def _positive(a: Any) -> Any:
    return jnp.einsum("...ij,...kj->...ik", a, a) + 2 * jnp.eye(a.shape[-1])


@case(lambda d: (d.normal(ROWS, N, N), d.normal(ROWS, N)), wrt=(0, 1))
def cholesky(a: Any, b: Any) -> Any:
    factor = jnp.linalg.cholesky(_positive(a))
    y = lax.linalg.triangular_solve(factor, b[..., None], left_side=True, lower=True)
    return y[..., 0], jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(-1)


@case(lambda d: (d.normal(ROWS, N, N),), wrt=(0,))
def eigh(a: Any) -> Any:
    """Eigenvalues, and a function of the vectors that knows neither their sign nor their order."""
    values, vectors = jnp.linalg.eigh(a + jnp.swapaxes(a, 1, 2) + jnp.diag(jnp.arange(N) * 4.0))
    root = jnp.einsum("bij,bj,bkj->bik", vectors, jnp.tanh(values), vectors)
    return values, root


@case(lambda d: (d.normal(N, N, ROWS), d.normal(N)), in_axes=(2, None), out_axes=1, wrt=(0, 1))
def solve(a: Any, b: Any) -> Any:
    """The batch is the last axis of the matrices and the second of the result."""
    matrices = jnp.moveaxis(a, 2, 0) + 4 * jnp.eye(N)
    return jax.vmap(lambda m: jnp.linalg.solve(m, b), out_axes=1)(matrices)


@case(lambda d: (d.normal(ROWS, N, 3),), wrt=(0,), once=True)
def svd_and_qr(a: Any) -> Any:
    values = jnp.linalg.svd(a, compute_uv=False)
    q, r = jnp.linalg.qr(a)
    return values, jnp.abs(jnp.diagonal(r, axis1=1, axis2=2)), q @ jnp.swapaxes(q, 1, 2)


@case(lambda d: (d.normal(ROWS, N, N),), wrt=(0,))
def det_and_inverse(a: Any) -> Any:
    matrix = a + 4 * jnp.eye(N)
    return jnp.linalg.slogdet(matrix)[1], jnp.linalg.inv(matrix)


@case(lambda d: (d.normal(ROWS, N, N, scale=0.3),), wrt=(0,), once=True)
def matrix_exponential(a: Any) -> Any:
    return jax.scipy.linalg.expm(a)


@case(lambda d: (d.normal(ROWS, 8), d.normal(8)), in_axes=(0, None), wrt=(0, 1))
def fft_filter(x: Any, kernel: Any) -> Any:
    return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(kernel), n=8)


@case(lambda d: (d.normal(4, ROWS, 4, dtype=jnp.complex64),), in_axes=1, out_axes=(2, 1), wrt=())
def fft_complex(x: Any) -> Any:
    y = jnp.fft.fft2(x, axes=(0, 2))
    return jnp.transpose(y, (0, 2, 1)), jnp.abs(y).sum(0)[None]


@case(
    lambda d: (d.normal(ROWS, N, dtype=jnp.complex64), d.normal(N, N, dtype=jnp.complex64)),
    in_axes=(0, None),
    wrt=(0, 1),
)
def complex_product(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.real(y * jnp.conj(y)), jnp.exp(0.1j * y)


@case(lambda d: (d.normal(ROWS, 3, N), d.normal(ROWS, N, 2), d.normal(2)), in_axes=(0, 0, None),
      wrt=(0, 1, 2))  # fmt: skip
def einsum_batched(a: Any, b: Any, c: Any) -> Any:
    return jnp.einsum("bij,bjk,k->bik", a, b, c)


@case(lambda d: (d.uniform(ROWS, 5),), wrt=(0,))
def special_functions(x: Any) -> Any:
    return (
        lax.erf(x) + lax.lgamma(x + 1) + lax.digamma(x + 1)
        + jax.scipy.special.ndtri(x) + jnp.arctan2(x, 1 - x) + jnp.sinc(x)
    )  # fmt: skip


@case(lambda d: (d.normal(ROWS, 7),), wrt=(0,))
def cumulative(x: Any) -> Any:
    """Along a row: sums, products, maxima, and an associative scan of pairs."""

    def join(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    _, state = lax.associative_scan(join, (jax.nn.sigmoid(x), x), axis=1)
    return state + jnp.cumsum(x, 1) * 0.1, lax.cumlogsumexp(x, 1), jnp.cumprod(1 + 0.1 * x, 1)


@case(lambda d: (d.normal(ROWS, 6, 6, 1),), wrt=(0,))
def resize(x: Any) -> Any:
    return jax.image.resize(x, (x.shape[0], 9, 4, 1), "linear")


@case(lambda d: (d.normal(ROWS, 12), d.weight(12, 12)), in_axes=(0, None), wrt=(0, 1))
def softmax_and_logsumexp(x: Any, w: Any) -> Any:
    y = x @ w
    return jax.nn.log_softmax(y) + jax.nn.softmax(-y), jax.nn.logsumexp(y, axis=-1, keepdims=True)
