"""A whole training step, gradient and update included, under one plan."""

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


def tower(w, x):
    """The last state of a recurrent network over ``x``: [T, B, D]."""

    def turn(state, row):
        return jnp.tanh(state @ w + row), None

    return jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)[0]


def loss(weights, x, y):
    """Two towers, one for each direction; neither pass of one needs the other's."""
    return jnp.mean((tower(weights["left"], x) + tower(weights["right"], x[::-1]) - y) ** 2)


@jax.jit
def step(weights, x, y):
    """One step of gradient descent."""
    value, gradient = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def main() -> None:
    """Trains with the scheduled step beside the original; the losses agree, and fall."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "left": jax.random.normal(keys[0], (64, 64)) / 16,
        "right": jax.random.normal(keys[1], (64, 64)) / 16,
    }
    x, y = jax.random.normal(keys[2], (16, 32, 64)), jax.random.normal(keys[3], (32, 64))
    fast = dfx.schedule(step, strategy="branches")
    print(dfx.explain(fast, weights, x, y))
    plain, losses = weights, []
    for _ in range(20):
        weights, value = fast(weights, x, y)
        plain, same = step(plain, x, y)
        assert jnp.allclose(value, same, rtol=1e-3)
        losses.append(value)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
