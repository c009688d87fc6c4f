"""Splits under conditions, in PyTorch: the values of the original, cut where it is allowed, shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaflow_xla as dfx


class Block(torch.nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.qkv = torch.nn.Linear(8, 24)
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.down(torch.tanh(self.up(x)))


def same_with_gradients(model: Any, fast: Any, x: torch.Tensor) -> None:
    found = []
    for call in (model, fast):
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = call(given)
        out.square().sum().backward()
        found.append([out.detach(), given.grad, *(p.grad.clone() for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    ("strategy", "sizes", "told"),
    [
        (dfx.NanoBatch(2, align=8), [16, 12], "beginning at multiples of 8 rows"),
        (dfx.NanoBatch(2, boundaries="starts"), [11, 17], "beginning at 4 given boundaries only"),
        (dfx.NanoBatch(2, weights="tokens"), [20, 8], "balanced by the work of each row"),
        (dfx.NanoBatch(2, uneven=True), None, "sizes chosen by the cost model"),
    ],
)
def test_conditions_are_kept_and_shown(strategy: Any, sizes: Any, told: str) -> None:
    model = Block()
    context = {"starts": [0, 3, 11, 20], "tokens": torch.arange(28)}
    fast = dfx.schedule(model, strategy, in_axes=0, context=context, backend="torch")
    x = torch.randn(28, 5, 8)
    same_with_gradients(model, fast, x)
    with torch.no_grad():  # the graph that ran
        text = dfx.explain(fast, x)
    assert f"nano-batches are {told}" in text
    if sizes:
        assert f"split into nano-batches of {sizes}" in text
    else:
        assert "the cost model chose [" in text
    with pytest.raises(dfx.PlanError, match="at most 1 nano-batches|at most 2 nano-batches"):
        dfx.schedule(model, dfx.NanoBatch(3, align=4), in_axes=0, backend="torch")(
            torch.randn(6, 5, 8)
        )


def test_what_does_not_depend_on_the_batch_runs_once_for_uneven_sizes() -> None:
    weight = torch.randn(8, 8)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, dim=-1).values @ torch.sort(weight, dim=0).values

    fast = dfx.schedule(
        model, dfx.NanoBatch([6, 4, 2]), in_axes=0, rules=[dfx.Op("*")], backend="torch"
    )
    x = torch.randn(12, 8)
    torch.testing.assert_close(fast(x), model(x))
    sorts = [r.name for r in dfx.graph(fast, x).regions if r.name.startswith("sort")]
    assert len(sorts) == 4, sorts  # one of the weights, and one for each nano-batch


@pytest.mark.parametrize("how", [dfx.NanoBatch(2), dfx.NanoBatch([7, 5, 4])])
def test_the_sequence_is_split_where_rows_of_it_are_independent(how: Any) -> None:
    model = Block()
    fast = dfx.schedule(model, how, in_axes=1, out_axes=1, backend="torch")
    x = torch.randn(3, 16, 8)
    same_with_gradients(model, fast, x)
    with torch.no_grad():
        told = dfx.explain(fast, x)
    assert "joined: " in told and "tanh" not in told.partition("joined: ")[2]


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (dfx.NanoBatch(4, align=16), "4 nano-batches of 12 rows need 3 cuts"),
        (dfx.NanoBatch([5, 7], align=4), "begins at row 5, where none may begin"),
        (dfx.NanoBatch(2, boundaries=[0, 3, 99]), "boundaries go to row 99"),
        (dfx.NanoBatch(5, boundaries=[0, 3]), "a nano-batch may begin only at row 3"),
        (dfx.NanoBatch(2, weights=[1.0] * 5), "work is given for 5 rows"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_told_before_anything_runs(strategy: Any, told: str) -> None:
    ran: list[int] = []

    def f(x: Any) -> Any:
        ran.append(1) if not torch.compiler.is_compiling() else None
        return x.tanh()

    fast = dfx.schedule(f, strategy, in_axes=0, backend="torch")
    with pytest.raises(dfx.PlanError, match=told):
        fast(torch.randn(12, 4))
    assert not ran
