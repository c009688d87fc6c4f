"""What each JAX primitive does to the batch: rules by family, and the walk that applies them."""

from dynaflow_xla.frontends.jax.batch.rules import (
    control_flow,
    elementwise,
    indexing,
    orders,
    others,
    reductions,
    shapes,
)

__all__ = ["control_flow", "elementwise", "indexing", "orders", "others", "reductions", "shapes"]
