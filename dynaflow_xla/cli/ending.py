"""How a command ends: its result as text or JSON, an error as a sentence, an exit status."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import click

from dynaflow_xla.cli.console import CommandOutput, elsewhere
from dynaflow_xla.errors import DynaflowError


def _locations(package: str) -> list[str]:
    found = importlib.util.find_spec(package)
    return [] if found is None else list(found.submodule_search_locations or ())


_LIBRARIES = tuple(
    os.path.join(place, "")
    for place in {
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *_locations("dynaflow_xla.frontends"),  # of an editable installation they lie elsewhere
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
"""Folders of this package, of Python and of what is installed; users' code may lie below a prefix."""


_EXTRAS = {
    "jax": "jax", "jaxlib": "jax", "torch": "torch", "torchax": "torch", "matplotlib": "trace",
    "perfetto": "trace",
}  # fmt: skip
"""By module the extra that installs it: users' code imports them, too."""


class Failed(click.ClickException):
    """An error with which a command ends: one or a few lines, no traceback.

    Args:
        message: The lines.
        kind: The error's type.
        as_json: Print it as JSON, too.
        document: What was found before.
    """

    def __init__(self, message: str, kind: str, as_json: bool, document: Any = None) -> None:
        super().__init__(message)
        self.kind, self.as_json, self.document = kind, as_json, document

    def show(self, file: Any = None) -> None:
        """Prints it to standard error, and as JSON where that is asked for."""
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(self.message, err=True)
        if self.as_json:
            print_json((self.document or {}) | {"error": self.message, "kind": self.kind})


class _Misused(Failed):
    """What is wrong with the command line itself."""

    exit_code = click.UsageError.exit_code


def print_json(document: Any) -> None:
    """What a command found; values that JSON lacks as their text."""
    click.echo(json.dumps(document, indent=1, default=str))


class Commands(click.Group):
    """All commands: what is wrong with a command line is told as JSON, too, where that is asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the command line; whether errors are to be JSON is known before it is understood."""
        before = args[: args.index("--")] if "--" in args else args
        ctx.meta[__name__] = "--json" in before
        with self._told(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with self._told(ctx):
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _told(self, ctx: click.Context) -> Iterator[None]:
        try:
            yield
        except Failed:
            raise
        except click.ClickException as error:
            if not ctx.meta[__name__]:
                raise
            failed = _Misused if isinstance(error, click.UsageError) else Failed
            raise failed(error.format_message(), type(error).__name__, True) from None


def command(function: Callable[..., int | None]) -> Callable[..., Any]:
    """What every command has: ``--json``, ``--traceback``, and errors as sentences."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @click.option("--traceback", "trace_back", is_flag=True, help="Print tracebacks of errors.")
    @functools.wraps(function)
    def wrapped(as_json: bool, trace_back: bool, **options: Any) -> None:
        out = CommandOutput(as_json)
        try:
            with elsewhere() if as_json else contextlib.nullcontext():
                status = function(out=out, **options)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, SystemExit) as error:  # the user's code may leave Python
            if trace_back:
                traceback.print_exc()
            kind = type(error).__name__
            raise Failed(told(error, trace_back), kind, as_json, out.document) from None
        if as_json:
            print_json(out.document)
        click.get_current_context().exit(status or 0)

    return wrapped


def told(error: BaseException, shown: bool) -> str:
    """An error in a sentence: ours as it is, others with their type and the user's line."""
    if isinstance(error, DynaflowError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))]
    if mine:
        text += f"\n  at {mine[-1].filename}:{mine[-1].lineno}, in {mine[-1].name}"
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or "")):
        text += f"\n  install it with: pip install 'dynaflow-xla[{extra}]'"
    return text if shown else text + "\n  --traceback shows all of it"
