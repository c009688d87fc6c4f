"""A scheduled function under JAX's transformations: one primitive, and its derivatives."""
