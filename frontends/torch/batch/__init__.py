"""Nano-batches of PyTorch graphs: axes, open sizes, the proof and its rules, the split graphs."""
