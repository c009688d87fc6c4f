"""Makes the picture of README.md: a model's regions one after another, and as two lanes run them.

``python docs/pictures/timelines.py`` measures the regions on this machine, a core for each lane.
``dfx.simulate`` puts them together to the two timelines, and the package's own code draws them on one
axis: ``timelines.png`` beside this file.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec

import dynaflow_xla as dfx
from dynaflow_xla.timelines.plot import write_plot

HERE = Path(__file__).parent
STEPS, ROWS, WIDTH = 48, 32, 128


def layer(w, x):
    """A recurrent layer over ``x``: [T, B, D]."""

    def turn(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state

    return jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)[1]


@jax.jit
def two_towers(weights, x, y):
    """A tower of three layers over each of two sequences, and a product that joins them."""
    for n in range(3):
        with dfx.mark(f"text{n}"):
            x = layer(weights[n], x)
    for n in range(3):
        with dfx.mark(f"image{n}"):
            y = layer(weights[3 + n], y)
    with dfx.mark("join"):
        return jnp.tanh(x.mean(0) @ y.mean(0).T)


def titled(timeline: dfx.Timeline, name: str) -> dfx.Timeline:
    """The timeline under another title."""
    return msgspec.structs.replace(timeline, meta={**timeline.meta, "name": name})


def predicted(rounds: int) -> tuple[dfx.Timeline, dfx.Timeline]:
    """Both timelines by ``dfx.simulate``, from each region's shortest time in several profiles."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (6, WIDTH, WIDTH)) / WIDTH
    x, y = (jax.random.normal(key, (STEPS, ROWS, WIDTH)) for key in keys[1:])
    one = dfx.schedule(two_towers, dfx.Sequential(), lanes=1)
    two = dfx.schedule(two_towers, dfx.Branches(), lanes=2)
    print(dfx.verify(two, weights, x, y))
    costs: dict[str, float] = {}
    for _ in range(rounds):
        for span in dfx.profile(two, weights, x, y).spans:
            if span.kind == "launch":
                costs[span.name] = min(costs.get(span.name, float("inf")), span.duration_ns)
    print({name: f"{ns / 1e6:.2f} ms" for name, ns in costs.items()})
    return tuple(dfx.simulate(fast, weights, x, y, costs=costs) for fast in (one, two))


def main(rounds: int = 10) -> None:
    """Measures, draws, and prints what the picture says."""
    one, two = predicted(rounds)
    path = write_plot(
        titled(two, "scheduled: dfx.schedule(two_towers, strategy='branches')"),
        HERE / "timelines.png",
        titled(one, "as written: one region after another"),
    )
    print(one.summary(), two.summary(), path, sep="\n")


if __name__ == "__main__":
    main()
