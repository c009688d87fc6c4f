"""Which matrix products and convolutions XLA:CPU shares out to several threads.

XLA leaves most of them to YNNPACK, which grows a tile of the result until it is work enough for one task
(``choose_split_factors`` in ``ynnpack/subgraph/dot.cc`` of github.com/google/XNNPACK); what is a single tile
runs on one thread, whatever its batch. Elements of a batch, heads of an attention among them, and rows of an
image are tiles of their own, and run one after another. So shapes decide, not the number of operations: 32
products of 128 x 64 x 128 take as long on two cores as on one, and 8 of 256 x 256 x 256 half the time.
What YNNPACK does not take goes to Eigen's tensors, which share by operations.

The limits are fitted to jaxlib 0.10.2: context switches a call and times beside one thread, some 110 products
and 40 convolutions of float32, bfloat16 and float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_DEEP = 1024
"""Longer sums are cut into pieces anyway."""

_TASK = 3 << 15
"""(rows + columns) * depth of a product from which on its result is more than one tile: 1.5 times what is
enough for a task, as tiles grow by doubling."""

_TASK_AREA = 1 << 17
"""The same for the elements of its result."""

_EIGEN_FLOPS = 1 << 22
"""Smaller products run on one thread in Eigen."""

_PRODUCTS = frozenset({"float64", "float32", "bfloat16", "int8"})
_CONVOLUTIONS = frozenset({"float64", "float32", "int8"})
"""Types that YNNPACK takes."""

_FEW_CHANNELS = 16
"""It leaves convolutions between so many to Eigen."""


class Matrices(NamedTuple):
    """Sizes of the matrices that a ``dot_general`` multiplies, and how many there are."""

    number: int
    rows: int
    columns: int
    depth: int

    @staticmethod
    def of(factors: Sequence[Any], numbers: Any) -> Matrices:
        """Of two factors, abstractly, with these dimension numbers."""
        contract, batches = numbers
        number, depth = (
            math.prod(factors[0].shape[d] for d in dims[0]) for dims in (batches, contract)
        )
        rows, columns = (math.prod(x.shape) // max(1, number * depth) for x in factors[:2])
        return Matrices(number, rows, columns, depth)


def is_tiled(rows: int, columns: int, depth: int) -> bool:
    """Whether YNNPACK makes more than one task of a product."""
    return (rows + columns) * min(depth, _DEEP) >= _TASK or rows * columns >= _TASK_AREA


def of_product(left: Any, right: Any, params: dict[str, Any]) -> bool:
    """Whether a ``dot_general`` is shared out.

    Args:
        left: The first factor: its shape and dtype.
        right: The second.
        params: The equation's.
    """
    _, rows, columns, depth = Matrices.of((left, right), params["dimension_numbers"])
    if is_product_of_ynnpack(left, right, params):
        return is_tiled(rows, columns, depth)
    return 2 * rows * columns * depth >= _EIGEN_FLOPS


def come_first(dims: Sequence[int]) -> bool:
    """Whether a factor's matrices lie one after another: these are the dimensions that count them."""
    return tuple(dims) == tuple(range(len(dims)))


def is_product_of_ynnpack(left: Any, right: Any, params: dict[str, Any]) -> bool:
    """Whether YNNPACK takes a ``dot_general``; Eigen takes the others.

    It sums along the left factor's last dimension. Where XLA has to copy that factor anyway, as its matrices
    do not lie one after another or sums over several of its dimensions become one, the copy has it there.
    """
    (summed, _), (batch, _) = params["dimension_numbers"]
    fits = len(left.shape) - 1 in summed or len(summed) > 1 or not come_first(batch)
    types = {left.dtype.name, right.dtype.name}
    if "int8" in types and str(params.get("preferred_element_type")) != "int32":
        return False
    return fits and types <= _PRODUCTS


def of_convolution(image: Any, kernel: Any, result: Sequence[int], params: dict[str, Any]) -> bool:
    """Whether a ``conv_general_dilated`` is shared out.

    Convolutions with a window of 1 x 1, too, are tiles of a row, although they are products.

    Args:
        image: Its shape and dtype.
        kernel: The same.
        result: The result's shape.
        params: The equation's.
    """
    numbers = params["dimension_numbers"]
    if not is_of_ynnpack(image, kernel, params):
        return True
    out_channels, in_channels, *window = (kernel.shape[d] for d in numbers.rhs_spec)
    row = result[numbers.out_spec[-1]]
    depth = min(in_channels * math.prod(window), _DEEP) - 1  # what is just at the limit is one tile
    return is_tiled(row, out_channels // max(1, params["feature_group_count"]), depth)


def is_of_ynnpack(image: Any, kernel: Any, params: dict[str, Any]) -> bool:
    """Whether YNNPACK takes a convolution (XLA, ``ynn_support.cc``); the others Eigen shares out."""
    channels = params["dimension_numbers"].rhs_spec[:2]
    return (
        len(image.shape) == 4
        and image.dtype.name in _CONVOLUTIONS
        and params["batch_group_count"] == 1
        and all(n == 1 for n in params["lhs_dilation"])
        and max(kernel.shape[d] for d in channels) > _FEW_CHANNELS
    )
