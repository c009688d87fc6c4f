"""What a strategy decided, in order: the input of plan building."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.ir import Source


@dataclass(frozen=True)
class Decision:
    """One ``execute``: region, lane (-1 for an outer region), nano-batch, replacement, user's line."""

    region: int
    lane: int
    nano: int = 0
    replace: Callable[..., Any] | None = None
    source: Source | None = None


@dataclass(frozen=True)
class Recording:
    """A strategy's decisions in order."""

    decisions: tuple[Decision, ...]
