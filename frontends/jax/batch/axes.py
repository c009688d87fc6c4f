"""``in_axes`` and ``out_axes`` as for ``jax.vmap``, spread over flat arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.arguments import call_axes, named_results
from dynaflow_xla.batch.proof import Mean, OutAxis, Sum, batch_of
from dynaflow_xla.errors import PlanError, checks


def _is_none(x: Any) -> bool:
    return x is None


def _path_names(tree: Any, prefix: str) -> list[str]:
    return [prefix + jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def input_axes(
    name: str,
    in_axes: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_nums: set[int],
    static_names: set[str],
    batch_size: int | None,
) -> tuple[tuple[int | None, ...], int]:
    """The batch axis of each flat dynamic argument, and the rows of the batch.

    Args:
        name: Of the function, for messages.
        in_axes: See ``call_axes``.
        function: Whose parameters ``in_axes`` may name.
        args: Of the call; leaves have a shape.
        kwargs: As ``args``.
        static_nums: Arguments that are no arrays.
        static_names: As ``static_nums``.
        batch_size: Rows the user says the batch has, or None.

    Raises:
        PlanError: axes that do not fit the arguments, or arguments with different numbers of rows.
    """
    given = call_axes(name, in_axes, function, args, kwargs, static_nums)
    named = isinstance(in_axes, Mapping)
    flat: list[int | None] = []
    names: list[str] = []
    leaves: list[Any] = []
    for number, (axes, value) in enumerate(zip(given.positional, args, strict=True)):
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
    for key in sorted(kwargs):  # the order in which JAX has them
        axes, value = given.keyword[key], kwargs[key]
        if key in static_names:
            if named and axes is not None:
                raise PlanError(
                    f"{name!r}: in_axes[{key!r}] must be None, because it is static; got {axes!r}"
                )
            continue
        flat += _spread(axes, value, f"{name!r}: in_axes of keyword argument {key!r}")
        names += _path_names(value, f"keyword argument ['{key}']")
        leaves += jax.tree_util.tree_leaves(value)
    return _normal(name, flat, names, leaves, batch_size)


def _over_leaves(prefix: Any, tree: Any, rule: str) -> list[Any]:
    """A prefix of a tree, spread over the tree's leaves; an error begins with the rule."""
    try:
        # None stands for "not cut" here, and is no leaf for JAX.
        spread = jax.tree.broadcast(prefix, tree, is_leaf=_is_none)
    except ValueError as error:
        raise PlanError(f"{rule}, {jax.tree_util.tree_structure(tree)}; got {prefix!r}") from error
    flat = jax.tree_util.tree_leaves(spread, is_leaf=_is_none)
    holes = jax.tree_util.tree_leaves(tree, is_leaf=_is_none)
    if len(flat) == len(holes):
        flat = [entry for entry, leaf in zip(flat, holes, strict=True) if leaf is not None]
    return flat


def _spread(axes: Any, value: Any, what: str) -> list[int | None]:
    """A prefix of a tree, spread over its leaves."""
    flat = _over_leaves(
        axes, value, f"{what} must be an integer, None or a tree that is a prefix of the argument"
    )
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


def output_specs(name: str, out_axes: Any, outputs: Any) -> tuple[OutAxis, ...]:
    """How each flat result is put together.

    Args:
        name: Of the function.
        out_axes: An integer, None, ``Sum()``, ``Mean()`` or a tree of these that is a prefix of the
            results; for a mapping or a dataclass also a mapping by name, where what is left out has
            axis 0.
        outputs: The results; leaves have a shape.

    Raises:
        PlanError: it is no such prefix, or an axis is out of range.
    """
    flat = _out_leaves(name, out_axes, outputs)
    paths = _path_names(outputs, "result")
    made: list[OutAxis] = []
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


def _out_leaves(name: str, out_axes: Any, outputs: Any) -> list[Any]:
    """``out_axes`` spread over the leaves of the results."""
    children = _named_children(outputs) if isinstance(out_axes, Mapping) else None
    if children is not None:
        specs = named_results(name, out_axes, children)
        return [s for key, part in children.items() for s in _out_leaves(name, specs[key], part)]
    return _over_leaves(
        out_axes,
        outputs,
        f"{name!r}: out_axes must be an integer, None, dfx.Sum(), dfx.Mean() or a tree of these "
        "that is a prefix of the results",
    )


def _named_children(tree: Any) -> dict[Any, Any] | None:
    """What a mapping or an object with named fields holds, in the order of its leaves; else None."""
    made: dict[Any, Any] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        key = path[0] if path else None
        if isinstance(key, jax.tree_util.DictKey):
            made[key.key] = tree[key.key]
        elif isinstance(key, jax.tree_util.GetAttrKey):
            made[key.name] = getattr(tree, key.name)
        else:
            return None
    return made or None
