"""PyTorch graphs as JAX programs: lowering of aten operators, and both XLA backends."""

from __future__ import annotations

from dynaflow_xla.errors import optional

# JAX is optional, and nothing else of this frontend needs it.
optional.require("jax", "running a PyTorch model on XLA", "jax")
