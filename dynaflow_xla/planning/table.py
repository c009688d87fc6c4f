"""What ``explain`` says of a plan: its regions as a table, and what making it took."""

from __future__ import annotations

from collections.abc import Mapping

from dynaflow_xla import machine
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.planning.plan import Plan


def region_table(plan: Plan, pg: PartitionedGraph) -> list[str]:
    """A heading and a line for each region, for ``explain``."""
    lanes = {i.region: i for i in plan.launches}
    heading = ("region", "lane", "resource", "est. us", "MB moved", "ops", "tags", "source")
    several = any(region.function for region in pg.regions)
    rows: list[tuple[str, ...]] = [(*heading, "function") if several else heading]
    for region in pg.regions:
        launch = lanes[region.id]
        rows.append(
            (
                region.name + (f" (replaced by {launch.replace})" if launch.replace else ""),
                _place(plan, region.outer, launch),
                region.resource,
                f"{region.cost_ns / 1e3:.1f}",
                f"{region.bytes_moved / 1e6:.2f}",
                str(len(region.ops)),
                ",".join(sorted(region.tags)) or "-",
                str(region.source or "-"),
                *([region.function or "-"] if several else []),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _place(plan: Plan, outer: bool, launch: Launch) -> str:
    if launch.lane < 0:
        return "outer" if outer else f"all ({plan.cores})"
    return str(launch.lane) if launch.width == 1 else f"{launch.lane} ({launch.width})"


def widths(plan: Plan, pg: PartitionedGraph, cores: int, threads: int = 0) -> list[str]:
    """Sentences about the cores that launches have, for ``explain``.

    Args:
        plan: The plan.
        pg: Its graph.
        cores: That the process may use now.
        threads: Of the pool that runs what is wide, where the user says how many; 0: one a core.
    """
    launches = plan.launches
    wide = [i for i in launches if i.lane < 0 and not pg.regions[i.region].outer]
    lines = []
    if wide and len(wide) == len(launches):
        lines.append(
            f"every region has all {_cores(plan.cores)}: the plan is the original program, and no lane runs"
        )
    elif wide:
        lines.append(
            f"{len(wide)} of {len(launches)} regions have all {_cores(plan.cores)}: they are parts of the "
            "program around the lanes, which sleep meanwhile"
        )
    if plan.cores and plan.cores != (threads or cores):
        why = "threads of PyTorch" if threads else "affinity or cgroup"
        lines.append(
            f"planned for {_cores(plan.cores)}; this process may use {threads or cores} now ({why}): the "
            "plan runs correctly, but its costs are others. clear_cache() has it made again"
        )
    if cores == 1 and (why := machine.bound_by()):
        lines.append(why)
    several = plan.cores or any(i.width > 1 for i in launches)  # else they may be streams
    if plan.lanes_used and several and plan.lane_cores > cores:
        lines.append(
            f"the lanes have {plan.lane_cores} threads for {_cores(cores)}: they share them, which is slower"
        )
    return lines


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def time_to_make(seconds: Mapping[str, float]) -> str:
    """How long each step took, for ``explain``."""
    steps = ", ".join(f"{name} {taken * 1e3:.0f} ms" for name, taken in seconds.items())
    return f"time to make: {steps}"
