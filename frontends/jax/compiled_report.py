"""What XLA:GPU made of a plan, beside what the plan asks for and what it makes of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynaflow_xla.frontends.jax import xla_dump
from dynaflow_xla.frontends.jax.collectives import Overlap, overlaps
from dynaflow_xla.frontends.jax.xla_backend import XlaEntry, scope_of
from dynaflow_xla.frontends.jax.xla_dump import Instruction, Thunk

REPORT_VERSION = 1

LOG_MODULES = xla_dump.LOG_MODULES

_KERNELS = frozenset({"kCustomKernel", "kKernel", "kFusion"})
_COPIES = frozenset({"kCopy", "kDeviceToDeviceCopy", "kMemcpyDeviceToDevice"})
_NOTHING = frozenset({"kMemzero", "kMemset32BitValue", "kSequential", "kAsyncDone"})


class RegionCode(msgspec.Struct, frozen=True):
    """What one region became.

    Attributes:
        name: Name of the region, "" for what is outside every region.
        lane: Its lane, -1 for an outer region.
        kernels: Kernels that XLA generated for it.
        library_calls: Names of calls into libraries, and of custom calls.
        shared_kernels: Kernels that hold operations of it and of another region.
    """

    name: str
    lane: int
    kernels: tuple[str, ...]
    library_calls: tuple[str, ...]
    shared_kernels: tuple[str, ...]


class Order(msgspec.Struct, frozen=True):
    """The plan's order beside the program's. Pairs are (earlier region, later region).

    Attributes:
        held: The plan's edges that every kernel of the two keeps. What communication waits for is
            the data that it reads, not the whole region that makes it.
        fused: Edges between regions that share all kernels of one: there is nothing left to order.
        broken: Edges that some kernel does not keep.
        parallel: Pairs that neither the plan nor the program orders.
        extra: Pairs that the plan leaves free and the program orders completely.
        partly: Pairs that the plan leaves free and whose kernels the program orders in part.
        merged: Pairs that the plan leaves free and for which one kernel makes results of both.
        conflicts: Edges of the CUDA graph that neither data nor the plan asks for, between regions
            that the plan leaves free: (kernel, its region, kernel that waits for it, its region).
            Mostly the second writes where a temporary of the first was.
    """

    held: tuple[tuple[str, str], ...]
    fused: tuple[tuple[str, str], ...]
    broken: tuple[tuple[str, str], ...]
    parallel: tuple[tuple[str, str], ...]
    extra: tuple[tuple[str, str], ...]
    partly: tuple[tuple[str, str], ...]
    merged: tuple[tuple[str, str], ...]
    conflicts: tuple[tuple[str, str, str, str], ...] = ()


class Program(msgspec.Struct, frozen=True):
    """One compiled program.

    Attributes:
        command_buffers: Number of commands in each CUDA graph.
        uncaptured: Steps outside of every CUDA graph.
        kernels, library_calls, copies: Counts of steps; ``copied_bytes`` is what the copies move.
        temp_bytes, argument_bytes, output_bytes, alias_bytes: XLA's memory analysis.
        peak_bytes: Arguments, results and temporaries, less what aliases.
    """

    compile_s: float
    command_buffers: tuple[int, ...]
    uncaptured: tuple[str, ...]
    kernels: int
    library_calls: int
    copies: int
    copied_bytes: int
    gates: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    peak_bytes: int


class CompiledReport(msgspec.Struct, frozen=True):
    """Result of ``dynaflow_xla.compile``.

    Attributes:
        version: Of this format.
        function, strategy, lanes: Of the plan.
        target: The GPU compiled for. No kernel was autotuned and nothing ran.
        jaxlib: Its version.
        options: XLA options of both programs.
        regions: What each region became.
        order: The plan's order beside the program's.
        scheduled, original: The two programs, compiled alike.
        notes: Sentences.
        collectives: The scheduled program's collectives, and what computes beside each.
    """

    version: int
    function: str
    strategy: str
    lanes: int
    target: str
    jaxlib: str
    options: dict[str, str]
    regions: tuple[RegionCode, ...]
    order: Order
    scheduled: Program
    original: Program
    notes: tuple[str, ...] = ()
    collectives: tuple[Overlap, ...] = ()

    @property
    def copies_added(self) -> int:
        """Copies that the original program does not make."""
        return self.scheduled.copies - self.original.copies

    @property
    def copied_bytes_added(self) -> int:
        """Bytes of copies that the original program does not make."""
        return self.scheduled.copied_bytes - self.original.copied_bytes

    def to_json(self) -> str:
        """JSON form."""
        return msgspec.json.format(
            msgspec.json.encode(self, order="deterministic"), indent=1
        ).decode()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class ReadProgram(msgspec.Struct, frozen=True):
    """What was read back of one program."""

    thunks: list[Thunk]
    instructions: dict[str, Instruction]
    order: xla_dump.GraphOrder
    result: dict[str, Any]


_MODE = "xla_gpu_command_buffer_scheduling_mode"


def read_program(
    folder: Path, log: str, result: dict[str, Any], options: dict[str, str]
) -> ReadProgram:
    """Reads one program's dump and log."""
    thunks, instructions = xla_dump.read_folder(folder)
    serial = options.get(_MODE) == "SERIALIZE"
    order = xla_dump.order_of(thunks, xla_dump.read_graphs(log), serial=serial)
    return ReadProgram(thunks, instructions, order, result)


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
    names = {scope_of(region.name): region.id for region in made.pg.regions}
    owned: dict[int, set[int]] = {}
    regions = []
    sharing: dict[int, set[int]] = {}  # leaf -> regions in it
    results: dict[int, set[int]] = {}  # leaf -> regions of its results
    for leaf in _leaves(scheduled):
        found = scheduled.instructions.get(leaf.name)
        if found is None or found.is_gate or leaf.kind in _NOTHING:
            continue
        if found.region in names:
            owned.setdefault(names[found.region], set()).add(id(leaf))
        sharing[id(leaf)] = {names[r] for r in {found.region, *found.held} if r in names}
        results[id(leaf)] = {names[r] for r in found.made if r in names}
    lanes = {launch.region: launch.lane for launch in made.order.launches}
    by_id = {id(leaf): leaf for leaf in _leaves(scheduled)}
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
    order = _order(made, owned, results, scheduled.order, by_id)
    notes = notes + _warnings(order, _program(scheduled), options)
    return CompiledReport(
        REPORT_VERSION,
        made.options.name,
        made.plan.strategy,
        made.plan.lanes,
        target,
        jaxlib,
        options,
        tuple(regions),
        order,
        _program(scheduled),
        _program(programs["original"]),
        tuple(notes),
        overlaps(
            scheduled.thunks,
            scheduled.instructions,
            computes,
            {scope: made.pg.regions[number].name for scope, number in names.items()},
        ),
    )


def _warnings(order: Order, program: Program, options: dict[str, str]) -> list[str]:
    """Sentences on what keeps the program from running as the plan says."""
    said = []
    if (order.extra or order.partly) and program.command_buffers:
        said.append(
            f"{len(order.extra) + len(order.partly)} pairs that the plan runs in parallel are put in an "
            f"order by the command buffers (mode {options.get(_MODE, 'of XLA')}): a serial mode, or "
            "temporaries that share memory"
        )
    if not program.command_buffers:
        said.append(
            "no command buffer was formed: every kernel is launched for itself, in one order"
        )
    elif program.uncaptured:
        said.append(
            f"{len(program.uncaptured)} steps are outside of the command buffers, which they split: "
            + ", ".join(program.uncaptured[:5])
        )
    if order.broken:
        said.append(f"{len(order.broken)} order edges of the plan are not in the program")
    if order.merged:
        said.append(
            f"XLA joined work of {len(order.merged)} pairs that should run in parallel in one kernel"
        )
    return said


def _leaves(program: ReadProgram) -> list[Thunk]:
    return [leaf for thunk in program.thunks for leaf in thunk.leaves()]


def _is_library(leaf: Thunk) -> bool:
    return leaf.kind not in _KERNELS | _COPIES | _NOTHING


def _order(
    made: XlaEntry,
    owned: dict[int, set[int]],
    results: dict[int, set[int]],
    graph: xla_dump.GraphOrder,
    leaves: dict[int, Thunk],
) -> Order:
    before = graph.before
    name = {region.id: region.name for region in made.pg.regions}
    fields = [field for field in Order.__struct_fields__ if field != "conflicts"]
    sets: dict[str, list[tuple[str, str]]] = {field: [] for field in fields}
    inner = [launch.region for launch in made.order.launches if launch.lane >= 0]
    by_data = {region.id for region in made.pg.regions if region.resource == "network"}
    for second in inner:
        for first in sorted({*made.order.direct[second], *made.order.data[second]}):
            pair = (name[first], name[second])
            ones, others = owned.get(first, set()), owned.get(second, set())
            if not ones or not others:
                sets["fused"].append(pair)
            elif second in by_data and first in made.order.data[second]:
                sets["held"].append(pair)
            elif all(a == b or a in before[b] for a in ones for b in others):
                sets["held"].append(pair)
            else:
                sets["broken"].append(pair)
    for position, second in enumerate(inner):
        for first in inner[:position]:
            if made.order.before(first, second) or made.order.before(second, first):
                continue
            pair = (name[first], name[second])
            ones, others = owned.get(first, set()), owned.get(second, set())
            if any({first, second} <= results.get(leaf, set()) for leaf in ones | others):
                sets["merged"].append(pair)
            ordered = [
                1 if a in before[b] else -1 if b in before[a] else 0
                for a in ones
                for b in others
                if a != b
            ]
            if ordered and (all(o == 1 for o in ordered) or all(o == -1 for o in ordered)):
                sets["extra"].append(pair if ordered[0] == 1 else pair[::-1])
            elif any(ordered):
                sets["partly"].append(pair)
            elif ordered:
                sets["parallel"].append(pair)
    region_of = {leaf: region for region, mine in owned.items() for leaf in mine}
    conflicts = []
    for leaf, waits in graph.edges.items():
        for other in waits:
            a, b = region_of.get(other), region_of.get(leaf)
            if a is None or b is None or a == b:
                continue
            if not made.order.before(a, b) and b not in results[other]:
                conflicts.append((leaves[other].name, name[a], leaves[leaf].name, name[b]))
    found = {field: tuple(pairs) for field, pairs in sets.items()}
    return Order(**found, conflicts=tuple(conflicts))


def _program(program: ReadProgram) -> Program:
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
    return Program(
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
    )


def _walk(thunks: list[Thunk]) -> list[Thunk]:
    return [t for thunk in thunks for t in (thunk, *_walk(thunk.children))]


def _lines(report: CompiledReport) -> list[str]:
    lines = [
        f"{report.function}: strategy {report.strategy}, compiled for {report.target} by jaxlib "
        f"{report.jaxlib} (not autotuned, not run)",
        "options: " + ", ".join(f"{k}={v}" for k, v in sorted(report.options.items())),
    ]
    rows = [("region", "lane", "kernels", "library calls", "shared with others")]
    for region in report.regions:
        rows.append(
            (
                region.name,
                "outer" if region.lane < 0 else str(region.lane),
                str(len(region.kernels)),
                str(len(region.library_calls)),
                str(len(region.shared_kernels)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    order = report.order
    lines.append(
        f"order edges of the plan: {len(order.held)} held, {len(order.fused)} fused away, "
        f"{len(order.broken)} broken"
    )
    lines += [f"  broken: {a} before {b}" for a, b in order.broken]
    lines.append(
        f"free pairs of the plan: {len(order.parallel)} parallel, {len(order.partly)} partly ordered, "
        f"{len(order.extra)} serialised, {len(order.merged)} with a common kernel"
    )
    lines += [f"  serialised: {a} before {b}" for a, b in order.extra]
    lines += [
        f"  {kernel} ({a}) before {waits} ({b}): no data, no edge of the plan"
        for kernel, a, waits, b in order.conflicts
    ]
    for one in report.collectives:
        beside = ", ".join(f"{n} kernels of {region}" for region, n in one.beside.items())
        lines.append(f"{one.name} ({one.region}) runs beside {beside or 'nothing'}")
    for which, program in (("scheduled", report.scheduled), ("original", report.original)):
        lines.append(
            f"{which}: CUDA graphs {list(program.command_buffers)}, kernels {program.kernels}, library "
            f"calls {program.library_calls}, copies {program.copies} ({program.copied_bytes} bytes), "
            f"steps outside graphs {len(program.uncaptured)}, temporaries {program.temp_bytes} bytes, "
            f"peak {program.peak_bytes} bytes, gates {program.gates}"
        )
    return lines + [f"note: {note}" for note in report.notes]
