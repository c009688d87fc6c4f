"""Rows of operators along dimensions: sums, scans, sorts, softmax, norms of layers, losses."""

from __future__ import annotations

from typing import Any

from batch_cases.elementwise import _dtype, aten
from batch_cases.table import Row, Stand
from batch_cases.values import BOOL, COMPLEX, INT, POSITIVE, UNIT, Operand, index

X = Operand((4, 3))
CUBE = Operand((2, 4, 3))
SIGNAL = Operand((2, 4, 3), axes=(0,), always=True)
IMAGES = Operand((2, 4, 3), axes=(0, 2))
PER_CHANNEL = Operand((4,), axes=())  # the operators do not check that these are as many
VARIANCES = Operand((4,), POSITIVE, axes=())


def _window(name: str, size: int = 2) -> Any:
    def apply(lax: Any, x: Any, *more: Any) -> Any:
        import jax.numpy as jnp

        start = {"add": 0.0, "max": -jnp.inf, "min": jnp.inf, "mul": 1.0}[name]
        return lax.reduce_window(x, start, getattr(lax, name), (1, size), (1, 1), "VALID")

    return apply


def _reduce(lax: Any, x: Any) -> Any:
    return lax.reduce(x, 1.5, lambda a, b: lax.max(lax.mul(a, b), a), (1,))


def _grad_of_max_pool(lax: Any, x: Any, g: Any) -> Any:
    import jax

    return jax.vjp(lambda y: _window("max")(lax, y), x)[1](g)[0]


def _batch_norm_backward(torch: Any, g: Any, x: Any, w: Any, m: Any, v: Any) -> Any:
    return torch.ops.aten.native_batch_norm_backward(
        g, x, w, m, v, m, v, True, 1e-3, [True, True, True]
    )


def _rms_backward(torch: Any, g: Any, x: Any, r: Any, w: Any) -> Any:
    """What is linear in ``g`` and ``w``, and any function of ``x`` and ``r``."""
    of_x = g * w * r - x * r**3 * (g * w * x).mean(-1, keepdim=True)
    return of_x, (g * x * r).sum((0, 1))


ROWS = [
    Row(
        "a sum of a dimension",
        (CUBE,),
        jax={"reduce_sum": lambda lax, x: lax.reduce_sum(x, (1,))},
        torch={
            "sum": lambda t, x: t.sum.dim_IntList(x, [1]),
            "nansum": lambda t, x: t.nansum.default(x, [1]),
            "mean": lambda t, x: t.mean.dim(x, [1], True),
        },
    ),
    Row(
        "a sum of two dimensions",
        (CUBE,),
        jax={"reduce_sum": lambda lax, x: lax.reduce_sum(x, (0, 2))},
        torch={
            "sum": lambda t, x: t.sum.dim_IntList(x, [0, -1], True),
            "mean": lambda t, x: t.mean.dim(x, [0, 2]),
        },
    ),
    Row(
        "a sum of everything",
        (X,),
        jax={"reduce_sum": lambda lax, x: lax.reduce_sum(x, (0, 1))},
        torch=aten("sum nansum mean"),
    ),
    Row(
        "a sum of integers",
        (Operand((4, 3), INT),),
        jax={"reduce_sum": lambda lax, x: lax.reduce_sum(x, (1,))},
        torch={"sum": lambda t, x: t.sum.dim_IntList(x, [1])},
    ),
    Row(
        "a count of truths",
        (Operand((4, 3), BOOL),),
        torch={"sum": lambda t, x: t.sum.dim_IntList(x, [1])},
    ),
    Row(
        "a sum, rounded",
        (X,),
        torch={
            "sum": lambda t, x: t.sum.dim_IntList(x, [1], dtype=_dtype("int64")),
            "cumsum": lambda t, x: t.cumsum.default(x, 1, dtype=_dtype("int64")),
        },
    ),
    Row(
        "the largest of a dimension",
        (CUBE,),
        jax={
            "reduce_max": lambda lax, x: lax.reduce_max(x, (1,)),
            "reduce_min": lambda lax, x: lax.reduce_min(x, (1,)),
            "reduce_prod": lambda lax, x: lax.reduce_prod(x, (1,)),
            "argmax": lambda lax, x: lax.argmax(x, 1, "int32"),
            "argmin": lambda lax, x: lax.argmin(x, 1, "int32"),
            "reduce": _reduce,
        },
        torch=aten("amax amin", [1])
        | aten("argmax argmin", 1)
        | aten("logsumexp", [1])
        | {
            "max": lambda t, x: t.max.dim(x, 1),
            "min": lambda t, x: t.min.dim(x, 1, True),
            "prod": lambda t, x: t.prod.dim_int(x, 1),
            "median": lambda t, x: t.median.dim(x, 1),
            "nanmedian": lambda t, x: t.nanmedian.dim(x, 1),
            "mode": lambda t, x: t.mode.default(x, 1),
            "var": lambda t, x: t.var.correction(x, [1]),
            "std": lambda t, x: t.std.correction(x, [1], keepdim=True),
            "var_mean": lambda t, x: t.var_mean.correction(x, [1]),
            "std_mean": lambda t, x: t.std_mean.correction(x, [1]),
            "linalg_vector_norm": lambda t, x: t.linalg_vector_norm.default(x, 2, [1]),
            "norm": lambda t, x: t.norm.ScalarOpt_dim(x, 2, [1]),
        },
    ),
    Row(
        "the largest of everything",
        (X,),
        torch=aten("max min argmax argmin prod median nanmedian mode amax amin linalg_vector_norm")
        | {"norm": lambda t, x: t.norm.Scalar(x)},
        never=True,
    ),
    Row(
        "a condition on a dimension",
        (Operand((2, 4, 3), BOOL),),
        jax={
            "reduce_and": lambda lax, x: lax.reduce_and(x, (1,)),
            "reduce_or": lambda lax, x: lax.reduce_or(x, (1,)),
            "reduce_xor": lambda lax, x: lax.reduce_xor(x, (1,)),
        },
        torch={"any": lambda t, x: t.any.dim(x, 1), "all": lambda t, x: t.all.dim(x, 1, True)},
    ),
    Row(
        "a scan along a dimension",
        (CUBE,),
        jax={
            k: (lambda lax, x, k=k: getattr(lax, k)(x, 1))
            for k in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        },
        torch=aten("cumsum cumprod logcumsumexp cummax cummin", 1)
        | {"diff": lambda t, x: t.diff.default(x, 1, 1)},
    ),
    Row(
        "sorted along a dimension",
        (CUBE,),
        jax={
            "sort": lambda lax, x: lax.sort(x, 1),
            "top_k": lambda lax, x: lax.top_k(x, 2),
            "approx_top_k": lambda lax, x: lax.approx_max_k(x, 2, reduction_dimension=1),
        },
        torch=aten("sort argsort", 1)
        | {
            "msort": lambda t, x: t.msort.default(x),
            "topk": lambda t, x: t.topk.default(x, 2, 1),
            "kthvalue": lambda t, x: t.kthvalue.default(x, 2, 1),
        },
    ),
    Row(
        "sorted together",
        (X, X, X),
        jax={"sort": lambda lax, x, y, z: lax.sort((x, y, z), 1, num_keys=2)},
    ),
    Row(
        "the largest, as many as the batch has rows",
        (Operand((2, 8)),),
        torch={"topk": lambda t, x, n: t.topk.default(x, n, 1)},
        never=True,
    ),
    Row(
        "a softmax of a dimension",
        (CUBE,),
        torch={
            k: (lambda t, x, k=k: getattr(t, k).default(x, 1, False))
            for k in ("_softmax", "_log_softmax")
        }
        | {
            "_safe_softmax": lambda t, x: t._safe_softmax.default(x, 1),
            "softmax": lambda t, x: t.softmax.int(x, 1),
            "log_softmax": lambda t, x: t.log_softmax.int(x, 1),
        },
    ),
    Row(
        "a gradient of a softmax",
        (X, Operand((4, 3), UNIT)),
        torch={
            k: (lambda t, g, y, k=k: getattr(t, k).default(g, y, 1, _dtype("float64")))
            for k in ("_softmax_backward_data", "_log_softmax_backward_data")
        },
        together=(0, 1),
    ),
    Row(
        "one half gates the other",
        (Operand((3, 4)),),
        torch={"glu": lambda t, x: t.glu.default(x, 1)},
    ),
    Row(
        "a window that moves",
        (Operand((3, 6)),),
        jax={
            "reduce_window_sum": _window("add"),
            "reduce_window_max": _window("max"),
            "reduce_window_min": _window("min"),
            "reduce_window": lambda lax, x: lax.reduce_window(
                x, 1.0, lambda a, b: lax.add(lax.mul(a, b), a), (1, 2), (1, 1), "VALID"
            ),
        },
    ),
    Row(
        "a gradient of the largest in windows",
        (Operand((3, 6)), Operand((3, 5))),
        jax={"select_and_scatter_add": _grad_of_max_pool},
    ),
    Row(
        "a transform",
        (Operand((2, 3, 4), POSITIVE),),
        jax={"fft": lambda lax, x: lax.fft(x, "RFFT", (4,))},
        torch={
            "_fft_r2c": lambda t, x: t._fft_r2c.default(x, [2], 0, True),
        },
    ),
    Row(
        "a transform of complex numbers",
        (Operand((2, 3, 4), COMPLEX),),
        jax={"fft": lambda lax, x: lax.fft(x, "FFT", (3, 4))},
        torch={
            "_fft_c2c": lambda t, x: t._fft_c2c.default(x, [1], 0, True),
            "_fft_c2r": lambda t, x: t._fft_c2r.default(x, [1, 2], 1, 6),
        },
    ),
    Row(
        "a layer norm",
        (CUBE, Operand((3,), also=((4, 3),)), Operand((3,), also=((4, 3),))),
        torch={
            "native_layer_norm": lambda t, x, w, b: t.native_layer_norm.default(x, [3], w, b, 1e-3)
        },
    ),
    Row(
        "a layer norm of two dimensions",
        (CUBE, X, X),
        torch={
            "native_layer_norm": lambda t, x, w, b: t.native_layer_norm.default(
                x, [4, 3], w, b, 1e-3
            )
        },
    ),
    Row(
        "a layer norm without a bias",
        (CUBE, Operand((3,))),
        torch={
            "native_layer_norm": lambda t, x, w: t.native_layer_norm.default(x, [3], w, None, 1e-3),
            "_fused_rms_norm": lambda t, x, w: t._fused_rms_norm.default(x, [3], w, 1e-3),
            "rms_norm": lambda t, x, w: t.rms_norm.default(x, [3], w, 1e-3),
        },
    ),
    Row(
        "a gradient of a layer norm",
        (CUBE, CUBE, Operand((2, 4, 1)), Operand((2, 4, 1), POSITIVE), Operand((3,), axes=())),
        torch={
            "native_layer_norm_backward": lambda t, g, x, m, r, w: (
                t.native_layer_norm_backward.default(g, x, [3], m, r, w, None, [True, True, False])
            )
        },
        together=(0, 1, 2, 3),
    ),
    Row(
        "a gradient of an RMS norm",
        (CUBE, CUBE, Operand((2, 4, 1), POSITIVE), Operand((3,))),
        torch={
            "_fused_rms_norm_backward": Stand(
                lambda t, g, x, r, w: t._fused_rms_norm_backward.default(
                    g, x, [3], r, w, [True, True]
                ),
                _rms_backward,
            )
        },
        together=(0, 1, 2),
    ),
    Row(
        "a group norm",
        (SIGNAL, PER_CHANNEL, PER_CHANNEL),
        torch={
            "native_group_norm": lambda t, x, w, b, n: t.native_group_norm.default(
                x, w, b, n, 4, 3, 2, 1e-3
            )
        },
    ),
    Row(
        "a gradient of a group norm",
        (
            SIGNAL,
            SIGNAL,
            Operand((2, 2), axes=(0,)),
            Operand((2, 2), POSITIVE, axes=(0,)),
            PER_CHANNEL,
        ),
        torch={
            "native_group_norm_backward": lambda t, g, x, m, r, w, n: (
                t.native_group_norm_backward.default(g, x, m, r, w, n, 4, 3, 2, [True, True, True])
            )
        },
        together=(0, 1, 2, 3),
    ),
    Row(
        "a batch norm in use",
        (IMAGES, PER_CHANNEL, PER_CHANNEL, PER_CHANNEL, VARIANCES),
        torch={
            "native_batch_norm": lambda t, x, w, b, m, v: t.native_batch_norm.default(
                x, w, b, m, v, False, 0.1, 1e-3
            ),
            "_native_batch_norm_legit_no_training": lambda t, x, w, b, m, v: (
                t._native_batch_norm_legit_no_training.default(x, w, b, m, v, 0.1, 1e-3)
            ),
            "_native_batch_norm_legit": lambda t, x, w, b, m, v: t._native_batch_norm_legit.default(
                x, w, b, m, v, False, 0.1, 1e-3
            ),
            "_native_batch_norm_legit_functional": lambda t, x, w, b, m, v: (
                t._native_batch_norm_legit_functional.default(x, w, b, m, v, False, 0.1, 1e-3)
            ),
            "_batch_norm_no_update": lambda t, x, w, b, m, v: t._batch_norm_no_update.default(
                x, w, b, m, v, 0.1, 1e-3
            ),
            "batch_norm": lambda t, x, w, b, m, v: t.batch_norm.default(
                x, w, b, m, v, False, 0.1, 1e-3, False
            ),
        },
    ),
    Row(
        "a batch norm in use, on a GPU",
        (IMAGES, PER_CHANNEL, PER_CHANNEL, PER_CHANNEL, VARIANCES),
        torch={
            "cudnn_batch_norm": Stand(
                lambda t, x, w, b, m, v: t.cudnn_batch_norm.default(
                    x, w, b, m, v, False, 0.1, 1e-3
                ),
                lambda torch, *xs: (*torch.native_batch_norm(*xs, False, 0.1, 1e-3), None),
            ),
            "miopen_batch_norm": Stand(
                lambda t, x, w, b, m, v: t.miopen_batch_norm.default(
                    x, w, b, m, v, False, 0.1, 1e-3
                ),
                lambda torch, *xs: torch.native_batch_norm(*xs, False, 0.1, 1e-3),
            ),
        },
    ),
    Row(
        "a gradient of a batch norm in training",
        (IMAGES, IMAGES, PER_CHANNEL, PER_CHANNEL, VARIANCES),
        torch={
            "cudnn_batch_norm_backward": Stand(
                lambda t, g, x, w, m, v: t.cudnn_batch_norm_backward.default(
                    x, g, w, m, v, m, v, 1e-3, x
                ),
                _batch_norm_backward,
            ),
            "batch_norm_backward": Stand(
                lambda t, g, x, w, m, v: t.batch_norm_backward.default(
                    g, x, w, m, v, m, v, True, 1e-3, [True, True, True], x
                ),
                _batch_norm_backward,
            ),
        },
        together=(0, 1),
        never=True,
    ),
    Row(
        "a batch norm in training",
        (IMAGES, PER_CHANNEL, PER_CHANNEL, PER_CHANNEL, VARIANCES),
        torch={
            "native_batch_norm": lambda t, x, w, b, m, v: t.native_batch_norm.default(
                x, w, b, m, v, True, 0.1, 1e-3
            ),
            "_native_batch_norm_legit_functional": lambda t, x, w, b, m, v: (
                t._native_batch_norm_legit_functional.default(x, w, b, m, v, True, 0.1, 1e-3)
            ),
            "_batch_norm_with_update_functional": lambda t, x, w, b, m, v: (
                t._batch_norm_with_update_functional.default(x, w, b, m, v, 0.1, 1e-3)
            ),
            "_batch_norm_with_update": lambda t, x, w, b, m, v: t._batch_norm_with_update.default(
                x, w, b, m, v, 0.1, 1e-3
            ),
        },
        never=True,
    ),
    Row(
        "a batch norm without statistics",
        (IMAGES, PER_CHANNEL, PER_CHANNEL),
        torch={
            "_native_batch_norm_legit": lambda t, x, w, b: t._native_batch_norm_legit.no_stats(
                x, w, b, True, 0.1, 1e-3
            )
        },
        never=True,
    ),
    Row(
        "a gradient of a batch norm in use",
        (IMAGES, IMAGES, PER_CHANNEL, PER_CHANNEL, VARIANCES),
        torch={
            "native_batch_norm_backward": lambda t, g, x, w, m, v: (
                t.native_batch_norm_backward.default(
                    g, x, w, m, v, m, v, False, 1e-3, [True, True, True]
                )
            )
        },
        together=(0, 1),
    ),
    *[
        Row(
            f"a loss, {how}",
            (X, Operand((4, 3), also=((3,),))),
            torch=aten("mse_loss smooth_l1_loss huber_loss soft_margin_loss", reduction)
            | {"l1_loss": lambda t, x, y, r=reduction: t.l1_loss.default(x, y, r)},
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a cross entropy of two classes, {how}",
            (Operand((4, 3), UNIT), Operand((4, 3), UNIT), Operand((4, 3), POSITIVE, also=((3,),))),
            torch={
                "binary_cross_entropy": lambda t, x, y, w, r=reduction: (
                    t.binary_cross_entropy.default(x, y, w, r)
                )
            },
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a gradient of a loss, {how}",
            (Operand((4, 3) if reduction == 0 else ()), X, X),
            torch=aten("mse_loss_backward soft_margin_loss_backward", reduction)
            | aten("smooth_l1_loss_backward huber_loss_backward", reduction, 1.0),
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a gradient of a cross entropy of two classes, {how}",
            (
                Operand((4, 3) if reduction == 0 else ()),
                Operand((4, 3), UNIT),
                Operand((4, 3), UNIT),
                Operand((4, 3), POSITIVE),
            ),
            torch={
                "binary_cross_entropy_backward": lambda t, g, x, y, w, r=reduction: (
                    t.binary_cross_entropy_backward.default(g, x, y, w, r)
                )
            },
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a likelihood, {how}",
            (Operand((2, 4), also=((4,),)), Operand((2,), index(4), also=((),)), VARIANCES),
            torch={
                "nll_loss_forward": lambda t, x, y, w, r=reduction: t.nll_loss_forward.default(
                    x, y, w, r, -100
                )
            },
            together=(0, 1),
            never=reduction == 1,
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a likelihood of a plane, {how}",
            (Operand((2, 4, 3, 2)), Operand((2, 3, 2), index(4)), VARIANCES),
            torch={
                "nll_loss2d_forward": lambda t, x, y, w, r=reduction: t.nll_loss2d_forward.default(
                    x, y, w, r, -100
                )
            },
            together=(0, 1),
            never=reduction == 1,
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a gradient of a likelihood, {how}",
            (
                Operand((2,) if reduction == 0 else ()),
                Operand((2, 4)),
                Operand((2,), index(4)),
                VARIANCES,
                Operand((), POSITIVE),
            ),
            torch={
                "nll_loss_backward": lambda t, g, x, y, w, s, r=reduction: (
                    t.nll_loss_backward.default(g, x, y, w, r, -100, s)
                )
            },
            together=(0, 1, 2) if reduction == 0 else (1, 2),
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
    *[
        Row(
            f"a gradient of a likelihood of a plane, {how}",
            (
                Operand((2, 3, 2) if reduction == 0 else ()),
                Operand((2, 4, 3, 2)),
                Operand((2, 3, 2), index(4)),
                VARIANCES,
                Operand((), POSITIVE),
            ),
            torch={
                "nll_loss2d_backward": lambda t, g, x, y, w, s, r=reduction: (
                    t.nll_loss2d_backward.default(g, x, y, w, r, -100, s)
                )
            },
            together=(0, 1, 2) if reduction == 0 else (1, 2),
        )
        for reduction, how in enumerate(("each", "mean", "sum"))
    ],
]
