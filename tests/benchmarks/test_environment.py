"""The stamp of benchmark results: a library that is missing, or hides its version, stops nothing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def environment() -> Any:
    from common import environment

    return environment


def test_a_library_that_is_missing(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", (*environment.PACKAGES, "nobody-has-this"))
    monkeypatch.setitem(environment.MODULES, "torch", "nobody_has_this")
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    made = json.loads(json.dumps(environment.stamp()))
    assert made["versions"]["nobody-has-this"] is None and made["versions"]["torch"] is None
    assert made["versions"]["numpy"] == known("numpy")
    assert "torch not installed, numpy " in environment.summary(made)


@pytest.mark.parametrize("says", [None, "", ValueError("metadata that nobody can read")])
def test_a_library_that_hides_its_version(
    says: Any, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> Any:
        if isinstance(says, Exception):
            raise says
        return says

    monkeypatch.setattr(importlib.metadata, "version", version)
    made = environment.stamp()
    assert set(made["versions"].values()) == {"unknown"}
    assert "jax unknown" in environment.summary(made)


def test_a_checkout_that_is_imported_as_it_is(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without metadata a module is asked; one without a version is "unknown", not missing."""
    monkeypatch.setitem(sys.modules, "checked_out", SimpleNamespace(__version__="1.2"))
    monkeypatch.setitem(sys.modules, "silent", SimpleNamespace())
    monkeypatch.setattr(environment, "PACKAGES", ("checked-out", "silent"))
    assert environment.stamp()["versions"] == {"checked-out": "1.2", "silent": "unknown"}


def test_a_stamp_of_an_older_run(environment: Any) -> None:
    """Packages that it does not list are told as such."""
    made = environment.stamp()
    del made["versions"]["torch"]
    assert "torch not recorded" in environment.summary(made)
