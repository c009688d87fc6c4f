"""What the tests of plans on streams and in graphs are called with."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def args() -> tuple[Any, Any]:
    """Of ``stream_books.model``."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
