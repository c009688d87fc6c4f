"""What a wheel must do where it is all that was installed: run as a program by who builds wheels.

The quickstart of README.md, the engine, the licences of what is compiled into it. Needs the extra ``jax``.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile

QUICKSTART = """
import jax, jax.numpy as jnp
import dynaflow_xla as dfx

f = jax.jit(lambda x, y: jnp.sort(x) + jnp.sort(y))
fast = dfx.schedule(f, strategy="branches")
x, y = jnp.arange(32768.0)[::-1], jnp.sin(jnp.arange(32768.0))
assert (fast(x, y) == f(x, y)).all()
print(dfx.explain(fast, x, y))
print(dfx.verify(fast, x, y))
"""
LICENCES = {"LICENSE", "nanobind.txt", "robin-map.txt", "openxla.txt"}


def main() -> int:
    """Runs everything; returns an exit status."""
    files = importlib.metadata.distribution("dynaflow-xla").files or []
    found = {file.name for file in files if "licenses" in file.parts}
    if missing := LICENCES - found:
        print(f"the wheel lacks the licences {sorted(missing)}; it has {sorted(found)}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            ["-c", QUICKSTART],
            ["-m", "dynaflow_xla", "doctor"],
            [
                "-m",
                "dynaflow_xla",
                "bench",
                "--case",
                "sorts",
                "--framework",
                "jax",
                "--rounds",
                "3",
            ],
        ):
            done = subprocess.run([sys.executable, "-P", *command], cwd=folder)
            if done.returncode:
                print(f"{command[:3]} ended with status {done.returncode}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
