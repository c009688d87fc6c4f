"""The private PyTorch names that the frontend uses, each with the reason, in one place."""
