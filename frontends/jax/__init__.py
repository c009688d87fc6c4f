"""JAX frontend: capture of jaxprs, lowering of plans to lane programs, the scheduled callable."""
