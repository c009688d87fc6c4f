"""A backend that the package does not know: regions run one after another, and are told.

Everything of it is in this folder, one module for each framework; ``ROW`` is its row in
``dynaflow_xla.backends.BACKENDS``.
"""

from __future__ import annotations

from dynaflow_xla.backends import BackendRow

LAUNCHED: list[str] = []
"""Regions in the order in which they ran, or were traced."""

ROW = BackendRow(jax=f"{__name__}.on_jax:InTurn", torch=f"{__name__}.on_torch:InTurn")
