"""Models for the published strategies, written once for JAX and PyTorch: same operators, same marks."""

from __future__ import annotations

from typing import Any

import numpy as np

import dynaflow_xla as dfx

WIDTH = 16


def parameters(seed: int = 0) -> dict[str, Any]:
    """Weights of an expert block, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    names = ("send", "s1", "s2", "e1", "e2", "back")
    made = {n: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for n in names}
    return {**made, "g": rng.normal(size=WIDTH).astype(np.float32)}


def norm(x: Any, g: Any) -> Any:
    """A norm over the last axis: what is marked "fused", and a kernel for it."""
    return x * ((x * x).sum(-1)[..., None] / x.shape[-1] + 1e-6) ** -0.5 * g


def block(xp: Any, p: Any, x: Any) -> Any:
    """A norm, routed experts between a dispatch and a combine, shared experts beside them.

    Args:
        xp: ``jax.numpy`` or ``torch``.
        p: Of ``parameters``.
        x: Rows.
    """
    with dfx.mark("norm", tags={"fused"}):
        y = norm(x, p["g"])
    with dfx.mark("dispatch", resource="network"):
        sent = xp.tanh(y @ p["send"])
    with dfx.mark("shared", resource="compute"):
        shared = xp.tanh(y @ p["s1"]) @ p["s2"]
    with dfx.mark("experts", resource="compute"):
        experts = xp.tanh(sent @ p["e1"]) @ p["e2"]
    with dfx.mark("combine", resource="network"):
        back = xp.tanh(experts @ p["back"])
    return x + shared + back


def branches(xp: Any, p: Any, x: Any) -> Any:
    """Four branches of one input, as in an Inception block, put together at the end."""
    made = []
    for number, name in enumerate(("s1", "s2", "e1", "e2")):
        with dfx.mark("first", tags={"branch"}):
            h = xp.tanh(x @ p[name])
        for _ in range(number % 2 + 1):
            with dfx.mark("then", tags={"branch"}):
                h = xp.tanh(h @ p["back"])
        made.append(h)
    return made[0] * made[1] + made[2] * made[3]


def decode(xp: Any, p: Any, x: Any, cache: Any) -> Any:
    """One token that reads a cache."""
    with dfx.mark("attention", resource="memory"):
        read = xp.exp((cache * (x @ p["s1"])[:, None]).sum(-1) / 8)
        read = (read[..., None] * cache).sum(1)
    return xp.tanh(read @ p["s2"])


def step(xp: Any, grad: Any, p: Any, x: Any) -> Any:
    """A training step: weights after a step down the gradient."""
    found = grad(lambda q: (block(xp, q, x) ** 2).sum())(p)
    return {name: p[name] - 0.01 * found[name] / (1 + found[name] ** 2) ** 0.5 for name in p}
