"""Makes sure that the tests see a whole package, and not the source folder in its place."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    import hypothesis
except ImportError:
    pass
else:
    # The same examples everywhere and always, however long a slow or busy machine takes to draw them.
    hypothesis.settings.register_profile(
        "dynaflow_xla",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("dynaflow_xla")


# Modules that take a minute or more on two cores. They begin first: several processes take module after
# module, and one that began such a module last would be left alone with it.
LONG = (
    "frontends/jax/batch/test_own_rules.py",
    "frontends/torch/native/test_compilers.py",
    "frontends/jax/test_matrix.py",
    "documentation/test_readme.py",
    "frontends/torch/batch/test_joined_models.py",
    "frontends/torch/tuning/test_auto_compilers.py",
    "frontends/torch/models/test_decode.py",
    "watchdog/test_no_hang.py",
    "frontends/jax/xla/test_collectives.py",
)


# Of a test with several cases, each of which takes a while, one of EVERY runs where all tests are asked for:
# the first, and some drawn by their names, so that strategies and backends are mixed. The others are sweeps.
# Who names files or tests gets all of their cases.
EVERY, SEVERAL = 5, 3
TABLES = ("frontends", "property")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    first = {here / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path, len(LONG)))
    if any((config.rootpath / given).resolve() != here for given in config.args):
        return
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        in_table = item.path.relative_to(here).parts[0] in TABLES
        if in_table and item.get_closest_marker("slow") is None:
            test = item.path, item.nodeid.partition("[")[0]
            cases.setdefault(test, []).append(item)
    for found in cases.values():
        for item in found[1:] if len(found) >= SEVERAL else ():
            if zlib.crc32(item.name.encode()) % EVERY:
                item.add_marker(pytest.mark.sweep)


@pytest.fixture(autouse=True, scope="module")
def _collector_knows_one_module() -> Iterator[None]:
    """The garbage collector does not look through what was there before the module, JAX and PyTorch included.

    It took a tenth of all tests' time, seconds whenever one collects everything. Nor does it look often:
    what is frozen does not count among the objects by whose number it decides when to look at all.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(10_000, 10, 20)
    yield
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def _cores_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody moves this machine's cores while a decision is tested."""
    if _is_whole():
        from dynaflow_xla.machine import distance

        monkeypatch.setattr(distance, "round_trip_ns", lambda: 0.0)
        # What earlier tests let the process see.
        monkeypatch.setattr(distance, "_shortest_ns", math.inf)
        monkeypatch.setattr(distance, "_near_seen", False)
        monkeypatch.setattr(distance, "_far_since", None)


@pytest.fixture(autouse=True)
def _lanes_for_everything(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of tests are so small that no strategy would give them lanes.

    So strategies know no regions on all cores here, except in tests with the marker ``wide``.
    """
    if not _is_whole() or request.node.get_closest_marker("wide") is not None:
        return
    if "jax" in sys.modules:
        from dynaflow_xla.frontends.jax.lanes.backend import LaneBackend

        monkeypatch.setattr(LaneBackend, "cores", lambda _: 0)
    if "torch" in sys.modules:
        from dynaflow_xla.frontends.torch.capture import context

        monkeypatch.setattr(context, "cores", lambda _: 0)


def _is_whole() -> bool:
    """Whether ``dynaflow_xla`` has its subpackages (a wheel or an editable install)."""
    parts = ("dynaflow_xla.frontends", "dynaflow_xla.ffi")
    return all(importlib.util.find_spec(part) is not None for part in parts)


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("dynaflow_xla")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _location() -> Path | None:
    spec = importlib.util.find_spec("dynaflow_xla")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def pytest_configure(config: pytest.Config) -> None:
    if _is_installed() and not _is_whole():
        raise pytest.UsageError(
            f"dynaflow_xla is installed, but the tests would import the source folder "
            f"{_location()}, which has no frontends and no engine. "
            f"Use `make test` or `python -P -m pytest`."
        )


def pytest_report_header(config: pytest.Config) -> str:
    if _is_whole():
        return f"dynaflow_xla: {_location()}"
    return f"dynaflow_xla: NOT INSTALLED, source folder {_location()}: no frontends, no engine"
