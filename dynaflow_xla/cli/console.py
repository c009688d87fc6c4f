"""What commands print: tables and sentences for people, or one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDE = 200
"""Columns where there is no terminal: lines in a file or a pipe are not to be cut."""


class Output:
    """Where a command's results go.

    Args:
        as_json: One JSON document on standard output, and nothing else there.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out, self._err = _console(stderr=False), _console(stderr=True)

    def result(self, data: Any) -> None:
        """The whole result, for programs; printed with ``--json`` only."""
        if self.as_json:
            # Not through the terminal's console, which would wrap it.
            print(json.dumps(data, indent=1, default=str), file=self._out.file)

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
