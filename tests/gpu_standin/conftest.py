"""Tests of the GPU path on a stand-in driver, under JAX's real CUDA plugin (``make test-gpu-standin``).

There is no GPU in it: what holds here holds for the calls that XLA and the engine make, not for a device.
Outside of that environment they are not collected. What the machine lacks for it (JAX's CUDA plugin, a C++
compiler, CUDA's headers) is told by ``build.py``, and nothing runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Their modules are found through that environment's path.
if not os.environ.get("DYNAFLOW_XLA_STANDIN"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def as_precise_as_a_cpu() -> Iterator[None]:
    import jax

    with jax.default_matmul_precision("highest"):
        yield
