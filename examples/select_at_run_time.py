"""Several plans for one function; a function of yours chooses one at each call."""

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


@jax.jit
def ranks(x):
    """Sorts each row."""
    return jnp.cumsum(jnp.sort(x, axis=-1), axis=-1)


def choose(call):
    """Small batches as they are, large ones in two parts."""
    if call.context["phase"] == "decode":
        return "plain"
    return "split" if call.batch >= 32 else "whole"


def main() -> None:
    """Calls with several batches; each plan is made when it is chosen for the first time."""
    state = {"phase": "prefill"}
    fast = dfx.schedule(
        ranks,
        {"whole": "sequential", "split": dfx.NanoBatch(2), "plain": "original"},
        select=choose,
        in_axes=0,
        context=state,
    )
    for rows, phase in ((64, "prefill"), (8, "prefill"), (1, "decode")):
        state["phase"] = phase
        x = jax.random.normal(jax.random.key(rows), (rows, 256))
        assert jnp.allclose(fast(x), ranks(x), atol=1e-4)
    state["phase"] = "prefill"
    print(dfx.explain(fast, jnp.ones((64, 256))))


if __name__ == "__main__":
    main()
