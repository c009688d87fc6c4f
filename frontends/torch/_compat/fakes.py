"""Tensors without data, which operators give shapes and types: PyTorch has no public name for them."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
