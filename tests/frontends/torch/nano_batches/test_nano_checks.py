"""Functions that raise where a factorization fails, in nano-batches: the check is each nano-batch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynaflow_xla as dfx

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "solve": lambda a, b: torch.linalg.solve(a, b),
    "inverse": lambda a, b: torch.linalg.inv(a) @ b,
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.mT) * b.sum((1, 2), keepdim=True),
    "two of them": lambda a, b: torch.linalg.solve(torch.linalg.inv(a), b),
}


def _matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 3) + 4 * torch.eye(3), torch.randn(4, 3, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str) -> None:
    function, (a, b) = FUNCTIONS[name], _matrices()
    fast = dfx.schedule(
        function, dfx.NanoBatch([3, 1]), in_axes=0, backend="torch", check=False
    )  # proved, not compared
    torch.testing.assert_close(fast(a, b), function(a, b))
    a.requires_grad_()
    b.requires_grad_()
    weights = torch.randn_like(function(a, b))
    got = torch.autograd.grad(fast(a, b), (a, b), weights)
    want = torch.autograd.grad(function(a, b), (a, b), weights)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "row"),
    [(dfx.NanoBatch([3, 1]), 0), (dfx.NanoBatch([3, 1]), 3), (dfx.Branches(), 3)],
    ids=["first", "last", "whole"],
)
@pytest.mark.parametrize("name", ["solve", "inverse"])
def test_a_row_that_fails_is_told(name: str, strategy: dfx.Strategy, row: int) -> None:
    function, (a, b) = FUNCTIONS[name], _matrices()
    fast = dfx.schedule(function, strategy, in_axes=0, backend="torch")
    torch.testing.assert_close(fast(a, b), function(a, b))
    a[row] = 0
    with pytest.raises(torch.linalg.LinAlgError):
        function(a, b)
    with pytest.raises(RuntimeError, match=r"linalg\.(solve|inv|cholesky)"):
        fast(a, b)


TAKEN = {
    "order": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "broadcast": lambda x: torch.take_along_dim(x[:, None], torch.tensor([[[2, 0], [1, 1]]]), 2),
    "one line": lambda x: torch.take(x[:, :1] * torch.arange(9.0), torch.tensor([2, 8])),
    "table": lambda x: x[:, :3] * torch.take(torch.arange(9.0), x.abs().long() % 9)[:, :3],
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.filterwarnings("error::dynaflow_xla.FallbackWarning")
def test_elements_that_are_taken(name: str) -> None:
    """Proved, or joined; the size of the batch stays open."""
    fast = dfx.schedule(TAKEN[name], dfx.NanoBatch([5, 3]), in_axes=0, backend="torch")
    x = torch.randn(8, 6)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = fast(mine), TAKEN[name](theirs)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
