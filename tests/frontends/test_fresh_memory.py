"""Results of both frameworks in memory that the process keeps; what ``explain`` says where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from page_faults import small_pages
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.machine import memory

pytestmark = small_pages
PAGES = 64 * 2**20 // 4096
"""Of a result of 4096 x 4096 float32."""

JAX = """
import jax, jax.numpy as jnp
x = jnp.ones((4096, 4096))
plain = jax.jit(lambda x: x * 2 + 1)
lanes = dfx.schedule(lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)), dfx.Branches(), lanes=2)
ready = jax.block_until_ready
"""
TORCH = """
import torch
torch.set_grad_enabled(False)
x = torch.ones(4096, 4096)
plain = lambda x: x * 2 + 1
lanes = dfx.schedule(lambda x: (torch.cumsum(x, 0), torch.cumsum(x, 1)), dfx.Branches(), lanes=2)
ready = lambda x: x
"""
PRINTED = """
import statistics
for f in (plain, lanes):
    taken = []
    for _ in range(rounds):  # the heap grows in the first calls
        before = memory.faults()
        ready(f(x))
        taken.append(memory.faults() - before)
    print(int(statistics.median(taken[rounds // 2:])))
"""


def pages(framework: str, keep: str, rounds: int) -> list[int]:
    """Page faults of most calls of an element-wise function, and of two cumulative sums on lanes."""
    begin = "import dynaflow_xla as dfx\nfrom dynaflow_xla.machine import memory\n"
    code = f"{begin}{keep}\nrounds = {rounds}\n{framework}{PRINTED}"
    made = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert made.returncode == 0, made.stderr
    return [int(number) for number in made.stdout.split()]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_results_in_kept_memory_map_no_pages(framework: str) -> None:
    pytest.importorskip(framework)
    code = {"jax": JAX, "torch": TORCH}[framework]
    plain, lanes = pages(code, "", 4)
    assert plain >= PAGES // 2 and lanes >= PAGES
    plain, lanes = pages(code, "dfx.keep_memory()", 33)
    assert plain < PAGES // 50 and lanes < PAGES // 50


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)
    monkeypatch.setattr(memory, "fault_ns", lambda: 1e6)


def explained(fast: Any, x: Any) -> str:
    fast(x)
    lines = dfx.explain(fast, x).splitlines()
    return next((line for line in lines if "fresh memory" in line), "nothing is told")


TOLD = r"auto: a call takes \d+(\.\d)? MiB of fresh memory from the system: \d+ page faults, about "


@pytest.mark.usefixtures("dear")
def test_explain_tells_of_fresh_memory_in_jax() -> None:
    jnp = pytest.importorskip("jax").numpy

    def f(x: Any) -> Any:
        return jnp.cumsum(x, 0), jnp.cumsum(x, 1)

    fast = dfx.schedule(f, dfx.Auto(budget_s=60.0), lanes=2)
    assert re.match(TOLD, explained(fast, jnp.ones((4096, 4096))))


@pytest.mark.usefixtures("dear")
def test_explain_tells_of_fresh_memory_in_torch() -> None:
    torch = pytest.importorskip("torch")

    def f(x: Any) -> Any:
        return torch.cumsum(x, 0), torch.cumsum(x, 1)

    fast = dfx.schedule(f, dfx.Auto(budget_s=60.0), lanes=2)
    with torch.no_grad():
        assert re.match(TOLD, explained(fast, torch.ones(4096, 4096)))
