"""Where operators of a jaxpr come from, when another program was turned into it.

The translator traces what it makes of its n-th operator under ``scope(n, ...)``; after the capture
``settle`` gives the jaxpr's operators the scope, classes, mark and source line of that operator, in place
of the translator's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.ir.graph import Operator, OpMark, Source

_NUMBER = re.compile(r"%(\d+)$")
_UNSAFE = re.compile(r"[/()]")


@dataclasses.dataclass(frozen=True)
class Location:
    """Where an operator came from, as ``ir.graph.Operator`` has it."""

    scope: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    call_path: tuple[str, ...] = ()
    mark: OpMark | None = None
    source: Source | None = None


def scope(number: int, kind: str, path: Sequence[str]) -> Any:
    """Context: what is traced inside comes from operator ``number``; profiles see the path too."""
    parts = [*path, f"{kind}%{number}"]
    return jax.named_scope("/".join(_UNSAFE.sub(".", part) for part in parts))


def settle(captured: Captured, places: Sequence[Operator | Location]) -> Captured:
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
