"""A batch in two parts that overlap. That this keeps the values is proved before anything runs."""

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx


def ranks(x):
    """Rows do not need each other: each is sorted alone."""
    return jnp.cumsum(jnp.sort(x, axis=-1), axis=-1)


def normalised(x):
    """Every row needs the mean of all rows."""
    return x - x.mean(0)


def main() -> None:
    """Splits what can be split, joins where rows meet, and shows why that cannot be split without."""
    x = jax.random.normal(jax.random.key(0), (32, 1024))
    fast = dfx.schedule(ranks, dfx.NanoBatch(2), in_axes=0)
    print(dfx.explain(fast, x))
    print(dfx.verify(fast, x))
    joined = dfx.schedule(normalised, dfx.NanoBatch(2), in_axes=0)
    print(dfx.verify(joined, x))
    print(*(line for line in dfx.explain(joined, x).splitlines() if "joined: " in line))
    try:
        dfx.plan(dfx.schedule(normalised, dfx.NanoBatch(2, joins=False), in_axes=0), x)
    except dfx.SeparabilityError as error:
        print(f"refused: {error}")
    else:
        raise SystemExit("a mean over the batch was split")


if __name__ == "__main__":
    main()
