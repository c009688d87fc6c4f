"""Auto for PyTorch: measuring candidates on copies, with state and random state restored."""
