"""Operators of the user's: PyTorch is told which arguments they write, not what else they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import operators

_KNOWN = frozenset({
    "aten", "dynaflow_xla", "inductor", "mkl", "mkldnn", "onednn", "prim", "prims", "profiler", "quantized",
    "quantized_decomposed", "torchaudio", "torchvision", "transformers", "xla",
})  # fmt: skip
"""Namespaces of operators without a state: those of PyTorch, of well known packages, and ours."""


def is_own(target: Any) -> bool:
    """Whether it is an operator of the user's."""
    return isinstance(target, operators.Operator) and target.namespace not in _KNOWN


def targets(payload: Any) -> Iterator[Any]:
    """Operators of the user's that a call runs: itself, and those in graphs that it is given."""
    inner = [x for x in payload.args if isinstance(x, torch.fx.GraphModule)]
    nested = [n.target for gm in inner for n in gm.graph.nodes if n.op == "call_function"]
    yield from filter(is_own, (payload.target, *nested))


def names_in(entries: Iterable[Any]) -> list[str]:
    """Operators of the user's in some graphs, which may count, or draw from a generator of theirs.

    PyTorch is told which arguments they write, not what else they change.
    """
    found = set()
    for entry in entries:
        for op in entry.captured.graph.ops:
            if not hasattr(op.payload, "target"):
                continue  # it is XLA's by now
            found |= {str(target.name()) for target in targets(op.payload)}
    return sorted(found)
