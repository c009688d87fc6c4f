"""Nano-batches of PyTorch graphs: axes, the proof and its rules, and what a backend gets to plan a split."""
