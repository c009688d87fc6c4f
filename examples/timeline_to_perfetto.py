"""What ran where and when: a page for the browser, and a trace for ui.perfetto.dev."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


@jax.jit
def two_sorts(x, y):
    """Two sorts that do not need each other."""
    return jnp.sort(x) + jnp.sort(y)


def main(folder: Path = Path("out")) -> None:
    """Writes the measured timeline beside the prediction."""
    folder.mkdir(exist_ok=True)
    x, y = jax.random.normal(jax.random.key(0), (2, 1 << 15))
    fast = dfx.schedule(two_sorts, strategy="branches")
    predicted, measured = dfx.simulate(fast, x, y), dfx.profile(fast, x, y)
    print(predicted.summary())
    print(measured)
    one_lane = dfx.profile(dfx.schedule(two_sorts, dfx.Sequential(), lanes=1), x, y)
    print(measured.to_html(folder / "timeline.html", original_ms=one_lane))
    print(measured.to_perfetto(folder / "timeline.json"), "opens in https://ui.perfetto.dev")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
