"""A strategy of your own: it sees regions, says lane and order, and is checked before it runs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


@dataclass(frozen=True)
class SortsAside(dfx.Strategy):
    """Sorts take turns on the lanes behind the first; everything else stays on lane 0."""

    def rules(self, graph):
        """A region for each sort, with a tag to know it by."""
        return [dfx.Op("sort", tags={"slow"})]

    def schedule(self, s):
        """Runs once for each input signature."""
        turn = 0
        while ready := s.ready():
            for op in ready:
                lane = 0
                if "slow" in op.tags and s.lanes > 1:
                    lane = 1 + turn % (s.lanes - 1)
                    turn += 1
                s.execute(op, lane=lane)


@jax.jit
def function(x, y):
    """A sort beside elementwise work."""
    return jnp.sort(x) + jnp.cumsum(jnp.tanh(y))


def main() -> None:
    """Prints the plan that the strategy made."""
    fast = dfx.schedule(function, strategy=SortsAside())
    x, y = jax.random.normal(jax.random.key(0), (2, 4096))
    print(dfx.plan(fast, x, y))
    print(dfx.verify(fast, x, y))


if __name__ == "__main__":
    main()
