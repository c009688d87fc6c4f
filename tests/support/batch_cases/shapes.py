"""Rows of operators that move elements, or make tensors from nothing."""

from __future__ import annotations

from typing import Any

from batch_cases.elementwise import _dtype, aten
from batch_cases.table import Row
from batch_cases.values import COMPLEX, INT, Operand

X = Operand((4, 3))
CUBE = Operand((2, 4, 3))


ROWS = [
    Row(
        "a reshape that joins dimensions",
        (CUBE,),
        torch={
            k: (lambda t, x, k=k: getattr(t, k).default(x, [-1, 3]))
            for k in ("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy")
        },
    ),
    Row(
        "a reshape to a line",
        (X,),
        jax={"reshape": lambda lax, x: lax.reshape(x, (x.size,))},
        torch={"view": lambda t, x: t.view.default(x, [-1])},
    ),
    Row(
        "a reshape that transposes first",
        (CUBE,),
        jax={
            "reshape": lambda lax, x: lax.reshape(
                x, (x.shape[2], x.shape[0] * x.shape[1]), dimensions=(2, 0, 1)
            )
        },
    ),
    Row(
        "a reshape that cuts dimensions",
        (Operand((12, 3)),),
        jax={"reshape": lambda lax, x: lax.reshape(x, (2, x.shape[0] // 2, x.shape[1]))},
        torch={
            "view": lambda t, x: t.view.default(x, [2, -1, 3]),
            "reshape": lambda t, x: t.reshape.default(x, [-1, 2, 3]),
        },
    ),
    Row(
        "a reshape that names the rows",
        (Operand((12, 3)),),
        jax={"reshape": lambda lax, x, n: lax.reshape(x, (n, x.shape[0] // n, x.shape[1]))},
        torch={"view": lambda t, x, n: t.view.default(x, [n, -1, 3])},
    ),
    Row(
        "the same bytes as another type",
        (X,),
        torch={"view": lambda t, x: t.view.dtype(x, _dtype("int64"))},
        never=True,
    ),
    Row(
        "a dimension of size 1 that goes",
        (Operand((1, 4, 3)),),
        jax={"squeeze": lambda lax, x: lax.squeeze(x, (0,))},
        torch={
            "squeeze": lambda t, x: t.squeeze.dim(x, 0),
            "squeeze_copy": lambda t, x: t.squeeze_copy.dim(x, 0),
        },
    ),
    Row(
        "all dimensions of size 1 that go",
        (Operand((1, 4, 3)),),
        torch={"squeeze": lambda t, x: t.squeeze.default(x)},
    ),
    Row(
        "several dimensions that go",
        (Operand((1, 4, 1, 3)),),
        jax={"squeeze": lambda lax, x: lax.squeeze(x, (0, 2))},
        torch={"squeeze": lambda t, x: t.squeeze.dims(x, [0, 2])},
    ),
    Row(
        "a new dimension",
        (X,),
        jax={"broadcast_in_dim": lambda lax, x: lax.broadcast_in_dim(x, (*x.shape, 1), (0, 1))},
        torch={
            "unsqueeze": lambda t, x: t.unsqueeze.default(x, 1),
            "unsqueeze_copy": lambda t, x: t.unsqueeze_copy.default(x, -1),
        },
    ),
    Row(
        "repeated along a new dimension",
        (X,),
        jax={"broadcast_in_dim": lambda lax, x: lax.broadcast_in_dim(x, (2, *x.shape), (1, 2))},
        torch={
            k: (lambda t, x, k=k: getattr(t, k).default(x, [2, -1, -1]))
            for k in ("expand", "expand_copy")
        },
    ),
    Row(
        "repeated for each row",
        (Operand((1, 3)),),
        jax={"broadcast_in_dim": lambda lax, x, n: lax.broadcast_in_dim(x, (n, *x.shape), (1, 2))},
        torch={
            "expand": lambda t, x, n: t.expand.default(x, [n, 3]),
            "expand_copy": lambda t, x, n: t.expand_copy.default(x, [2 * n, 3]),
            "broadcast_to": lambda t, x, n: t.broadcast_to.default(x, [n, 3]),
        },
    ),
    Row(
        "written into another shape",
        (X, Operand((3,), also=((4, 3), ()))),
        torch={"copy": lambda t, x, y: t.copy.default(x, y)},
    ),
    Row(
        "written into integers",
        (Operand((4, 3), INT), X),
        torch={"copy": lambda t, x, y: t.copy.default(x, y)},
    ),
    Row(
        "dimensions in another order",
        (CUBE,),
        jax={"transpose": lambda lax, x: lax.transpose(x, (2, 0, 1))},
        torch={
            k: (lambda t, x, k=k: getattr(t, k).default(x, [2, 0, 1]))
            for k in ("permute", "permute_copy")
        },
    ),
    Row(
        "two dimensions exchanged",
        (CUBE,),
        torch=aten("swapaxes", 0, 2)
        | aten("mT mH adjoint")
        | {
            "transpose": lambda t, x: t.transpose.int(x, 0, -1),
            "transpose_copy": lambda t, x: t.transpose_copy.int(x, 1, 2),
        },
    ),
    Row("a matrix turned", (X,), torch=aten("t t_copy numpy_T")),
    Row(
        "reversed",
        (CUBE,),
        jax={"rev": lambda lax, x: lax.rev(x, (1,))},
        torch=aten("flip", [1])
        | aten("roll", [1], [1])
        | {"rot90": lambda t, x: t.rot90.default(x, 1, [1, 2])},
    ),
    Row(
        "rolled by the batch size",
        (X,),
        torch={"roll": lambda t, x, n: t.roll.default(x, [n], [1])},
        never=True,
    ),
    Row(
        "a slice",
        (Operand((4, 5)),),
        jax={"slice": lambda lax, x: lax.slice(x, (0, 1), (x.shape[0], 4), (1, 2))},
        torch={
            "slice": lambda t, x: t.slice.Tensor(x, 1, 1, 4, 2),
            "slice_copy": lambda t, x: t.slice_copy.Tensor(x, 1, 1),
        },
    ),
    Row(
        "the first rows",
        (Operand((8, 3)),),
        jax={"slice": lambda lax, x, n: lax.slice(x, (0, 0), (n, 3))},
        torch={"slice": lambda t, x, n: t.slice.Tensor(x, 0, 0, n)},
    ),
    Row(
        "rows behind the first",
        (Operand((8, 3)),),
        jax={"slice": lambda lax, x, n: lax.slice(x, (n, 0), (2 * n, 3))},
        torch={"slice": lambda t, x, n: t.slice.Tensor(x, 0, n, 2 * n)},
    ),
    Row(
        "a window whose place depends on the batch size",
        (Operand((9, 3)),),
        jax={"slice": lambda lax, x, n: lax.slice(x, (n, 0), (n + 2, 3))},
        torch={"slice": lambda t, x, n: t.slice.Tensor(x, 0, n, n + 2)},
        never=True,
    ),
    Row(
        "one of a dimension",
        (Operand((4, 5)),),
        torch={
            "select": lambda t, x: t.select.int(x, 1, -1),
            "select_copy": lambda t, x: t.select_copy.int(x, 1, 2),
        },
    ),
    Row(
        "one of a dimension, by the batch size",
        (Operand((5, 6)),),
        torch={"select": lambda t, x, n: t.select.int(x, 1, n - 1)},
        never=True,
    ),
    Row(
        "parts",
        (Operand((2, 4)),),
        jax={"split": lambda lax, x: lax.split(x, (1, 3), 1)},
        torch={
            k: (lambda t, x, k=k: getattr(t, k).default(x, [1, 3], 1))
            for k in ("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
        }
        | {
            k: (lambda t, x, k=k: getattr(t, k).Tensor(x, 2, 1))
            for k in ("split", "split_copy", "unsafe_split")
        }
        | {k: (lambda t, x, k=k: getattr(t, k).default(x, 2, 1)) for k in ("chunk", "unsafe_chunk")}
        | {k: (lambda t, x, k=k: getattr(t, k).int(x, 1)) for k in ("unbind", "unbind_copy")},
    ),
    Row(
        "parts that are rows each",
        (Operand((8, 3)),),
        jax={"split": lambda lax, x, n: lax.split(x, (n, x.shape[0] - n), 0)},
        torch={
            "split": lambda t, x, n: t.split.Tensor(x, n, 0),
            "chunk": lambda t, x: t.chunk.default(x, 2, 0),
        },
    ),
    Row(
        "parts that begin by the batch size",
        (Operand((30004, 2)),),
        torch={
            "split_with_sizes": lambda t, x, n: t.split_with_sizes.default(x, [n, 4, 30000 - n], 0)
        },
        never=True,
    ),
    Row(
        "joined",
        (X, X),
        jax={"concatenate": lambda lax, x, y: lax.concatenate([x, y], 1)},
        torch={"cat": lambda t, x, y: t.cat.default([x, y], 1)},
    ),
    Row(
        "joined along the first",
        (X, X),
        jax={"concatenate": lambda lax, x, y: lax.concatenate([x, y], 0)},
        torch={"cat": lambda t, x, y: t.cat.default([x, y], 0)},
    ),
    Row(
        "stacked",
        (X, X),
        jax={"stack": lambda lax, x, y: _bind("stack", x, y, axis=1)},
        torch={"stack": lambda t, x, y: t.stack.default([x, y], 1)},
    ),
    Row("unstacked", (X,), jax={"unstack": lambda lax, x: _bind("unstack", x, axis=1)}),
    Row(
        "a part replaced",
        (Operand((4, 5)), Operand((4, 2))),
        torch={"slice_scatter": lambda t, x, y: t.slice_scatter.default(x, y, 1, 1, 3)},
    ),
    Row(
        "everything replaced",
        (X, X),
        torch={"slice_scatter": lambda t, x, y: t.slice_scatter.default(x, y, 0)},
    ),
    Row(
        "a part replaced, by the batch size",
        (Operand((4, 9)), Operand((4, 2))),
        torch={"slice_scatter": lambda t, x, y, n: t.slice_scatter.default(x, y, 1, n, n + 2)},
        never=True,
    ),
    Row(
        "one replaced",
        (X, Operand((4,))),
        torch={"select_scatter": lambda t, x, y: t.select_scatter.default(x, y, 1, 0)},
    ),
    Row(
        "tiled",
        (X,),
        jax={"tile": lambda lax, x: _bind("tile", x, reps=(2, 1))},
        torch={"repeat": lambda t, x: t.repeat.default(x, [2, 1, 3])},
    ),
    Row(
        "tiled for each row",
        (Operand((1, 3)),),
        torch={"repeat": lambda t, x, n: t.repeat.default(x, [n, 2])},
    ),
    Row(
        "padded with zeros",
        (X,),
        jax={"pad": lambda lax, x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 0)))},
        torch={
            "constant_pad_nd": lambda t, x: t.constant_pad_nd.default(x, [1, 1], 0),
            "pad": lambda t, x: t.pad.default(x, [1, 1], "constant", 0),
        },
    ),
    Row(
        "padded with a number",
        (X,),
        jax={"pad": lambda lax, x: lax.pad(x, 1.5, ((0, 0, 0), (1, 1, 0)))},
        torch={
            "constant_pad_nd": lambda t, x: t.constant_pad_nd.default(x, [1, 1], 1.5),
            "pad": lambda t, x: t.pad.default(x, [1, 1], "constant", 1.5),
        },
    ),
    Row(
        "padded with a value",
        (X, Operand(())),
        jax={"pad": lambda lax, x, v: lax.pad(x, v, ((0, 0, 0), (1, 0, 0)))},
    ),
    Row(
        "padded with the batch size",
        (X,),
        torch={"constant_pad_nd": lambda t, x, n: t.constant_pad_nd.default(x, [1, 1], n)},
    ),
    Row(
        "padded like its border, lines",
        (Operand((2, 3, 5), axes=(0, 1)),),
        torch=aten("reflection_pad1d replication_pad1d", [1, 2])
        | {"pad": lambda t, x: t.pad.default(x, [1, 2], "reflect")},
    ),
    Row(
        "padded like its border, planes",
        (Operand((2, 3, 5, 5), axes=(0, 1)),),
        torch=aten("reflection_pad2d replication_pad2d", [1, 2, 1, 1]),
    ),
    Row(
        "padded like its border, bodies",
        (Operand((1, 2, 3, 3, 3), axes=(0, 1)),),
        torch=aten("reflection_pad3d replication_pad3d", [1, 1, 1, 1, 1, 1]),
    ),
    Row("a triangle", (Operand((2, 4, 4)),), torch=aten("tril triu", 0)),
    Row(
        "a triangle that depends on the batch size",
        (Operand((2, 6, 6)),),
        torch={"tril": lambda t, x, n: t.tril.default(x, n - 3)},
        never=True,
    ),
    Row(
        "a diagonal",
        (Operand((2, 4, 4)),),
        torch={"diagonal": lambda t, x: t.diagonal.default(x, 0, 1, 2)},
    ),
    Row(
        "a diagonal of the first dimensions",
        (Operand((4, 4, 2)),),
        torch={"diagonal": lambda t, x: t.diagonal.default(x, 1, 0, 1)},
    ),
    Row("a diagonal matrix", (X,), torch={"diag_embed": lambda t, x: t.diag_embed.default(x)}),
    Row(
        "a diagonal matrix in front",
        (X,),
        torch={"diag_embed": lambda t, x: t.diag_embed.default(x, 0, 0, 1)},
    ),
    Row("two numbers of a complex one", (Operand((4, 3), COMPLEX),), torch=aten("view_as_real")),
    Row("a complex number of two", (Operand((4, 2), axes=(0,)),), torch=aten("view_as_complex")),
    Row("windows", (Operand((3, 6)),), torch={"unfold": lambda t, x: t.unfold.default(x, 1, 3, 2)}),
    Row(
        "the bits of a number",
        (X,),
        jax={"bitcast_convert_type": lambda lax, x: lax.bitcast_convert_type(x, "int64")},
    ),
    Row(
        "the bits of half a number",
        (X,),
        jax={"bitcast_convert_type": lambda lax, x: lax.bitcast_convert_type(x, "int32")},
    ),
    Row(
        "zeros, ones and other constants",
        (X,),
        torch=aten("zeros_like ones_like")
        | aten("full_like", 2.5)
        | {
            "new_zeros": lambda t, x, n: t.new_zeros.default(x, [n, 2]),
            "new_ones": lambda t, x, n: t.new_ones.default(x, [2, 2 * n]),
            "new_full": lambda t, x, n: t.new_full.default(x, [n, 2], 2.5),
            "zeros": lambda t, x, n: t.zeros.default([n, 2]),
            "ones": lambda t, x, n: t.ones.default([n]),
            "full": lambda t, x, n: t.full.default([2, n], 3.0),
        },
    ),
    Row(
        "a constant of the batch size",
        (X,),
        torch={
            "full": lambda t, x, n: t.full.default([n, 2], n),
            "full_like": lambda t, x, n: t.full_like.default(x, n),
            "new_full": lambda t, x, n: t.new_full.default(x, [2, 3], n),
            "scalar_tensor": lambda t, x, n: t.scalar_tensor.default(n),
        },
    ),
    Row("filled with a number", (X,), torch={"fill": lambda t, x: t.fill.Scalar(x, 2.0)}),
    Row(
        "filled with a value", (X, Operand(())), torch={"fill": lambda t, x, v: t.fill.Tensor(x, v)}
    ),
    Row(
        "the number of each row",
        (X,),
        jax={"iota": lambda lax, x, n: lax.broadcasted_iota("int32", (n, 3), 0)},
        torch={"arange": lambda t, x, n: t.arange.default(n)},
    ),
    Row(
        "the number of each column",
        (X,),
        jax={"iota": lambda lax, x, n: lax.broadcasted_iota("int32", (n, 3), 1)},
    ),
    Row(
        "numbers from the batch size on",
        (X,),
        torch={"arange": lambda t, x, n: t.arange.start_step(n, n + 3, 1)},
        never=True,
    ),
    Row(
        "numbers up to the batch size",
        (X,),
        torch={
            "linspace": lambda t, x, n: t.linspace.default(0, n, 5),
            "logspace": lambda t, x, n: t.logspace.default(0, n, 5),
            "eye": lambda t, x, n: t.eye.default(n),
            "tril_indices": lambda t, x, n: t.tril_indices.default(3, 3, n - 3),
            "triu_indices": lambda t, x, n: t.triu_indices.default(3, 3, n - 3),
        },
        never=True,
    ),
    Row(
        "a gradient put into its slice",
        (Operand((3, 2)),),
        torch={"slice_backward": lambda t, g: t.slice_backward.default(g, [3, 5], 1, 1, 3, 1)},
    ),
    Row(
        "rows of a gradient put into a slice",
        (Operand((3, 2), axes=(0,)),),
        torch={
            "slice_backward": lambda t, g, n: t.slice_backward.default(g, [n, 5], 1, 1, 3, 1),
            "select_backward": lambda t, g, n: t.select_backward.default(g, [n, 2, 4], 2, 1),
        },
    ),
    Row(
        "a gradient put into its place",
        (Operand((3,)),),
        torch={"select_backward": lambda t, g: t.select_backward.default(g, [3, 5], 1, 2)},
    ),
    Row(
        "a gradient put into a diagonal",
        (Operand((2, 4)),),
        torch={
            "diagonal_backward": lambda t, g: t.diagonal_backward.default(g, [2, 4, 4], 0, 1, 2)
        },
    ),
    Row(
        "a gradient put into the diagonals of rows",
        (Operand((4, 2)),),
        torch={
            "diagonal_backward": lambda t, g, n: t.diagonal_backward.default(g, [2, n, 3], 1, 0, 2)
        },
    ),
    Row(
        "a gradient put into the diagonals of matrices of rows",
        (Operand((4, 3)),),
        torch={
            "diagonal_backward": lambda t, g, n: t.diagonal_backward.default(g, [n, 3, 3], 0, 1, 2)
        },
    ),
    Row(
        "a gradient of windows",
        (Operand((3, 2, 3)),),
        torch={"unfold_backward": lambda t, g: t.unfold_backward.default(g, [3, 6], 1, 3, 2)},
    ),
    Row(
        "a gradient of windows of rows",
        (Operand((4, 2, 3)),),
        torch={"unfold_backward": lambda t, g, n: t.unfold_backward.default(g, [n, 6], 1, 3, 2)},
    ),
    Row(
        "a gradient of windows of rows in the middle",
        (Operand((2, 4, 3)),),
        torch={"unfold_backward": lambda t, g, n: t.unfold_backward.default(g, [5, n], 0, 3, 2)},
    ),
]

NOT_DETERMINED = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
}  # fmt: skip
"""Rules of what holds any bits: nothing to compare."""


def _bind(name: str, *operands: Any, **params: Any) -> Any:
    from batch_cases import on_jax

    return on_jax.primitive(name).bind(*operands, **params)
