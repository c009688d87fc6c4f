"""The order that every run of a plan keeps: lane order, Record before Wait, outer regions as barriers."""

from __future__ import annotations

from collections.abc import Sequence

from dynaflow_xla.planning.instructions import Instruction, Launch, Merge, Record, Slice, Wait


class HappensBefore:
    """Reachability over an instruction list, as one bit set an instruction.

    A Wait whose event was not recorded earlier in the list gets no edge; ``validate`` reports it.
    """

    def __init__(self, instructions: Sequence[Instruction]):
        self._before: list[int] = []
        last: dict[int, int] = {}
        recorded: dict[int, int] = {}
        barrier = 0
        for number, instruction in enumerate(instructions):
            if isinstance(instruction, Launch) and instruction.lane < 0:
                before = (1 << number) - 1
                barrier = before | 1 << number
                last.clear()
            elif isinstance(instruction, Slice | Merge):
                before = 0  # they only say where bytes lie
            else:
                before = barrier
                if instruction.lane in last:
                    previous = last[instruction.lane]
                    before |= self._before[previous] | 1 << previous
                if isinstance(instruction, Wait) and instruction.event in recorded:
                    source = recorded[instruction.event]
                    before |= self._before[source] | 1 << source
                last[instruction.lane] = number
            if isinstance(instruction, Record):
                recorded.setdefault(instruction.event, number)
            self._before.append(before)

    def __call__(self, first: int, second: int) -> bool:
        """Whether instruction ``first`` is over before ``second`` starts, in every run."""
        return bool(self._before[second] >> first & 1)
