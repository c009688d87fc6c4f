"""Every rule that proves a split, on operands of every state: what it says of the results is true.

A row of the table (``tests/support/batch_cases``) is an operator with operands. Each operand carries each
state that it may have: rows (also several for each row, or several runs of the batch), the same for all,
scaled by a power of the batch size, a sum or a mean over the batch, one known value, row numbers. What the
rule accepts is carried out on the whole batch and on uneven nano-batches, and the results are held against
the state that it gave them. ``DFX_BATCH_CASES=20`` tries that many layouts for each row.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from batch_cases import table
from batch_cases.everything import ROWS, WITHOUT_CASES
from batch_cases.table import Tally, functions

LAYOUTS = os.environ.get("DFX_BATCH_CASES")
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]


@pytest.fixture
def exact() -> Iterator[None]:
    """JAX with 64 bits; its errors, of operands that do not fit, need no pretty traceback.

    Each operator is compiled for each shape; what the compiler could do to make it fast is not tested.
    """
    jax = pytest.importorskip("jax")
    filtering = jax.config.jax_traceback_filtering
    optimizations = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_traceback_filtering", "off")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_traceback_filtering", filtering)
    jax.config.update("jax_disable_most_optimizations", optimizations)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The operands are tiny: threads of PyTorch would only wait for each other, on busy cores for long."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _names(framework: str) -> list[str]:
    return sorted({name for name, _, _ in functions(ROWS, framework)})


def _tried(framework: str, check: Any, name: str, layouts: int, more: int) -> None:
    tally = table.DONE.setdefault(framework, {}).setdefault(name, Tally())
    rows = [(row, f) for known, row, f in functions(ROWS, framework) if known == name]
    with np.errstate(all="ignore"):
        for row, function in rows:
            before = tally.accepted
            rng = np.random.default_rng(zlib.crc32(f"{name} {row.idea}".encode()))
            check(name, row, function, rng, tally, most=layouts, more=more)
            assert not tally.wrong, f"{row.idea}:\n" + "\n".join(tally.wrong[:10])
            assert row.never or tally.accepted > before, (
                f"{name}: no use of {row.idea!r} is accepted, so nothing is carried out"
            )


@pytest.mark.parametrize("name", _names("torch"))
def test_torch(name: str, one_thread: None) -> None:
    from batch_cases import on_torch

    if not on_torch.is_here(name):
        pytest.skip(f"this PyTorch has no {name}")
    _tried("torch", on_torch.check, name, int(LAYOUTS or 3), 1)


def test_every_rule_of_torch_has_a_case() -> None:
    pytest.importorskip("torch")
    from dynaflow_xla.frontends.torch.batch import proof

    missing = proof.covered() - set(_names("torch")) - WITHOUT_CASES["torch"]
    assert not missing, f"add a row to tests/support/batch_cases for {sorted(missing)}"


@pytest.mark.parametrize("name", _names("jax"))
def test_jax(name: str, exact: None) -> None:
    from batch_cases import on_jax

    if not on_jax.is_here(name):
        pytest.skip(f"this JAX has no {name}")
    _tried("jax", on_jax.check, name, int(LAYOUTS or 4), 1)


def test_every_rule_of_jax_has_a_case() -> None:
    pytest.importorskip("jax")
    from batch_cases import on_jax

    from dynaflow_xla.frontends.jax.batch import separability

    missing = separability.covered() - set(_names("jax")) - WITHOUT_CASES["jax"]
    missing = {name for name in missing if on_jax.is_here(name)}
    assert not missing, f"add a row to tests/support/batch_cases for {sorted(missing)}"
