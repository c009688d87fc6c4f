"""What operators of JAX cost on one core, and what of it XLA:CPU shares out to more."""

from dynaflow_xla.frontends.jax.capture.costs.avals import aval_bytes as aval_bytes
from dynaflow_xla.frontends.jax.capture.costs.estimates import (
    BYTES_PER_NS as BYTES_PER_NS,
    CALLBACKS as CALLBACKS,
    COLLECTIVES as COLLECTIVES,
    HANDED_OVER_FLOPS as HANDED_OVER_FLOPS,
    OP_OVERHEAD_NS as OP_OVERHEAD_NS,
    OUTER_CALLS as OUTER_CALLS,
    PURE_CALLBACKS as PURE_CALLBACKS,
    SCHEDULED as SCHEDULED,
    elements_in_steps as elements_in_steps,
    estimate as estimate,
    has_products as has_products,
    one_pass_ns as one_pass_ns,
    original_ns as original_ns,
)
from dynaflow_xla.frontends.jax.capture.costs.fused import (
    Applied as Applied,
    in_their_readers as in_their_readers,
)
from dynaflow_xla.frontends.jax.capture.costs.kinds import (
    ELEMENTWISE as ELEMENTWISE,
    GENERATORS as GENERATORS,
)
from dynaflow_xla.frontends.jax.capture.costs.parts import (
    applied as applied,
    as_parts as as_parts,
)
