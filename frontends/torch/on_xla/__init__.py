"""PyTorch graphs as JAX programs: lowering of aten operators, and both XLA backends."""
