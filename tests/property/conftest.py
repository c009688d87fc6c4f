"""Says at the end of a run how many rules and cases the table of batch rules has tried."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    import sys

    table = sys.modules.get("batch_cases.table")
    for framework, tallies in sorted((table.DONE if table else {}).items()):
        accepted, refused, unknown = (
            sum(getattr(t, n) for t in tallies.values()) for n in ("accepted", "refused", "unknown")
        )
        terminalreporter.write_line(
            f"batch rules, {framework}: {len(tallies)} rules tried; {accepted} uses accepted, carried out "
            f"and compared, {refused} refused, {unknown} left unproven"
        )
