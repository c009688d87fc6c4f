"""flax linen with optax: a whole training step under one plan."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import dynaflow_xla as dfx  # +


class Towers(nn.Module):
    """Two recurrent towers over [B, T, D]."""

    @nn.compact
    def __call__(self, x):
        left = nn.RNN(nn.GRUCell(32), name="left")(x)
        right = nn.RNN(nn.GRUCell(32), reverse=True, name="right")(x)
        return nn.Dense(1)(jnp.concatenate([left, right], -1).mean(1))


@jax.jit
def step(state, x, y):
    """One step of Adam."""

    def loss(params):
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value


def main() -> None:
    """Trains twice from the same weights."""
    x, y = jax.random.normal(jax.random.key(0), (8, 12, 16)), jnp.ones((8, 1))
    model = Towers()
    params = model.init(jax.random.key(1), x)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    fast = dfx.schedule(step, "branches")  # +

    losses: dict[str, list[float]] = {}
    for name, call in (("plain", step), ("scheduled", fast)):
        now, losses[name] = state, []
        for _ in range(5):
            now, value = call(now, x, y)
            losses[name].append(float(value))
    print({name: [round(v, 4) for v in values] for name, values in losses.items()})
    assert jnp.allclose(jnp.array(losses["plain"]), jnp.array(losses["scheduled"]), rtol=1e-3)


if __name__ == "__main__":
    main()
