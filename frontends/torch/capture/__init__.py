"""From a PyTorch module or function to the graph IR: sizes, random draws, effects, shared memory."""
