"""A pytest plugin under which ``jax.jit`` schedules what it makes, and each test's outcome is a line of JSON.

``run.py`` loads it into the processes that run JAX's own test files. ``DFX_MODE`` says how functions are
scheduled (``MODES``; ``original``: not at all), ``DFX_OUTCOMES`` where lines go.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import dynaflow_xla as dfx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from nano_jit import NOTHING, REFUSALS, NanoJit, told, words  # noqa: E402
from round_robin import RoundRobin  # noqa: E402

NANO = "nano-batches"
MODES: dict[str, dict[str, Any] | None] = {
    "original": None,
    "lanes": {"strategy": RoundRobin(), "lanes": 2},
    "branches": {"strategy": "branches", "lanes": 2},
    "auto": {"strategy": "auto"},
    "xla": {"strategy": "branches", "backend": "xla"},
    NANO: {},
}

_jit = jax.jit


def made_of(options: dict[str, Any], fun: Any, /, **given: Any) -> Any:
    """What a mode makes of a function."""
    if not options:
        return NanoJit(_jit, fun, given)
    return dfx.schedule(_jit(fun, **given), **options)


def scheduled_jit(options: dict[str, Any]) -> Any:
    """What stands in for ``jax.jit`` where a test calls it; whoever else does gets JAX's own."""

    def jit(fun: Any = None, /, **given: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(os.environ["DFX_TESTS"]) and not file.endswith("test_util.py"):
            return _jit(**given) if fun is None else _jit(fun, **given)
        if fun is None:
            return lambda fun: made_of(options, fun, **given)
        return made_of(options, fun, **given)

    return functools.wraps(_jit)(jit)


def pytest_configure(config: pytest.Config) -> None:
    """Takes the place of ``jax.jit``, also in what JAX's test cases compile by themselves.

    What they give to ``check_grads`` is jitted, too: most of it is no jitted function by itself.
    """
    import jax.test_util
    from jax._src import api, public_test_util, test_util

    options = MODES[os.environ["DFX_MODE"]]
    jit = _jit if options is None else functools.partial(made_of, options)
    check = public_test_util.check_grads

    def check_grads(f: Any, *args: Any, **kwargs: Any) -> None:
        check(jit(f), *args, **kwargs)

    for module in (jax.test_util, public_test_util, test_util):
        module.check_grads = functools.wraps(check)(check_grads)
    if options is None:
        return
    jax.jit = scheduled_jit(options)
    instead = types.ModuleType(api.__name__)
    instead.__dict__.update(vars(api), jit=jax.jit)
    test_util.api = instead  # type: ignore[attr-defined]


def refusal(error: BaseException | None) -> str:
    """The message of ours that an error is, or was raised because of, without its names and numbers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, REFUSALS):
            return words(error)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""


def write(test: str, outcome: str, why: str = "", **more: Any) -> None:
    """Adds a line, in one piece."""
    with open(os.environ["DFX_OUTCOMES"], "a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why} | more) + "\n")


def split(made: str) -> tuple[str, dict[str, Any]]:
    """Of a test in nano-batches: what it counts as, and what came of its functions.

    One that passes is refused if none of its functions could be split, and *whole* if none has a batch.
    """
    if os.environ["DFX_MODE"] != NANO:
        return made, {}
    functions = {why: number for why, number in told.items() if number > 0}
    if made == "passed" and "split" not in functions:
        made = "refused" if functions.keys() - {NOTHING} else "whole"
    return made, {"functions": functions}


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
    told.clear()
    dfx.stats(reset=True)
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
    made, functions = split(made)
    write(named(item.nodeid), made, why, plans=dfx.stats().plans, **functions)
