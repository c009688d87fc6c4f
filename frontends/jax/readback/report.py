"""The report about a compiled program: what it says, and its text."""

from __future__ import annotations

import msgspec

from dynaflow_xla.frontends.jax.readback.collectives_read import Overlap
from dynaflow_xla.frontends.jax.readback.compiled_order import OrderReport

REPORT_VERSION = 1


class RegionCode(msgspec.Struct, frozen=True):
    """What one region became.

    Attributes:
        name: Name of the region, "" for what is outside every region.
        lane: Its lane, -1 for an outer region.
        kernels: Kernels that XLA generated for it.
        library_calls: Names of calls into libraries, and of custom calls.
        shared_kernels: Kernels that hold operations of it and of another region.
        bytes: What its steps read and write.
        streams: Of those of its steps that XLA started on a stream of their own.
    """

    name: str
    lane: int
    kernels: tuple[str, ...]
    library_calls: tuple[str, ...]
    shared_kernels: tuple[str, ...]
    bytes: int = 0
    streams: tuple[str, ...] = ()


class LoopReport(msgspec.Struct, frozen=True):
    """What the body of a loop became.

    Attributes:
        name: The region that the loop is in, and the loop's operator.
        strategy, lanes: Of the plan of the body.
        regions, order: As of the report.
    """

    name: str
    strategy: str
    lanes: int
    regions: tuple[RegionCode, ...]
    order: OrderReport


class MarkKernels(msgspec.Struct, frozen=True):
    """Kernels and library calls of what a mark (``dfx.mark``) names, in both programs.

    Attributes:
        name: Of the mark.
        nano_batches: In how many nano-batches its regions run.
        scheduled, original: Number of steps; fusion is kept where the first is the second times the
            nano-batches. A kernel that puts the results of several regions together counts for each.
    """

    name: str
    nano_batches: int
    scheduled: int
    original: int


class ProgramReport(msgspec.Struct, frozen=True):
    """One compiled program.

    Attributes:
        compile_s: Seconds that XLA took; a first program in its process takes longer.
        command_buffers: Number of commands in each CUDA graph.
        uncaptured: Steps outside of every CUDA graph.
        kernels, library_calls, copies: Counts of steps; ``copied_bytes`` is what the copies move.
        temp_bytes, argument_bytes, output_bytes, alias_bytes: XLA's memory analysis.
        peak_bytes: Arguments, results and temporaries, less what aliases.
        streams: Those that its steps are on, besides the main one.
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
    streams: tuple[str, ...] = ()


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
        bodies: Loops whose bodies have a plan of their own.
        plain: The original without any of the options, if it was asked for.
        marks: What each mark became in both programs.
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
    order: OrderReport
    scheduled: ProgramReport
    original: ProgramReport
    notes: tuple[str, ...] = ()
    bodies: tuple[LoopReport, ...] = ()
    plain: ProgramReport | None = None
    marks: tuple[MarkKernels, ...] = ()
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


def _lines(report: CompiledReport) -> list[str]:
    """The report, line by line."""
    said = [
        f"{report.function}: strategy {report.strategy}, compiled for {report.target} by jaxlib "
        f"{report.jaxlib} (not autotuned, not run)",
        "options: " + ", ".join(f"{k}={v}" for k, v in sorted(report.options.items())),
    ]
    said += _plan_lines(report.regions, report.order)
    for body in report.bodies:
        said.append(f"body of the loop {body.name[:-1]}: strategy {body.strategy}")
        said += ["  " + line for line in _plan_lines(body.regions, body.order)]
    for one in report.collectives:
        beside = ", ".join(f"{n} kernels of {region}" for region, n in one.beside.items())
        said.append(f"{one.name} ({one.region}) runs beside {beside or 'nothing'}")
    said += [
        f"mark {mark.name}: {mark.scheduled} steps in {mark.nano_batches} nano-batches, the original "
        f"has {mark.original}"
        for mark in report.marks
    ]
    programs = {"scheduled": report.scheduled, "original": report.original, "plain": report.plain}
    for which, program in programs.items():
        if program is None:
            continue
        said.append(
            f"{which}: CUDA graphs {list(program.command_buffers)}, kernels {program.kernels}, library "
            f"calls {program.library_calls}, copies {program.copies} ({program.copied_bytes} bytes), "
            f"steps outside graphs {len(program.uncaptured)}, temporaries {program.temp_bytes} bytes, "
            f"peak {program.peak_bytes} bytes, gates {program.gates}, streams besides the main one: "
            f"{', '.join(program.streams) or 'none'}"
        )
    return said + [f"note: {note}" for note in report.notes]


def _plan_lines(regions: tuple[RegionCode, ...], order: OrderReport) -> list[str]:
    rows = [
        ("region", "lane", "kernels", "library calls", "MB moved", "shared with others", "streams")
    ]
    for region in regions:
        rows.append(
            (
                region.name,
                "outer" if region.lane < 0 else str(region.lane),
                str(len(region.kernels)),
                str(len(region.library_calls)),
                f"{region.bytes / 1e6:.2f}",
                str(len(region.shared_kernels)),
                ",".join(region.streams) or "main",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append(
        f"order edges of the plan: {len(order.held)} held, {len(order.fused)} fused away, "
        f"{len(order.broken)} broken"
    )
    lines += [f"  broken: {a} before {b}" for a, b in order.broken]
    lines.append(
        f"free pairs of the plan: {len(order.parallel)} parallel, {len(order.partly)} partly ordered, "
        f"{len(order.extra)} serialised, {len(order.merged)} with a common kernel, "
        f"{len(order.donated)} ordered by donation, {len(order.common)} that share a kernel's result"
    )
    lines += [f"  serialised: {a} before {b}" for a, b in order.extra]
    return lines + [
        f"  {kernel} ({a}) before {waits} ({b}): no data, no edge of the plan"
        for kernel, a, waits, b in order.conflicts
    ]
