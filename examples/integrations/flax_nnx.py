"""flax nnx with optax: a step that changes a module and its optimizer."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import dynaflow_xla as dfx  # +


class Net(nnx.Module):
    """Two branches, batch norm and dropout."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(jnp.sort(self.a(x)) + jnp.sort(self.b(x)))))


@nnx.jit
def step(model, optimizer, x, y):
    """One step."""
    value, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradient)
    return value


def main() -> None:
    """Trains twice from the same weights."""
    x, y = jax.random.normal(jax.random.key(0), (8, 16)), jnp.ones((8, 1))

    fast = dfx.schedule(step, "branches")  # +

    losses = []
    for call in (step, fast):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses.append([float(call(model, optimizer, x, y)) for _ in range(5)])
    print("losses", [[round(v, 4) for v in values] for values in losses])
    assert jnp.allclose(jnp.array(losses[0]), jnp.array(losses[1]), rtol=1e-3)


if __name__ == "__main__":
    main()
