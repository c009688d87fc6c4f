"""keras on the JAX backend: inference through ``stateless_call``, scheduled."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras

import dynaflow_xla as dfx  # +


def main() -> None:
    """Two branches of a functional model, with random weights."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 16))
    left = keras.layers.GRU(16)(inputs)
    right = keras.layers.GRU(16, go_backwards=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.concatenate([left, right])))
    x = jax.random.normal(jax.random.key(0), (8, 12, 16))
    plain = jnp.asarray(model(x))

    def forward(weights, state, x):  # +
        return model.stateless_call(weights, state, x)  # +

    fast = dfx.schedule(jax.jit(forward), "branches")  # +
    weights = [v.value for v in model.trainable_variables]  # +
    state = [v.value for v in model.non_trainable_variables]  # +
    result, _ = fast(weights, state, x)  # +

    print(f"greatest difference {jnp.abs(result - plain).max():.1e}")
    assert jnp.allclose(result, plain, atol=1e-5)


if __name__ == "__main__":
    main()
