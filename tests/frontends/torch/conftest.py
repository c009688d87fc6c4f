"""Shared by the tests of the PyTorch frontend; all are skipped where PyTorch is missing."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from round_robin import RoundRobin
from unhurried import unhurried
from watched import ended, told, watched

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

LANES = min(2, len(os.sched_getaffinity(0)))
two_cores = pytest.mark.skipif(LANES < 2, reason="needs two cores")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            # Of PyTorch's own code, which is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("default::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("default::UserWarning:torch.*"))


STRATEGIES = [dfx.Sequential(), dfx.Branches(), RoundRobin()]


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Auto`` decides as on a machine that is fast and idle."""
    unhurried(monkeypatch)


@pytest.fixture(params=STRATEGIES, ids=["sequential", "branches", "round_robin"])
def strategy(request: pytest.FixtureRequest) -> dfx.Strategy:
    return request.param


@pytest.fixture
def distances_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule for ``torch.cdist``: an operator of which nothing is proved."""
    from dynaflow_xla.frontends.torch.batch import proof
    from dynaflow_xla.frontends.torch.batch.walking.registry import RULES

    assert proof  # it fills the table
    for name in ("_cdist_forward", "_euclidean_dist"):
        monkeypatch.delitem(RULES, name)


@pytest.fixture
def round_robin() -> dfx.Strategy:
    return RoundRobin()


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lanes have one intra-op thread each; some operators round by their number of threads."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert torch.get_num_threads() == 1, "a test or the engine changed the number of threads"
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also plans that are the original program run at every call, else a second call would test nothing."""
    from dynaflow_xla.frontends.torch.tuning.originals import SameAsOriginal

    monkeypatch.setattr(SameAsOriginal, "any", lambda _: False)


def _assert_equal(want: Any, got: Any) -> None:
    from torch.utils import _pytree as pytree

    want_leaves, want_tree = pytree.tree_flatten(want)
    got_leaves, got_tree = pytree.tree_flatten(got)
    assert want_tree == got_tree
    for w, g in zip(want_leaves, got_leaves, strict=True):
        if isinstance(w, torch.Tensor):
            assert (w.dtype, w.shape, w.requires_grad) == (g.dtype, g.shape, g.requires_grad)
            torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        else:
            assert w == g


@pytest.fixture
def assert_equal() -> Callable[[Any, Any], None]:
    """Same structure, types and bits."""
    return _assert_equal


_TWO = """
import torch
import dynaflow_xla as dfx
torch.manual_seed(0)
def two(x, y):
    with dfx.mark("left"):
        a = torch.cumsum(torch.sort(x).values, 0)
    with dfx.mark("right"):
        b = torch.cumsum(torch.sort(y).values, 0)
    return a @ b + a.sum()
x, y = torch.randn(2000), torch.randn(2000)
fast = dfx.schedule(two, strategy=dfx.Branches(), lanes=2)
"""


@pytest.fixture
def run_script() -> Callable[..., str]:
    """Runs a script in a process of its own that is killed if it hangs."""

    def run(body: str, limit: int = 360, expect: int = 0) -> str:
        done = ended(watched(limit) + _TWO + textwrap.dedent(body), limit_s=limit)
        assert done.returncode == expect, told(done)
        return str(done.stdout)

    return run
