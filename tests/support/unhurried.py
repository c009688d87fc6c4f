"""``Auto`` decides as on a machine that is fast and idle: what a test expects does not depend on it."""

from __future__ import annotations

import pytest

from dynaflow_xla.tuning import budget, quiet


def unhurried(patch: pytest.MonkeyPatch) -> None:
    """No time passes on the clock of budgets, and measuring waits for threads that come to rest late.

    What is measured is real, so a test must not expect a certain candidate to win.
    """
    patch.setattr(budget, "clock", lambda: 0.0)  # a busy machine leaves nothing out
    patch.setattr(quiet, "PATIENCE_S", 120.0)
