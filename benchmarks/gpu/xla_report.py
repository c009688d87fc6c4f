"""The report on ``backend="xla"``: what XLA makes of plans, read back from deviceless GPU compilations.

``xla_report.py measure OUT.json`` compiles every case under the installed jaxlib; ``xla_report.py write
OUT.md IN.json ...`` makes the page. `make report-xla` does both under several jaxlib versions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment

TRACE_REPEATS, GPU_REPEATS, CPU_REPEATS = 3, 2, 3


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure", help="compile the cases under this jaxlib")
    measured.add_argument("out", type=Path)
    measured.add_argument("--only", default="", help="these alone; others stay in the file")
    written = commands.add_parser("write", help="make the page from measured files")
    written.add_argument("out", type=Path)
    written.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.only, given.out)
    else:
        pages = [json.loads(path.read_text()) for path in given.files]
        given.out.write_text(page(pages, [path.name for path in given.files]))


# -- measuring -------------------------------------------------------------------------------------


def measure(only: str, out: Path) -> None:
    """Everything about every case under the installed jaxlib; written after each."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from gpu.xla_cases import CASES, DEVICES

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.jit(lambda x: x + 1)(1.0)

    known = json.loads(out.read_text())["cases"] if only and out.is_file() else []
    rows: dict[str, dict[str, Any]] = {row["case"]: row for row in known}
    for case in CASES:
        if only in case.name:
            rows[case.name] = _case(case)
            kept = [rows[c.name] for c in CASES if c.name in rows]
            report = {"environment": environment.stamp(), "cases": kept}
            out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def _case(case: Any) -> dict[str, Any]:
    from dynaflow_xla.frontends.jax.readback import deviceless
    from gpu.xla_cases import ABSTRACT_MESH, TARGET

    print(case.name, flush=True)
    arguments = case.on(ABSTRACT_MESH)
    # The first takes what JAX and this package do once a process.
    planned = [
        _seconds(lambda: case.scheduled(target=TARGET).trace(*arguments))
        for _ in range(1 + TRACE_REPEATS)
    ]
    plain = [_seconds(lambda: case.original().trace(*arguments)) for _ in range(1 + TRACE_REPEATS)]
    fast = case.scheduled(target=TARGET)
    report = deviceless.compile_report(fast, arguments, {}, repeats=GPU_REPEATS)
    row = json.loads(report.to_json())
    row["case"] = case.name
    row["trace_and_plan_s"] = round(min(planned[1:]), 3)
    row["first_trace_and_plan_s"] = round(planned[0], 3)
    row["plain_trace_s"] = round(min(plain[1:]), 3)
    alone = _alone(case, report.options)
    for mark in row["marks"]:
        mark["alone"] = alone.get(mark["name"])
    row["cpu_compile_s"] = _cpu_seconds(case)
    row["load"] = round(os.getloadavg()[0], 1)
    return row


def _alone(case: Any, options: dict[str, str]) -> dict[str, int]:
    """Kernels and library calls of each mark's regions, each region a program of its own.

    Of nano-batches the first one's regions, in their shapes. A gate counts where it is part of a product.
    """
    import jax

    import dynaflow_xla as dfx
    from dynaflow_xla.frontends.jax.capture.tracing import tracing_afresh
    from dynaflow_xla.frontends.jax.xla.xla_backend import traced_entries
    from gpu.xla_cases import ABSTRACT_MESH, TARGET

    with traced_entries() as entries, tracing_afresh():
        case.scheduled(target=TARGET).trace(*case.on(ABSTRACT_MESH))
    for entry in entries:  # grows: bodies have bodies
        entries += [body for _, body in entry.bodies()]
    found: dict[str, int] = {}
    for entry in {id(entry): entry for entry in entries}.values():
        for region in entry.pg.regions:
            marks = {op.mark.name for i in region.ops if (op := entry.pg.graph.ops[i]).mark}
            if len(marks) != 1 or region.nano > 0:
                continue
            read = (*region.inputs, *entry._beside(region.id))
            specs = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                for aval in (entry.captured.avals[value] for value in read)
            ]
            function = jax.jit(entry.functions[region.id])
            fast = dfx.schedule(
                function, dfx.Sequential(), backend="xla", target=TARGET, compiler_options=options
            )
            original = dfx.compile(fast, *specs).original
            mark = marks.pop()
            found[mark] = found.get(mark, 0) + original.kernels + original.library_calls
    return found


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cpu_seconds(case: Any) -> dict[str, float]:
    """The shortest of several compilations for this CPU, in turn; lowered before, each time anew."""
    import jax

    from gpu.xla_cases import AXIS, DEVICES

    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    best = {"plain": float("inf"), "scheduled": float("inf")}
    for _ in range(CPU_REPEATS):
        for which, fn in (
            ("plain", case.original(mesh)),
            ("scheduled", case.scheduled(mesh, backend="xla")),
        ):
            lowered = fn.lower(*case.on(mesh))
            best[which] = min(best[which], _seconds(lowered.compile))
    return {which: round(seconds, 3) for which, seconds in best.items()}


# -- the page --------------------------------------------------------------------------------------


def page(reports: list[dict[str, Any]], files: list[str]) -> str:
    """The page in Markdown."""
    versions = [report["environment"]["versions"]["jaxlib"] for report in reports]
    lines = [
        "# What XLA makes of plans: the report",
        "",
        "After this page you know which order edges, kernels, copies and memory XLA gave to ten plans.",
        "",
        "Made by `make report-xla`; do not edit. Every program is compiled for an NVIDIA H200 without one "
        "and read back: nothing ran, no kernel was autotuned, overlap is not measured. Command-buffer mode "
        f"CONCURRENT. jaxlib {' and '.join(versions)}; numbers are in this order. [xla.md](xla.md) says what "
        "the columns rest on.",
        "",
    ]
    by_name = [{row["case"]: row for row in report["cases"]} for report in reports]
    names = list(by_name[0])
    missing = {name for rows in by_name for name in names if name not in rows}
    if missing:
        raise SystemExit(f"not in every file: {', '.join(sorted(missing))}")

    def table(title: str, columns: dict[str, Any], note: str = "") -> None:
        lines.extend([f"## {title}", ""])
        if note:
            lines.extend([note, ""])
        lines.append("| case | " + " | ".join(columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for name in names:
            cells = []
            for value in columns.values():
                found = [str(value(rows[name])) for rows in by_name]
                cells.append(found[0] if len(set(found)) == 1 else ", ".join(found))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")

    table(
        "Order",
        {
            "edges of the plan": lambda r: _sum(r, "held", "broken", "fused"),
            "held": lambda r: _sum(r, "held"),
            "inside one kernel": lambda r: _sum(r, "fused"),
            "broken": lambda r: _sum(r, "broken"),
            "free pairs": lambda r: _sum(r, "parallel", "common", "extra", "partly", "donated"),
            "parallel": lambda r: _sum(r, "parallel"),
            "parallel but for common work": lambda r: _sum(r, "common"),
            "beside a collective in part": lambda r: _in_order(r, True),
            "serialised": lambda r: _in_order(r, False),
            "by donation": lambda r: _sum(r, "donated"),
            "joined in a kernel": lambda r: _sum(r, "merged"),
            "edges from memory": lambda r: _sum(r, "conflicts"),
        },
        "Pairs of regions, bodies of loops included. *Broken*: some kernel does not keep an edge. "
        "*Serialised*: the plan runs the two in parallel, the CUDA graph does not, at least in part. "
        "*Beside a collective in part*: the one is a collective, which XLA waits for once what it has put "
        "beside it takes long enough. *Common work*: XLA computes once what both begin with. "
        "*By donation*: the second writes over a donated argument that the first reads, as in the "
        "original. *Edges from memory*: of the graph, which neither data, plan nor donation ask for.",
    )
    table(
        "Kernels, copies, memory",
        {
            "kernels": lambda r: r["scheduled"]["kernels"],
            "of the original": lambda r: r["original"]["kernels"],
            "library calls": lambda r: (
                f"{r['scheduled']['library_calls']} / {r['original']['library_calls']}"
            ),
            "copies added": lambda r: r["scheduled"]["copies"] - r["original"]["copies"],
            "bytes copied more": lambda r: (
                r["scheduled"]["copied_bytes"] - r["original"]["copied_bytes"]
            ),
            "gates": lambda r: r["scheduled"]["gates"],
            "command buffers": lambda r: _buffers(r["scheduled"]),
            "streams besides the main one": lambda r: len(r["scheduled"]["streams"]),
            "peak MB": lambda r: f"{r['scheduled']['peak_bytes'] / 1e6:.1f}",
            "peak of the original": lambda r: f"{r['original']['peak_bytes'] / 1e6:.1f}",
            "with XLA's defaults": lambda r: f"{r['plain']['peak_bytes'] / 1e6:.1f}",
        },
        "The original is compiled with the same options; *with XLA's defaults*: without any. Command "
        "buffers: commands in each.",
    )
    lines.extend(_fusion(by_name, names))
    table(
        "Seconds",
        {
            "trace and plan": lambda r: f"{r['trace_and_plan_s']:.2f}",
            "the first time": lambda r: f"{r['first_trace_and_plan_s']:.2f}",
            "plain trace": lambda r: f"{r['plain_trace_s']:.2f}",
            "GPU compile": lambda r: f"{r['scheduled']['compile_s']:.2f}",
            "/ plain jit": lambda r: _ratio(r["scheduled"], r["plain"]),
            "/ same options": lambda r: _ratio(r["scheduled"], r["original"]),
            "CPU compile": lambda r: f"{r['cpu_compile_s']['scheduled']:.2f}",
            "/ plain jit ": lambda r: (
                f"{r['cpu_compile_s']['scheduled'] / r['cpu_compile_s']['plain']:.2f}"
            ),
            "load": lambda r: r["load"],
        },
        "The shortest of several, in a warm process; of compiling, tracing and lowering not counted. *The "
        "first time*: in this process, with what is done once. Seconds of the machine below. "
        "*Load*: the system's average at the end of the case, other work included. Plain "
        "jit: the original with XLA's default options.",
    )
    lines.extend(_collectives(by_name, names))
    lines.extend(["## Notes of the compiler's reader", ""])
    for name in names:
        for note in dict.fromkeys(note for rows in by_name for note in rows[name]["notes"]):
            lines.append(f"- {name}: {note}")
    stamp = reports[0]["environment"]
    lines.extend(
        [
            "",
            f"Measured {stamp['date'][:10]} on {stamp['cores']} cores of {stamp['cpu']}. Every number "
            "and the region-by-region account: "
            + ", ".join(f"`benchmarks/results/{name}`" for name in files)
            + ".",
            "",
        ]
    )
    return "\n".join(lines)


def _orders(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row["order"], *(body["order"] for body in row["bodies"])]


def _sum(row: dict[str, Any], *fields: str) -> int:
    return sum(len(order[field]) for order in _orders(row) for field in fields)


def _in_order(row: dict[str, Any], collectives: bool) -> int:
    """Free pairs that the program orders, wholly or in part: those with a collective, or the others."""
    outer = {one["region"] for one in row["collectives"]}
    found = 0
    for plan in (row, *row["bodies"]):
        pairs = [*plan["order"]["extra"], *plan["order"]["partly"]]
        found += sum(collectives != outer.isdisjoint(pair) for pair in pairs)
    return found


def _buffers(program: dict[str, Any]) -> str:
    return " + ".join(map(str, program["command_buffers"])) or "none"


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{a['compile_s'] / b['compile_s']:.2f}"


def _collectives(by_name: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What computes between the start and the done of each collective."""
    lines = [
        "## Collectives",
        "",
        "Kernels that XLA's schedule has between a collective's start and its done.",
        "",
        "| case | collective | of | beside it |",
        "|---|---|---|---|",
    ]
    for name in names:
        for each in zip(*(rows[name]["collectives"] for rows in by_name), strict=True):
            cells = []
            for told in (
                [one["name"] for one in each],
                [one["region"] for one in each],
                [
                    ", ".join(f"{n} of {region}" for region, n in one["beside"].items())
                    or "nothing"
                    for one in each
                ],
            ):
                cells.append("; ".join(dict.fromkeys(told)))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _fusion(by_name: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Kernels of each marked part beside those of the unscheduled function."""
    lines = [
        "## Fusion inside regions",
        "",
        "Kernels and library calls of each marked part (all its nano-batches), those of the unscheduled "
        "function, and those of its regions compiled *alone*, each as a program of its own, for one "
        "nano-batch: what fusion inside regions gives. A kernel that puts the results of several regions "
        "together counts for each of them. Where scheduled and original differ, the original's fusion goes "
        "across regions, or XLA cuts the summed axis of a nano-batch's smaller product to fill the GPU, "
        "and the sum of the parts is one kernel more.",
        "",
        "| case | mark | nano-batches | scheduled | original | alone |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        for number, mark in enumerate(by_name[0][name]["marks"]):
            rows = [rows[name]["marks"][number] for rows in by_name]
            cells = []
            for field in ("nano_batches", "scheduled", "original", "alone"):
                found = [str(row[field]) for row in rows]
                cells.append(found[0] if len(set(found)) == 1 else ", ".join(found))
            lines.append(f"| {name} | {mark['name']} | " + " | ".join(cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
