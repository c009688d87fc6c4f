"""Named programs: what is separable, how, and which operator and line is to blame if it is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynaflow_xla as dfx
from dynaflow_xla.batch.proof import Proof
from dynaflow_xla.batch.states import Partial, Rows, Same
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch import separability
from dynaflow_xla.frontends.jax.batch.rules import coverage
from dynaflow_xla.frontends.jax.capture import capture

pytestmark = pytest.mark.usefixtures("quick_to_compile")

BATCH, SIZES = 5, (2, 3)
T, D, H = 4, 6, 8


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((*shape, seed)).normal(size=shape), jnp.float32)


X = normal(BATCH, D)
SEQ = normal(BATCH, T, D)
W = normal(D, H)
LABELS = jnp.asarray([0, 3, 1, 5, 3])


def _cut(leaves: Sequence[Any], axes: Sequence[int | None], start: int, stop: int) -> list[Any]:
    return [
        x if a is None else x[(slice(None),) * a + (slice(start, stop),)]
        for x, a in zip(leaves, axes, strict=True)
    ]


def _trace(fn: Callable[..., Any], leaves: Sequence[Any]) -> tuple[capture.Captured, list[Any]]:
    closed = jax.make_jaxpr(fn)(*leaves)
    return capture.capture(closed, 0, getattr(fn, "__name__", "f")), closed.consts


def _flat(fn: Callable[..., Any], args: Any, in_axes: Any) -> tuple[Any, list[Any], list[Any]]:
    leaves, tree = jax.tree.flatten(args)
    axes = [
        axis
        for arg, axis in zip(args, in_axes, strict=True)
        for _ in jax.tree.leaves(arg)
    ]  # fmt: skip

    def flat(*xs: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, xs)))

    return flat, leaves, axes


def prove(
    fn: Callable[..., Any],
    args: Sequence[Any],
    in_axes: Sequence[int | None],
    out_axes: Any = 0,
    sizes: Sequence[int] = SIZES,
) -> Proof:
    """Proves, with one ``out_axes`` for all outputs or one for each."""
    flat, leaves, axes = _flat(fn, args, in_axes)
    batch = next(x.shape[a] for x, a in zip(leaves, axes, strict=True) if a is not None)
    whole, consts = _trace(flat, leaves)
    traces = {n: _trace(flat, _cut(leaves, axes, 0, n)) for n in dict.fromkeys(sizes)}
    outs = out_axes if isinstance(out_axes, list) else [out_axes] * len(whole.outputs)
    return separability.prove(
        whole,
        {n: captured for n, (captured, _) in traces.items()},
        batch=batch,
        in_axes=axes,
        out_axes=outs,
        consts=[consts, *(c for _, c in traces.values())],
    )


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    in_axes: Sequence[int | None],
    out_axes: Any = 0,
    sizes: Sequence[int] = SIZES,
) -> Proof:
    """Proves and carries the split out: the values are the original's."""
    proof = prove(fn, args, in_axes, out_axes, sizes)
    assert proof.status == "separable", str(proof)
    proof.raise_if_refused()
    flat, leaves, axes = _flat(fn, args, in_axes)
    runs, start = [], 0
    for n in sizes:
        runs.append(flat(*_cut(leaves, axes, start, start + n)))
        start += n
    assert start == proof.batch
    for number, want in enumerate(flat(*leaves)):
        wanted, parts = proof.outputs[number].wanted, [run[number] for run in runs]
        if isinstance(wanted, int):
            got = jnp.concatenate(parts, wanted)
        elif isinstance(wanted, dfx.Sum):
            got = sum(parts)
        elif isinstance(wanted, dfx.Mean):
            got = sum(p * (n / proof.batch) for p, n in zip(parts, sizes, strict=True))
        else:
            got = parts[-1]
        # What cancels in a sum is as exact as its summands are.
        scale = float(np.max(np.abs(want))) if isinstance(wanted, dfx.Sum | dfx.Mean) else 1.0
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, scale))
    return proof


def line_of(marker: str) -> int:
    """Number of the line of this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, text in enumerate(lines) if text.endswith(f"# <{marker}>"))


# -- programs that real models are made of -----------------------------------------------------------


def mlp(params: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ params["w"] + params["b"]) @ params["w"].T


MLP = {"w": W, "b": normal(H)}


def attention(params: Any, x: Any, mask: Any = None) -> Any:
    q, k, v = (
        (x @ params[n]).reshape(x.shape[0], x.shape[1], 2, -1).swapaxes(1, 2)
        for n in ("q", "k", "v")
    )
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jax.nn.softmax(scores, -1) @ v
    return mixed.swapaxes(1, 2).reshape(x.shape[0], x.shape[1], -1) @ params["o"]


ATTENTION = {n: normal(D, D, seed=i) for i, n in enumerate("qkvo")}


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def lstm(params: Any, x: Any) -> Any:
    """[B, T, D] -> [B, T, D]; scans over time, which lax.scan wants in front."""

    def step(carry: Any, x_t: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x_t @ params["x"] + h @ params["h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], D))
    _, out = lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return out.swapaxes(0, 1)


LSTM = {"x": normal(D, 4 * D), "h": normal(D, 4 * D, seed=1)}


def conv(params: Any, x: Any) -> Any:
    y = lax.conv_general_dilated(
        x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return y.mean((1, 2))


IMAGES, KERNEL = normal(BATCH, 6, 6, 3), normal(3, 3, 3, 4)


def moe(params: Any, x: Any) -> Any:
    """Top-2 gating without capacity: every expert sees every row, gates choose."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ params["gate"]), 2)
    combine = (jax.nn.one_hot(chosen, 3) * gates[..., None]).sum(1)
    experts = jax.nn.relu(jnp.einsum("bd,edh->ebh", x, params["experts"]))
    return jnp.einsum("be,ebh->bh", combine, experts)


MOE = {"gate": normal(D, 3), "experts": normal(3, D, H)}


def token_losses(params: Any, x: Any, labels: Any) -> Any:
    logp = jax.nn.log_softmax(mlp(params, x))
    return -logp[jnp.arange(x.shape[0]), labels]


def sum_loss(params: Any, x: Any, labels: Any) -> Any:
    return token_losses(params, x, labels).sum()


def mean_loss(params: Any, x: Any, labels: Any) -> Any:
    return token_losses(params, x, labels).mean()


def pixel_loss(params: Any, x: Any) -> Any:
    return jnp.mean(conv(params, x) ** 2)


def lstm_loss(params: Any, x: Any) -> Any:
    return jnp.mean((lstm(params, x) - x) ** 2)


CAUSAL = jnp.tril(jnp.ones((T, T), bool))
PADDING = jnp.arange(T) < jnp.asarray([1, 4, 2, 3, 4])[:, None, None, None]

MODELS: dict[str, tuple[Any, ...]] = {
    "mlp": (mlp, (MLP, X), (None, 0)),
    "mlp, batch last": (lambda p, x: mlp(p, x.T).T, (MLP, X.T), (None, 1), 1),
    "attention": (attention, (ATTENTION, SEQ), (None, 0)),
    "attention, causal": (attention, (ATTENTION, SEQ, CAUSAL), (None, 0, None)),
    "attention, padding": (attention, (ATTENTION, SEQ, PADDING), (None, 0, 0)),
    "attention, jax.nn": (
        lambda x: jax.nn.dot_product_attention(*[x.reshape(-1, T, 2, D // 2)] * 3, is_causal=True),
        (SEQ,), (0,),
    ),
    "layer norm": (layer_norm, (SEQ,), (0,)),
    "merged rows": (lambda p, x: (x.reshape(-1, D) @ p).reshape(-1, T, H), (W, SEQ), (None, 0)),
    "merged rows out": (lambda p, x: x.reshape(-1, D) @ p, (W, SEQ), (None, 0)),
    "lstm": (lstm, (LSTM, SEQ), (None, 0)),
    "conv": (conv, (KERNEL, IMAGES), (None, 0)),
    "embedding": (lambda table, i: table[i], (W, LABELS), (None, 0)),
    "take": (lambda table, i: jnp.take(table, i, axis=0), (W, LABELS), (None, 0)),
    "moe": (moe, (MOE, X), (None, 0)),
    "token losses": (token_losses, (MLP, X, LABELS), (None, 0, 0)),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (X, LABELS), (0, 0)),
    "own row": (lambda x, i: x[jnp.arange(len(i)), i], (X, LABELS), (0, 0)),
    "own row, set": (lambda x, i: x.at[jnp.arange(len(i)), i].set(0.0), (X, LABELS), (0, 0)),
    "own row, batch of sequences": (
        lambda x, i: x[jnp.arange(x.shape[0])[:, None], jnp.arange(T)[None], (i % D)[:, None]],
        (SEQ, LABELS), (0, 0),
    ),
    "keys of rows": (
        lambda k: jax.vmap(lambda key: jax.random.normal(key, (3,)))(k),
        (jax.random.split(jax.random.key(0), BATCH),), (0,),
    ),
    "vmap of while": (
        jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + r**2 + 1, r)),
        (X,), (0,),
    ),
    "lax.map": (lambda x: lax.map(lambda r: jnp.sort(r) - r.max(), x), (X,), (0,)),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c + i), x), (X,), (0,)),
    "vmap of cond": (
        jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r)), (X,), (0,)
    ),
    "shared cond": (
        lambda flag, x: lax.cond(flag, jnp.sin, jnp.cos, x), (jnp.asarray(True), X), (None, 0)
    ),
    "remat": (jax.checkpoint(mlp), (MLP, X), (None, 0)),
    "sort, argmax, top_k by row": (
        lambda x: (jnp.sort(x, 1), jnp.argmax(x, 1), lax.top_k(x, 2)), (X,), (0,)
    ),
    "fft by row": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)), (X,), (0,)),
    "solve by row": (
        lambda x: jnp.linalg.solve(x[:, :, None] * x[:, None] + 2 * jnp.eye(D), x[..., None]),
        (X,), (0,),
    ),
    "eigh by row": (lambda x: jnp.linalg.eigvalsh(x[:, :, None] * x[:, None]), (X,), (0,)),
    "one matrix, many right sides": (
        lambda a, x: jax.scipy.linalg.solve_triangular(a, x.T, lower=True).T,
        (jnp.tril(normal(D, D)) + 4 * jnp.eye(D), X), (None, 0),
    ),
    "joined and split again": (
        lambda x, y: jnp.split(jax.nn.relu(jnp.concatenate([x, y])), 2), (X, -X), (0, 0)
    ),
    "cache update": (
        lambda c, x, t: lax.dynamic_update_slice_in_dim(c, x, t, axis=1),
        (SEQ, SEQ[:, :1] * 2, jnp.int32(2)), (0, 0, None),
    ),
    "sum loss": (sum_loss, (MLP, X, LABELS), (None, 0, 0), dfx.Sum()),
    "mean loss": (mean_loss, (MLP, X, LABELS), (None, 0, 0), dfx.Mean()),
    "count": (lambda x: (x > 0).sum(), (X,), (0,), dfx.Sum()),
    "accuracy": (lambda x, y: (x.argmax(1) == y).mean(), (X, LABELS), (0, 0), dfx.Mean()),
    "mean by ones": (lambda x: x.sum() / jnp.ones(x.shape[0]).sum(), (X,), (0,), dfx.Mean()),
    "grads of sum loss": (jax.grad(sum_loss), (MLP, X, LABELS), (None, 0, 0), dfx.Sum()),
    "grads of mean loss": (
        jax.value_and_grad(mean_loss), (MLP, X, LABELS), (None, 0, 0), dfx.Mean()
    ),
    "grads of conv": (jax.grad(pixel_loss), (KERNEL, IMAGES), (None, 0), dfx.Mean()),
    "grads of lstm": (jax.grad(lstm_loss), (LSTM, SEQ), (None, 0), dfx.Mean()),
    "grads of attention": (
        jax.grad(lambda p, x: (attention(p, x, CAUSAL) ** 2).sum()),
        (ATTENTION, SEQ), (None, 0), dfx.Sum(),
    ),
    "grads of embedding": (
        jax.grad(lambda table, i: (table[i] ** 2).sum()), (W, LABELS), (None, 0), dfx.Sum()
    ),
    "grads of moe": (
        jax.grad(lambda p, x: (moe(p, x) ** 2).mean()), (MOE, X), (None, 0), dfx.Mean()
    ),
    "grads by row": (jax.vmap(jax.grad(lambda r: (r**3).sum())), (X,), (0,)),
    "grads of conv by row": (
        jax.vmap(jax.grad(lambda w, x: pixel_loss(w, x[None])), (None, 0)),
        (KERNEL, IMAGES), (None, 0),
    ),
    "grads of conv, weights by row": (
        jax.vmap(jax.grad(lambda w, x: pixel_loss(w, x[None]), (0, 1))),
        (jnp.stack([KERNEL * (1 + i) for i in range(len(IMAGES))]), IMAGES), (0, 0),
    ),
    "sgd step on a mean": (
        lambda p, x, y: jax.tree.map(
            lambda a, g: a - 0.1 * g, p, jax.grad(mean_loss)(p, x, y)
        ),
        (MLP, X, LABELS), (None, 0, 0), dfx.Mean(),
    ),
    "same": (lambda x, w: (x, w * 2), (X, W), (0, None), [0, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_separable(name: str) -> None:
    check(*MODELS[name])


def test_even_split_needs_one_trace() -> None:
    check(mlp, (MLP, normal(6, D)), (None, 0), sizes=(2, 2, 2))


def test_nano_batch_of_one_row() -> None:
    check(mlp, (MLP, X), (None, 0), sizes=(1, 4))


def test_nano_batch_of_one_row_that_other_axes_could_hold() -> None:
    def columns(x: Any) -> Any:  # [D, 1, B] becomes [D, B]
        return lax.reshape(x.T[:, None], (D, x.shape[0]))

    check(columns, (X,), (0,), 1, sizes=(1, 4))


# -- programs that mix the batch ---------------------------------------------------------------------


def batch_norm(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


TRICKS: dict[str, tuple[Any, ...]] = {
    "flip": (lambda x: jnp.flip(x, 0), "rev"),
    "roll": (lambda x: jnp.roll(x, 1, 0), "slice"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), "cumsum"),
    "cumprod": (lambda x: jnp.cumprod(x, 0), "cumprod"),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), "cumlogsumexp"),
    "softmax": (lambda x: jax.nn.softmax(x, 0), "reduce_max"),
    "batch norm": (batch_norm, "reduce_sum"),
    "gram": (lambda x: x @ x.T, "dot_general"),
    "pairwise": (lambda x: x[:, None] - x[None], "sub"),
    "positions": (lambda x: x + jnp.arange(x.shape[0])[:, None], None),
    "positions in NumPy": (lambda x: x * np.arange(float(x.shape[0]))[:, None], None),
    "scan": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0] * 0, x)[1], None),
    "scan, zeros": (lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(D), x)[1], "scan"),
    "scan counts rows": (lambda x: lax.scan(lambda c, r: (c + 1, r * c), 0.0, x)[1], "scan"),
    "sort": (lambda x: jnp.sort(x, 0), "sort"),
    "sort by key": (lambda x: x[jnp.argsort(x[:, 0])], "sort"),
    "argmax": (lambda x: jnp.argmax(x, 0), "argmax"),
    "top_k": (lambda x: lax.top_k(x.T, 2)[0], "top_k"),
    "first row": (lambda x: x - x[0], "slice"),
    "every other row": (lambda x: x[::2], "slice"),
    "all but one": (lambda x: x[1:] - x[:-1], "slice"),
    "row by number": (lambda x: jnp.take(x, jnp.asarray([0, 1]), 0, mode="clip"), None),
    "row by dynamic number": (lambda x: lax.dynamic_slice(x, (1, 0), (1, D)), "dynamic_slice"),
    "rows with themselves": (lambda x: jnp.concatenate([x, x]), "concatenate"),
    "tile": (lambda x: jnp.tile(x, (2, 1)), None),
    "other order": (lambda x: x.reshape(D, -1).T, "reshape"),
    "batch into columns": (lambda x: x.T.reshape(-1, D), "reshape"),
    "interleave": (lambda x: jnp.stack([x, x], 0).reshape(-1, D), None),
    "compare positions": (lambda x: jnp.where(jnp.arange(len(x)) < 2, x[:, 0], 0), None),
    "eye": (lambda x: x @ x.T * jnp.eye(len(x)), None),
    "maximum": (lambda x: x.max(), "reduce_max"),
    "any": (lambda x: (x > 3).any(), "reduce_or"),
    "minus mean": (lambda x: x - x.mean(), "reduce_sum"),
    "log of sum": (lambda x: jnp.log(jnp.exp(x).sum()), "reduce_sum"),
    "ratio of sums": (lambda x: x.sum() / (x**2).sum(), "reduce_sum"),
    "sum plus one": (lambda x: x.sum() + 1, "reduce_sum"),
    "standard error": (lambda x: x / np.sqrt(x.shape[0]), "div"),
    "plus size": (lambda x: x + (x.shape[0] - 1), "add"),
    "exp of mean cotangent": (
        lambda x: jnp.exp(jax.grad(lambda y: (y**2).mean())(x)), "exp"
    ),
    "noise": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "random_bits"),
    "dropout": (
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0),
        "random_bits",
    ),
    "keys by position": (
        lambda x: jax.vmap(lambda k, r: r + jax.random.normal(k))(
            jax.random.split(jax.random.key(0), x.shape[0]), x
        ),
        "random_split",
    ),
    "fold_in positions": (
        lambda x: jax.vmap(lambda i, r: r + jax.random.normal(jax.random.fold_in(
            jax.random.key(0), i)))(jnp.arange(x.shape[0]), x),
        None,
    ),
    "while until all": (
        lambda x: lax.while_loop(lambda c: (c < 1).any(), lambda c: c * 2 + 1, jnp.abs(x)),
        "reduce_or",
    ),
    "cond on all": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), None),
    "rows by loop": (
        lambda x: lax.fori_loop(0, 2, lambda i, c: c.at[i].set(c[i] * 2), x), None
    ),
    "fft": (lambda x: jnp.fft.fft(x, axis=0).real, "fft"),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), "svd"),
    "conv along the batch": (
        lambda x: lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 3, 1)), (1, 1), "SAME"),
        "conv_general_dilated",
    ),
    "window": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
        "reduce_window_max",
    ),
    "all rows placed by those of a nano-batch": (
        lambda x: _compat.primitive("select_and_scatter_add").bind(
            jnp.arange(BATCH * float(D)).reshape(BATCH, D), x, select_prim=lax.ge_p,
            window_dimensions=(1, 1), window_strides=(1, 1), padding=((0, 0), (0, 0)),
        ),
        "select_and_scatter_add",
    ),
    "diagonal": (lambda x: x[jnp.arange(len(x)), jnp.arange(len(x))], "gather"),
    "other row": (lambda x: x[(jnp.arange(len(x)) + 1) % len(x), jnp.zeros(len(x), int)], None),
    "set one row": (lambda x: x.at[0].set(0.0), None),
    "table by position": (
        lambda x: x + lax.dynamic_slice(jnp.arange(60.0).reshape(-1, D), (1, 0), x.shape),
        "dynamic_slice",
    ),
    "capacity": (
        lambda x: jnp.cumsum(jax.nn.one_hot(x.argmax(1), D), 0) * x, "cumsum"
    ),
    "narrow count": (
        lambda x: (x > 0).astype(jnp.uint8).sum(dtype=jnp.uint8).astype(jnp.float32), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_mixed(name: str) -> None:
    fn, operator = TRICKS[name]
    specs: tuple[Any, ...] = (0, 1, dfx.Sum(), dfx.Mean(), None)
    for spec in specs:
        proof = prove(fn, (X,), (0,), spec)
        assert proof.status == "mixed", str(proof)
        (found, *_) = proof.findings
        if operator is not None:
            assert operator in {f.op for f in proof.findings}
        if not found.op.startswith("closed-over"):
            lines, start = inspect.getsourcelines(fn)
            assert found.source is not None and found.source.file == __file__
            assert start <= found.source.line < start + len(lines)
        with pytest.raises(dfx.SeparabilityError, match="assume_separable=True"):
            proof.raise_if_refused()


def wrong_somewhere(x: Any) -> Any:
    h = jnp.tanh(x * 2)
    with jax.named_scope("norm"):
        centred = h - h.mean(0)  # <centre>
    return centred * 3


def test_message() -> None:
    proof = prove(wrong_somewhere, (X,), (0,))
    (finding,) = proof.findings
    assert finding.source is not None
    assert (finding.op, finding.source.line) == ("reduce_sum", line_of("centre"))
    assert finding.scope == ("norm",)
    with pytest.raises(dfx.SeparabilityError) as caught:
        proof.raise_if_refused()
    text = str(caught.value)
    for part in (
        f"{__file__}:{line_of('centre')}", "reduce_sum", "sub at", "in norm", "output 0", "dfx.Sum()",
        "exclude the region", "assume_separable=True",
    ):  # fmt: skip
        assert part in text, text


def test_wrong_merge_is_named_and_the_right_one_suggested() -> None:
    proof = prove(mean_loss, (MLP, X, LABELS), (None, 0, 0), dfx.Sum())
    assert proof.outputs[0].suggestion == "out_axes=dfx.Mean()"
    with pytest.raises(
        dfx.SeparabilityError, match=r"it is a mean over the batch(.|\n)*dfx.Mean\(\)"
    ):
        proof.raise_if_refused()
    rows = prove(lambda x: x.T * 2, (X,), (0,), 0)
    assert rows.outputs[0].suggestion == "out_axes=1"


def test_mean_of_integers_is_refused() -> None:
    assert prove(lambda x, n: n, (X, jnp.int32(3)), (0, None), dfx.Mean()).status == "mixed"
    check(lambda x, n: n, (X, jnp.int32(3)), (0, None), None)


def test_negative_axes() -> None:
    check(lambda x: x.T, (X,), (0,), 1)
    assert prove(lambda x: x.T, (X,), (0,), -1).status == "separable"
    whole, part = (_trace(lambda x: x.T, [x])[0] for x in (X.T, X.T[:, :2]))
    assert separability.prove(
        whole, {2: part}, batch=BATCH, in_axes=[-1], out_axes=[-2]
    ).status == "separable"  # fmt: skip


def test_states_of_values() -> None:
    proof = prove(lambda w, x: (x @ w).sum(0), (W, X), (None, 0), dfx.Sum())
    assert proof.states == (Same(), Rows(0), Rows(0), Partial())
    assert "additive" in str(proof)


# -- what no rule covers -----------------------------------------------------------------------------


def test_callback_is_unproven() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # <callback>

    proof = prove(fn, (X,), (0,))
    assert proof.status == "unproven"
    assert proof.findings[0].op == "pure_callback"
    assert proof.findings[0].source is not None
    assert proof.findings[0].source.line == line_of("callback")
    proof.raise_if_refused(allow_unproven=True)
    with pytest.raises(dfx.SeparabilityError, match="not proved"):
        proof.raise_if_refused()


def test_effects_are_unproven() -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{}", x.shape)
        return x * 2

    proof = prove(fn, (X,), (0,))
    assert proof.outputs[0].status == "separable" and proof.status == "unproven"
    with pytest.raises(dfx.SeparabilityError, match="once for each nano-batch"):
        proof.raise_if_refused()


# Programs that trace to other operators when the batch size is another, on top of mixing it.
RAGGED = {
    "associative scan": lambda x: lax.associative_scan(jnp.add, x),
    "convolve": lambda x: jnp.convolve(x[:, 0], jnp.ones(3), mode="same"),
    "rows of a table": lambda x: x + jnp.arange(30.0).reshape(-1, D)[: len(x)],
}


@pytest.mark.parametrize("name", RAGGED)
def test_traces_that_differ_are_not_separable(name: str) -> None:
    for spec in (0, dfx.Sum(), dfx.Mean(), None):
        proof = prove(RAGGED[name], (X,), (0,), spec)
        assert proof.status != "separable"
        with pytest.raises(dfx.SeparabilityError):
            proof.raise_if_refused()


def test_other_program_at_another_size_is_unproven() -> None:
    def fn(x: Any) -> Any:
        return jnp.sin(x) if x.shape[0] > 3 else jnp.cos(x)

    proof = prove(fn, (X,), (0,))
    assert proof.status == "unproven"
    assert "other operators" in proof.findings[0].reason


def test_constant_chosen_by_size_is_refused() -> None:
    def fn(x: Any) -> Any:
        return x + (1.0 if x.shape[0] > 3 else 1.5)

    assert prove(fn, (X,), (0,)).status == "mixed"


def test_permutation_chosen_by_size_is_refused() -> None:
    def fn(x: Any) -> Any:
        return jnp.transpose(x, (0, 1, 2) if x.shape[0] > 3 else (0, 2, 1))

    assert prove(fn, (normal(BATCH, 4, 4),), (0,)).status != "separable"


def test_closed_over_constant_of_the_batch_size() -> None:
    check(lambda x: x * np.full((x.shape[0], 1), 3.0, np.float32), (X,), (0,))
    assert prove(lambda x: x * normal(x.shape[0], 1), (X,), (0,)).status == "mixed"


def test_a_rule_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.batch.states import BrokenRule
    from dynaflow_xla.frontends.jax.batch.rules.walk import RULES

    def broken(site: Any) -> Any:
        raise KeyError("dims")

    monkeypatch.setitem(RULES, "rev", broken)
    for fn in (lambda x: x[:, ::-1], jax.checkpoint(lambda x: lax.rev(x, (1,)))):
        with pytest.raises(BrokenRule, match=r"rule that says what rev .*KeyError.*please report"):
            prove(fn, (X,), (0,))


# -- the documented table of rules -------------------------------------------------------------------


def test_the_page_lists_the_rules() -> None:
    page = (Path(__file__).parents[4] / "docs/separability.md").read_text()
    table = page.split(coverage.BEGIN)[1].split(coverage.END)[0].strip()
    assert table == coverage.rules_table(), "paste the output of batch_axis.coverage into the page"


def test_common_primitives_have_rules() -> None:
    """What the public lax surface is made of; the rest of JAX's list is exotic."""
    known = "add mul dot_general gather scatter-add scan while cond sort conv_general_dilated exp".split()
    assert set(known) <= separability.covered()
    assert set(known) <= _compat.registered_primitives()
    assert not set(known) & set(coverage.without_rule())


# -- requests that make no sense ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_axes", "sizes", "match"),
    [
        ((None,), SIZES, "no batched input"),
        ((2,), SIZES, "must be an axis"),
        ((1,), SIZES, "must have"),
        ((0, 0), SIZES, "one entry for each"),
        ((0,), (7,), "from 1 to 5 rows"),
        ((0,), (), "each nano-batch size"),
    ],
)
def test_bad_requests(in_axes: Any, sizes: Any, match: str) -> None:
    whole, _ = _trace(lambda x: x * 2, [X])
    part = {n: _trace(lambda x: x * 2, [X[:n]])[0] for n in sizes}
    with pytest.raises(dfx.SeparabilityError, match=match):
        separability.prove(whole, part, batch=BATCH, in_axes=in_axes, out_axes=[0])


def test_bad_out_axes() -> None:
    whole, _ = _trace(lambda x: x * 2, [X])
    part = {2: _trace(lambda x: x * 2, [X[:2]])[0]}
    with pytest.raises(dfx.SeparabilityError, match="one entry for each of 1 outputs"):
        separability.prove(whole, part, batch=BATCH, in_axes=[0], out_axes=[0, 0])
