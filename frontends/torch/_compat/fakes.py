"""Tensors without data, which operators give shapes and types: PyTorch has no public name for them."""

from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily as with_data,
)

__all__ = ["FakeTensor", "FakeTensorMode", "with_data"]
