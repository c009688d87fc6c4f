"""A plan compiled for an H200 that need not be there, and read back from what XLA made.

Needs JAX's CUDA plugin, but no GPU: ``pip install '.[cuda]'`` from a checkout.
"""

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


@jax.jit
def two_branches(x, y):
    """Two chains of products that do not need each other."""
    with dfx.mark("left"):
        a = jnp.tanh(x @ x) @ x
    with dfx.mark("right"):
        b = jnp.tanh(y @ y) @ y
    return a + b


def main() -> None:
    """Prints kernels, edges and memory of the CUDA graph; without the plugin what is missing."""
    fast = dfx.schedule(two_branches, strategy="branches", target="nvidia-h200")
    x, y = jax.random.normal(jax.random.key(0), (2, 256, 256))
    assert jnp.allclose(fast(x, y), two_branches(x, y), rtol=1e-3, atol=1e-3)
    print(dfx.plan(fast, x, y))
    try:
        print(dfx.compile(fast, x, y))
    except dfx.UnsupportedError as error:
        print(f"not compiled: {error}")


if __name__ == "__main__":
    main()
