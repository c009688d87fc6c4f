"""``jax.jit`` with a batch in two nano-batches, for functions that nobody wrote to be split.

JAX's tests do not say which axis of which argument is a batch, so it is guessed at each signature: axis 0
of all arrays that have equally many rows (two at least), or else of the first or of the last of these alone.
Of a result with as many rows axis 0 is the batch; every other result must be proved not to depend on it.
What is not proved, or compared at the first call where that is possible, runs as it is and is counted.
"""

from __future__ import annotations

import functools
import re
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.capture.tracing import capturing

REFUSALS = (dfx.UnsupportedError, dfx.SeparabilityError, dfx.PlanError)

NOTHING = "no array has two rows"

told: Counter[str] = Counter()
"""Of the test that runs: functions at a signature that were split (``"split"``), or why not."""


def words(error: BaseException) -> str:
    """A message of ours without its names and numbers."""
    text = str(error).splitlines()[0]
    text = re.sub(r" at \S+\.py:\d+( \(.*?\))?| \(\S+\.py:\d+\)", "", text)
    text = text.split(". ")[0]
    return re.sub(r"'[^']*'", "'...'", re.sub(r"\d+", "N", text))[:160]


class NanoJit:
    """What stands in for a jitted function: each signature is split if that is proved.

    Args:
        jit: JAX's own.
        fun: What is jitted.
        given: Options of ``jax.jit``.
    """

    def __init__(self, jit: Any, fun: Any, given: dict[str, Any]) -> None:
        self._jitted = jit(fun, **given)
        self._made: dict[Any, Any] = {}
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capturing() or jax.config.jax_disable_jit:
            return self._jitted(*args, **kwargs)
        try:
            key = _signature(args, kwargs)
            hash(key)
        except TypeError:
            return self._jitted(*args, **kwargs)  # JAX's own words for what it cannot take
        if key not in self._made:
            self._made[key] = self._split(args, kwargs)
        fast = self._made[key]
        if fast is None:
            return self._jitted(*args, **kwargs)
        try:
            return fast(*args, **kwargs)
        except dfx.SeparabilityError as error:  # the first call's values were others
            self._made[key] = None
            told["split"] -= 1
            told[words(error)] += 1
            return self._jitted(*args, **kwargs)

    def _split(self, args: Any, kwargs: Any) -> Any:
        """The function with nano-batches for such arguments; None if it has none."""
        why = NOTHING
        for axes, rows in _guesses(args, kwargs):
            results = self._jitted.eval_shape(*args, **kwargs)
            out_axes = jax.tree.map(
                lambda x, n=rows: 0 if getattr(x, "shape", ())[:1] == (n,) else None, results
            )
            fast = dfx.schedule(
                self._jitted, dfx.NanoBatch(2), in_axes=axes, out_axes=out_axes, lanes=2
            )
            try:
                made = fast.planned(args, kwargs)
            except REFUSALS as error:
                why = words(error) if why == NOTHING else why
                continue
            if made.split is not None:
                told["split"] += 1
                return fast
        told[why] += 1
        return None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def _rows(leaf: Any) -> int:
    """Rows of an array, 0 of anything else."""
    shape = getattr(leaf, "shape", ()) if hasattr(leaf, "dtype") else ()
    return shape[0] if shape and isinstance(shape[0], int) and shape[0] > 1 else 0


def _signature(args: Any, kwargs: Any) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    return tree, tuple(
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        else (type(leaf), None if isinstance(leaf, int | float | complex) else leaf)
        for leaf in leaves
    )


def _guesses(args: Any, kwargs: Any) -> Iterator[tuple[Any, int]]:
    """Batch axes that are tried, with the rows of the batch."""
    leaves = jax.tree.leaves((args, kwargs))
    counted = Counter(rows for leaf in leaves if (rows := _rows(leaf)))
    for rows, _ in counted.most_common(1):
        places = [n for n, leaf in enumerate(leaves) if _rows(leaf) == rows]
        for chosen in dict.fromkeys((tuple(places), (places[0],), (places[-1],))):
            axes = [0 if n in chosen else None for n in range(len(leaves))]
            by_place, by_name = _unflatten(axes, args, kwargs)
            yield ((by_place, by_name) if kwargs else by_place), rows


def _unflatten(axes: list[Any], args: Any, kwargs: Any) -> Any:
    """For each argument its tree of axes; None where there is none, which static ones need."""
    left = iter(axes)

    def of(argument: Any) -> Any:
        structure = jax.tree.structure(argument)
        mine = [next(left) for _ in range(structure.num_leaves)]
        return structure.unflatten(mine) if any(axis is not None for axis in mine) else None

    places = tuple(of(argument) for argument in args)
    return places, {key: of(kwargs[key]) for key in sorted(kwargs)}
