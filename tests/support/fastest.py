"""Measurements that come out as a test wants them."""

from __future__ import annotations

from typing import Any

import pytest

from dynaflow_xla.tuning import autotune


def always(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[set[str]]:
    """Every candidate runs as often as it must, and the wanted one is taken for the fastest."""
    seen: list[set[str]] = []

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        seen.append(set(runs))
        for run in runs.values():
            run()
        return autotune.Medians({name: [1.0 if name == wanted else 2.0] for name in runs})

    monkeypatch.setattr(autotune, "measure", measure)
    return seen
