"""Nano-batches of JAX functions: axes, the proof and its rules, the split functions."""
