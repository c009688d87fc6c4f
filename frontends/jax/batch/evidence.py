"""Whether a call's arguments can show that a split does not keep the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch import evidence
from dynaflow_xla.frontends.jax.batch.split import SplitCapture


def undecided(split: SplitCapture, leaves: Sequence[Any]) -> str:
    """Why comparing a call would not show whether a split keeps the values; "" if it would.

    Args:
        split: The split that is not proved.
        leaves: The flat arguments.
    """
    silent = evidence.silent(_batched(split, leaves), split.sizes)
    if not silent:
        return ""
    named = [f"flat argument {silent[0]}", *silent[1:]]
    return evidence.undecided(named, "the original", "The original runs")


def _batched(split: SplitCapture, leaves: Sequence[Any]) -> Iterator[evidence.Batched]:
    resolved, whole = split.resolved, split.resolved.at[sum(split.sizes)]
    graph = whole.graph
    skip = len(resolved.in_specs) - len(leaves)
    read = {*graph.consumers(), *graph.outputs}
    for number, (axis, leaf) in enumerate(zip(resolved.in_specs[skip:], leaves, strict=True)):
        if not isinstance(axis, int) or graph.inputs[skip + number] not in read:
            continue
        aval = whole.avals[graph.inputs[skip + number]]
        is_data = jax.dtypes.issubdtype(aval.dtype, np.inexact)
        axis %= len(aval.shape)
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        yield evidence.Batched(str(number), is_data, np.asarray(leaf), axis)
