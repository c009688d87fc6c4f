"""For pytest (``-p standin_plugin``): kernels have values, and a test fails by what the stand-in lacks.

It is not a GPU: nothing here says anything about speed, memory, real overlap or generated code.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

import driver_trace as traces
import pytest
import values as kernels

TOTAL: collections.Counter[str] = collections.Counter()
VALUES: kernels.Values | None = None
DRIVER: traces.Driver | None = None
if os.environ.get("DYNAFLOW_XLA_STANDIN"):
    VALUES = kernels.installed()
    DRIVER = traces.Driver(os.environ["DYNAFLOW_XLA_STANDIN"])


@pytest.fixture
def values() -> kernels.Values:
    assert VALUES is not None
    return VALUES


@pytest.fixture
def driver() -> Iterator[traces.Driver]:
    """The driver; delays and the mutant end with the test."""
    assert DRIVER is not None
    yield DRIVER
    DRIVER.delay(0)
    DRIVER.ignore_waits(False)


@pytest.fixture(autouse=True)
def what_the_standin_lacks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails by the names of kernels without values, of missing functions, of what a driver forbids."""
    if VALUES is None or DRIVER is None:
        yield
        return
    VALUES.forget()
    DRIVER.misuse()
    lacked = set(DRIVER.missing())
    yield
    TOTAL.update(kernels=sum(VALUES.computed.values()), tests=1)
    if request.node.get_closest_marker("not_computed") is None:
        assert not VALUES.unknown, f"kernels that nobody computes: {dict(VALUES.unknown)}"
        assert not VALUES.errors, VALUES.errors[0]
    missing = set(DRIVER.missing()) - lacked
    if request.config.getoption("--skip-uncomputed"):
        missing.clear()  # told above
    assert not missing, f"functions that the stand-in driver lacks: {sorted(missing)}"
    lost = DRIVER.without_context()
    assert not lost, f"called on a thread without a context, and refused: {lost}"
    misuse = DRIVER.misuse()
    assert not misuse, f"a real driver would not forgive: {misuse}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skip-uncomputed", action="store_true",
        help="what needs a kernel or a function that nobody computes is skipped, by its name",
    )  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Of tests that were not written for the stand-in: what it cannot judge says so."""
    if VALUES is None or DRIVER is None or not item.config.getoption("--skip-uncomputed"):
        return (yield)
    lacked = set(DRIVER.missing())
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
    why = sorted({*VALUES.unknown, *(set(DRIVER.missing()) - lacked)})
    VALUES.unknown.clear()
    if why:
        TOTAL.update(uncomputed=1)
        pytest.skip(f"nobody computes {', '.join(why)[:200]}")
    if failed is not None:
        raise failed
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_computed: kernels without values are no failure")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = [f"{TOTAL['kernels']} launches computed in {TOTAL['tests']} tests"]
    if TOTAL["plans"]:
        counts.append(f"{TOTAL['plans']} random plans without a race")
    if TOTAL["mutants"]:
        counts.append(f"{TOTAL['mutants']} plans with a race found")
    terminalreporter.write_line("stand-in driver (no GPU): " + ", ".join(counts))
