"""Plans of PyTorch's operators on a GPU: lanes as streams, calls as CUDA graphs."""
