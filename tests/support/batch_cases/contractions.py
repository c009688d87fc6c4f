"""Rows of products, convolutions, attention, factorizations, transforms, planes, recurrent layers."""

from __future__ import annotations

from typing import Any

from batch_cases.elementwise import aten
from batch_cases.table import Row, Stand
from batch_cases.values import MATRIX, SPD, UNIT, Domain, Operand, index

LEFT, RIGHT = Operand((4, 3)), Operand((3, 5))
QUERY = Operand((2, 2, 3, 4), also=())
PLANES = Operand((2, 2, 4, 4))
IMAGE, KERNEL = Operand((2, 3, 4, 4), also=((3, 4, 4),)), Operand((2, 3, 2, 2))
BYTES = Domain("bytes", lambda rng, s: rng.integers(0, 2, s), "int8", (0, 1), (1,))


def _dot(lax: Any, contract: Any, batch: Any) -> Any:
    return lambda lax, x, y: lax.dot_general(x, y, (contract, batch))


def _attention(name: str, *more: Any, stand: bool = False, **kwargs: Any) -> Any:
    def call(t: Any, q: Any, k: Any, v: Any) -> Any:
        return getattr(t, name).default(q, k, v, *more, **kwargs)

    def run(torch: Any, q: Any, k: Any, v: Any) -> Any:
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return (*made, None, None, None, None, None, None, None)[:9]

    return Stand(call, run) if stand else call


def _attention_backward(torch: Any, *operands: Any) -> Any:
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, 0.0, False
    )
    return (*made, None)


def _planes(names: str, *more: Any) -> dict[str, Any]:
    return aten(names, *more)


ROWS = [
    Row(
        "a product of matrices",
        (LEFT, RIGHT),
        jax={"dot_general": _dot(None, ((1,), (0,)), ((), ()))},
        torch=aten("mm matmul") | {"linear": lambda t, x, w: t.linear.default(x, w)},
    ),
    Row(
        "a linear layer",
        (Operand((2, 4, 3)), Operand((5, 3)), Operand((5,))),
        torch={"linear": lambda t, x, w, b: t.linear.default(x, w, b)},
    ),
    Row(
        "a product of matrices in batches",
        (Operand((2, 4, 3)), Operand((2, 3, 5))),
        jax={"dot_general": _dot(None, ((2,), (1,)), ((0,), (0,)))},
        torch=aten("bmm"),
    ),
    Row("a product of a matrix and a vector", (LEFT, Operand((3,))), torch=aten("mv matmul")),
    Row(
        "a product of vectors",
        (Operand((4,)), Operand((4,))),
        jax={"dot_general": _dot(None, ((0,), (0,)), ((), ()))},
        torch=aten("dot vdot matmul"),
    ),
    Row(
        "a product over two dimensions",
        (Operand((2, 4, 3)), Operand((2, 3, 4))),
        jax={"dot_general": _dot(None, ((1, 2), (2, 1)), ((), ()))},
    ),
    Row(
        "a product and a sum",
        (Operand((4, 5), also=((5,),)), LEFT, RIGHT),
        torch={
            "addmm": lambda t, b, x, y: t.addmm.default(b, x, y, beta=0.5, alpha=2),
            "_addmm_activation": lambda t, b, x, y: t._addmm_activation.default(b, x, y),
        },
    ),
    Row(
        "a product in batches and a sum",
        (Operand((2, 4, 5), also=((5,),)), Operand((2, 4, 3)), Operand((2, 3, 5))),
        torch=aten("baddbmm"),
    ),
    Row(
        "a product with a vector and a sum",
        (Operand((4,)), LEFT, Operand((3,))),
        torch=aten("addmv"),
    ),
    Row(
        "a convolution",
        (IMAGE, KERNEL, Operand((2,))),
        torch={
            "convolution": lambda t, x, w, b: t.convolution.default(
                x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
            ),
            "_convolution": lambda t, x, w, b: t._convolution.default(
                x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False
            ),
            "conv2d": lambda t, x, w, b: t.conv2d.default(x, w, b),
            "mkldnn_convolution": Stand(
                lambda t, x, w, b: t.mkldnn_convolution.default(x, w, b, [0, 0], [1, 1], [1, 1], 1),
                lambda torch, x, w, b: torch.conv2d(x, w, b),
            ),
        },
    ),
    Row(
        "a convolution without a bias",
        (Operand((2, 3, 4, 4)), KERNEL),
        jax={
            "conv_general_dilated": lambda lax, x, w: lax.conv_general_dilated(
                x, w, (1, 1), "VALID"
            )
        },
        torch={
            "cudnn_convolution": Stand(
                lambda t, x, w: t.cudnn_convolution.default(
                    x, w, [0, 0], [1, 1], [1, 1], 1, False, False, False
                ),
                lambda torch, x, w: torch.conv2d(x, w),
            )
        },
    ),
    Row(
        "a convolution with weights for each row",
        (Operand((1, 4, 5), axes=(1,)), Operand((4, 1, 3), axes=(0,))),
        jax={
            "conv_general_dilated": lambda lax, x, w: lax.conv_general_dilated(
                x, w, (1,), "SAME", feature_group_count=x.shape[1]
            )
        },
        together=(0, 1),
    ),
    Row(
        "a convolution with weights for each row, of groups of the batch",
        (Operand((4, 2, 5), axes=(0,)), Operand((4, 2, 3), axes=(0,))),
        jax={
            "conv_general_dilated": lambda lax, x, w: lax.conv_general_dilated(
                x, w, (1,), "VALID", batch_group_count=x.shape[0]
            )
        },
        together=(0, 1),
    ),
    Row(
        "a convolution of lines",
        (Operand((2, 3, 5)), Operand((2, 3, 2)), Operand((2,))),
        torch={"conv1d": lambda t, x, w, b: t.conv1d.default(x, w, b)},
    ),
    Row(
        "a convolution of bodies",
        (Operand((2, 1, 2, 2, 3)), Operand((2, 1, 1, 2, 2))),
        torch={"conv3d": lambda t, x, w: t.conv3d.default(x, w)},
    ),
    Row(
        "a gradient of a convolution",
        (Operand((2, 2, 3, 3)), Operand((2, 3, 4, 4)), Operand((2, 3, 2, 2))),
        torch={
            "convolution_backward": lambda t, g, x, w: t.convolution_backward.default(
                g, x, w, [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
            )
        },
        together=(0, 1),
    ),
    Row(
        "attention",
        (QUERY, QUERY, QUERY),
        torch={
            "_scaled_dot_product_flash_attention_for_cpu": _attention(
                "_scaled_dot_product_flash_attention_for_cpu"
            ),
            "scaled_dot_product_attention": _attention("scaled_dot_product_attention"),
            "_scaled_dot_product_flash_attention": _attention(
                "_scaled_dot_product_flash_attention", stand=True
            ),
            "_scaled_dot_product_efficient_attention": _attention(
                "_scaled_dot_product_efficient_attention", None, True, stand=True
            ),
            "_scaled_dot_product_cudnn_attention": _attention(
                "_scaled_dot_product_cudnn_attention", None, True, stand=True
            ),
            "_scaled_dot_product_fused_attention_overrideable": _attention(
                "_scaled_dot_product_fused_attention_overrideable", stand=True
            ),
        },
        together=(0, 1, 2),
    ),
    Row(
        "attention with a mask",
        (QUERY, QUERY, QUERY, Operand((2, 2, 3, 3), also=((2, 1, 3, 3), (3, 3)))),
        torch={
            "_scaled_dot_product_flash_attention_for_cpu": lambda t, q, k, v, m: (
                t._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, attn_mask=m)
            ),
            "scaled_dot_product_attention": lambda t, q, k, v, m: (
                t.scaled_dot_product_attention.default(q, k, v, m)
            ),
        },
        together=(0, 1, 2),
    ),
    Row(
        "a gradient of attention",
        (QUERY, QUERY, QUERY, QUERY, QUERY, Operand((2, 2, 3))),
        torch={
            "_scaled_dot_product_flash_attention_for_cpu_backward": lambda t, g, q, k, v, o, s: (
                t._scaled_dot_product_flash_attention_for_cpu_backward.default(
                    g, q, k, v, o, s, 0.0, False
                )
            ),
            "_scaled_dot_product_flash_attention_backward": Stand(
                lambda t, g, q, k, v, o, s: t._scaled_dot_product_flash_attention_backward.default(
                    g, q, k, v, o, s, None, None, 3, 3, 0.0, False, None, None
                ),
                _attention_backward,
            ),
            "_scaled_dot_product_efficient_attention_backward": Stand(
                lambda t, g, q, k, v, o, s: (
                    t._scaled_dot_product_efficient_attention_backward.default(
                        g, q, k, v, None, o, s, None, None, 0.0, [True, True, True, False]
                    )
                ),
                _attention_backward,
            ),
            "_scaled_dot_product_cudnn_attention_backward": Stand(
                lambda t, g, q, k, v, o, s: t._scaled_dot_product_cudnn_attention_backward.default(
                    g, q, k, v, o, s, None, None, None, None, None, 3, 3, 0.0, False
                ),
                _attention_backward,
            ),
            "_scaled_dot_product_fused_attention_overrideable_backward": Stand(
                lambda t, g, q, k, v, o, s: (
                    t._scaled_dot_product_fused_attention_overrideable_backward.default(
                        g,
                        q,
                        k,
                        v,
                        None,
                        [True, True, True, False],
                        o,
                        s,
                        None,
                        None,
                        3,
                        3,
                        0.0,
                        False,
                        None,
                        None,
                    )
                ),
                _attention_backward,
            ),
        },
        together=(0, 1, 2, 3, 4, 5),
    ),
    Row(
        "multi-head attention",
        (Operand((2, 3, 4)), *(Operand(s, axes=()) for s in ((12, 4), (12,), (4, 4), (4,)))),
        torch={
            "_native_multi_head_attention": lambda t, x, w, b, p, c: (
                t._native_multi_head_attention.default(x, x, x, 4, 2, w, b, p, c)
            )
        },
    ),
    Row(
        "a layer of a transformer",
        (Operand((2, 3, 4)), *(Operand(s, axes=()) for s in ((12, 4), (12,), (4, 4), (4,)))),
        torch={
            "_transformer_encoder_layer_fwd": lambda t, x, w, b, p, c: (
                t._transformer_encoder_layer_fwd.default(
                    x, 4, 2, w, b, p, c, False, False, 1e-3, c, c, c, c, p, c, p, c
                )
            )
        },
    ),
    Row(
        "matrices, each for itself",
        (Operand((2, 3, 3), SPD),),
        torch=aten(
            "_linalg_eigh cholesky linalg_cholesky_ex linalg_inv_ex "
            "linalg_lu_factor_ex linalg_lu _linalg_det _linalg_slogdet linalg_matrix_exp "
            "geqrf linalg_ldl_factor_ex inverse cholesky_inverse linalg_eigvals "
            "_linalg_eigvals linalg_eig linalg_qr _linalg_svd"
        )
        | {"linalg_pinv": lambda t, x: t.linalg_pinv.default(x, 1e-12)},
    ),
    Row(
        "matrices and right-hand sides",
        (Operand((2, 3, 3), SPD), Operand((2, 3, 2), MATRIX)),
        torch={
            "_linalg_solve_ex": lambda t, a, b: t._linalg_solve_ex.default(a, b),
            "linalg_solve_triangular": lambda t, a, b: t.linalg_solve_triangular.default(
                a, b, upper=True
            ),
            "triangular_solve": lambda t, a, b: t.triangular_solve.default(b, a),
            "cholesky_solve": lambda t, a, b: t.cholesky_solve.default(b, a),
        },
    ),
    Row(
        "reflections",
        (
            Operand((2, 3, 3), MATRIX),
            Operand((2, 3), Domain("vector", lambda rng, s: rng.normal(size=s), core=1)),
        ),
        torch=aten("linalg_householder_product"),
    ),
    Row(
        "reflections applied",
        (
            Operand((2, 3, 3), MATRIX),
            Operand((2, 3), Domain("vector", lambda rng, s: rng.normal(size=s), core=1)),
            Operand((2, 3, 2), MATRIX),
        ),
        torch={"ormqr": lambda t, a, b, c: t.ormqr.default(a, b, c)},
    ),
    Row(
        "planes, each for itself",
        (PLANES,),
        torch=_planes("max_pool2d_with_indices max_pool2d avg_pool2d", [2, 2])
        | aten("_adaptive_avg_pool2d adaptive_max_pool2d", [2, 2])
        | aten("upsample_nearest2d _upsample_nearest_exact2d", [8, 8])
        | aten(
            "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
            [6, 6],
            False,
        )
        | aten("im2col", [2, 2], [1, 1], [0, 0], [1, 1]),
    ),
    Row(
        "channels of planes",
        (Operand((2, 4, 2, 2)),),
        torch=aten("pixel_shuffle pixel_unshuffle channel_shuffle", 2),
    ),
    Row(
        "planes put together of windows",
        (Operand((2, 8, 9)),),
        torch=aten("col2im", [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    ),
    Row(
        "lines, each for itself",
        (Operand((2, 3, 6)),),
        torch=aten("avg_pool1d", [2])
        | aten("adaptive_avg_pool1d", [2])
        | aten("upsample_nearest1d", [8])
        | aten("upsample_linear1d", [8], False),
    ),
    Row(
        "bodies, each for itself",
        (Operand((2, 2, 4, 2, 2)),),
        torch=aten("max_pool3d_with_indices avg_pool3d", [2, 2, 2])
        | aten("_adaptive_avg_pool3d adaptive_max_pool3d", [2, 1, 1])
        | aten("upsample_nearest3d", [4, 4, 4])
        | aten("upsample_trilinear3d", [4, 4, 4], False),
    ),
    Row(
        "a gradient of the largest of planes",
        (Operand((2, 2, 2, 2)), PLANES, Operand((2, 2, 2, 2), index(16))),
        torch={
            "max_pool2d_with_indices_backward": lambda t, g, x, i: (
                t.max_pool2d_with_indices_backward.default(
                    g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i
                )
            ),
            "adaptive_max_pool2d_backward": lambda t, g, x, i: (
                t.adaptive_max_pool2d_backward.default(g, x, i)
            ),
        },
        together=(0, 1, 2),
    ),
    Row(
        "a gradient of the largest of bodies",
        (Operand((2, 2, 2, 1, 1)), Operand((2, 2, 4, 2, 2)), Operand((2, 2, 2, 1, 1), index(16))),
        torch={
            "max_pool3d_with_indices_backward": lambda t, g, x, i: (
                t.max_pool3d_with_indices_backward.default(
                    g, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, i
                )
            )
        },
        together=(0, 1, 2),
    ),
    Row(
        "an integer product of matrices",
        (Operand((32, 32), BYTES), Operand((32, 32), BYTES)),
        torch=aten("_int_mm"),
    ),
    Row(
        "samples of planes",
        (Operand((2, 2, 4, 4)), Operand((2, 3, 3, 2), UNIT)),
        torch=aten("grid_sampler_2d", 0, 0, False),
    ),
    Row(
        "samples of bodies",
        (Operand((2, 2, 3, 3, 3)), Operand((2, 2, 2, 2, 3), UNIT)),
        torch=aten("grid_sampler_3d", 0, 0, False),
    ),
    Row(
        "a gradient of means of planes",
        (Operand((2, 2, 2, 2)), PLANES),
        torch={
            "avg_pool2d_backward": lambda t, g, x: t.avg_pool2d_backward.default(
                g, x, [2, 2], [2, 2], [0, 0], False, True, None
            ),
            "_adaptive_avg_pool2d_backward": lambda t, g, x: (
                t._adaptive_avg_pool2d_backward.default(g, x)
            ),
        },
        together=(0, 1),
    ),
    Row(
        "a gradient of means of bodies",
        (Operand((2, 2, 2, 1, 1)), Operand((2, 2, 4, 2, 2))),
        torch={
            "avg_pool3d_backward": lambda t, g, x: t.avg_pool3d_backward.default(
                g, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None
            ),
            "_adaptive_avg_pool3d_backward": lambda t, g, x: (
                t._adaptive_avg_pool3d_backward.default(g, x)
            ),
        },
        together=(0, 1),
    ),
    Row(
        "a gradient of larger planes",
        (Operand((2, 2, 4, 4)),),
        torch={
            "upsample_nearest2d_backward": lambda t, g: t.upsample_nearest2d_backward.default(
                g, [4, 4], [2, 2, 2, 2]
            ),
            "upsample_bilinear2d_backward": lambda t, g: t.upsample_bilinear2d_backward.default(
                g, [4, 4], [2, 2, 2, 2], False
            ),
            "upsample_bicubic2d_backward": lambda t, g: t.upsample_bicubic2d_backward.default(
                g, [4, 4], [2, 2, 2, 2], False
            ),
        },
        never=True,
    ),
    Row(
        "rows of a gradient of larger planes",
        (Operand((2, 2, 4, 4), axes=(0,), always=True),),
        torch={
            "upsample_nearest2d_backward": lambda t, g, n: t.upsample_nearest2d_backward.default(
                g, [4, 4], [n, 2, 2, 2]
            ),
            "upsample_bilinear2d_backward": lambda t, g, n: t.upsample_bilinear2d_backward.default(
                g, [4, 4], [n, 2, 2, 2], False
            ),
            "upsample_bicubic2d_backward": lambda t, g, n: t.upsample_bicubic2d_backward.default(
                g, [4, 4], [n, 2, 2, 2], False
            ),
        },
    ),
    Row(
        "a gradient of larger lines",
        (Operand((2, 2, 4), axes=(0,), always=True),),
        torch={
            "upsample_nearest1d_backward": lambda t, g, n: t.upsample_nearest1d_backward.default(
                g, [4], [n, 2, 2]
            )
        },
    ),
]
