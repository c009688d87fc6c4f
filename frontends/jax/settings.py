"""What the user asked ``schedule`` for, as every part of this frontend reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynaflow_xla.kernels import Lanes
from dynaflow_xla.strategies.base import Strategy


@dataclass(frozen=True)
class Options:
    """What the user asked ``schedule`` for, as far as one entry needs it."""

    name: str
    strategy: Strategy
    rules: tuple[Any, ...] | None
    lanes: int
    user: Any = field(default_factory=dict, hash=False, compare=False)
    in_axes: Any = None
    out_axes: Any = 0
    batch_size: int | None = None
    compiler_options: dict[str, Any] | None = field(default=None, hash=False, compare=False)
    default_cut: bool = False
    backend: str = "ffi"
    target: str | None = None
    gpu_lanes: bool = False
    gpu: Lanes | None = None
