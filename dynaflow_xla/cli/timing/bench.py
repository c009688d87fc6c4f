"""``dynaflow-xla bench``: strategies against the plain ways to run the same function."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import dynaflow_xla as dfx
from dynaflow_xla import dispatch, machine
from dynaflow_xla.cli import targets
from dynaflow_xla.cli.cases import cases_of
from dynaflow_xla.cli.console import CommandOutput
from dynaflow_xla.cli.targets import Target, TargetError
from dynaflow_xla.cli.timing import measuring
from dynaflow_xla.errors import optional

_PACKAGES = ("dynaflow-xla", "jax", "jaxlib", "torch", "numpy")
FRAMEWORKS = ("jax", "torch")


def built_in(names: Sequence[str], frameworks: Sequence[str]) -> tuple[list[Target], list[str]]:
    """The cases of this package in each framework that is there; and a sentence for each that is not.

    Raises:
        TargetError: there is no case of a name, or no framework.
    """
    found, notes = [], []
    for framework in frameworks or FRAMEWORKS:
        if not optional.available(framework):
            notes.append(f"{framework} is not installed: its cases are left out")
            continue
        try:
            made = cases_of(dispatch.frontend(framework))
        except dfx.UnsupportedError as error:
            notes.append(f"{framework} is left out: {error}")
            continue
        if unknown := [name for name in names if name not in made]:
            raise TargetError(f"there is no case {unknown[0]!r}; there are {', '.join(made)}")
        found += [Target(n, *made[n], {}, framework) for n in names or made]
    if not found:
        raise TargetError(f"nothing to measure: {'; '.join(notes)}")
    return found, notes


def framework_of(target: Target) -> str:
    """Whose the function of a target is."""
    if target.framework:
        return target.framework
    loaded = [name for name in FRAMEWORKS if dispatch.is_loaded(name)]
    if len(loaded) == 1:
        return loaded[0]
    if callable(getattr(target.fn, "lower", None)):
        return "jax"
    return dispatch.of_call(target.name, (target.fn,), target.args, target.kwargs)


def parsed(texts: Sequence[str]) -> dict[str, Any]:
    """Strategies by how they are written on the command line.

    Raises:
        TargetError: one means none, or cannot be made.
    """
    return {text: targets.strategy(text) for text in texts}


def run(
    cases: Sequence[Target],
    strategies: Mapping[str, Any],
    rounds: int,
    out: CommandOutput,
    options: dict[str, Any],
    opponents: Sequence[str] = (),
    lanes: Sequence[int] = (),
) -> dict[str, Any]:
    """Measures all; what fails on a case is told, and the rest goes on.

    Args:
        cases: What to run.
        strategies: By how they are written on the command line.
        rounds: Samples of each.
        out: For progress.
        options: For ``schedule``.
        opponents: Only these ways without a schedule; () for all.
        lanes: Each strategy on each of these numbers of lanes; of several the ways' names tell it.
    """
    counts: list[int | None] = [*dict.fromkeys(lanes)] or [None]
    ways = {
        f"{text}, {count} lanes" if len(counts) > 1 else text: (
            strategy,
            options | {"lanes": count},
        )
        for text, strategy in strategies.items()
        for count in counts
    }
    record: dict[str, Any] = {
        "format": 1, "benchmark": "bench", "environment": stamp(), "rounds": rounds, "baselines": [],
        "scheduled": list(ways), "cases": [],
    }  # fmt: skip
    start = time.perf_counter()
    with out.progress("measuring", len(cases) * (rounds + 1)) as step:
        for case in cases:
            made = _case(case, ways, rounds, step, opponents)
            record["cases"].append(made)
            record["baselines"] += [n for n in made["plain"] if n not in record["baselines"]]
    record["seconds"] = time.perf_counter() - start
    return record


def _case(
    case: Target,
    ways: Mapping[str, tuple[Any, dict[str, Any]]],
    rounds: int,
    step: Any,
    chosen: Sequence[str],
) -> dict[str, Any]:
    framework = framework_of(case)
    frontend = dispatch.frontend(framework)
    scheduled = dispatch.is_scheduled(case.fn)  # a function of the user's may have any attribute
    original = getattr(case.fn, "original", case.fn) if scheduled else case.fn
    made: dict[str, Any] = {
        "name": case.name, "framework": framework, "failed": {}, "notes": {}, "plain": [],
    }  # fmt: skip
    step(f"{case.name} ({framework}): first calls", over=False)
    plain = frontend.opponents(original, case.args, case.kwargs)
    if unknown := [name for name in chosen if name not in plain]:
        made["failed"] |= {name: f"{framework} has {', '.join(plain)}" for name in unknown}
    runs = {name: call for name, call in plain.items() if not chosen or name in chosen}
    made_fast: dict[str, Any] = {}
    for text, (strategy, options) in ways.items():
        with _noted(made, text):
            made_fast[text] = dfx.schedule(original, strategy=strategy, **options)
            runs[text] = _call(made_fast[text], case, frontend)
    works = {}
    for name, call in runs.items():
        with _noted(made, name):
            call()
            works[name] = call
    step("", over=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dfx.FallbackWarning)  # told at the first call
        samples = measuring.paired(
            works, rounds, step=lambda: step(f"{case.name} ({framework})", over=True)
        )
    made["plain"] = [name for name in plain if name in works]
    made["samples_ms"] = samples
    made["timelines"] = {
        n: t for n, f in made_fast.items() if n in works and (t := _lanes(f, case))
    }
    made["statistics_ms"] = {name: measuring.statistics(values) for name, values in samples.items()}
    if made["plain"]:
        made["ratios"] = {
            name: measuring.ratio(samples, name, made["plain"])
            for name in works
            if name not in plain
        }
    return made


def _lanes(fast: Any, case: Target) -> dict[str, Any] | None:
    """Lane, name, start and end in nanoseconds of a plan's regions, for the report's pictures.

    Measured; predicted where what runs has no time stamps (one XLA program). Its notes say if a call runs
    something else than this plan. None if there is no plan.
    """
    for kind, timeline in {"measured": dfx.profile, "predicted": dfx.simulate}.items():
        try:
            made = timeline(case.bound(fast), *case.args)
        except Exception:  # a picture less; the measurement of calls stands
            continue
        if ran := [
            (s.lane, s.name, s.start_ns, s.end_ns) for s in made.spans if s.kind == "launch"
        ]:
            return {"kind": kind, "spans": ran, "notes": list(made.meta.get("notes", ()))}
    return None


@contextlib.contextmanager
def _noted(made: dict[str, Any], name: str) -> Iterator[None]:
    """What goes wrong with one way is kept, and the rest goes on; so is what runs otherwise than asked."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", dfx.FallbackWarning)
        try:
            yield
        except dfx.DynaflowError as error:
            made["failed"][name] = str(error)
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            made["failed"][name] = f"{type(error).__name__}: {line}"
    said = [str(w.message) for w in told if issubclass(w.category, dfx.FallbackWarning)]
    if said and name not in made["failed"]:
        made["notes"][name] = " ".join([*filter(None, [made["notes"].get(name)]), *said])


def _call(fast: Any, case: Target, frontend: Any) -> Any:
    def call() -> None:
        frontend.wait(fast(*case.args, **case.kwargs))

    return call


def show(
    record: dict[str, Any], path: Path | None, notes: Sequence[str], out: CommandOutput
) -> int:
    """Prints a table and writes the file; returns the exit status: 1 if there is nothing to compare.

    Raises:
        TargetError: the file cannot be written; all is printed then.
    """
    out.result(record | {"notes": list(notes)})
    rows = []
    for case in record["cases"]:
        for name, told in case["statistics_ms"].items():
            found = case.get("ratios", {}).get(name)
            quartiles = f"{told['q1']:.3g} to {told['q3']:.3g}"
            against = ""
            if found:
                spread = f"{found['low']:.2f} to {found['high']:.2f}"
                against = f"{found['ratio']:.2f} ({spread}) of {found['baseline']}"
            style = (
                "green"
                if found and found["high"] < 1
                else "red"
                if found and found["low"] > 1
                else ""
            )
            rows.append(
                [
                    case["name"],
                    case["framework"],
                    name,
                    f"{told['median']:.3g}",
                    quartiles,
                    (against, style),
                ]
            )
    out.table(
        ["case", "framework", "way", "ms", "quartiles", "ratio (95 %) to the best without a plan"],
        rows, right=(3, 4),
    )  # fmt: skip
    for case in record["cases"]:
        for name, why in case["failed"].items():
            out.text(f"failed: {name} on {case['name']} ({case['framework']}): {why}", "yellow")
        for name, why in case["notes"].items():
            out.text(f"note: {name} on {case['name']} ({case['framework']}): {why}", "yellow")
    load = record["environment"]["load_average"][0]
    if load > machine.cores() / 2:
        out.text(
            f"note: other programs ran (load {load}); measure again when the machine is quiet",
            "yellow",
        )
    for note in notes:
        out.text(f"note: {note}", "yellow")
    if path is not None:
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        except OSError as error:
            raise TargetError(f"{path} cannot be written: {error.strerror}") from error
        out.text(f"written: {path}")
    return 0 if any(case.get("ratios") for case in record["cases"]) else 1


def stamp() -> dict[str, Any]:
    """What a reader needs to judge a measurement."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": machine.cpu_model(),
        "cores": machine.cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
