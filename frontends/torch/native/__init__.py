"""Plans on PyTorch's own operators: CPU lanes, CUDA streams, compiled regions, graphs of nano-batches."""
