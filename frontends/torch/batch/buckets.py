"""A function of a batch called at few sizes: each batch is padded to the next bucket.

A plan, and on a GPU its CUDA graph, is for one size. With buckets, a server whose batches have any size
has as many graphs as buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.batch.arguments import call_axes
from dynaflow_xla.errors import (
    PlanError,
    PlanTypeError,
    SeparabilityError,
    UnsupportedError,
    checks,
)


class Bucketed:
    """The callable that ``dynaflow_xla.bucketed`` returns.

    Attributes:
        scheduled: What is called at the buckets' sizes.
        sizes: The buckets, ascending.
        alone: Gives the leaves of what the original returns, without a trace of that call; None where it
            cannot be asked yet. Its arguments are the scheduled callable, the padded arguments of a call,
            and its own. What that takes is in modules above this one, so ``scheduled`` puts it here.
    """

    alone: ClassVar[Callable[[Any, Any, Any, Any], list[Any] | None]]

    def __init__(
        self,
        scheduled: Any,
        sizes: Sequence[int],
        in_axes: Any,
        out_axes: Any,
        check: bool,
    ) -> None:
        asked = checks.items(sizes) or ()
        given = [n for n in map(checks.integer, asked) if n is not None and n > 0]
        if not given or len(given) != len(asked):
            kind = PlanError if asked and None not in map(checks.integer, asked) else PlanTypeError
            raise kind(f"sizes must be positive integers; got {sizes!r}")
        compares = checks.flag("check", check)
        self.scheduled = scheduled
        self.original = getattr(scheduled, "original", scheduled)
        self.sizes = tuple(sorted(set(given)))
        self._name = scheduled._dfx_core.options.name
        self._in_axes, self._out_axes = in_axes, out_axes
        self._check = compares
        self._checked: set[Any] = set()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function's values for the batch as it is.

        Raises:
            PlanError: no tensor has the batch axis, sizes that differ, a batch larger than the buckets.
            SeparabilityError: the first padded call at a bucket showed that rows depend on each other.
            UnsupportedError: the function wrote into an argument that was padded, or a result is an object
                whose rows cannot be cut.
        """
        flat, tree = pytree.tree_flatten((args, kwargs))
        axes = self._argument_axes(args, kwargs)
        batch = self._batch(flat, axes)
        bucket = next((size for size in self.sizes if size >= batch), None)
        if bucket is None:
            raise PlanError(
                f"a batch of {batch} is larger than every bucket of {list(self.sizes)}: add a bucket"
            )
        if bucket == batch:
            return self.scheduled(*args, **kwargs)
        padded = [
            x if axis is None else _pad(x, axis, bucket) for x, axis in zip(flat, axes, strict=True)
        ]
        versions = [
            None if axis is None else x._version for x, axis in zip(padded, axes, strict=True)
        ]
        given = pytree.tree_unflatten(padded, tree)
        wanted = None
        if self._check and bucket not in self._checked:
            wanted = Bucketed.alone(self.scheduled, given, args, kwargs)
        result = self.scheduled(*given[0], **given[1])
        for name, x, version in zip(_names(args, kwargs), padded, versions, strict=True):
            if version is not None and x._version != version:
                raise UnsupportedError(
                    f"{self._name!r} writes into {name}, which was padded from {batch} rows to the bucket of "
                    f"{bucket}: what it wrote is in the padded copy, and the caller's tensor is as it was. "
                    "Return the new value instead, or pass a batch that is a bucket's size"
                )
        outs, out_tree = pytree.tree_flatten(result)
        out_axes = _axes(
            self._out_axes, result if isinstance(result, tuple) else (result,), "out_axes"
        )
        explicit = isinstance(self._out_axes, tuple | list)
        cut = [
            self._cut(x, a, batch, bucket, explicit) for x, a in zip(outs, out_axes, strict=True)
        ]
        if wanted is not None:
            _compare(wanted, cut, batch, bucket)
            self._checked.add(bucket)
        return pytree.tree_unflatten(cut, out_tree)

    def _argument_axes(self, args: Any, kwargs: Any) -> list[int | None]:
        """An axis for each leaf of the arguments, positional ones first."""
        given = self._in_axes
        several = isinstance(given, tuple | list)
        if isinstance(given, Mapping) or (
            several
            and len(given) == 2
            and isinstance(given[0], tuple | list)
            and isinstance(given[1], Mapping)
        ):
            # A module's call takes what its forward takes.
            module = isinstance(self.original, torch.nn.Module)
            called = self.original.forward if module else self.original
            each = call_axes(self._name, given, called, args, kwargs)
            axes: list[int | None] = []
            for number, (a, value) in enumerate(zip(each.positional, args, strict=True)):
                axes += _spread(self._name, f"argument {number}", a, value)
            for key, value in kwargs.items():
                axes += _spread(self._name, f"keyword argument {key}", each.keyword[key], value)
            return axes
        # A tuple is for positional arguments alone, as for ``torch.vmap``.
        by_keyword = 0 if several else given
        axes = _axes(given, args, "in_axes")
        return axes + _axes(by_keyword, tuple(kwargs.values()), "in_axes")

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
    def _cut(x: Any, axis: int | None, batch: int, bucket: int, explicit: bool) -> Any:
        if _may_hold_rows(x) and not (explicit and axis is None):
            raise UnsupportedError(
                f"a result is an object of type {type(x).__qualname__}, whose added rows cannot be cut: "
                "register the type with torch.utils._pytree, leave it out of the result (use_cache=False for "
                "a model's cache of keys and values), or give None in out_axes if it has no batch"
            )
        if axis is None or not isinstance(x, torch.Tensor):
            return x
        if not -x.dim() <= axis < x.dim() or x.shape[axis] != bucket:
            raise PlanError(
                f"out_axes says axis {axis} of {_show(x)} is the batch; it must have {bucket} rows there"
            )
        return x.narrow(axis, 0, batch)


def _compare(wanted: Sequence[Any], cut: Sequence[Any], batch: int, bucket: int) -> None:
    """Raises SeparabilityError if results of the original and of the padded call differ."""
    for number, (want, got) in enumerate(zip(wanted, cut, strict=True)):
        try:
            if isinstance(want, torch.Tensor):
                torch.testing.assert_close(got, want, equal_nan=True)
            elif isinstance(want, int | float | complex) and want == want:
                assert got == want, f"{want!r} became {got!r}"
        except AssertionError as error:
            raise SeparabilityError(
                f"result {number} of a batch of {batch} changes when rows are added up to the bucket "
                f"of {bucket}: rows depend on each other, or the function draws random numbers. Give "
                f"None in out_axes to what has no batch, or do not use buckets. {error}"
            ) from None


def _may_hold_rows(x: Any) -> bool:
    """Whether a leaf is an object whose insides are not known, say a cache of keys and values."""
    if isinstance(x, torch.Tensor | torch.Generator | enum.Enum) or callable(x):
        return False
    return hasattr(x, "__dict__") or hasattr(x, "__slots__") or hasattr(x, "shape")


def _pad(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Repeats the last row: a value that the function can take, as zeros may not be."""
    rows = x.shape[axis]
    shape = list(x.shape)
    shape[axis] = size - rows
    if torch.is_inference_mode_enabled():
        # A tensor of inference counts no writes, by which writes into the copy are noticed.
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([x, x.narrow(axis, rows - 1, 1).expand(shape)], axis)
    return torch.cat([x, x.narrow(axis, rows - 1, 1).expand(shape)], axis)


def _names(args: Any, kwargs: Any) -> list[str]:
    """What to call each leaf of the arguments."""
    named = [(f"argument {number}", x) for number, x in enumerate(args)]
    named += [(f"keyword argument {key}", x) for key, x in kwargs.items()]
    return [name for name, x in named for _ in pytree.tree_leaves(x)]


def _spread(name: str, what: str, axes: Any, value: Any) -> list[int | None]:
    """An axis for each leaf of an argument; ``axes`` is an integer, None, or a tree that is its prefix."""
    if isinstance(axes, tuple | list | Mapping):
        kinds: Any = dict if isinstance(axes, Mapping) else (tuple, list)
        fits = isinstance(value, kinds) and (
            set(axes) <= set(value) if isinstance(axes, Mapping) else len(axes) == len(value)
        )
        if not fits:
            raise PlanError(f"{name!r}: in_axes of {what} must be a prefix of it; got {axes!r}")
        if isinstance(axes, Mapping):
            parts = [(f"{what}[{k!r}]", axes.get(k), v) for k, v in value.items()]
        else:
            parts = [
                (f"{what}[{n}]", a, v) for n, (a, v) in enumerate(zip(axes, value, strict=True))
            ]
        return [axis for part, a, v in parts for axis in _spread(name, part, a, v)]
    axis = None if axes is None else checks.integer(axes)
    if axis is None and axes is not None:
        raise PlanTypeError(f"{name!r}: in_axes of {what} must be an integer or None; got {axes!r}")
    return [axis if isinstance(x, torch.Tensor) else None for x in pytree.tree_leaves(value)]


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
