"""Programs for a GPU, compiled without one. Needs JAX's CUDA plugin: ``make test-gpu-compile``."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        here = str(Path(__file__).parent) + "/"
        for item in items:
            if str(item.path).startswith(here):
                item.add_marker(pytest.mark.skip(reason="JAX's CUDA plugin is not installed"))
