"""All rows of the table."""

from __future__ import annotations

from batch_cases import (
    contractions,
    elementwise,
    indexing,
    layers,
    others,
    programs,
    rarer,
    reductions,
    shapes,
)
from batch_cases.table import Row

ROWS: list[Row] = [
    *elementwise.ROWS,
    *shapes.ROWS,
    *indexing.ROWS,
    *reductions.ROWS,
    *contractions.ROWS,
    *layers.ROWS,
    *others.ROWS,
    *programs.ROWS,
    *rarer.ROWS,
]

OF_PYTHON = {"dynaflow_xla.opaque", "dynaflow_xla.opaque_backward", "while_loop"}
"""They hold Python or a graph of their own; ``test_opaque.py`` and ``test_joins.py`` try them."""

WITHOUT_CASES = {
    "torch": shapes.NOT_DETERMINED | layers.UNTRIED | OF_PYTHON,
    "jax": programs.UNTRIED,
}
"""Rules that are let off, each set with its reason where it stands."""
