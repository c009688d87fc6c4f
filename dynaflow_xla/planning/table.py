"""What ``explain`` says of a plan: its regions as a table, and what making it took."""

from __future__ import annotations

from collections.abc import Mapping

from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.planning.plan import Plan


def region_table(plan: Plan, pg: PartitionedGraph) -> list[str]:
    """A heading and a line for each region, for ``explain``."""
    lanes = {i.region: i for i in plan.instructions if isinstance(i, Launch)}
    heading = ("region", "lane", "resource", "est. us", "MB moved", "ops", "tags", "source")
    several = any(region.function for region in pg.regions)
    rows: list[tuple[str, ...]] = [(*heading, "function") if several else heading]
    for region in pg.regions:
        launch = lanes[region.id]
        rows.append(
            (
                region.name + (f" (replaced by {launch.replace})" if launch.replace else ""),
                "outer" if launch.lane < 0 else str(launch.lane),
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


def time_to_make(seconds: Mapping[str, float]) -> str:
    """How long each step took, for ``explain``."""
    steps = ", ".join(f"{name} {taken * 1e3:.0f} ms" for name, taken in seconds.items())
    return f"time to make: {steps}"
