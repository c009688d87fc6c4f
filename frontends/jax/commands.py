"""What the command line asks of JAX: who it is, arrays of a shape, and plain ways to run a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ffi import xla


def about() -> dict[str, Any]:
    """Versions and devices, as JAX tells them when it has started."""
    return {
        "version": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": jax.default_backend(),
        "devices": [str(device) for device in jax.devices()],
        "gpu": any(device.platform in ("gpu", "cuda", "rocm") for device in jax.devices()),
    }


def cases() -> dict[str, Callable[..., Any]]:
    """By name small functions, see ``dynaflow_xla.cli.cases``."""

    def sorts(x: Any, y: Any) -> Any:
        return jnp.sort(x) + jnp.sort(y)

    def recurrent(x: Any, w: Any, v: Any) -> Any:
        def run(xs: Any, weights: Any) -> Any:
            start = jnp.zeros(xs.shape[1:])
            return jax.lax.scan(lambda h, a: (jnp.tanh(a + h @ weights),) * 2, start, xs)[1]

        return run(x, w) + run(x[::-1], v)[::-1]

    def products(x: Any, w: Any, v: Any) -> Any:
        return (x @ w) * (x @ v)

    def chain(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = jnp.sort(x @ w, axis=-1)
        return x

    def small(x: Any, y: Any) -> Any:
        return jnp.tanh(x) @ x.T + jnp.sin(y) @ y.T

    made: tuple[Any, ...] = (sorts, recurrent, products, chain, small)
    return {fn.__name__: jax.jit(fn) for fn in made}


def works() -> dict[str, Callable[..., Any]]:
    """By name what a machine is measured with, see ``dynaflow_xla.calibration``."""

    def products(x: Any, y: Any) -> Any:
        return x @ y

    def convolutions(x: Any, kernel: Any) -> Any:
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    def elements(x: Any, y: Any) -> Any:
        return jnp.tanh(x) * y + x

    def serial(x: Any) -> Any:
        return jnp.sort(x)

    def pair(x: Any, y: Any) -> Any:
        return jnp.sort(x), jnp.sort(y)

    def chain(x: Any, y: Any) -> Any:
        for n in range(9):
            x = jnp.sort(x) if n % 2 else jax.lax.cumsum(x)
        return x, y

    made: tuple[Any, ...] = (products, convolutions, elements, serial, pair, chain)
    return {fn.__name__: jax.jit(fn) for fn in made}


_WITHOUT_X64 = {
    "float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64",
}  # fmt: skip


def example(shape: Sequence[int], dtype: str, seed: int) -> Any:
    """An array of random values: small integers, truth values, or the normal distribution.

    Args:
        shape: Its dimensions.
        dtype: NumPy's name of the type of its elements, or "bfloat16".
        seed: Of the values.

    Raises:
        UnsupportedError: JAX would make a narrower type of it.
    """
    kind = jnp.dtype(dtype)
    narrow = _WITHOUT_X64.get(kind.name)
    if narrow is not None and not jax.config.jax_enable_x64:
        raise UnsupportedError(
            f"JAX makes {narrow} of {kind} unless 64-bit types are on: set JAX_ENABLE_X64=1 in the "
            "environment, or give a narrower type"
        )
    drawn = np.random.default_rng(seed)
    if not jnp.issubdtype(kind, jnp.inexact):
        return jnp.asarray(drawn.integers(0, 2, size=tuple(shape)), dtype=kind)
    return jnp.asarray(drawn.normal(size=tuple(shape)), dtype=kind)


def copies(tree: Any) -> Any:
    """The same with every array copied, JAX's and NumPy's."""

    def copied(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf

    return jax.tree_util.tree_map(copied, tree)


def wait(result: Any) -> None:
    """Returns when the results are there."""
    jax.block_until_ready(result)


def opponents(
    original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Callable[[], Any]]:
    """By name, what runs the original without a plan and waits for its results.

    ``jit`` is XLA with all cores, ``jit, one core`` XLA with one: for small work that is often faster, and a
    schedule that only beats the former has gained nothing.
    """
    jitted = original if hasattr(original, "lower") else jax.jit(original)
    found = {"jit": lambda: jax.block_until_ready(jitted(*args, **kwargs))}
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    on_cpu = jax.default_backend() == "cpu" and len(jax.devices()) == 1
    if on_cpu and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        placed = SingleDeviceSharding(xla.lane_device(0))
        alone = jax.jit(lambda a, k: jitted(*a, **k), in_shardings=placed, out_shardings=placed)
        moved = jax.device_put((args, dict(kwargs)), xla.lane_device(0))
        found["jit, one core"] = lambda: jax.block_until_ready(alone(*moved))
    return found
