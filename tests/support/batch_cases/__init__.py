"""Property cases of the rules that prove a split: one table for JAX and PyTorch."""
