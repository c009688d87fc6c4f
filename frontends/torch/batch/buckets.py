"""A function of a batch called at few sizes: each batch is padded to the next bucket.

A plan, and on a GPU its CUDA graph, is for one size. With buckets, a server whose batches have any size
has as many graphs as buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import PlanError, SeparabilityError, checks


class Bucketed:
    """The callable that ``dynaflow_xla.bucketed`` returns.

    Attributes:
        scheduled: What is called at the buckets' sizes.
        sizes: The buckets, ascending.
    """

    def __init__(
        self,
        scheduled: Callable[..., Any],
        sizes: Sequence[int],
        in_axes: Any,
        out_axes: Any,
        check: bool,
    ) -> None:
        asked = checks.items(sizes) or ()
        given = [n for n in map(checks.integer, asked) if n is not None and n > 0]
        if not given or len(given) != len(asked):
            raise PlanError(f"sizes must be positive integers; got {sizes!r}")
        self.scheduled = scheduled
        self.original = getattr(scheduled, "original", scheduled)
        self.sizes = tuple(sorted(set(given)))
        self._in_axes, self._out_axes = in_axes, out_axes
        self._check = check
        self._checked: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """The function's values for the batch as it is.

        Raises:
            PlanError: no tensor has the batch axis, sizes that differ, a batch larger than the buckets.
            SeparabilityError: the first padded call at a bucket showed that rows depend on each other.
        """
        flat, tree = pytree.tree_flatten(args)
        axes = _axes(self._in_axes, args, "in_axes")
        batch = self._batch(flat, axes)
        bucket = next((size for size in self.sizes if size >= batch), None)
        if bucket is None:
            raise PlanError(
                f"a batch of {batch} is larger than every bucket of {list(self.sizes)}: add a bucket"
            )
        if bucket == batch:
            return self.scheduled(*args)
        padded = [
            x if axis is None else _pad(x, axis, bucket) for x, axis in zip(flat, axes, strict=True)
        ]
        result = self.scheduled(*pytree.tree_unflatten(padded, tree))
        outs, out_tree = pytree.tree_flatten(result)
        out_axes = _axes(
            self._out_axes, result if isinstance(result, tuple) else (result,), "out_axes"
        )
        cut = [self._cut(x, a, batch, bucket) for x, a in zip(outs, out_axes, strict=True)]
        if self._check and bucket not in self._checked:
            self._compare(args, cut, batch, bucket)
            self._checked.add(bucket)
        return pytree.tree_unflatten(cut, out_tree)

    def _batch(self, flat: Sequence[Any], axes: Sequence[int | None]) -> int:
        found = set()
        for x, axis in zip(flat, axes, strict=True):
            if axis is None:
                continue
            if not isinstance(x, torch.Tensor) or not -x.dim() <= axis < x.dim():
                raise PlanError(
                    f"in_axes gives axis {axis} to {_show(x)}: give None to what has no batch"
                )
            found.add(x.shape[axis])
        if len(found) != 1 or 0 in found:
            raise PlanError(
                f"the batch must have one size, at least 1, in all arguments; got {sorted(found)}"
            )
        return int(found.pop())

    @staticmethod
    def _cut(x: Any, axis: int | None, batch: int, bucket: int) -> Any:
        if axis is None or not isinstance(x, torch.Tensor):
            return x
        if not -x.dim() <= axis < x.dim() or x.shape[axis] != bucket:
            raise PlanError(
                f"out_axes says axis {axis} of {_show(x)} is the batch; it must have {bucket} rows there"
            )
        return x.narrow(axis, 0, batch)

    def _compare(self, args: Any, cut: Sequence[Any], batch: int, bucket: int) -> None:
        wanted = pytree.tree_leaves(self.original(*args))
        for number, (want, got) in enumerate(zip(wanted, cut, strict=True)):
            if not isinstance(want, torch.Tensor):
                continue
            try:
                torch.testing.assert_close(got, want, equal_nan=True)
            except AssertionError as error:
                raise SeparabilityError(
                    f"result {number} of a batch of {batch} changes when rows are added up to the bucket "
                    f"of {bucket}: rows depend on each other, or the function draws random numbers. Give "
                    f"None in out_axes to what has no batch, or do not use buckets. {error}"
                ) from None


def _pad(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Repeats the last row: a value that the function can take, as zeros may not be."""
    rows = x.shape[axis]
    last = x.narrow(axis, rows - 1, 1)
    shape = list(x.shape)
    shape[axis] = size - rows
    return torch.cat([x, last.expand(shape)], axis)


def _axes(given: Any, values: Any, what: str) -> list[int | None]:
    """An axis for each leaf of ``values``, a tuple; ``given`` is one for all, or one an element."""
    several = isinstance(given, tuple | list)
    asked = list(given) if several else [given] * len(values)
    each = [axis if axis is None else checks.integer(axis) for axis in asked]
    if any(a is not None and e is None for a, e in zip(asked, each, strict=True)):
        raise PlanError(f"{what} must be an axis, None or a tuple of them; got {given!r}")
    if len(each) != len(values):
        raise PlanError(f"{what} has {len(each)} entries for {len(values)} values")
    axes: list[int | None] = []
    for axis, value in zip(each, values, strict=True):
        leaves = pytree.tree_leaves(value)
        if several:
            axes += [axis] * len(leaves)
        else:  # one for all: for all tensors
            axes += [axis if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return axes


def _show(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
