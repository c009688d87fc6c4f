"""What XLA:GPU made of a plan, beside what the plan asks for and what it makes of the original."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dynaflow_xla.frontends.jax.readback import xla_dump
from dynaflow_xla.frontends.jax.readback.collectives_read import overlaps, unordered
from dynaflow_xla.frontends.jax.readback.compiled_order import OrderReport, compare, that_compute
from dynaflow_xla.frontends.jax.readback.report import (
    REPORT_VERSION,
    CompiledReport,
    LoopReport,
    MarkKernels,
    ProgramReport,
    RegionCode,
)
from dynaflow_xla.frontends.jax.readback.xla_dump import Instruction, Thunk
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry, scope_of

LOG_MODULES = xla_dump.LOG_MODULES

_KERNELS = frozenset({"kCustomKernel", "kKernel", "kFusion"})
_COPIES = frozenset({"kCopy", "kDeviceToDeviceCopy", "kMemcpyDeviceToDevice"})
_NOTHING = frozenset({"kMemzero", "kMemset32BitValue", "kSequential", "kAsyncDone"})

_FILLING = frozenset({"broadcast", "constant", "iota", "bitcast", "parameter"})


class ReadProgram(msgspec.Struct, frozen=True):
    """What was read back of one program."""

    thunks: list[Thunk]
    instructions: dict[str, Instruction]
    order: xla_dump.GraphOrder
    result: dict[str, Any]
    aliases: dict[int, int]


_MODE = "xla_gpu_command_buffer_scheduling_mode"


def read_program(
    folder: Path, log: str, result: dict[str, Any], options: dict[str, str]
) -> ReadProgram:
    """Reads one program's dump and log."""
    thunks, instructions = xla_dump.read_folder(folder)
    serial = options.get(_MODE) == "SERIALIZE"
    order = xla_dump.order_of(thunks, xla_dump.read_graphs(log), serial=serial)
    aliases = xla_dump.read_aliases((folder / "compiled.txt").read_text())
    return ReadProgram(thunks, instructions, order, result, aliases)


def make(
    made: XlaEntry,
    programs: dict[str, ReadProgram],
    *,
    target: str,
    options: dict[str, str],
    jaxlib: str,
    notes: list[str],
) -> CompiledReport:
    """Compares a plan with its compiled program."""
    scheduled = programs["scheduled"]
    regions, order, computes = _compare(made, scheduled, "", scheduled.aliases)
    bodies = [
        LoopReport(
            name, entry.plan.strategy, entry.plan.lanes, *_compare(entry, scheduled, name, {})[:2]
        )
        for name, entry in _bodies(made, "")
    ]
    network = {r.name for r in made.pg.regions if r.resource == "network"}
    for each in (order, *(body.order for body in bodies)):
        notes = notes + _order_notes(each, _program(scheduled), options, network)
    notes = notes + unordered(scheduled.thunks, scheduled.order.before)
    plain = programs.get("plain")
    return CompiledReport(
        REPORT_VERSION,
        made.options.name,
        made.plan.strategy,
        made.plan.lanes,
        target,
        jaxlib,
        options,
        regions,
        order,
        _program(scheduled),
        _program(programs["original"]),
        tuple(dict.fromkeys(notes + _warnings(_program(scheduled)))),
        tuple(bodies),
        None if plain is None else _program(plain),
        _mark_kernels(made, scheduled, programs["original"]),
        overlaps(
            scheduled.thunks,
            scheduled.instructions,
            computes,
            {scope_of(region.name): region.name for region in made.pg.regions},
            scheduled.order.before,
        ),
    )


def _mark_kernels(
    made: XlaEntry, scheduled: ReadProgram, original: ReadProgram
) -> tuple[MarkKernels, ...]:
    nanos: dict[str, set[int]] = {}
    marked: dict[str, str] = {}  # region, as in the program -> its mark, if it has one
    for prefix, entry in [("", made), *_bodies(made, "")]:
        for region in entry.pg.regions:
            found = {op.mark.name for i in region.ops if (op := entry.pg.graph.ops[i]).mark}
            for name in found:
                nanos.setdefault(name, set()).add(region.nano)
            if len(found) == 1:
                marked[prefix + scope_of(region.name)] = found.pop()
    counts: list[Counter[str]] = []
    for program in (scheduled, original):
        counts.append(Counter())
        for leaf in _leaves(program):
            step = program.instructions.get(leaf.name)
            if step is None or leaf.kind in _COPIES | _NOTHING:
                continue
            if not (step.is_gate or step.is_copy or _is_fill(step, program)):
                counts[-1].update(_marks_of(step, marked))
    return tuple(
        MarkKernels(name, len(nanos[name]), counts[0][name], counts[1][name])
        for name in sorted(nanos)
    )


def _marks_of(step: Instruction, marked: dict[str, str]) -> list[str]:
    """The marks of a step: of its region; outside of all, of the regions that end in it; else its own.

    Operators lose the mark around a nested call in a capture, not the region.
    """
    if step.region in marked:
        return [marked[step.region]]
    return [marked[path] for path in step.ends if path in marked] or [step.mark]


def _bodies(made: XlaEntry, prefix: str) -> list[tuple[str, XlaEntry]]:
    found = []
    for name, entry in made.bodies():
        found += [(prefix + name, entry), *_bodies(entry, prefix + name)]
    return found


def _compare(
    made: XlaEntry, program: ReadProgram, prefix: str, aliases: dict[int, int]
) -> tuple[tuple[RegionCode, ...], OrderReport, dict[int, str]]:
    """What became of the regions of a plan and of its order, and the region of each step that computes.

    ``prefix``: see ``xla_dump.region_of``.
    """
    names = {scope_of(region.name): region.id for region in made.pg.regions}

    def ids(paths: Iterable[str]) -> set[int]:
        local = (path[len(prefix) :].split("/")[0] for path in paths if path.startswith(prefix))
        return {names[name] for name in local if name in names}

    owned: dict[int, set[int]] = {}
    sharing: dict[int, set[int]] = {}  # leaf -> regions in it
    results: dict[int, set[int]] = {}  # leaf -> regions of its results
    by_id = {id(leaf): leaf for leaf in _leaves(program)}
    for number, leaf in by_id.items():
        found = program.instructions.get(leaf.name)
        if found is None or found.is_gate or leaf.kind in _NOTHING or _is_fill(found, program):
            continue
        for region_id in ids([found.region]):
            owned.setdefault(region_id, set()).add(number)
        sharing[number] = ids([found.region, *found.held])
        results[number] = ids(found.made)
    lanes = {launch.region: launch.lane for launch in made.order.launches}
    streams = _streams(program)
    regions = []
    for region in made.pg.regions:
        mine = [by_id[n] for n in by_id if n in owned.get(region.id, ())]
        regions.append(
            RegionCode(
                region.name,
                lanes[region.id],
                tuple(leaf.name for leaf in mine if leaf.kind in _KERNELS),
                tuple(leaf.name for leaf in mine if _is_library(leaf)),
                tuple(
                    by_id[n].name for n, who in sharing.items() if region.id in who and len(who) > 1
                ),
                sum(_moved_bytes(leaf, program) for leaf in mine),
                tuple(sorted({streams[id(leaf)] for leaf in mine if id(leaf) in streams})),
            )
        )
    computes = {
        leaf: made.pg.regions[region].name
        for region, mine in owned.items()
        for leaf in mine
        if by_id[leaf].kind in _KERNELS or _is_library(by_id[leaf])
    }
    for region in made.pg.regions:
        # Of communication the collectives count, not what moves their data to and fro.
        if region.resource == "network" and (steps := owned.get(region.id)):
            owned[region.id] = {n for n in steps if _is_library(by_id[n])} or steps
    known = {n: found for n, x in by_id.items() if (found := program.instructions.get(x.name))}
    products = {n for n, step in known.items() if _multiplies(step)}
    layouts = {n for n, step in known.items() if step.is_layout}
    reads = _reads(program, by_id)
    owned = {region: that_compute(mine, layouts, reads) for region, mine in owned.items()}
    order = compare(made, owned, sharing, results, program.order, by_id, aliases, reads, products)
    return tuple(regions), order, computes


def _multiplies(step: Instruction) -> bool:
    library = step.target.startswith(("__cublas", "__cudnn"))
    return library or not {"dot", "convolution"}.isdisjoint({step.opcode, *step.body})


def _reads(program: ReadProgram, leaves: dict[int, Thunk]) -> dict[int, set[int]]:
    """For each step those whose results it needs, directly or not; what a gate waits for is no need."""
    numbers: dict[str, set[int]] = {}
    for number, leaf in leaves.items():
        numbers.setdefault(leaf.name, set()).add(number)
    known: dict[str, set[int]] = {}

    def of(name: str) -> set[int]:
        if name not in known:
            known[name] = set()
            step = program.instructions.get(name)
            if step is not None and not step.is_gate:
                for operand in step.operands:
                    known[name] |= numbers.get(operand, set()) | of(operand)
        return known[name]

    # XLA lists what is computed before what reads it: nothing is deep that is asked for in this order.
    for name in program.instructions:
        of(name)
    return {number: of(leaf.name) for number, leaf in leaves.items()}


def _is_fill(found: Instruction, program: ReadProgram) -> bool:
    """Whether a step fills memory with a constant: nothing orders that, and nothing need."""
    return (
        found.opcode == "fusion"
        and found.body <= _FILLING
        and all(
            program.instructions[name].opcode == "constant"
            for name in found.operands
            if name in program.instructions
        )
    )


def _moved_bytes(leaf: Thunk, program: ReadProgram) -> int:
    known = program.instructions
    found = known[leaf.name]
    return found.bytes + sum(known[name].bytes for name in found.operands if name in known)


def _streams(program: ReadProgram) -> dict[int, str]:
    """The stream of each step that has one of its own."""
    found: dict[int, str] = {}
    for thunk in _walk(program.thunks):
        if stream := re.search(r"stream=(\w+\[\d+\])", thunk.text):
            found.update((id(leaf), stream[1]) for leaf in thunk.leaves())
    return found


def _order_notes(
    order: OrderReport, program: ProgramReport, options: dict[str, str], network: set[str]
) -> list[str]:
    """Sentences on where the program's order is not the plan's; ``network``: regions that communicate."""
    said = []
    ordered = [*order.extra, *order.partly]
    beside = [pair for pair in ordered if not network.isdisjoint(pair)]
    if beside:
        said.append(
            f"{len(beside)} free pairs of a collective and a region are in order in part: XLA waits for a "
            "collective once what it has put beside it takes long enough"
        )
    if len(ordered) > len(beside) and program.command_buffers:
        said.append(
            f"{len(ordered) - len(beside)} pairs that the plan runs in parallel are put in an "
            f"order by the command buffers (mode {options.get(_MODE, 'of XLA')}): a serial mode, or "
            "temporaries that share memory"
        )
    if order.broken:
        said.append(f"{len(order.broken)} order edges of the plan are not in the program")
    if order.merged:
        said.append(
            f"XLA joined work of {len(order.merged)} pairs that should run in parallel in one kernel"
        )
    return said


def _warnings(program: ProgramReport) -> list[str]:
    """Sentences on what keeps the program from being one CUDA graph."""
    said = []
    if not program.command_buffers:
        said.append(
            "no command buffer was formed: every kernel is launched for itself, in one order"
        )
    elif program.uncaptured:
        said.append(
            f"{len(program.uncaptured)} steps are outside of the command buffers, which they split: "
            + ", ".join(program.uncaptured[:5])
        )
    return said


def _leaves(program: ReadProgram) -> list[Thunk]:
    return [leaf for thunk in program.thunks for leaf in thunk.leaves()]


def _is_library(leaf: Thunk) -> bool:
    return leaf.kind not in _KERNELS | _COPIES | _NOTHING


def _program(program: ReadProgram) -> ProgramReport:
    leaves = _leaves(program)
    copies: dict[str, int] = {}
    gates = kernels = library = 0
    for leaf in leaves:
        found = program.instructions.get(leaf.name)
        if found is not None and found.is_gate:
            gates += 1
        elif leaf.kind in _COPIES or (found is not None and found.is_copy):
            copies[leaf.name or str(leaf.number)] = found.bytes if found is not None else 0
        elif leaf.kind in _KERNELS:
            kernels += 1
        elif leaf.kind not in _NOTHING:
            library += 1
    buffers = [t for t in _walk(program.thunks) if t.kind == "kCommandBuffer"]
    inside = {id(leaf) for t in buffers for leaf in t.leaves()}
    result = program.result
    return ProgramReport(
        compile_s=result["compile_s"],
        command_buffers=tuple(len(t.children) for t in buffers),
        uncaptured=tuple(f"{x.kind} {x.name}".strip() for x in leaves if id(x) not in inside),
        kernels=kernels,
        library_calls=library,
        copies=len(copies),
        copied_bytes=sum(copies.values()),
        gates=gates,
        temp_bytes=result["temp_bytes"],
        argument_bytes=result["argument_bytes"],
        output_bytes=result["output_bytes"],
        alias_bytes=result["alias_bytes"],
        peak_bytes=result["temp_bytes"]
        + result["argument_bytes"]
        + result["output_bytes"]
        - result["alias_bytes"],
        streams=tuple(sorted(set(_streams(program).values()))),
    )


def _walk(thunks: list[Thunk]) -> list[Thunk]:
    return [t for thunk in thunks for t in (thunk, *_walk(thunk.children))]
