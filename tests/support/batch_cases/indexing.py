"""Rows of operators that read or write elements by their number."""

from __future__ import annotations

from typing import Any

from batch_cases.elementwise import aten
from batch_cases.table import Row
from batch_cases.values import BOOL, COUNT, Operand, index

X = Operand((4, 8))
LINE = Operand((5,), index(8))
SAME_RANK = Operand((4, 5), index(8), also=((1, 5),))
INTO = Operand((4, 5))


def _along(lax: Any, x: Any, i: Any, axis: int) -> Any:
    import jax.numpy as jnp

    return jnp.take_along_axis(x, i, axis, mode="clip")


def _at(x: Any, i: Any, y: Any, how: str) -> Any:
    """Writes along the second dimension, the first one row by row."""
    import jax

    return jax.vmap(lambda r, j, v: getattr(r.at[j], how)(v, mode="drop"))(x, i, y)


def _writes(how: str) -> Any:
    return lambda lax, x, i, y: getattr(x.at[:, i], how)(y, mode="drop")


def _row_writes(how: str) -> Any:
    return lambda lax, x, i, y: _at(x, i, y, how)


def _own(how: str) -> Any:
    def write(lax: Any, x: Any, p: Any, i: Any, y: Any) -> Any:
        return getattr(x.at[p, i], how)(y, mode="promise_in_bounds")

    return write


HOWS = {"scatter": "set", "scatter-add": "add", "scatter-sub": "subtract", "scatter-mul": "multiply",
        "scatter-min": "min", "scatter-max": "max"}  # fmt: skip


def _reduced(reduce: str, include: bool = True) -> Any:
    return lambda t, x, i, y: t.scatter_reduce.two(x, 1, i, y, reduce, include_self=include)


ROWS = [
    Row(
        "some of a dimension",
        (X, LINE),
        jax={"gather": lambda lax, x, i: x.at[:, i].get(mode="clip")},
        torch={
            "index_select": lambda t, x, i: t.index_select.default(x, 1, i),
            "index": lambda t, x, i: t.index.Tensor(x, [None, i]),
            "_unsafe_index": lambda t, x, i: t._unsafe_index.Tensor(x, [None, i]),
        },
    ),
    Row(
        "some of a dimension, or a number",
        (X, LINE),
        jax={"gather": lambda lax, x, i: x.at[:, i].get(mode="fill", fill_value=1.5)},
    ),
    Row(
        "some of the first dimension",
        (Operand((8, 3)), Operand((5,), index(8))),
        jax={"gather": lambda lax, x, i: x.at[i].get(mode="clip")},
        torch={
            "index_select": lambda t, x, i: t.index_select.default(x, 0, i),
            "index": lambda t, x, i: t.index.Tensor(x, [i]),
        },
    ),
    Row(
        "rows of a table",
        (Operand((8, 3)), Operand((4, 5), index(8), also=((5,),))),
        jax={"gather": lambda lax, x, i: x.at[i].get(mode="fill")},
        torch={
            "embedding": lambda t, w, i: t.embedding.default(w, i),
            "index": lambda t, w, i: t.index.Tensor(w, [i]),
        },
    ),
    Row(
        "gradients of rows of a table",
        (Operand((4, 5, 3), also=((5, 3),)), Operand((4, 5), index(8), also=((5,),))),
        torch={
            "embedding_dense_backward": lambda t, g, i: t.embedding_dense_backward.default(
                g, i, 8, -1, False
            )
        },
    ),
    Row(
        "gradients of rows of a table, by how often each is used",
        (Operand((4, 3)), Operand((4,), index(8))),
        torch={
            "embedding_dense_backward": lambda t, g, i: t.embedding_dense_backward.default(
                g, i, 8, -1, True
            )
        },
        never=True,
    ),
    Row(
        "an element each, by its number in the row",
        (X, SAME_RANK),
        jax={"gather": lambda lax, x, i: _along(lax, x, i, 1)},
        torch={
            "gather": lambda t, x, i: t.gather.default(x, 1, i),
            "take_along_dim": lambda t, x, i: t.take_along_dim.default(x, i, 1),
        },
    ),
    Row(
        "an element each, by its number in the whole",
        (Operand((2, 4)), Operand((3, 2), index(8))),
        torch={"take": lambda t, x, i: t.take.default(x, i)},
    ),
    Row(
        "writes elements, by their number in the whole",
        (Operand((2, 4)), Operand((3,), index(8)), Operand((3,))),
        torch={"put": lambda t, x, i, y: t.put.default(x, i, y, True)},
        never=True,
    ),
    Row(
        "an element each, by its number in the column",
        (Operand((8, 4)), Operand((5, 4), index(8))),
        jax={"gather": lambda lax, x, i: _along(lax, x, i, 0)},
        torch={"gather": lambda t, x, i: t.gather.default(x, 0, i)},
    ),
    Row(
        "elements of a plane",
        (Operand((8, 8)), LINE, LINE),
        jax={"gather": lambda lax, x, i, j: x.at[i, j].get(mode="clip")},
        torch={
            "index": lambda t, x, i, j: t.index.Tensor(x, [i, j]),
            "_unsafe_index": lambda t, x, i, j: t._unsafe_index.Tensor(x, [i, j]),
        },
    ),
    Row(
        "elements of a plane, apart",
        (Operand((8, 2, 8)), LINE, LINE),
        torch={"index": lambda t, x, i, j: t.index.Tensor(x, [i, None, j])},
    ),
    Row(
        "elements of a table, crossed",
        (Operand((2, 8, 8)), Operand((5, 1), index(8)), Operand((3,), index(8))),
        torch={"index": lambda t, x, i, j: t.index.Tensor(x, [None, i, j])},
    ),
    Row(
        "written to some of a dimension",
        (X, LINE, INTO),
        jax={name: _writes(how) for name, how in HOWS.items()},
        torch={
            "index_add": lambda t, x, i, y: t.index_add.default(x, 1, i, y, alpha=0.5),
            "index_copy": lambda t, x, i, y: t.index_copy.default(x, 1, i, y),
            "index_fill": lambda t, x, i, y: t.index_fill.int_Scalar(x, 1, i, 1.5),
            "index_put": lambda t, x, i, y: t.index_put.default(x, [None, i], y, True),
            "_unsafe_index_put": lambda t, x, i, y: t._unsafe_index_put.default(x, [None, i], y),
            "_index_put_impl": lambda t, x, i, y: t._index_put_impl.default(x, [None, i], y),
        },
    ),
    Row(
        "written to some of the first dimension",
        (Operand((8, 3)), LINE, Operand((5, 3))),
        jax={
            name: (lambda lax, x, i, y, how=how: getattr(x.at[i], how)(y, mode="drop"))
            for name, how in HOWS.items()
        },
        torch={
            "index_add": lambda t, x, i, y: t.index_add.default(x, 0, i, y),
            "index_copy": lambda t, x, i, y: t.index_copy.default(x, 0, i, y),
            "index_put": lambda t, x, i, y: t.index_put.default(x, [i], y, True),
            "_unsafe_index_put": lambda t, x, i, y: t._unsafe_index_put.default(x, [i], y, True),
            "_index_put_impl": lambda t, x, i, y: t._index_put_impl.default(x, [i], y, True),
        },
    ),
    Row(
        "one value written to some of a dimension",
        (X, LINE, Operand(())),
        torch={
            "index_fill": lambda t, x, i, y: t.index_fill.int_Tensor(x, 1, i, y),
            "index_put": lambda t, x, i, y: t.index_put.default(x, [None, i], y),
        },
    ),
    Row(
        "one value written where a mask is true",
        (X, Operand((4, 8), BOOL), Operand(())),
        torch={
            "index_put": lambda t, x, m, y: t.index_put.default(x, [m], y),
            "_unsafe_index_put": lambda t, x, m, y: t._unsafe_index_put.default(x, [m], y),
            "_index_put_impl": lambda t, x, m, y: t._index_put_impl.default(x, [m], y),
        },
    ),
    Row(
        "one value written where a mask of some dimensions is true",
        (Operand((4, 3, 5)), Operand((4, 3), BOOL), Operand((1,))),
        torch={"index_put": lambda t, x, m, y: t.index_put.default(x, [m], y)},
    ),
    Row(
        "one value written where a mask of a later dimension is true",
        (X, Operand((8,), BOOL), Operand((1,))),
        torch={"index_put": lambda t, x, m, y: t.index_put.default(x, [None, m], y)},
    ),
    Row(
        "the batch size written to some of a dimension",
        (X, LINE),
        torch={"index_fill": lambda t, x, i, n: t.index_fill.int_Scalar(x, 1, i, n)},
    ),
    Row(
        "written to an element each",
        (X, SAME_RANK, INTO),
        jax={name: _row_writes(how) for name, how in HOWS.items()},
        torch={
            "scatter": lambda t, x, i, y: t.scatter.src(x, 1, i, y),
            "scatter_add": lambda t, x, i, y: t.scatter_add.default(x, 1, i, y),
            "scatter_reduce": _reduced("sum"),
        },
    ),
    Row(
        "one number written to an element each",
        (X, SAME_RANK),
        torch={"scatter": lambda t, x, i: t.scatter.value(x, 1, i, 0.0)},
    ),
    Row(
        "another number written to an element each",
        (X, SAME_RANK),
        torch={"scatter": lambda t, x, i: t.scatter.value(x, 1, i, 1.5)},
    ),
    Row(
        "the batch size written to an element each",
        (X, SAME_RANK),
        torch={"scatter": lambda t, x, i, n: t.scatter.value(x, 1, i, n)},
    ),
    Row(
        "the mean written to an element each",
        (X, SAME_RANK, INTO),
        torch={
            "scatter_reduce": _reduced("mean"),
            "scatter": lambda t, x, i, y: t.scatter.reduce(x, 1, i, y, reduce="multiply"),
        },
    ),
    Row(
        "the largest written to an element each",
        (X, SAME_RANK, INTO),
        torch={
            "scatter_reduce": _reduced("amax"),
            "scatter": lambda t, x, i, y: t.scatter.reduce(x, 1, i, y, reduce="add"),
        },
    ),
    Row(
        "the product written to an element each",
        (X, SAME_RANK, INTO),
        torch={"scatter_reduce": _reduced("prod")},
    ),
    Row(
        "a sum in the place of what was there",
        (X, SAME_RANK, INTO),
        torch={"scatter_reduce": _reduced("sum", False)},
    ),
    Row(
        "written by columns",
        (Operand((8, 4)), Operand((5, 4), index(8)), Operand((5, 4))),
        torch={
            "scatter": lambda t, x, i, y: t.scatter.src(x, 0, i, y),
            "scatter_add": lambda t, x, i, y: t.scatter_add.default(x, 0, i, y),
            "scatter_reduce": lambda t, x, i, y: t.scatter_reduce.two(x, 0, i, y, "sum"),
        },
    ),
    Row(
        "added to bins",
        (Operand((8,)), Operand((4,), index(8)), Operand((4,))),
        jax={
            "scatter-add": lambda lax, x, i, y: x.at[i].add(y, mode="drop"),
            "scatter": lambda lax, x, i, y: x.at[i].set(y, mode="drop"),
        },
        torch={
            "scatter_add": lambda t, x, i, y: t.scatter_add.default(x, 0, i, y),
            "scatter_reduce": lambda t, x, i, y: t.scatter_reduce.two(x, 0, i, y, "sum"),
            "index_add": lambda t, x, i, y: t.index_add.default(x, 0, i, y),
            "index_put": lambda t, x, i, y: t.index_put.default(x, [i], y, True),
        },
    ),
    Row(
        "each row's own element",
        (Operand((4, 8), axes=(0,)), Operand((4,), index(1), axes=(0,)), Operand((4,), index(8))),
        jax={"gather": lambda lax, x, p, i: x.at[p, i].get(mode="promise_in_bounds")},
        torch={"index": lambda t, x, p, i: t.index.Tensor(x, [p, i])},
    ),
    Row(
        "written to each row's own element",
        (
            Operand((4, 8), axes=(0,)),
            Operand((4,), index(1), axes=(0,)),
            Operand((4,), index(8)),
            Operand((4,), also=((),)),
        ),
        jax={name: _own(how) for name, how in HOWS.items() if how != "multiply"},
        torch={
            "index_put": lambda t, x, p, i, y: t.index_put.default(x, [p, i], y, True),
            "_unsafe_index_put": lambda t, x, p, i, y: t._unsafe_index_put.default(x, [p, i], y),
            "_index_put_impl": lambda t, x, p, i, y: t._index_put_impl.default(x, [p, i], y),
        },
    ),
    Row(
        "a window that moves",
        (Operand((4, 8)), Operand((), index(4))),
        jax={"dynamic_slice": lambda lax, x, i: lax.dynamic_slice_in_dim(x, i, 3, 1)},
    ),
    Row(
        "a window that moves, written",
        (Operand((4, 8)), Operand((4, 3)), Operand((), index(4))),
        jax={
            "dynamic_update_slice": lambda lax, x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1)
        },
    ),
    Row(
        "what elements there are",
        (Operand((4, 3), COUNT),),
        torch=aten("nonzero _unique2 unique_consecutive")
        | {
            "masked_select": lambda t, x: t.masked_select.default(x, x),
            "histc": lambda t, x: t.histc.default(x, 4),
            "_local_scalar_dense": lambda t, x: t._local_scalar_dense.default(x),
        },
        never=True,
    ),
    Row(
        "how many there are of each number",
        (Operand((4,), index(8)),),
        torch=aten("bincount"),
        never=True,
    ),
    Row(
        "found among boundaries",
        (X, Operand((5,))),
        torch={
            "bucketize": lambda t, x, b: t.bucketize.Tensor(x, b),
            "searchsorted": lambda t, x, b: t.searchsorted.Tensor(b, x),
        },
    ),
    Row(
        "found among each row's own boundaries",
        (Operand((2, 4, 3)), Operand((2, 4, 5))),
        torch={"searchsorted": lambda t, x, b: t.searchsorted.Tensor(b, x)},
    ),
    Row(
        "found among each row's own boundaries, which are sorted by numbers",
        (Operand((4, 3)), Operand((4, 5)), Operand((4, 5), index(5))),
        torch={"searchsorted": lambda t, x, b, i: t.searchsorted.Tensor(b, x, sorter=i)},
    ),
]
