"""What each piece of a plan's memory holds while the plan runs, kept beside the values themselves."""

from __future__ import annotations

from dynaflow_xla.planning.instructions import Launch, Merge, Slice
from dynaflow_xla.planning.plan import Plan


class Unwritten(Exception):
    """A launch reads memory that does not hold what it means to read.

    Attributes:
        launch: Which.
    """

    def __init__(self, launch: Launch, text: str) -> None:
        super().__init__(text)
        self.launch = launch


class Shadow:
    """Who wrote a plan's buffers so far, in one run; scratch by the byte.

    Before anything is written, nothing is held: as if all memory were poisoned.

    Args:
        plan: The plan that runs.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._makers: dict[int, Launch] = {}
        for launch in plan.launches:
            self._makers.update(dict.fromkeys(launch.outs, launch))
        self._given = {b.id for b in plan.buffers if b.kind == "arg"}
        self._parts = {
            i.out: ((i.src,) if isinstance(i, Slice) else i.srcs)
            for i in plan.instructions
            if isinstance(i, Slice | Merge)
        }
        self._written: dict[int, int] = {}  # buffer -> the lane that wrote it
        self._scratch: dict[int, tuple[int, int]] = {}  # buffer -> its bytes, still whole

    def read(self, launch: Launch) -> None:
        """Notes that a launch reads its inputs.

        Raises:
            Unwritten: one of them is not there.
        """
        for number in launch.ins:
            for part in self._pieces(number):
                self._check(launch, part)

    def _pieces(self, number: int) -> tuple[int, ...]:
        made = self._parts.get(number)
        if number in self._given or made is None:
            return (number,)
        return tuple(piece for part in made for piece in self._pieces(part))

    def _check(self, launch: Launch, number: int) -> None:
        if number in self._given:
            return
        buffer = self._plan.buffers[number]
        what = f"buffer {number} ({buffer.kind}, {buffer.dtype}{list(buffer.shape)})"
        maker = self._makers.get(number)
        made = "which nothing makes"
        if maker is not None:
            made = f"which region {maker.name!r} on lane {maker.lane} makes"
        if number not in self._written:
            raise Unwritten(launch, f"{what}, {made}, is not written yet")
        if buffer.kind == "local" and self._written[number] != launch.lane:
            raise Unwritten(launch, f"{what}, {made}, never leaves that lane")
        if buffer.kind == "scratch" and number not in self._scratch:
            raise Unwritten(launch, f"{what}, {made}, has been written over")

    def wrote(self, launch: Launch) -> None:
        """Notes that a launch wrote its results."""
        for number in launch.outs:
            self._written[number] = launch.lane
            buffer = self._plan.buffers[number]
            if buffer.kind != "scratch":
                continue
            begin, end = buffer.offset, buffer.offset + buffer.bytes
            for other, (a, b) in list(self._scratch.items()):
                if a < end and begin < b:
                    del self._scratch[other]
            self._scratch[number] = (begin, end)
