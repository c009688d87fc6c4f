"""Tests that count page faults."""

from __future__ import annotations

from pathlib import Path

import pytest

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

small_pages = pytest.mark.skipif(
    _HUGE.exists() and "[always]" in _HUGE.read_text(), reason="a page fault maps 2 MiB here"
)
