"""Singular values and eigenvalues alone, as the original computes them.

PyTorch decides while it runs whether the vectors are computed too: it does for gradients, and for
tensors that only stand for others, which a capture has. So a captured ``svdvals`` would compute
vectors that nobody reads, in twice the time and with another rounding. Here they go.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

_aten = torch.ops.aten
_WHICH = {_aten._linalg_svd.default: 1, _aten._linalg_eigh.default: 0, _aten.linalg_eig.default: 0}
"""What computes values and vectors -> which of its results the values are."""

_ORIGINS = frozenset({
    "linalg_svdvals", "linalg_eigvalsh", "linalg_eigvals", "linalg_matrix_norm", "linalg_norm",
    "linalg_cond", "linalg_matrix_rank",
})  # fmt: skip
"""Functions that want the values alone; ``svd(x).S`` computes vectors in the original too."""


def without_vectors(gm: Any) -> None:
    """Rewrites an aten graph that is captured without gradients.

    The calls say so themselves, so that it does not matter what PyTorch decides while they run.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _WHICH:
            continue
        stack = node.meta.get("source_fn_stack") or [("", None)]
        if getattr(stack[-1][1], "__name__", "") not in _ORIGINS:
            continue
        which = _WHICH[node.target]
        if any(u.target is not operator.getitem or u.args[1] != which for u in node.users):
            continue
        values = node.meta["val"][which]
        if node.target is _aten.linalg_eig.default:
            node.target = _aten._linalg_eigvals.default
            node.meta["val"] = values
            for user in list(node.users):
                user.replace_all_uses_with(node)
                gm.graph.erase_node(user)
            continue
        second = "L" if node.target is _aten._linalg_eigh.default else False  # UPLO, full_matrices
        node.args = (*node.args, second)[:2] + (False,)
        node.meta["val"] = tuple(values if n == which else None for n in range(2 + which))
    gm.recompile()
