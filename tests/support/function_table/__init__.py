"""Functions of many kinds, with arguments, batch axes and how their results are put together."""

from function_table import control, indexing, linear, losses, models, types
from function_table.registry import CASES, ROWS, Case, Draw

__all__ = [
    "CASES", "ROWS", "Case", "Draw", "control", "indexing", "linear", "losses", "models", "types",
]  # fmt: skip
