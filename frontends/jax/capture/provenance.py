"""Where operators of a jaxpr come from, when another program was turned into it.

The translator traces what it makes of its n-th operator under ``scope(n, ...)``; after the capture
``settle`` gives the jaxpr's operators the scope, classes, mark and source line of that operator, in place
of the translator's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.ir.graph import OpMark, Source

_NUMBER = re.compile(r"%(\d+)$")
_UNSAFE = re.compile(r"[/()]")


class HasOrigin(Protocol):
    """What is known of an operator's origin (``ir.graph.Operator`` has it all)."""

    @property
    def scope(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def classes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def call_path(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def mark(self) -> OpMark | None: ...  # noqa: D102
    @property
    def source(self) -> Source | None: ...  # noqa: D102


def scope(number: int, kind: str, path: Sequence[str]) -> Any:
    """Context: what is traced inside comes from operator ``number``; profiles see the path too."""
    parts = [*path, f"{kind}%{number}"]
    return jax.named_scope("/".join(_UNSAFE.sub(".", part) for part in parts))


def settle(captured: Captured, places: Sequence[HasOrigin]) -> Captured:
    """The graph with each operator at the place of the operator it came from."""
    ops = []
    for op in captured.graph.ops:
        numbers = [m.group(1) for part in op.scope if (m := _NUMBER.search(part))]
        if numbers:
            at = places[int(numbers[0])]
            op = dataclasses.replace(
                op,
                scope=at.scope,
                classes=at.classes,
                call_path=at.call_path,
                mark=at.mark,
                source=at.source,
            )
        ops.append(op)
    graph = dataclasses.replace(captured.graph, ops=tuple(ops))
    return dataclasses.replace(captured, graph=graph)
