"""The plan: an immutable, versioned list of instructions over numbered lanes and buffers.

A strategy's decisions are recorded as a :class:`Plan`; ``validate`` proves it; a backend turns it
into a callable. Text and JSON forms round-trip; the content hash names a plan.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import PlanError, bad_argument
from dynaflow_xla.planning import text as text_form
from dynaflow_xla.planning.instructions import (
    Instruction,
    Launch,
    Merge,
    PlanBuffer,
    Record,
    Slice,
    Wait,
)

PLAN_VERSION = 4
"""Version of the plan format, apart from the package version."""

_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What decoding raises: ``ValueError`` for text that is no Unicode and numbers that are too long."""


def _readable(text: Any) -> None:
    if not isinstance(text, str | bytes):
        raise bad_argument(text, str, f"a plan is read from text or bytes; got {text!r:.80}")


class Plan(msgspec.Struct, frozen=True):
    """What runs where and in which order.

    The instruction list is one legal total order; what binds is the order of instructions of one
    lane, plus Record before Wait across lanes. A Launch on lane -1 (an outer region, or one that has all
    cores) is a full barrier: everything before it is finished, everything after it starts later. So a plan
    is a sequence of phases, of lanes and of such launches, and no lane ever waits for a wide launch.

    Attributes:
        version: ``PLAN_VERSION``.
        graph: Name of the function.
        strategy: Text form of the strategy.
        lanes: Number of lanes, numbered from 0.
        cores: Of the machine that it was made for: what a wide launch has. 0: whoever runs it knows no
            wide launches but those of outer regions.
        events: Number of events.
        buffers: All buffers.
        instructions: What is done; those of a lane are in its order.
        scratch_bytes: Size of the shared scratch block (peak, after reuse).
        copied_bytes: Bytes that crossing lanes and results will copy in one call, per design.
        notes: Sentences for ``explain``.
    """

    version: int
    graph: str
    strategy: str
    lanes: int
    events: int
    buffers: tuple[PlanBuffer, ...]
    instructions: tuple[Instruction, ...]
    scratch_bytes: int
    copied_bytes: int
    notes: tuple[str, ...] = ()
    cores: int = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What it runs, without what is between."""
        return tuple(i for i in self.instructions if isinstance(i, Launch))

    @property
    def lanes_used(self) -> frozenset[int]:
        """Lanes on which something is launched, the outer program's aside."""
        return frozenset(i.lane for i in self.launches if i.lane >= 0)

    @property
    def replaces(self) -> bool:
        """Whether something stands in a region's place: of that a plan holds no more than a name.

        So plans that are equal may do different things.
        """
        return any(i.replace for i in self.launches)

    @property
    def widths(self) -> dict[int, int]:
        """Cores of each lane that is used."""
        return {i.lane: i.width for i in self.launches if i.lane >= 0}

    @property
    def lane_width(self) -> int:
        """Cores of one lane, of the widest."""
        return max(self.widths.values(), default=1)

    @property
    def lane_cores(self) -> int:
        """Cores of all its lanes together."""
        return sum(self.widths.values())

    def cores_of(self, launch: Launch) -> int:
        """Cores that a launch has."""
        return launch.width if launch.lane >= 0 else max(1, self.cores)

    def stages(self) -> list[tuple[list[Launch | Record | Wait], Launch | None]]:
        """What lanes do, cut at outer launches: instructions, and the outer launch after them.

        The last stage has no outer launch after it.
        """
        stages: list[tuple[list[Launch | Record | Wait], Launch | None]] = [([], None)]
        for instruction in self.instructions:
            if isinstance(instruction, Launch) and instruction.lane < 0:
                stages[-1] = (stages[-1][0], instruction)
                stages.append(([], None))
            elif not isinstance(instruction, Slice | Merge):
                stages[-1][0].append(instruction)
        return stages

    def to_json(self) -> str:
        """JSON form; ``Plan.from_json`` reads it back, equal."""
        return msgspec.json.format(
            msgspec.json.encode(self, order="deterministic"), indent=1
        ).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan; raises ``PlanError`` for another version or a malformed text."""
        _readable(text)
        try:
            head = msgspec.json.decode(text)
        except _UNREADABLE as error:
            raise PlanError(
                f"a plan must be JSON; got text that does not parse: {error}"
            ) from error
        version = head.get("version") if isinstance(head, dict) else None
        if version != PLAN_VERSION:
            raise PlanError(
                f"this build reads plan version {PLAN_VERSION}; got version {version!r}. "
                "Make the plan again with this version of dynaflow_xla."
            )
        try:
            return msgspec.json.decode(text, type=cls)
        except _UNREADABLE as error:
            raise PlanError(f"malformed plan: {error}") from error

    def content_hash(self) -> str:
        """SHA-256 (hex) over the canonical JSON form."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def outline(self) -> str:
        """The text form without what is a frontend's own.

        That is the numbers of the graph's values, and the cores of a wide launch where there is none.
        One model written in two frameworks with the same marks has the same outline under the same
        strategy.
        """
        wide = any(i.width == 0 for i in self.launches)
        return re.sub(r" value=\d+" if wide else r" (?:value|cores)=\d+", "", self.to_text())

    def to_text(self) -> str:
        """Readable listing; ``Plan.from_text`` reads it back, equal."""
        return text_form.written(self)

    @classmethod
    def from_text(cls, text: str | bytes) -> Plan:
        """Reads the text form; raises ``PlanError`` with the line number if malformed."""
        _readable(text)
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return cls.from_json(msgspec.json.encode(text_form.read(text)))
        except PlanError:
            raise
        except _UNREADABLE as error:
            raise PlanError(f"malformed plan: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, with its version and a hash; whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        content = {"plan": msgspec.to_builtins(self)}
        private_files.replace(Path(path), private_files.sealed(content, PLAN_VERSION))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what ``save`` wrote. What it is a plan for is not known here: ``validate`` proves it.

        Raises:
            PlanError: the file is not as it was written, or of another version.
            OSError: it cannot be read.
        """
        try:
            found = private_files.opened(Path(path).read_bytes(), PLAN_VERSION)
            return msgspec.convert(found.get("plan"), cls)
        except (private_files.Broken, *_UNREADABLE) as error:
            raise PlanError(
                f"{os.fspath(path)} holds no plan that this build reads: {error}"
            ) from error

    def __str__(self) -> str:
        return self.to_text()
