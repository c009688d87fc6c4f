"""What each JAX primitive does to the batch: rules by family, and the walk that applies them."""
