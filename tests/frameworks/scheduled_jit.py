"""A pytest plugin under which ``jax.jit`` schedules what it makes, and each test's outcome is a line of JSON.

``run.py`` loads it into the processes that run JAX's own test files. ``DFX_MODE`` says how functions are
scheduled (``MODES``; ``original``: not at all), ``DFX_OUTCOMES`` where lines go.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import dynaflow_xla as dfx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from round_robin import RoundRobin  # noqa: E402

MODES: dict[str, dict[str, Any] | None] = {
    "original": None,
    "lanes": {"strategy": RoundRobin(), "lanes": 2},
    "branches": {"strategy": "branches", "lanes": 2},
    "auto": {"strategy": "auto"},
    "xla": {"strategy": "branches", "backend": "xla"},
}

_jit = jax.jit


def scheduled_jit(options: dict[str, Any]) -> Any:
    """What stands in for ``jax.jit`` where a test calls it; whoever else does gets JAX's own."""

    def jit(fun: Any = None, /, **given: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(os.environ["DFX_TESTS"]) and not file.endswith("test_util.py"):
            return _jit(**given) if fun is None else _jit(fun, **given)
        if fun is None:
            return lambda fun: dfx.schedule(_jit(fun, **given), **options)
        return dfx.schedule(_jit(fun, **given), **options)

    return functools.wraps(_jit)(jit)


def pytest_configure(config: pytest.Config) -> None:
    """Takes the place of ``jax.jit``, also in what JAX's test cases compile by themselves."""
    options = MODES[os.environ["DFX_MODE"]]
    if options is None:
        return
    from jax._src import api, test_util

    jax.jit = scheduled_jit(options)
    instead = types.ModuleType(api.__name__)
    instead.__dict__.update(vars(api), jit=jax.jit)
    test_util.api = instead  # type: ignore[attr-defined]


def refusal(error: BaseException | None) -> str:
    """The message of ours that an error is, or was raised because of, without its names and numbers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, dfx.UnsupportedError | dfx.SeparabilityError | dfx.PlanError):
            text = str(error).splitlines()[0]
            text = re.sub(r" at \S+\.py:\d+( \(.*?\))?| \(\S+\.py:\d+\)", "", text)
            text = text.split(". ")[0]
            return re.sub(r"'[^']*'", "'...'", re.sub(r"\d+", "N", text))[:160]
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""


def write(test: str, outcome: str, why: str = "") -> None:
    """Adds a line, in one piece."""
    with open(os.environ["DFX_OUTCOMES"], "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


def named(nodeid: str) -> str:
    """A test's name, without that of its file."""
    return nodeid.split("::", 1)[-1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has an outcome already."""
    from run import read

    had = {
        test
        for test, line in read(Path(os.environ["DFX_OUTCOMES"])).items()
        if line["outcome"] != "started"
    }
    out = [item for item in items if named(item.nodeid) in had]
    items[:] = [item for item in items if named(item.nodeid) not in had]
    if out:
        config.hook.pytest_deselected(items=out)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Says which test runs: it may take the process with it."""
    write(named(nodeid), "started")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Writes what came of a test."""
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and report.passed:
        return
    made, why = "passed", ""
    if report.skipped:
        made = "skipped"
    elif report.failed and call.excinfo is not None:
        error = call.excinfo.value
        if why := refusal(error):
            made = "refused"
        else:
            first = (str(error).strip().splitlines() or [""])[0]
            made, why = "failed", f"{type(error).__name__}: {first}"[:160]
    write(named(item.nodeid), made, why)
