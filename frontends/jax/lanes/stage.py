"""One stage of a plan as lanes run it: an engine program behind one custom call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynaflow_xla.ffi import programs
from dynaflow_xla.ffi.lane_program import LaneProgram
from dynaflow_xla.frontends.jax import _compat


@_compat.weak_parameter
@dataclass(eq=False)
class Stage:
    """One custom call: what runs between two outer regions.

    Attributes:
        inputs, outputs: Value ids, in the order of the custom call's operands and results.
        reads: The plan's buffers that the operands are.
        writes: For each result the plan's buffers that it stands for.
        told: What the engine's program is told: buffers (kind, argument or result, offset, bytes), and what
            its lanes do in which order.
        hash: Content hash, the custom call's attribute.
        lanes: Lanes that run something here.
        loaded: Engine program with the lane executables, shared with equal stages. Kept while
            anything may still lower or instantiate the custom call.
        reference: The same stage as a plain traceable function (other platforms).
        output_avals: Abstract values of ``outputs``.
        platform: Where the custom call runs; elsewhere the reference does.
        scratch_bytes: On CUDA, memory that the custom call asks XLA for.
        in_place_bytes: Of its results, what lanes write where the outer program wants it, without a copy.
        replaceable: Whether the reference may run where lanes cannot; else that is an error.
        capturable: On CUDA, whether the custom call may be recorded into a CUDA graph: kernels only.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    hash: str
    lanes: tuple[int, ...]
    loaded: programs.Loaded
    reference: Callable[..., list[Any]]
    output_avals: tuple[Any, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[tuple[int, ...], ...] = ()
    told: tuple[tuple[Any, ...], ...] = ()
    lane_texts: dict[int, str] = field(default_factory=dict)
    program_name: str = ""
    platform: str = "cpu"
    scratch_bytes: int = 0
    capturable: bool = False
    in_place_bytes: int = 0
    replaceable: bool = False

    @property
    def program(self) -> Any:
        """The engine's program."""
        return self.loaded.program

    @property
    def lane_programs(self) -> list[LaneProgram]:
        """What runs on the lanes of a CPU."""
        return self.loaded.lane_programs

    @property
    def counters(self) -> list[Any]:
        """Of device lanes: what their steps did."""
        return self.loaded.counters

    @property
    def note(self) -> str:
        """Of device lanes: a sentence for explain."""
        return self.loaded.note
