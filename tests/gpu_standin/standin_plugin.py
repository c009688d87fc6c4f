"""For pytest (``-p standin_plugin``): kernels have values, and a test fails by what the stand-in lacks.

It is not a GPU: nothing here says anything about speed, memory, real overlap or generated code.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import driver_trace as traces
import pytest
import values as kernels

TOTAL: collections.Counter[str] = collections.Counter()
HEEDLESS_DELAY_US = 20_000
HEEDLESS_TRIES = 8
# How tests say that values are wrong. What else fails says nothing of waits.
WRONG_VALUES = re.compile(r"Not equal to tolerance|Arrays are not equal|wrong values")
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
    DRIVER.forget_missing()
    yield
    TOTAL.update(kernels=sum(VALUES.computed.values()), tests=1, idle=not VALUES.computed)
    if request.node.get_closest_marker("not_computed") is None:
        assert not VALUES.unknown, f"kernels that nobody computes: {dict(VALUES.unknown)}"
        assert not VALUES.errors, VALUES.errors[0]
    missing = set(DRIVER.missing())
    if request.config.getoption("--skip-uncomputed"):
        missing.clear()  # told above
    assert not missing, f"functions that the stand-in driver lacks: {sorted(missing)}"
    _no_misuse()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test of values runs again, and must find them wrong, under a driver whose kernels wait for nothing.

    With ``--no-waits`` any test does, and only that.
    """
    only = pyfuncitem.config.getoption("--no-waits")
    if VALUES is None or not (only or pyfuncitem.get_closest_marker("values")):
        return None
    names = pyfuncitem._fixtureinfo.argnames

    def call() -> None:
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    if not only:
        call()
        _no_misuse()
    before = VALUES.computed.copy(), VALUES.unknown.copy(), list(VALUES.errors)
    for _ in range(HEEDLESS_TRIES):  # by chance all comes in order
        if why := heedless(call):
            TOTAL.update(noticed=1)
            pyfuncitem.user_properties.append(("noticed", why))
            VALUES.computed, VALUES.unknown, VALUES.errors = before
            return True
    pytest.fail("it passes where no kernel waits for anything")


def heedless(call: Callable[[], None]) -> str:
    """Which values are wrong where kernels wait for nothing, or ``""``.

    What the call counts is not counted. If it fails by anything but its values, that is raised.
    """
    assert DRIVER is not None
    variables = {"FAKE_CUDA_IGNORE_WAITS": "1", "FAKE_CUDA_DELAY_US": str(HEEDLESS_DELAY_US)}
    kept = {name: os.environ.get(name) for name in variables}
    counted = TOTAL.copy()
    os.environ |= variables  # for processes that the test starts
    DRIVER.ignore_waits(True)
    DRIVER.least_delay_us = HEEDLESS_DELAY_US
    DRIVER.delay(0)
    try:
        call()
    except Exception as error:
        if isinstance(error, AssertionError) and WRONG_VALUES.search(str(error)):
            return f"{type(error).__name__}: {error}"[:200]
        error.add_note(
            "That is where kernels wait for nothing, which wrong values alone must show."
        )
        raise
    finally:
        TOTAL.clear()
        TOTAL.update(counted)
        DRIVER.least_delay_us = 0
        DRIVER.ignore_waits(False)
        DRIVER.delay(0)
        DRIVER.drain()
        DRIVER.misuse()
        for name, value in kept.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}
    return ""


def _no_misuse() -> None:
    assert DRIVER is not None
    lost = DRIVER.without_context()
    assert not lost, f"called on a thread without a context, and refused: {lost}"
    misuse = DRIVER.misuse()
    assert not misuse, f"a real driver would not forgive: {misuse}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-waits",
        action="store_true",
        help="tests must fail: the driver's kernels wait for nothing",
    )
    parser.addoption(
        "--skip-uncomputed", action="store_true",
        help="what needs a kernel or a function that nobody computes is skipped, by its name",
    )  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """One line of JSON a test in the file that STANDIN_RESULTS names, as they end."""
    report: pytest.TestReport = yield
    to = os.environ.get("STANDIN_RESULTS")
    if to and VALUES is not None and (report.when == "call" or report.failed):
        row: dict[str, Any] = {"test": item.nodeid.rpartition("::")[2], "outcome": report.outcome}
        row |= {"when": report.when, "launches": sum(VALUES.computed.values())}
        row |= dict(item.user_properties)
        if report.skipped and isinstance(report.longrepr, tuple):
            row["why"] = report.longrepr[2]
        elif report.failed:
            row["why"] = str(report.longrepr)[-400:]
        with Path(to).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Of tests that were not written for the stand-in: what it cannot judge says so."""
    if VALUES is None or DRIVER is None or not item.config.getoption("--skip-uncomputed"):
        return (yield)
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
    if failed is not None:
        DRIVER.drain()  # what failed first may not be what nobody computes
    why = sorted({*VALUES.unknown, *DRIVER.missing()})
    if "cuFFT" in str(failed):  # whose library is not there
        why.append("cuFFT")
    VALUES.unknown.clear()
    if why:
        # What a library refuses has to be told; only a kernel without values may leave wrong ones.
        item.user_properties.append(("call", "ended" if failed is None else type(failed).__name__))
        TOTAL.update(uncomputed=1)
        pytest.skip(f"nobody computes {', '.join(why)[:200]}")
    if failed is not None:
        raise failed
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that were not written for the stand-in do not expect what is told on a GPU alone."""
    if config.getoption("--skip-uncomputed"):
        mark = pytest.mark.filterwarnings("ignore::dynaflow_xla.errors.FallbackWarning")
        for item in items:
            item.add_marker(mark)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that were to run on the stand-in, and did not, have not passed."""
    foreign = session.config.getoption("--skip-uncomputed")
    if VALUES is not None and foreign and TOTAL["tests"] and not TOTAL["kernels"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_computed: kernels without values are no failure")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = [f"{TOTAL['kernels']} launches computed in {TOTAL['tests']} tests"]
    if TOTAL["idle"]:
        counts.append(f"{TOTAL['idle']} tests without a launch")
    if TOTAL["plans"]:
        counts.append(f"{TOTAL['plans']} random plans without a race")
    if TOTAL["noticed"]:
        counts.append(f"{TOTAL['noticed']} tests failed, as they must, where no kernel waits")
    if TOTAL["mutants"]:
        counts.append(f"{TOTAL['mutants']} plans with a race found")
    terminalreporter.write_line("stand-in driver (no GPU): " + ", ".join(counts))
