"""The text of a compiled HLO program, line by line: nothing inside a computation is passed over.

XLA writes an instruction as ``ROOT %name = SHAPE opcode(OPERANDS), ATTRIBUTES``. Shapes nest, hold layouts
with parentheses of their own, and number every fifth member in a comment (``/*index=5*/``), so brackets are
matched and quoted text is skipped, instead of looking for the next bracket or comma.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dynaflow_xla.errors import EngineError


class DumpError(EngineError):
    """What XLA wrote does not look as this version of dynaflow_xla expects."""


@dataclass(frozen=True)
class Line:
    """An instruction as it is written.

    Attributes:
        root: Whether it is the result of its computation.
        name: Its name, without ``%``.
        shape: What it gives, without comments.
        opcode: What it does.
        operands: Names of what it reads; none of a parameter or constant.
        attributes: What follows the operands.
    """

    root: bool
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, name: str) -> str:
        """An attribute that is quoted text, such as a custom call's target; "" without."""
        return _quoted(rf"(?<![\w.]){name}=", self.attributes)

    @property
    def op_name(self) -> str:
        """The name of the user's operation, with its scopes; "" without."""
        return self.attribute("op_name")

    def computations(self, *attributes: str) -> Iterator[str]:
        """Names of the computations that these attributes name, one or several in braces."""
        for attribute in attributes:
            for found in re.finditer(
                rf"(?<![\w.]){attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes
            ):
                for name in found[1].strip("{}").split(","):
                    if name.strip():
                        yield name.strip().lstrip("%")


_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)?(?: -> .*)? \{$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_WITHOUT_OPERANDS = frozenset(
    {"constant", "parameter", "iota", "infeed", "rng-get-and-update-state"}
)
_OPEN, _CLOSE = "([{", ")]}"


def read(text: str) -> dict[str, list[Line]]:
    """By name of a computation, every instruction of a compiled program.

    Raises:
        DumpError: a line inside a computation is no instruction that this version can read.
    """
    computations: dict[str, list[Line]] = {}
    current: list[Line] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if current is None:
            if found := _HEAD.match(line):  # tables of files and frames stand outside, too
                current = computations.setdefault(found[2], [])
        elif line.startswith("}"):
            current = None
        elif line.strip():
            made = instruction(line)
            if made is None:
                raise DumpError(
                    f"line {number} of a compiled program is no instruction that this version of "
                    f"dynaflow_xla can read: {line.strip()[:200]!r}"
                )
            current.append(made)
    return computations


def instruction(line: str) -> Line | None:
    """One line; None if it is no instruction."""
    named = _NAME.match(line)
    if named is None:
        return None
    end = _shape_end(line, named.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _matching(line, opcode.end() - 1)
    if close < 0:
        return None
    operands: tuple[str, ...] = ()
    if opcode[1] not in _WITHOUT_OPERANDS:
        parts = _split(_COMMENT.sub("", line[opcode.end() : close]))
        operands = tuple(part.split()[-1].lstrip("%") for part in parts)
    shape = _COMMENT.sub("", line[named.end() : end]).strip()
    return Line(bool(named[1]), named[2], shape, opcode[1], operands, line[close + 1 :])


def _shape_end(line: str, start: int) -> int:
    """Where a shape ends: at its bracket, or at the space behind an array's type and layout."""
    if line.startswith("(", start):
        return _matching(line, start) + 1
    depth = 0
    for place in range(start, len(line)):
        if line[place] in _OPEN:
            depth += 1
        elif line[place] in _CLOSE:
            depth -= 1
        elif line[place] == " " and depth == 0:
            return place
    return len(line)


def _matching(line: str, start: int) -> int:
    """The bracket that closes the one at ``start``; -1 if there is none."""
    depth, place = 0, start
    while place < len(line):
        char = line[place]
        if char == '"':
            place = _end_of_quoted(line, place)
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return -1


def _end_of_quoted(line: str, start: int) -> int:
    place = start + 1
    while place < len(line) and line[place] != '"':
        place += 2 if line[place] == "\\" else 1
    return place


def _split(operands: str) -> list[str]:
    """What stands between commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(operands):
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth == 0:
            parts.append(operands[start:place])
            start = place + 1
    return [part for part in (*parts, operands[start:]) if part.strip()]


def _quoted(before: str, text: str) -> str:
    found = re.search(rf'{before}"((?:[^"\\]|\\.)*)"', text)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([^\]]*)\]")
_BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4,
    "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all members of a tuple.

    Raises:
        DumpError: an element type is not known.
    """
    total = 0
    for name, dimensions in _ARRAY.findall(shape):
        bits = 8 if name.startswith("f8") else _BITS.get(name)
        if bits is None:
            raise DumpError(f"the element type {name!r} in {shape[:100]!r} is not known")
        sizes = (int(d.strip().removeprefix("<=")) for d in dimensions.split(",") if d)
        total += -(-math.prod(sizes) * bits // 8)
    return total


def aliases(header: str) -> dict[int, int]:
    """Results that are written over an argument: number of the result -> number of the argument.

    Raises:
        DumpError: one of them is written in another way than known.
    """
    found = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", header)
    if len(found) != len(re.findall(r"-alias\)", header)):
        raise DumpError(
            f"which results are written over arguments cannot be read: {header[:300]!r}"
        )
    return {int(result or 0): int(argument) for result, argument in found}
