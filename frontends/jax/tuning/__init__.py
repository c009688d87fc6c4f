"""Auto for JAX functions: measuring candidates, keeping decisions, programs on the caller's thread."""
