"""``in_axes`` and ``out_axes`` as for ``jax.vmap``, spread over flat arguments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla import checks
from dynaflow_xla.errors import PlanError
from dynaflow_xla.separability import Mean, OutSpec, Sum, batch_of


def _is_none(x: Any) -> bool:
    return x is None


def _path_names(tree: Any, prefix: str) -> list[str]:
    return [prefix + jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def input_axes(
    name: str,
    in_axes: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_nums: set[int],
    static_names: set[str],
    batch_size: int | None,
) -> tuple[tuple[int | None, ...], int]:
    """The batch axis of each flat dynamic argument, and the rows of the batch.

    Args:
        name: Of the function, for messages.
        in_axes: An integer, None, or a tuple with an entry for each positional argument, which may be
            a tree prefix of it; keyword arguments are cut along axis 0, as in ``jax.vmap``.
        args: Of the call; leaves have a shape.
        kwargs: As ``args``.
        static_nums: Arguments that are no arrays.
        static_names: As ``static_nums``.
        batch_size: Rows the user says the batch has, or None.

    Raises:
        PlanError: axes that do not fit the arguments, or arguments with different numbers of rows.
    """
    if (one := checks.integer(in_axes)) is not None:
        in_axes = one
    elif not isinstance(in_axes, tuple | list):
        raise PlanError(
            f"{name!r}: in_axes must be an integer or a tuple with an entry for each positional "
            f"argument, as for jax.vmap; got {in_axes!r}"
        )
    if isinstance(in_axes, int):
        entries: Sequence[Any] = [None if n in static_nums else in_axes for n in range(len(args))]
    else:
        entries = in_axes
    if len(entries) != len(args):
        raise PlanError(
            f"{name!r}: in_axes must have an entry for each of {len(args)} positional arguments; got "
            f"{in_axes!r}"
        )
    flat: list[int | None] = []
    names: list[str] = []
    leaves: list[Any] = []
    for number, (axes, value) in enumerate(zip(entries, args, strict=True)):
        if number in static_nums:
            if axes is not None:
                raise PlanError(
                    f"{name!r}: in_axes[{number}] must be None, because argument {number} is static; "
                    f"got {axes!r}"
                )
            continue
        flat += _spread(axes, value, f"{name!r}: in_axes[{number}]")
        names += _path_names(value, f"argument {number}")
        leaves += jax.tree_util.tree_leaves(value)
    dynamic = {k: v for k, v in kwargs.items() if k not in static_names}
    flat += [0] * len(jax.tree_util.tree_leaves(dynamic))
    names += _path_names(dynamic, "keyword argument ")
    leaves += jax.tree_util.tree_leaves(dynamic)
    return _normal(name, flat, names, leaves, batch_size)


def _spread(axes: Any, value: Any, what: str) -> list[int | None]:
    """A prefix of a tree, spread over its leaves."""
    try:
        # None stands for "not cut" here, and is no leaf for JAX.
        spread = jax.tree.broadcast(axes, value, is_leaf=_is_none)
    except ValueError as error:
        raise PlanError(
            f"{what} must be an integer, None or a tree that is a prefix of the argument, "
            f"{jax.tree_util.tree_structure(value)}; got {axes!r}"
        ) from error
    flat = jax.tree_util.tree_leaves(spread, is_leaf=_is_none)
    holes = jax.tree_util.tree_leaves(value, is_leaf=_is_none)
    if len(flat) == len(holes):
        flat = [axis for axis, leaf in zip(flat, holes, strict=True) if leaf is not None]
    made = [axis if axis is None else checks.integer(axis) for axis in flat]
    for axis, number in zip(flat, made, strict=True):
        if axis is not None and number is None:
            raise PlanError(f"{what} must hold integers and None; got {axis!r}")
    return made


def _normal(
    name: str,
    axes: Sequence[int | None],
    names: Sequence[str],
    leaves: Sequence[Any],
    batch_size: int | None,
) -> tuple[tuple[int | None, ...], int]:
    batched = [
        (where, np.shape(leaf), axis)
        for axis, where, leaf in zip(axes, names, leaves, strict=True)
        if axis is not None
    ]
    counted, batch, where = batch_of(name, batched)
    if batch_size is not None and batch != batch_size:
        raise PlanError(
            f"{name!r}: batch_size={batch_size} was given to schedule; got {batch} rows in {where}"
        )
    normal = iter(counted)
    return tuple(None if axis is None else next(normal) for axis in axes), batch


def output_specs(name: str, out_axes: Any, outputs: Any) -> tuple[OutSpec, ...]:
    """How each flat result is put together.

    Args:
        name: Of the function.
        out_axes: An integer, None, ``Sum()``, ``Mean()`` or a tree of these that is a prefix of the
            results.
        outputs: The results; leaves have a shape.

    Raises:
        PlanError: it is no such prefix, or an axis is out of range.
    """
    try:
        spread = jax.tree.broadcast(out_axes, outputs, is_leaf=_is_none)
    except ValueError as error:
        raise PlanError(
            f"{name!r}: out_axes must be an integer, None, dfx.Sum(), dfx.Mean() or a tree of these "
            f"that is a prefix of the results, {jax.tree_util.tree_structure(outputs)}; got "
            f"{out_axes!r}"
        ) from error
    flat = jax.tree_util.tree_leaves(spread, is_leaf=_is_none)
    holes = jax.tree_util.tree_leaves(outputs, is_leaf=_is_none)
    if len(flat) == len(holes):
        flat = [spec for spec, leaf in zip(flat, holes, strict=True) if leaf is not None]
    paths = _path_names(outputs, "result")
    made: list[OutSpec] = []
    for spec, where, leaf in zip(flat, paths, jax.tree_util.tree_leaves(outputs), strict=True):
        if spec is None or isinstance(spec, Sum | Mean):
            made.append(spec)
            continue
        rank = len(np.shape(leaf))
        number = checks.integer(spec)
        if number is None or not -rank <= number < rank:
            raise PlanError(
                f"{name!r}: out_axes of {where} must be an axis of its shape {list(np.shape(leaf))}, "
                f"dfx.Sum(), dfx.Mean() or None; got {spec!r}"
            )
        made.append(number % rank)
    return tuple(made)
