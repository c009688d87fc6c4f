"""Rows of activations, further layers and losses, and of their gradients, in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from batch_cases.elementwise import aten
from batch_cases.table import Row
from batch_cases.values import POSITIVE, UNIT, Domain, Operand, index

X = Operand((4, 3))
PLANES = Operand((2, 2, 4, 4))
HALF = Operand((2, 2, 2, 2))
BODIES = Operand((2, 1, 4, 2, 2))


def _places(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """In each plane or body of a sample other places."""
    inner = shape[2:]
    return np.broadcast_to(rng.permutation(math.prod(inner)).reshape(inner), shape)


PLACES = Domain("places", _places, "int64", (), (), False)


def _each(reduction: int) -> Any:
    return Operand((4,)) if reduction == 0 else Operand(())


HOW = tuple(enumerate(("each", "mean", "sum")))

ROWS = [
    Row("an activation", (X,), torch=aten("hardswish")),
    Row("an activation with its buffer", (X,), torch=aten("log_sigmoid_forward")),
    Row(
        "an activation with a weight",
        (X, Operand((4, 3), also=((3,),))),
        torch=aten("_prelu_kernel"),
    ),
    Row(
        "a complex number of two real ones",
        (X, Operand((4, 3), also=((3,),))),
        torch=aten("complex polar"),
    ),
    Row(
        "a gradient of an activation",
        (X, Operand((4, 3), UNIT)),
        torch=aten(
            "hardswish_backward hardsigmoid_backward mish_backward silu_backward "
            "tanh_backward gelu_backward"
        )
        | aten("sigmoid_backward", overload="default")
        | {
            "elu_backward": lambda t, g, x: t.elu_backward.default(g, 1.0, 1.0, 1.0, False, x),
            "leaky_relu_backward": lambda t, g, x: t.leaky_relu_backward.default(g, x, 0.1, False),
            "hardtanh_backward": lambda t, g, x: t.hardtanh_backward.default(g, x, -1, 1),
            "softplus_backward": lambda t, g, x: t.softplus_backward.default(g, x, 1, 20),
            "softshrink_backward": lambda t, g, x: t.softshrink_backward.default(g, x, 0.1),
            "hardshrink_backward": lambda t, g, x: t.hardshrink_backward.default(g, x, 0.1),
            "threshold_backward": lambda t, g, x: t.threshold_backward.default(g, x, 0.1),
            "logit_backward": lambda t, g, x: t.logit_backward.default(g, x),
        },
    ),
    Row(
        "a gradient of an activation with a buffer",
        (X, X, X),
        together=(0, 1, 2),
        torch={
            "log_sigmoid_backward": lambda t, g, x, b: t.log_sigmoid_backward.default(g, x, b),
            "rrelu_with_noise_backward": lambda t, g, x, b: t.rrelu_with_noise_backward.default(
                g, x, b, 0.1, 0.3, True, False
            ),
            "_prelu_kernel_backward": lambda t, g, x, w: t._prelu_kernel_backward.default(g, x, w),
        },
    ),
    Row(
        "a gradient of gated halves",
        (Operand((3, 2)), Operand((3, 4))),
        together=(0, 1),
        torch={"glu_backward": lambda t, g, x: t.glu_backward.default(g, x, 1)},
    ),
    Row(
        "a gradient of a weight's norm",
        (
            Operand((4, 3), axes=()),
            Operand((4, 3), axes=()),
            Operand((4, 1), axes=()),
            Operand((4, 1), POSITIVE, axes=()),
        ),
        never=True,
        torch={
            "_weight_norm_interface_backward": lambda t, g, v, w, n: (
                t._weight_norm_interface_backward.default(g, v, w, n, 0)
            )
        },
    ),
    Row(
        "pools of lines",
        (Operand((2, 3, 6)),),
        torch=aten("max_pool1d", [2])
        | aten("adaptive_max_pool1d", [2])
        | aten("_upsample_nearest_exact1d", [8]),
    ),
    Row("pools of planes", (PLANES,), torch=aten("adaptive_avg_pool2d", [2, 2])),
    Row(
        "pools of bodies",
        (BODIES,),
        torch=aten("max_pool3d", [2, 2, 2])
        | aten("adaptive_avg_pool3d", [2, 1, 1])
        | aten("_upsample_nearest_exact3d", [4, 4, 4]),
    ),
    Row(
        "planes resampled",
        (PLANES,),
        torch={
            "_upsample_lanczos2d_aa": lambda t, x: t._upsample_lanczos2d_aa.default(
                x, [6, 6], False
            )
        },
    ),
    Row("channels shuffled", (Operand((2, 4, 2, 2)),), torch=aten("native_channel_shuffle", 2)),
    Row(
        "planes put back",
        (HALF, Operand((2, 2, 2, 2), PLACES, axes=(0, 1))),
        together=(0, 1),
        torch={"max_unpool2d": lambda t, x, i: t.max_unpool2d.default(x, i, [4, 4])},
    ),
    Row(
        "bodies put back",
        (Operand((2, 1, 2, 1, 1)), Operand((2, 1, 2, 1, 1), PLACES, axes=(0, 1))),
        together=(0, 1),
        torch={
            "max_unpool3d": lambda t, x, i: t.max_unpool3d.default(
                x, i, [4, 2, 2], [2, 2, 2], [0, 0, 0]
            )
        },
    ),
    Row(
        "grids of maps",
        (Operand((2, 2, 3)),),
        never=True,
        torch={
            "affine_grid_generator": lambda t, x: t.affine_grid_generator.default(
                x, [2, 1, 4, 4], False
            )
        },
    ),
    Row(
        "grids of maps of rows",
        (Operand((2, 2, 3), axes=(0,), always=True),),
        torch={
            "affine_grid_generator": lambda t, x, n: t.affine_grid_generator.default(
                x, [n, 1, 4, 4], False
            )
        },
    ),
    Row(
        "a gradient of grids of maps",
        (Operand((2, 4, 4, 2), axes=(0,), always=True),),
        torch={
            "affine_grid_generator_backward": lambda t, g, n: (
                t.affine_grid_generator_backward.default(g, [n, 1, 4, 4], False)
            )
        },
    ),
    Row(
        "a gradient of the largest of bodies, adaptive",
        (Operand((2, 1, 2, 1, 1)), BODIES, Operand((2, 1, 2, 1, 1), index(16))),
        together=(0, 1, 2),
        torch=aten("adaptive_max_pool3d_backward"),
    ),
    Row(
        "a gradient of larger lines, rows",
        (Operand((2, 2, 4), axes=(0,), always=True),),
        torch={
            "upsample_linear1d_backward": lambda t, g, n: t.upsample_linear1d_backward.default(
                g, [4], [n, 2, 2], False
            ),
            "_upsample_nearest_exact1d_backward": lambda t, g, n: (
                t._upsample_nearest_exact1d_backward.default(g, [4], [n, 2, 2])
            ),
        },
    ),
    Row(
        "a gradient of larger planes, rows",
        (Operand((2, 2, 4, 4), axes=(0,), always=True),),
        torch={
            "_upsample_nearest_exact2d_backward": lambda t, g, n: (
                t._upsample_nearest_exact2d_backward.default(g, [4, 4], [n, 2, 2, 2])
            ),
            "_upsample_bilinear2d_aa_backward": lambda t, g, n: (
                t._upsample_bilinear2d_aa_backward.default(g, [4, 4], [n, 2, 2, 2], False)
            ),
            "_upsample_bicubic2d_aa_backward": lambda t, g, n: (
                t._upsample_bicubic2d_aa_backward.default(g, [4, 4], [n, 2, 2, 2], False)
            ),
        },
    ),
    Row(
        "a gradient of larger bodies, rows",
        (Operand((2, 1, 4, 4, 4), axes=(0,), always=True),),
        torch={
            "upsample_nearest3d_backward": lambda t, g, n: t.upsample_nearest3d_backward.default(
                g, [4, 4, 4], [n, 1, 2, 2, 2]
            ),
            "_upsample_nearest_exact3d_backward": lambda t, g, n: (
                t._upsample_nearest_exact3d_backward.default(g, [4, 4, 4], [n, 1, 2, 2, 2])
            ),
            "upsample_trilinear3d_backward": lambda t, g, n: (
                t.upsample_trilinear3d_backward.default(g, [4, 4, 4], [n, 1, 2, 2, 2], False)
            ),
        },
    ),
    Row(
        "a gradient of samples of planes",
        (Operand((2, 2, 3, 3)), PLANES, Operand((2, 3, 3, 2), UNIT)),
        together=(0, 1, 2),
        torch={
            "grid_sampler_2d_backward": lambda t, g, x, s: t.grid_sampler_2d_backward.default(
                g, x, s, 0, 0, False, [True, True]
            )
        },
    ),
    Row(
        "a gradient of samples of bodies",
        (Operand((2, 1, 2, 2, 2)), Operand((2, 1, 3, 3, 3)), Operand((2, 2, 2, 2, 3), UNIT)),
        together=(0, 1, 2),
        torch={
            "grid_sampler_3d_backward": lambda t, g, x, s: t.grid_sampler_3d_backward.default(
                g, x, s, 0, 0, False, [True, True]
            )
        },
    ),
    Row(
        "pools of random windows of planes",
        (PLANES, Operand((2, 2, 2), UNIT)),
        together=(0, 1),
        torch={
            "fractional_max_pool2d": lambda t, x, s: t.fractional_max_pool2d.default(
                x, [2, 2], [2, 2], s
            )
        },
    ),
    Row(
        "pools of random windows of bodies",
        (Operand((2, 1, 4, 4, 4)), Operand((2, 1, 3), UNIT)),
        together=(0, 1),
        torch={
            "fractional_max_pool3d": lambda t, x, s: t.fractional_max_pool3d.default(
                x, [2, 2, 2], [2, 2, 2], s
            )
        },
    ),
    Row(
        "a gradient of pools of random windows of planes",
        (HALF, PLANES, Operand((2, 2, 2, 2), index(16))),
        together=(0, 1, 2),
        torch={
            "fractional_max_pool2d_backward": lambda t, g, x, i: (
                t.fractional_max_pool2d_backward.default(g, x, [2, 2], [2, 2], i)
            )
        },
    ),
    Row(
        "a gradient of pools of random windows of bodies",
        (Operand((2, 1, 2, 2, 2)), Operand((2, 1, 4, 4, 4)), Operand((2, 1, 2, 2, 2), index(16))),
        together=(0, 1, 2),
        torch={
            "fractional_max_pool3d_backward": lambda t, g, x, i: (
                t.fractional_max_pool3d_backward.default(g, x, [2, 2, 2], [2, 2, 2], i)
            )
        },
    ),
    Row(
        "a gradient of padded lines",
        (Operand((2, 3, 8)), Operand((2, 3, 5))),
        together=(0, 1),
        torch=aten("reflection_pad1d_backward replication_pad1d_backward", [1, 2]),
    ),
    Row(
        "a gradient of padded planes",
        (Operand((2, 2, 6, 6)), PLANES),
        together=(0, 1),
        torch=aten("reflection_pad2d_backward replication_pad2d_backward", [1, 1, 1, 1]),
    ),
    Row(
        "a gradient of padded bodies",
        (Operand((2, 1, 5, 5, 5)), Operand((2, 1, 3, 3, 3))),
        together=(0, 1),
        torch=aten("reflection_pad3d_backward replication_pad3d_backward", [1, 1, 1, 1, 1, 1]),
    ),
    Row(
        "a product of three",
        (Operand((4, 3)), Operand((2, 3, 5)), Operand((4, 5))),
        torch={
            "_trilinear": lambda t, x, w, y: t._trilinear.default(
                x, w, y, [1, 3], [0], [1, 2], [2, 3]
            )
        },
    ),
    Row("distances of all pairs", (Operand((4, 3)),), torch=aten("_pdist_forward"), never=True),
    Row(
        "a gradient of distances of all pairs",
        (Operand((6,), axes=()), Operand((4, 3), axes=()), Operand((6,), axes=())),
        never=True,
        torch={"_pdist_backward": lambda t, g, x, d: t._pdist_backward.default(g, x, 2.0, d)},
    ),
    Row(
        "weights scaled in place",
        (Operand((8, 3)), Operand((4,), index(8))),
        never=True,
        torch={"embedding_renorm": lambda t, w, i: t.embedding_renorm.default(w, i, 1.0, 2.0)},
    ),
    *[
        Row(
            f"a loss of logits, {how}",
            (X, X, Operand((3,), POSITIVE, also=((4, 3),))),
            torch={
                "binary_cross_entropy_with_logits": lambda t, x, y, w, r=reduction: (
                    t.binary_cross_entropy_with_logits.default(x, y, w, None, r)
                )
            },
        )
        for reduction, how in HOW
    ],
    *[
        Row(
            f"a loss of margins, {how}",
            (X, Operand((4,), index(3))),
            together=(0, 1),
            torch={
                "multi_margin_loss": lambda t, x, y, r=reduction: t.multi_margin_loss.default(
                    x, y, 1, 1.0, None, r
                )
            },
        )
        for reduction, how in HOW
    ],
    *[
        Row(
            f"a gradient of a loss of margins, {how}",
            (_each(reduction), X, Operand((4,), index(3))),
            together=(0, 1, 2) if reduction == 0 else (1, 2),
            torch={
                "multi_margin_loss_backward": lambda t, g, x, y, r=reduction: (
                    t.multi_margin_loss_backward.default(g, x, y, 1, 1.0, None, r)
                )
            },
        )
        for reduction, how in HOW
    ],
    *[
        Row(
            f"a loss of several labels, {how}",
            (X, Operand((4, 3), index(3))),
            together=(0, 1),
            torch=aten("multilabel_margin_loss_forward", reduction),
        )
        for reduction, how in HOW
    ],
    *[
        Row(
            f"a gradient of a loss of several labels, {how}",
            (_each(reduction), X, Operand((4, 3), index(3)), Operand((4, 3), UNIT)),
            together=(0, 1, 2, 3) if reduction == 0 else (1, 2, 3),
            torch={
                "multilabel_margin_loss_backward": lambda t, g, x, y, i, r=reduction: (
                    t.multilabel_margin_loss_backward.default(g, x, y, r, i)
                )
            },
        )
        for reduction, how in HOW
    ],
]

UNTRIED = {
    "_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
    "linear_backward",
    "max_unpool2d_backward",
    "max_unpool3d_backward",
    "rrelu_with_noise",
    "rrelu_with_noise_functional",
    "with_effects",
}  # fmt: skip
"""Rules that read more of a graph than one operator, or draw random numbers (tests of whole models try
them), or whose operator does not run on CPUs."""
