"""Whether a call's arguments can show that a split does not keep the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_xla.batch.evidence import tells
from dynaflow_xla.frontends.jax.batch.split import SplitCapture


def silent(split: SplitCapture, leaves: Sequence[Any]) -> list[int]:
    """The batched arguments that say nothing, or [] if a comparison on these decides.

    Floating-point arguments that the function reads decide, each of them, as these are what data are made of;
    where there are none, one of the others is enough (of flags and labels equal ones are common).

    Args:
        split: The split that is not proved.
        leaves: The flat arguments.
    """
    resolved, whole = split.resolved, split.resolved.at[sum(split.sizes)]
    graph = whole.graph
    skip = len(resolved.in_specs) - len(leaves)
    read = {*graph.consumers(), *graph.outputs}
    floats: dict[int, bool] = {}
    others: dict[int, bool] = {}
    for number, (axis, leaf) in enumerate(zip(resolved.in_specs[skip:], leaves, strict=True)):
        if not isinstance(axis, int) or graph.inputs[skip + number] not in read:
            continue
        aval = whole.avals[graph.inputs[skip + number]]
        kind = floats if jax.dtypes.issubdtype(aval.dtype, np.inexact) else others
        axis %= len(aval.shape)
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        kind[number] = tells(np.asarray(leaf), axis, split.sizes)
    if floats:
        return [number for number, told in floats.items() if not told]
    return [] if any(others.values()) else list(others)
