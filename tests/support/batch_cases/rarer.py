"""Rows of PyTorch's operators that models seldom have, from all of the above families."""

from __future__ import annotations

from batch_cases.elementwise import aten, like
from batch_cases.table import Row
from batch_cases.values import COUNT, INT, MATRIX, SPD, Domain, Operand

X = Operand((4, 3))
CUBE = Operand((2, 4, 3))
PIVOTS = Domain("pivots", lambda rng, s: 0 * rng.integers(1, 2, s) + s[-1], "int32", (), (), core=1)

ROWS: list[Row] = [
    Row("a quotient of integers", like(COUNT, 2, broadcast=True), torch=aten("floor_divide")),
    Row("a copy", (X,), torch=aten("alias_copy")),
    Row(
        "an outer product and a sum",
        (Operand((4, 5), also=((5,), (4, 1), ())), Operand((4,)), Operand((5,))),
        torch={"addr": lambda t, b, x, y: t.addr.default(b, x, y, beta=0.5, alpha=2)},
    ),
    Row(
        "a cross product",
        (CUBE, Operand((2, 4, 3), also=((1, 4, 3), (4, 3)))),
        torch={"linalg_cross": lambda t, x, y: t.linalg_cross.default(x, y, dim=-1)},
    ),
    Row(
        "a cross product along another dimension",
        (Operand((2, 3, 4)), Operand((1, 3, 4), also=((2, 3, 1),))),
        torch={"linalg_cross": lambda t, x, y: t.linalg_cross.default(x, y, dim=1)},
    ),
    Row(
        "distances",
        (Operand((2, 4, 3)), Operand((2, 5, 3))),
        torch={
            "_cdist_forward": lambda t, x, y: t._cdist_forward.default(x, y, 1.0, None),
            "_euclidean_dist": lambda t, x, y: t._euclidean_dist.default(x, y),
        },
    ),
    Row(
        "gradients of distances",
        (Operand((2, 4, 5)), Operand((2, 4, 3)), Operand((2, 5, 3)), Operand((2, 4, 5))),
        torch={"_cdist_backward": lambda t, g, x, y, d: t._cdist_backward.default(g, x, y, 1.0, d)},
    ),
    Row(
        "factors of matrices, and right-hand sides",
        (Operand((2, 3, 3), SPD), Operand((2, 3), PIVOTS), Operand((2, 3, 2), MATRIX)),
        torch={"linalg_lu_solve": lambda t, a, p, b: t.linalg_lu_solve.default(a, p, b)},
        together=(0, 1),
    ),
    Row(
        "factors of matrices, unpacked",
        (Operand((2, 3, 3), SPD), Operand((2, 3), PIVOTS)),
        torch={"lu_unpack": lambda t, a, p: t.lu_unpack.default(a, p)},
        together=(0, 1),
    ),
    Row(
        "smallest and largest",
        (CUBE,),
        torch={
            "aminmax": lambda t, x: t.aminmax.default(x, dim=1),
            "count_nonzero": lambda t, x: t.count_nonzero.dim_IntList(x, [1]),
        },
    ),
    Row(
        "smallest and largest, the dimension kept",
        (CUBE,),
        torch={"aminmax": lambda t, x: t.aminmax.default(x, dim=-1, keepdim=True)},
    ),
    Row(
        "smallest and largest of all",
        (X,),
        torch={"aminmax": lambda t, x: t.aminmax.default(x)},
        never=True,
    ),
    Row(
        "how many are not 0",
        (Operand((4, 3), INT),),
        torch={
            "count_nonzero": lambda t, x: t.count_nonzero.default(x),
        },
    ),
    Row(
        "one number of all elements",
        (X, X),
        torch={
            "dist": lambda t, x, y: t.dist.default(x, y),
            "trace": lambda t, x, y: t.trace.default(x),
        },
        never=True,
    ),
    Row(
        "slices, each with a norm",
        (CUBE,),
        torch={"renorm": lambda t, x: t.renorm.default(x, 2.0, 1, 0.5)},
    ),
    Row(
        "elements among others",
        (Operand((4, 3), INT), Operand((3,), INT)),
        torch={"isin": lambda t, x, y: t.isin.Tensor_Tensor(x, y)},
    ),
    Row(
        "elements that are one number",
        (Operand((4, 3), INT),),
        torch={"isin": lambda t, x: t.isin.Tensor_Scalar(x, 2)},
    ),
    Row(
        "a part copied",
        (CUBE,),
        torch={
            "narrow_copy": lambda t, x: t.narrow_copy.default(x, 1, 1, 2),
            "unfold_copy": lambda t, x: t.unfold_copy.default(x, -1, 2, 1),
        },
    ),
    Row(
        "a diagonal copied",
        (Operand((2, 4, 4, 3)),),
        torch={"diagonal_copy": lambda t, x: t.diagonal_copy.default(x, 0, 1, 2)},
    ),
    Row(
        "a diagonal replaced",
        (Operand((2, 4, 4, 3)), Operand((2, 3, 4))),
        torch={"diagonal_scatter": lambda t, x, y: t.diagonal_scatter.default(x, y, 0, 1, 2)},
    ),
    Row(
        "by places in memory",
        (Operand((4, 3)),),
        torch={
            "as_strided": lambda t, x: t.as_strided.default(x, (2, 3), (3, 1), 1),
            "as_strided_copy": lambda t, x: t.as_strided_copy.default(x, (3, 2), (1, 3)),
        },
    ),
    Row(
        "replaced by places in memory",
        (Operand((4, 3)), Operand((2, 3))),
        torch={
            "as_strided_scatter": lambda t, x, y: t.as_strided_scatter.default(
                x, y, (2, 3), (6, 1), 3
            )
        },
    ),
    Row("all elements made 0", (X,), torch=aten("zero")),
]
