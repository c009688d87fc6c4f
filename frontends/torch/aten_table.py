"""Own lowerings of aten operators: where torchax has none, or another meaning than PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten

TABLE: dict[Any, Callable[..., Any]] = {}
DECOMPOSE: set[Any] = set()


def lowers(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the lowering of operators."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            TABLE[op] = fn
        return fn

    return register
