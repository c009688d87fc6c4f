"""Everything that reads bytes which somebody else may have written, with examples that are read well."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.machine import figures
from dynaflow_xla.planning.plan import PLAN_VERSION, Plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.tuning import autotune


@dataclass(frozen=True)
class Decoder:
    """One of them.

    Attributes:
        name: For messages.
        examples: What it reads.
        decode: From bytes; takes a folder of its own, too.
        errors: What it may raise.
    """

    name: str
    examples: tuple[bytes, ...]
    decode: Callable[[bytes, Path], Any]
    errors: tuple[type[Exception], ...]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass" if data[:1] == b"{" else "replace")


def _loose(read: Callable[[Any], Any]) -> Callable[[bytes, Path], Any]:
    """As bytes, or where they are text as that."""

    def decode(data: bytes, _: Path) -> Any:
        try:
            text: str | bytes = _text(data)
        except UnicodeDecodeError:
            text = data
        return read(text)

    return decode


def _from_file(data: bytes, folder: Path) -> Any:
    path = folder / "a.plan"
    path.write_bytes(data)
    return Plan.load(path)


def _decision(data: bytes, folder: Path) -> Any:
    path = folder / "k.json"
    path.write_bytes(data)
    before = private_files.cache_folder
    private_files.cache_folder = lambda: folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return autotune.load("k")
    finally:
        private_files.cache_folder = before


DECISION = {
    "choice": "Branches(lanes=2)", "reason": "it was quicker", "medians_ms": {"original": 2.0, "b": 1.5},
    "predicted_ms": {"b": 1.4}, "left_out": {"c": "slow"}, "seconds": 1.25,
    "costs": {"region_ns": {"sort": 12.0}, "scale": 1.0},
}  # fmt: skip


MEASURED = dataclasses.asdict(
    dataclasses.replace(figures.ASSUMED, speeds={"jax products": 0.9}, measured="2026-11-23")
)


def _sealed_numbers(changed: dict[str, Any]) -> bytes:
    return private_files.sealed(MEASURED | changed, figures.VERSION)


def _numbers(data: bytes, folder: Path) -> Any:
    """What a machine's file is taken for: itself, or what is assumed."""
    before = private_files.cache_folder
    private_files.cache_folder = lambda: folder
    try:
        figures.path(("a",)).write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return figures.kept(("a",))
    finally:
        private_files.cache_folder = before


def _content(data: bytes, _: Path) -> Any:
    found = json.loads(data)
    return figures.checked(found)


def decoders(plan: Plan, timeline: Timeline, pg: PartitionedGraph) -> tuple[Decoder, ...]:
    """All of them, with these as examples."""
    whole = json.loads(plan.to_json())
    json_plan = (plan.to_json().encode(), json.dumps(whole, indent=None).encode())
    file_plan = private_files.sealed({"plan": whole}, PLAN_VERSION)
    decision = private_files.sealed(DECISION, autotune.CACHE_VERSION)
    ours = (DynaflowError,)
    return (
        Decoder("plan, JSON", json_plan, _loose(Plan.from_json), ours),
        Decoder("plan, JSON bytes", json_plan, lambda data, _: Plan.from_json(data), ours),
        Decoder(
            "plan, proved", json_plan, lambda data, _: validate(Plan.from_json(data), pg) or True, ours
        ),
        Decoder("plan, text", (plan.to_text().encode(),), _loose(Plan.from_text), ours),
        Decoder("plan, file", (file_plan,), _from_file, ours),
        Decoder(
            "timeline, JSON", (timeline.to_json().encode(),), _loose(Timeline.from_json), ours
        ),
        Decoder("decision, file", (decision,), _decision, ()),
        Decoder("machine, file", (_sealed_numbers({}),), _numbers, ()),
        Decoder("machine, content", (json.dumps(MEASURED).encode(),), _content, (ValueError, RecursionError)),
        Decoder(
            "sealed file", (decision,),
            lambda data, _: private_files.opened(data, autotune.CACHE_VERSION),
            (private_files.Broken,),
        ),
    )  # fmt: skip


_TOKENS = (
    b"null", b"[]", b"{}", b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b'"\\ud800"', b"\xff",
    b"\x00",
    b"[" * 3000, b'{"a":' * 3000, b"true", b'""', b"\xed\xa0\x80", b"version=", b"launch ", b"=", b"\n",
)  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut, repeated, or replaced by what decoders stumble over."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(made) + 1)
        length = draw.choice((0, 1, 1, 3, 10, 100))
        how = draw.randrange(6)
        if how == 0:
            del made[at:]
        elif how == 1:
            made[at : at + length] = draw.choice(_TOKENS)
        elif how == 2 and at < len(made):
            made[at] = draw.randrange(256)
        elif how == 3:
            del made[at : at + length]
        elif how == 4:
            made[at:at] = made[at : at + length * 3]
        else:
            digits = [n for n, c in enumerate(made) if 48 <= c < 58]
            if digits:
                made[draw.choice(digits)] = draw.choice(b"0123456789-.e")
        if not made:
            break
    return bytes(made)


def crash(decoder: Decoder, data: bytes, folder: Path) -> str:
    """What is wrong with what a decoder did, or ""."""
    try:
        decoder.decode(data, folder)
    except decoder.errors:
        return ""
    except BaseException as error:
        return f"{decoder.name}: {type(error).__name__}: {error}"[:300]
    return ""
