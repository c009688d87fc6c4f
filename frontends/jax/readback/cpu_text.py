"""What XLA made of a plan for this CPU; what only a GPU's program could tell is said to be missing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dynaflow_xla.frontends.jax.adapters.lifted import looks_inside
from dynaflow_xla.frontends.jax.readback import xla_dump

_CANNOT = (
    "On a CPU the plan's order is not kept: gates are nothing there, and there are no streams and no command "
    "buffers to read back. For those give a target, no GPU is needed: "
    "schedule(..., target='nvidia-h200'), then explain(deep=True)."
)
_FREE = frozenset("parameter constant bitcast tuple get-tuple-element iota broadcast".split())


@looks_inside
def text(fast: Any, args: Any, kwargs: Any) -> str:
    """The account of ``explain(deep=True)`` without a GPU and without a target."""
    programs = {
        "scheduled": fast.planning(args, kwargs).lower(*args, **kwargs).compile(),
        "original": fast.original.lower(*args, **kwargs).compile(),
    }
    lines = ["compiled for this CPU, which is not what the plan is for:"]
    regions: Counter[tuple[str, str]] = Counter()
    totals: dict[str, Counter[str]] = {}
    for which, compiled in programs.items():
        totals[which] = Counter()
        for found in xla_dump.read_instructions(compiled.as_text() or "").values():
            if found.inside or found.opcode in _FREE:
                continue
            kind = _kind(found)
            totals[which][kind] += 1
            totals[which]["copied bytes"] += found.bytes if kind == "copies" else 0
            if which == "scheduled" and found.region:
                regions[found.region, kind] += 1
    for region in dict.fromkeys(name for name, _ in regions):
        counts = {kind: n for (name, kind), n in regions.items() if name == region}
        lines.append(
            f"  {region}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        )
    for which, compiled in programs.items():
        memory = compiled.memory_analysis()
        peak = (
            memory.temp_size_in_bytes
            + memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        counts = totals[which]
        lines.append(
            f"{which}: fusions {counts['fusions']}, library calls {counts['library calls']}, other operators "
            f"{counts['other operators']}, copies {counts['copies']} ({counts['copied bytes']} bytes), "
            f"temporaries {memory.temp_size_in_bytes} bytes, peak {peak} bytes"
        )
    return "\n".join([*lines, _CANNOT])


def _kind(found: xla_dump.Instruction) -> str:
    if found.is_copy:
        return "copies"
    kinds = {"fusion": "fusions", "custom-call": "library calls"}
    return kinds.get(found.opcode, "other operators")
