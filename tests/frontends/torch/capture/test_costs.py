"""Costs of PyTorch's operators on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dynaflow_xla.frontends.torch.capture import costs  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("assumed_numbers")


def work(target: Any, *args: Any, **kwargs: Any) -> Any:
    return costs.estimate(target, args, kwargs, target(*args, **kwargs))


def test_decompositions_cost_what_is_asked_of_them() -> None:
    x = torch.randn(128, 128)
    both, values = (work(aten._linalg_svd.default, x, False, asked) for asked in (True, False))
    assert values.ns < 0.6 * both.ns
    both, values = (work(aten._linalg_eigh.default, x, "L", asked) for asked in (True, False))
    assert values.ns < 0.7 * both.ns


def test_solutions_by_a_matrix_cost_by_their_right_hand_sides() -> None:
    matrix = torch.randn(256, 256).tril() + 300 * torch.eye(256)
    few, many = matrix[:, :8].contiguous(), matrix.clone()
    for target, args in (
        (aten.linalg_solve_triangular.default, lambda b: (matrix, b)),
        (aten.triangular_solve.default, lambda b: (b, matrix)),
        (aten.cholesky_solve.default, lambda b: (b, matrix)),
    ):
        given = {"upper": False} if target is aten.linalg_solve_triangular.default else {}
        one, other = (work(target, *args(b), **given) for b in (few, many))
        assert other.flops == pytest.approx(32 * one.flops)
        assert 15 < other.ns / one.ns < 33
