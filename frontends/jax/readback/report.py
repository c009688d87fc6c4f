"""The text of a compiled program's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaflow_xla.frontends.jax.readback.compiled_order import Order
    from dynaflow_xla.frontends.jax.readback.compiled_report import CompiledReport, RegionCode


def lines(report: CompiledReport) -> list[str]:
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


def _plan_lines(regions: tuple[RegionCode, ...], order: Order) -> list[str]:
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
