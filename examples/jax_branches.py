"""Two independent parts of a JAX function, side by side on two lanes."""

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


def recurrence(w, x):
    """A simple recurrent network over ``x``: [T, B, D]."""

    def turn(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state

    return jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)[1]


@jax.jit
def both_directions(w, x):
    """The two recurrences do not need each other, but a program runs them one after the other."""
    with dfx.mark("forwards"):
        a = recurrence(w, x)
    with dfx.mark("backwards"):
        b = recurrence(w, x[::-1])[::-1]
    return a + b


def main() -> None:
    """Schedules the function, shows its plan, and compares it with the original."""
    fast = dfx.schedule(both_directions, strategy="branches")
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (64, 64)) / 16, jax.random.normal(keys[1], (128, 16, 64))
    print(dfx.explain(fast, w, x))
    print(dfx.verify(fast, w, x))
    assert jnp.allclose(fast(w, x), both_directions(w, x), atol=1e-4)


if __name__ == "__main__":
    main()
