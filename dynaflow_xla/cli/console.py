"""What commands print: tables and sentences for people, or one JSON document for programs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDE = 200
"""Columns where there is no terminal: lines in a file or a pipe are not to be cut."""


class CommandOutput:
    """Where a command's results go.

    Args:
        as_json: The result is one JSON document; nothing else is printed to standard output.

    Attributes:
        document: The result, once it is known; whoever runs the command prints it at its end.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.document: Any = None
        self._out, self._err = _console(stderr=False), _console(stderr=True)

    def result(self, data: Any) -> None:
        """The whole result, for programs."""
        self.document = data

    def text(self, text: str = "", style: str = "") -> None:
        """Lines for people. Names in them are printed as they are."""
        if not self.as_json:
            self._out.print(Text(text, style=style), soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()
    ) -> None:
        """Rows for people.

        Args:
            columns: Their headings.
            rows: Cells; a cell is a text, or a pair of a text and its style.
            right: Numbers of the columns that end at the right.
        """
        if self.as_json:
            return
        made = Table(box=None, pad_edge=False, header_style="bold")
        for number, name in enumerate(columns):
            made.add_column(
                Text(name), justify="right" if number in right else "left", overflow="fold"
            )
        for row in rows:
            made.add_row(*[_cell(cell) for cell in row])
        self._out.print(made)

    def aside(self, text: str, style: str = "") -> None:
        """A line beside the result, on standard error."""
        self._err.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Any]:
        """A bar on standard error while something takes long; nothing where that is no terminal.

        Yields:
            A function: what is done now, and whether a step is over.
        """
        shown = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._err, transient=True, disable=not self._err.is_terminal,
        )  # fmt: skip
        with shown:
            task = shown.add_task(_plain(text), total=total)

            def step(now: str = "", over: bool = True) -> None:
                shown.update(task, advance=int(over), description=_plain(now or text))

            yield step


@contextmanager
def elsewhere() -> Iterator[None]:
    """What anybody prints to standard output goes to standard error: Python, libraries in C, children."""
    sys.stdout.flush()
    numbers = _number(sys.stdout), _number(sys.stderr)
    kept = os.dup(numbers[0]) if numbers[0] is not None and numbers[1] is not None else None
    if numbers[0] is not None and numbers[1] is not None:
        os.dup2(numbers[1], numbers[0])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # Whoever kept the stream itself, and C, may hold text back until now.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        if kept is not None and numbers[0] is not None:
            os.dup2(kept, numbers[0])
            os.close(kept)


def _number(stream: Any) -> int | None:
    """A stream's file descriptor; None where it has none, as in a notebook."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return text.replace("[", r"\[")


def _cell(cell: Any) -> Text:
    text, style = cell if isinstance(cell, tuple) else (cell, "")
    return Text(str(text), style=style)


def _console(stderr: bool) -> Console:
    # rich knows NO_COLOR, FORCE_COLOR and dumb terminals, and prints no colours to what is none.
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, emoji=False, width=_WIDE)
    return console
