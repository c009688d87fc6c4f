"""Tests of torch_xla run where it is installed: ``make test-torch-xla``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla is first imported

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_models.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            # Of PyTorch's and torch_xla's own code, which is not ours to mend.
            for kind in ("FutureWarning", "UserWarning", "SyntaxWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"default::{kind}"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    yield
