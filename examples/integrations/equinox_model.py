"""equinox: a filtered step of a module with state that is no array."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import dynaflow_xla as dfx  # +


@eqx.filter_jit
def step(model, state, x, y, optimizer):
    """One step."""

    @eqx.filter_value_and_grad
    def loss(m):
        return jnp.mean((jax.vmap(m)(x) - y) ** 2)

    value, gradient = loss(model)
    updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def main() -> None:
    """Trains twice from the same weights."""
    x, y = jax.random.normal(jax.random.key(0), (8, 16)), jnp.ones((8, 1))
    optimizer = optax.adam(1e-2)

    fast = dfx.schedule(step, "branches")  # +

    losses = []
    for call in (step, fast):
        model = eqx.nn.MLP(16, 1, 32, 2, key=jax.random.key(1))
        state, values = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for _ in range(5):
            model, state, value = call(model, state, x, y, optimizer)
            values.append(float(value))
        losses.append(values)
    print("losses", [[round(v, 4) for v in values] for values in losses])
    assert jnp.allclose(jnp.array(losses[0]), jnp.array(losses[1]), rtol=1e-3)


if __name__ == "__main__":
    main()
