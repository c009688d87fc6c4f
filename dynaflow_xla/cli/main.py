"""The commands and their options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import dynaflow_xla as dfx
from dynaflow_xla import backends, dispatch
from dynaflow_xla._version import __version__
from dynaflow_xla.caches import private_files
from dynaflow_xla.cli import kept, targets, trace as tracing
from dynaflow_xla.cli.console import CommandOutput
from dynaflow_xla.cli.ending import Commands, command, told
from dynaflow_xla.cli.health import doctor as examining
from dynaflow_xla.cli.targets import Target, TargetError
from dynaflow_xla.cli.timing import bench as benching, compare as comparing, report as reporting
from dynaflow_xla.errors import DynaflowError


def _on_target(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of commands that work on a call of the user's function."""
    for option in reversed(
        [
            click.argument("target"),
            click.argument("shapes", nargs=-1),
            click.option("--args", "make", metavar="MODULE:NAME", help="What makes the arguments."),
            *_SCHEDULE,
        ]
    ):
        function = option(function)
    return function


_SCHEDULE: list[Any] = [
    click.option(
        "--factory", is_flag=True, help="TARGET makes the function (a model, say) when called."
    ),
    click.option(
        "--framework", type=click.Choice(["jax", "torch"]), help="Whose arrays shapes are."
    ),
    click.option(
        "--strategy",
        default="auto",
        show_default=True,
        help="Name, NanoBatch(4), IOS() or module:Strategy.",
    ),
    click.option("--lanes", type=int, help="Number of lanes."),
    click.option("--backend", default="auto", show_default=True, help=f"{backends.names()}."),
    click.option("--compiler", default="eager", show_default=True, help="How PyTorch regions run."),
    click.option("--in-axes", metavar="LITERAL", help="Where the batch is, as a Python literal."),
    click.option("--out-axes", metavar="LITERAL", help="How results are put together."),
    click.option("--seed", type=int, default=0, help="Of random arguments."),
]


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options of ``schedule`` among those of a command, which lose them."""
    made = {name: options.pop(name) for name in ("strategy", "lanes", "backend", "compiler")}
    made["strategy"] = targets.strategy(made["strategy"])
    for name in ("in_axes", "out_axes"):
        if (text := options.pop(name)) is not None:
            made[name] = targets.literal(text, f"--{name.replace('_', '-')}")
    return made


def _scheduled(target: str, shapes: tuple[str, ...], options: dict[str, Any]) -> tuple[Target, Any]:
    """The call, and its function scheduled; one that is scheduled already stays as it is."""
    given = _given(options)
    found = targets.target(target, shapes, **options)
    if dispatch.is_scheduled(found.fn):
        return found, found.fn
    return found, dfx.schedule(found.fn, **given)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="dynaflow-xla")
def cli() -> None:
    """Schedules for JAX and PyTorch functions: look at them, measure them, find what is wrong.

    TARGET is module:function or file.py:function; its arguments are shapes such as f32[8,128], Python
    literals, or what --args makes.
    """


@cli.command()
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=180.0,
    show_default=True,
    help="Seconds for a trial.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="First measure the numbers that plans assume of this machine (a minute).",
)
@command
def doctor(out: CommandOutput, timeout: float, measure: bool) -> int:
    """Say what of this machine and environment works, what does not, and how to mend it.

    Ends with status 1 if something does not work.
    """
    if measure:
        with out.progress("measuring", 0) as tell:
            dfx.measure_machine(tell=lambda now: tell(f"measuring: {now}"))
    with out.progress("looking", 4) as step:
        found = examining.examine(step, timeout)
    return examining.show(found, out)


@cli.command()
@_on_target
@click.option("--deep", is_flag=True, help="With what the compiler made of the plan (backend xla).")
@command
def explain(
    out: CommandOutput, target: str, shapes: tuple[str, ...], deep: bool, **options: Any
) -> None:
    """Show regions, lanes, costs, copies and notes of the plan of TARGET for these arguments."""
    found, fast = _scheduled(target, shapes, options)
    text = dfx.explain(found.bound(fast), *found.args, deep=deep)
    if out.as_json:
        data: dict[str, Any] = {"target": target, "text": text}
        try:
            plan = dfx.plan(fast, *found.args, **found.kwargs)
        except DynaflowError as error:  # several graphs, or the original: explain says so
            data["no_plan"] = str(error)
        else:
            data |= {"plan": json.loads(plan.to_json()), "notes": list(plan.notes)}
            graph = dfx.graph(fast, *found.args, **found.kwargs)
            data["graph"] = json.loads(graph.to_json())
        out.result(data)
    out.text(text)


@cli.command()
@_on_target
@click.option("--estimated", is_flag=True, help="From the cost model alone; run nothing.")
@click.option(
    "--rounds", type=click.IntRange(1), default=15, show_default=True, help="Timed calls."
)
@click.option(
    "-o", "--out", "path", type=click.Path(path_type=Path), help="Timeline with the reasons."
)
@command
def why(
    out: CommandOutput,
    target: str,
    shapes: tuple[str, ...],
    estimated: bool,
    rounds: int,
    path: Path | None,
    **options: Any,
) -> None:
    """Say why the plan of TARGET gains or does not, and what each decision is worth."""
    if path is not None:
        tracing.check(path)
    found, fast = _scheduled(target, shapes, options)
    report = dfx.why(found.bound(fast), *found.args, measure=not estimated, rounds=rounds)
    out.result(report.to_dict())
    out.text(report.to_text())
    if path is not None:
        out.text(f"written: {tracing.write(report.timeline, path)}")


@cli.command()
@_on_target
@click.option("--predicted", is_flag=True, help="Simulate; run nothing but the script.")
@click.option(
    "-o", "--out", "path", type=click.Path(path_type=Path), default="trace.html", show_default=True,
    help=f"{', '.join(tracing.SUFFIXES)}; .json and .pftrace are for Perfetto.",
)  # fmt: skip
@click.option(
    "--open", "opened", is_flag=True, help="Open it in the browser, or in Perfetto's page."
)
@command
def trace(
    out: CommandOutput, target: str, shapes: tuple[str, ...], predicted: bool, path: Path, opened: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Write a timeline of TARGET, or of what a script schedules and calls (TARGET is script.py).

    Arguments of a script come after --.
    """
    tracing.check(path)
    if target.endswith(".py"):
        calls = [(found, found.fn) for found in tracing.of_script(Path(target), shapes)]
    else:
        calls = [_scheduled(target, shapes, options)]
    written: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for number, (found, fast) in enumerate(calls, 1):
        try:
            made = tracing.timeline(found, fast, predicted)
        except Exception as error:  # of one of several functions: the others are traced
            if len(calls) == 1:
                raise
            out.aside(f"{found.name}: {told(error, True)}", "yellow")
            failed.append({"name": found.name, "error": told(error, True)})
            continue
        where = tracing.write(made, tracing.numbered(path, found.name, number, len(calls)))
        written.append({"name": found.name, "path": str(where), "summary": made.summary()})
        out.text(f"{found.name}: {made.summary()}")
        out.text(f"written: {where}")
    out.result({"timelines": written, "failed": failed})
    if not written:
        raise TargetError("none of these functions could be traced")
    if opened:
        for one in written:
            tracing.open_in_browser(Path(one["path"]), out)


@cli.command()
@click.argument("target", required=False)
@click.argument("shapes", nargs=-1)
@click.option("--args", "make", metavar="MODULE:NAME", help="What makes the arguments.")
@click.option("--factory", is_flag=True, help="TARGET makes the function when called.")
@click.option("--case", "cases", multiple=True, help="One of the built-in cases; default: all.")
@click.option("--framework", "frameworks", multiple=True, type=click.Choice(["jax", "torch"]))
@click.option("--strategy", "strategies", multiple=True, help="Default: branches and auto.")
@click.option("--against", "opponents", multiple=True, help="Only these ways without a plan.")
@click.option(
    "--rounds", type=click.IntRange(3), default=20, show_default=True, help="Samples of each."
)
@click.option(
    "--lanes", type=click.IntRange(1), multiple=True, help="Number of lanes; several are compared."
)
@click.option("--in-axes", metavar="LITERAL", help="Where the batch of TARGET is, for nano_batch.")
@click.option("--out-axes", metavar="LITERAL", help="How results are put together.")
@click.option(
    "-o", "--out", "path", type=click.Path(path_type=Path), help="Result file, for compare."
)
@command
def bench(
    out: CommandOutput, target: str | None, shapes: tuple[str, ...], make: str | None, factory: bool,
    cases: tuple[str, ...], frameworks: tuple[str, ...], strategies: tuple[str, ...],
    opponents: tuple[str, ...], rounds: int, lanes: tuple[int, ...],
    in_axes: str | None, out_axes: str | None, path: Path | None,
) -> int:  # fmt: skip
    """Time strategies against the plain ways to run TARGET, or the built-in cases, in turns."""
    if path is not None:
        targets.check_folder(path)
    settings: dict[str, Any] = {}
    for option, text in {"in_axes": in_axes, "out_axes": out_axes}.items():
        if text is None:
            continue
        if target is None:
            raise TargetError(f"--{option.replace('_', '-')} is for a TARGET; the cases have none")
        settings[option] = targets.literal(text, f"--{option.replace('_', '-')}")
    notes: list[str] = []
    given = benching.parsed(strategies or ("branches", "auto"))
    if target is None:
        found, notes = benching.built_in(cases, frameworks)
    elif cases:
        raise TargetError("bench takes a TARGET or --case; got both")
    else:
        whose = frameworks[0] if frameworks else None
        found = [targets.target(target, shapes, make, framework=whose, factory=factory)]
    record = benching.run(found, given, rounds, out, settings, opponents, lanes)
    return benching.show(record, path, notes, out)


@cli.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--least", type=click.FloatRange(0, 1), default=0.03, show_default=True,
    help="Smaller changes do not count.",
)  # fmt: skip
@command
def compare(out: CommandOutput, before: Path, after: Path, least: float) -> int:
    """Say what became slower or faster from one result file to another.

    Ends with status 1 if a schedule became slower, after what became of the machine.
    """
    return comparing.compare(before, after, least, out)


@cli.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", "path", type=click.Path(path_type=Path), default="report.html", show_default=True,
    help=".html (one page that loads nothing) or .md.",
)  # fmt: skip
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@command
def report(out: CommandOutput, results: tuple[Path, ...], path: Path, opened: bool) -> None:
    """Write result files as a page or a Markdown table: what gains, what loses, with intervals."""
    made = reporting.write(results, path)
    out.result({"path": str(path), "rows": [dataclasses.asdict(row) for row in made]})
    out.text(f"written: {path}, {len(made)} rows")
    if opened:
        tracing.open_in_browser(path, out)


@cli.command()
@click.argument("action", type=click.Choice(["list", "size", "clear"]), default="list")
@click.option("--kind", type=click.Choice(["decision", "machine", "compiled"]), help="Only these.")
@click.option("--yes", is_flag=True, help="Clear without asking.")
@command
def cache(out: CommandOutput, action: str, kind: str | None, yes: bool) -> int:
    """List, sum up or clear what is kept on disk: decisions, the machine's numbers, compiled regions."""
    try:
        folder = private_files.cache_folder()
    except private_files.NoFolder as error:
        raise TargetError(str(error)) from error
    try:
        found = [e for e in kept.entries(folder) if kind in (None, e.kind)]
    except OSError as error:
        raise TargetError(f"the cache folder {folder} cannot be read: {error.strerror}") from error
    total = sum(entry.bytes for entry in found)
    told = f"{folder}: {len(found)} files, {kept.size(total)}"
    data: dict[str, Any] = {"folder": str(folder), "files": len(found), "bytes": total}
    status = 0
    if action == "list":
        data["entries"] = [
            {"file": e.path.name, "kind": e.kind, "bytes": e.bytes, "age_s": round(e.age_s),
             "about": e.about()} for e in found
        ]  # fmt: skip
        rows = [
            [e.kind, kept.size(e.bytes), kept.age(e.age_s), e.path.name, e.about()] for e in found
        ]
        if rows:
            out.table(["kind", "size", "age", "file", "holds"], rows, right=(1, 2))
    elif action == "clear" and found:
        if not yes and not out.as_json:
            click.confirm(
                f"remove {len(found)} files ({kept.size(total)}) from {folder}?", abort=True
            )
        elif not yes:
            raise TargetError("with --json, clear needs --yes")
        failed = kept.clear(found)
        data |= {"removed": len(found) - len(failed), "failed": failed}
        told = f"{folder}: removed {len(found) - len(failed)} files, {kept.size(total)}"
        status = 1 if failed else 0
        for line in failed:
            out.aside(line, "red")
    out.result(data)
    out.text(told)
    return status


def run(args: list[str] | None = None) -> int:
    """Runs a command line; returns its exit status."""
    try:
        cli.main(args, prog_name="dynaflow-xla", standalone_mode=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except OSError as error:  # of an output that cannot be written: click tells all others
        click.echo(f"error: {error}", err=True)
        return 1
