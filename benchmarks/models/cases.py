"""What is measured: functions of plain JAX, none of which knows about schedules.

``kind`` says what the predictor of ``docs`` expects on a CPU: a *gain* where independent branches of
a millisecond or more leave XLA's pool idle, a *loss* where the branches are too small or XLA already
uses every core. The losses are there on purpose: ``auto`` has to leave them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import dynaflow_xla as dfx

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Build = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        name: Its name on the command line.
        kind: What is expected: "gain" or "loss".
        note: Shapes and structure, in words.
        make: Returns a function (not jitted) and its arguments.
        lapack: Whether it calls LAPACK, whose threads are not XLA's.
        in_axes: Batch axes as for ``dfx.schedule``; None if it is not split.
        out_axes: As for ``dfx.schedule``.
        around: For a function that has a scheduled one inside. It makes the whole from the inner one,
            which ``make`` does with the plain inner function; ``inner`` is that.
        inner: Returns the inner function.
    """

    name: str
    kind: Literal["gain", "loss"]
    note: str
    make: Callable[[], Made]
    lapack: bool = False
    in_axes: Any = None
    out_axes: Any = 0
    around: Build | None = None
    inner: Callable[..., Any] | None = None


def _keys(n: int, seed: int) -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(seed), n))


# ---- gains ------------------------------------------------------------------------------------


def lstm_parameters(key: jax.Array, features: int, width: int) -> dict[str, jax.Array]:
    """Returns one direction's weights: ``x`` [F, 4D], ``h`` [D, 4D], ``b`` [4D]."""
    kx, kh = jax.random.split(key)
    bias = jnp.zeros(4 * width).at[width : 2 * width].set(1.0)  # the forget gate starts open
    return {
        "x": jax.random.normal(kx, (features, 4 * width)) / features**0.5,
        "h": jax.random.normal(kh, (width, 4 * width)) / width**0.5,
        "b": bias,
    }


def lstm(p: dict[str, jax.Array], xs: jax.Array, *, reverse: bool) -> jax.Array:
    """Runs one direction over ``xs`` [T, B, F]; returns the states [T, B, D]."""
    width = p["h"].shape[0]

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((xs.shape[1], width), xs.dtype)
    _, states = jax.lax.scan(step, (zero, zero), xs, reverse=reverse)
    return states


def _bilstm(batch: int, steps: int, width: int) -> Made:
    ka, kb, kc, kx = _keys(4, 0)
    params = {
        "forward": lstm_parameters(ka, width, width),
        "backward": lstm_parameters(kb, width, width),
        "dense": jax.random.normal(kc, (2 * width, width)) / (2 * width) ** 0.5,
    }

    def bilstm(p: Any, x: jax.Array) -> jax.Array:
        xs = x.swapaxes(0, 1)
        forward = lstm(p["forward"], xs, reverse=False)
        backward = lstm(p["backward"], xs, reverse=True)
        return (jnp.concatenate([forward, backward], axis=-1) @ p["dense"]).swapaxes(0, 1)

    return bilstm, (params, jax.random.normal(kx, (batch, steps, width)))


def _sorts() -> Made:
    def sorts(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sort(a), jnp.sort(b)

    ka, kb = _keys(2, 1)
    return sorts, (jax.random.normal(ka, (2**15,)), jax.random.normal(kb, (2**15,)))


def spd(key: jax.Array, n: int) -> jax.Array:
    """Returns a well-conditioned symmetric positive definite matrix [n, n]."""
    a = jax.random.normal(key, (n, n))
    return a @ a.T / n + jnp.eye(n)


SORT_BESIDE_CHOLESKY = 2**14
"""Elements of the sort that take as long as a Cholesky factor of 768 on the measured machine."""


def _sort_cholesky() -> Made:
    def sort_cholesky(x: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sort(x), jnp.linalg.cholesky(a)

    kx, ka = _keys(2, 2)
    return sort_cholesky, (jax.random.normal(kx, (SORT_BESIDE_CHOLESKY,)), spd(ka, 768))


def spectrum(a: jax.Array) -> Any:
    """Eigenvalues of ``a``, and its exponential filter made with the eigenvectors.

    Eigenvectors themselves are no output to compare: they change with the order of rounding.
    """
    w, v = jnp.linalg.eigh(a)
    return w, (v * jnp.exp(-w)) @ v.T


def _eighs() -> Made:
    def eighs(a: jax.Array, b: jax.Array) -> Any:
        return spectrum(a), spectrum(b)

    ka, kb = _keys(2, 3)
    return eighs, (spd(ka, 192), spd(kb, 192))


NEWTON_POINTS = 16384


def _newton() -> Made:
    def kepler(mean: jax.Array, eccentricity: jax.Array) -> jax.Array:
        """Damped Newton iteration for Kepler's equation, E - e sin E = M."""

        def residual(anomaly: jax.Array) -> jax.Array:
            return anomaly - eccentricity * jnp.sin(anomaly) - mean

        def more(state: Any) -> jax.Array:
            anomaly, count = state
            return (jnp.max(jnp.abs(residual(anomaly))) > 1e-5) & (count < 200)

        def step(state: Any) -> Any:
            anomaly, count = state
            slope = 1 - eccentricity * jnp.cos(anomaly)
            return anomaly - 0.3 * residual(anomaly) / slope, count + 1

        return jax.lax.while_loop(more, step, (mean, 0))[0]

    def newton(m1: jax.Array, e1: jax.Array, m2: jax.Array, e2: jax.Array) -> Any:
        return kepler(m1, e1), kepler(m2, e2)

    ka, kb = _keys(2, 4)
    mean = [jax.random.uniform(k, (NEWTON_POINTS,), minval=0.2, maxval=6.0) for k in (ka, kb)]
    return newton, (mean[0], jnp.float32(0.5), mean[1], jnp.float32(0.45))


TOP_K_ROWS = 32


def top_k_eigh_arguments(rows: int = TOP_K_ROWS, n: int = 192) -> tuple[jax.Array, jax.Array]:
    """Returns scores [rows, 32768] and a symmetric matrix [n, n]."""
    kx, ka = _keys(2, 5)
    return jax.random.normal(kx, (rows, 32768)), spd(ka, n)


def top_k_eigh(scores: jax.Array, a: jax.Array) -> Any:
    """Returns the 16 best scores of each row with their indices, and the spectrum of ``a``."""
    return jax.lax.top_k(scores, 16), spectrum(a)


def _top_k_eigh() -> Made:
    return top_k_eigh, top_k_eigh_arguments()


def _lstm(batch: int, steps: int, width: int) -> Made:
    kp, kx = _keys(2, 10)

    def one_lstm(p: Any, xs: jax.Array) -> jax.Array:
        return lstm(p, xs, reverse=False)

    return one_lstm, (
        lstm_parameters(kp, width, width),
        jax.random.normal(kx, (steps, batch, width)),
    )


def rows(fn: Callable[[jax.Array], Any], shape: tuple[int, ...], seed: int) -> Made:
    """A function of one array, and normal numbers of that shape."""
    return fn, (jax.random.normal(jax.random.key(seed), shape),)


def _convolutions() -> Made:
    def convolutions(kernels: Any, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return x

    *keys, kx = _keys(3, 13)
    kernels = [jax.random.normal(k, (3, 3, 64, 64)) / 24 for k in keys]
    return convolutions, (kernels, jax.random.normal(kx, (8, 32, 32, 64)))


_OPTIMIZER = optax.adam(1e-3)


def train_loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of a bi-LSTM classifier; ``x`` [B, T, F], ``labels`` [B]."""
    xs = x.swapaxes(0, 1)
    ends = [lstm(p["forward"], xs, reverse=False)[-1], lstm(p["backward"], xs, reverse=True)[0]]
    scores = jnp.concatenate(ends, axis=-1) @ p["dense"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train_step(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """One step of Adam around a loss with its gradient."""

    def step(p: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
        value, gradient = value_and_grad(p, x, labels)
        updates, state = _OPTIMIZER.update(gradient, state)
        return optax.apply_updates(p, updates), state, value

    return step


def _train(batch: int, steps: int, features: int, width: int) -> Made:
    ka, kb, kc, kx, ky = _keys(5, 14)
    p = {
        "forward": lstm_parameters(ka, features, width),
        "backward": lstm_parameters(kb, features, width),
        "dense": jax.random.normal(kc, (2 * width, 10)) / (2 * width) ** 0.5,
    }
    step = train_step(jax.value_and_grad(train_loss))
    x = jax.random.normal(kx, (batch, steps, features))
    labels = jax.random.randint(ky, (batch,), 0, 10)
    state = _OPTIMIZER.init(p)
    for _ in range(5):  # Adam's first steps take the sign of each gradient, rounding or not
        p, state, _ = jax.jit(step)(p, state, x, labels)
    return step, (p, state, x, labels)


# ---- losses -----------------------------------------------------------------------------------


def mlp_parameters(key: jax.Array, widths: list[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Returns weights and biases between consecutive widths."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n))
        for k, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def mlp(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """Applies the layers with a GELU between them."""
    for weight, bias in layers[:-1]:
        x = jax.nn.gelu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def _mlp(batch: int, widths: list[int]) -> Made:
    kp, kx = _keys(2, 6)
    return mlp, (mlp_parameters(kp, widths), jax.random.normal(kx, (batch, widths[0])))


def _ensemble() -> Made:
    def ensemble(members: Any, x: jax.Array) -> jax.Array:
        return sum(mlp(m, x) for m in members) / len(members)  # type: ignore[return-value]

    *keys, kx = _keys(9, 7)
    members = [mlp_parameters(k, [64, 64, 64, 64]) for k in keys]
    return ensemble, (members, jax.random.normal(kx, (64, 64)))


def elementwise(*xs: jax.Array) -> list[jax.Array]:
    """Chains of elementwise operators beside each other."""
    out = []
    for x in xs:
        for _ in range(4):
            x = jnp.tanh(x) * jnp.exp(-x * x) + 0.5 * x
        out.append(x)
    return out


def _elementwise() -> Made:
    return elementwise, tuple(jax.random.normal(k, (1024,)) for k in _keys(8, 8))


def _moe() -> Made:
    experts, width, batch = 8, 256, 256

    def moe(gate: jax.Array, members: Any, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x @ gate)
        outs = [mlp(m, x) for m in members]
        return sum(weights[:, i : i + 1] * y for i, y in enumerate(outs))  # type: ignore[return-value]

    kg, kx, *keys = _keys(2 + experts, 9)
    gate = jax.random.normal(kg, (width, experts)) / width**0.5
    members = [mlp_parameters(k, [width, width, width]) for k in keys]
    return moe, (gate, members, jax.random.normal(kx, (batch, width)))


CASES: tuple[Case, ...] = (
    Case("bilstm", "gain", "bi-LSTM B32 T32 d128: two lax.scan, concat, dense",
         lambda: _bilstm(32, 32, 128)),
    Case("sorts", "gain", "two sorts of 2^15 float32", _sorts),
    Case("sort_cholesky", "gain", f"sort of {SORT_BESIDE_CHOLESKY} beside Cholesky 768",
         _sort_cholesky, lapack=True),
    Case("eighs", "gain", "two spectra by eigh 192", _eighs, lapack=True),
    Case("newton", "gain", f"two while-loops, damped Newton on {NEWTON_POINTS} points", _newton),
    Case("topk_eigh", "gain", f"top_k of {TOP_K_ROWS}x32768 beside eigh 192", _top_k_eigh,
         lapack=True),
    Case("lstm", "gain", "LSTM B128 T32 d128", lambda: _lstm(128, 32, 128), in_axes=(None, 1),
         out_axes=1),
    Case("top_k", "gain", "top_k of 64x32768",
         lambda: rows(lambda x: jax.lax.top_k(x, 16), (64, 32768), 11), in_axes=0),
    Case("sort_rows", "gain", "sort of 32x2048 along the rows",
         lambda: rows(lambda x: jnp.sort(x, axis=1), (32, 2048), 12), in_axes=0),
    Case("conv", "gain", "two 3x3 convolutions, 64 channels, B8 32x32", _convolutions,
         in_axes=(None, 0)),
    Case("train", "gain", "train step of a bi-LSTM B64 T32 d64, width 128: loss, gradient, Adam",
         lambda: _train(64, 32, 64, 128), in_axes=(None, 0, 0), out_axes=dfx.Mean(),
         around=train_step, inner=train_loss),
    Case("mlp_small", "loss", "MLP d64 B64, 4 layers", lambda: _mlp(64, [64] * 5),
         in_axes=(None, 0)),
    Case("ensemble", "loss", "8 MLPs d64 B64, 3 layers each", _ensemble),
    Case("elementwise", "loss", "8 chains of elementwise operations on 1024 floats", _elementwise),
    Case("mlp_large", "loss", "MLP d512-d1024 B512, 4 layers",
         lambda: _mlp(512, [512, 1024, 512, 1024, 512]), in_axes=(None, 0)),
    Case("moe", "loss", "dense mixture of 8 experts d256 B256", _moe,
         in_axes=(None, None, 0)),
)  # fmt: skip


def scheduled(case: Case, fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The ways to schedule a case: name -> a function like ``fn``.

    ``sequential``, ``branches`` and ``auto`` always; ``nano``, two nano-batches, if it has a batch; ``whole``
    if a scheduled function stands inside: then the others schedule that one, and ``whole`` all of it.
    """
    axes: dict[str, Any] = {"in_axes": case.in_axes, "out_axes": case.out_axes}
    if case.around is None or case.inner is None:
        made = {
            "sequential": dfx.schedule(jax.jit(fn), dfx.Sequential()),
            "branches": dfx.schedule(jax.jit(fn), dfx.Branches()),
        }
        if case.in_axes is None:
            return made | {"auto": dfx.schedule(jax.jit(fn), "auto")}
        nano = dfx.schedule(jax.jit(fn), dfx.NanoBatch(2), **axes)
        return made | {"nano": nano, "auto": dfx.schedule(jax.jit(fn), "auto", **axes)}
    both, one = (
        dfx.schedule(jax.value_and_grad(case.inner), how)
        for how in (dfx.Branches(), dfx.Sequential())
    )
    nano = jax.value_and_grad(dfx.schedule(case.inner, dfx.NanoBatch(2), **axes))
    return {
        "sequential": jax.jit(case.around(one)),
        "branches": jax.jit(case.around(both)),
        "nano": jax.jit(case.around(nano)),
        "whole": dfx.schedule(jax.jit(fn), dfx.Branches()),
        "auto": dfx.schedule(jax.jit(fn), "auto"),
    }


def select(names: str | None, among: tuple[Case, ...] = CASES) -> list[Case]:
    """Returns the cases of a comma-separated list (all for None).

    Raises:
        SystemExit: a name is unknown.
    """
    if not names:
        return list(among)
    by_name = {case.name: case for case in among}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]
