"""Cumulative sums with results of hundreds of megabytes: lanes beside ``jax.jit``.

    python benchmarks/machine/large_results.py [--rounds 7] [--rows 8192] [--out FILE]

Each case is called under plain jit, ``Branches()``, and ``Branches()`` with lanes that leave these operators
to XLA (``one_pass=False``), in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import jax
import jax.numpy as jnp
import numpy as np
from common.environment import stamp
from common.measure import Contention
from cpu.width import measured

import dynaflow_xla as dfx

CASES = {
    "cumsum along both axes": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)),
    "cumsum along the rows, of x and 2x": lambda x: (jnp.cumsum(x, 1), jnp.cumsum(2 * x, 1)),
    "cumsum of one row, of x and 2x": lambda x: (
        jnp.cumsum(x.reshape(-1)),
        jnp.cumsum(2 * x.reshape(-1)),
    ),
    "cumsum and cummax along the rows": lambda x: (jnp.cumsum(x, 1), jax.lax.cummax(x, 1)),
}


def measure(rounds: int, rows: int) -> dict[str, Any]:
    """All cases on an array of so many rows of 8192 float32."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 8192), dtype=np.float32))
    made = {}
    for name, fn in CASES.items():
        ways = {
            "jit": jax.jit(fn),
            "branches": dfx.schedule(fn, dfx.Branches(), lanes=2),
            "as XLA compiles them": dfx.schedule(
                fn, dfx.Branches(), lanes=dfx.Lanes(2, one_pass=False)
            ),
        }
        with Contention() as contention:
            made[name] = measured(ways, (x,), rounds)
        made[name]["contention"] = contention.as_dict()
        made[name]["one pass"] = dfx.explain(ways["branches"], x).count(" in region ")
        print(name, {k: round(v, 3) for k, v in made[name]["ratio"].items()}, flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    environment = stamp()
    cases = measure(given.rounds, given.rows)
    result = {
        "environment": environment, "load_after": stamp()["load_average"],
        "shape": [given.rows, 8192], "cases": cases,
    }  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
