"""A function of two branches that meet, and arguments: what is put into programs, transformed and copied."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def block(w: Any, x: Any) -> Any:
    """Two branches that meet: a sort and a matmul; differentiable in both arguments."""
    a = jnp.tanh(x @ w)
    b = jnp.sort(x * 0.5, axis=-1)
    return a + jnp.cos(b @ w.T)


W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4)), jnp.float32)
