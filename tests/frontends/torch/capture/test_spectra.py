"""Singular values and eigenvalues alone: computed as in the original, without vectors."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
L = torch.linalg


def symmetric(x: Any) -> Any:
    return L.eigvalsh(x + x.mT, UPLO="U")


VALUES = {
    "svdvals": L.svdvals,
    "eigvalsh": symmetric,
    "eigvals": L.eigvals,
    "cond": lambda x: L.cond(x),
}


def results(fast: Any, *args: Any) -> list[int]:
    """How many results each factorization in the graph of a call has."""
    graph = dfx.graph(fast, *args).graph
    return [len(op.outputs) for op in graph.ops if "linalg" in op.kind]


@pytest.mark.parametrize("name", VALUES)
def test_values_alone_are_the_originals(name: str, assert_equal: Any) -> None:
    x = torch.randn(6, 9, 9)
    with torch.no_grad():
        fast = dfx.schedule(VALUES[name], dfx.Sequential())
        for _ in range(2):
            assert_equal(VALUES[name](x), fast(x))
        assert results(fast, x) == [1]


@pytest.mark.parametrize("name", ["svdvals", "eigvalsh", "eigvals"])
def test_nano_batches_of_matrices(name: str) -> None:
    x = torch.randn(6, 9, 9)
    with torch.no_grad():
        fast = dfx.schedule(VALUES[name], dfx.NanoBatch(2))  # proved, not tried
        for _ in range(2):  # LAPACK rounds by where a matrix lies in memory
            torch.testing.assert_close(fast(x), VALUES[name](x))
        assert results(fast, x) == [1, 1]


def test_vectors_that_the_original_computes_are_computed(assert_equal: Any) -> None:
    def fn(x: Any) -> Any:
        return L.svd(x).S, L.eigh(x @ x.mT).eigenvalues, L.svd(x, full_matrices=False).U

    x = torch.randn(3, 9, 7)
    with torch.no_grad():
        fast = dfx.schedule(fn, dfx.Sequential())
        assert_equal(fn(x), fast(x))
        assert results(fast, x) == [3, 2, 3]


def test_gradients_keep_the_vectors() -> None:
    x = torch.randn(3, 7, 7, dtype=torch.float64, requires_grad=True)
    fast = dfx.schedule(lambda x: L.svdvals(x).square().sum(), dfx.Sequential())
    fast(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
