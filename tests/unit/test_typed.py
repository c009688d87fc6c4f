"""What type checkers are told of ``schedule`` is what it takes; ``tests/support/typed_usage.py`` shows it."""

from __future__ import annotations

import inspect
import typing

import dynaflow_xla as dfx
from dynaflow_xla.typed import Options


def test_options_are_those_of_schedule() -> None:
    parameters = inspect.signature(dfx.schedule).parameters
    assert [n for n in parameters if n not in ("fn", "strategy")] == list(Options.__annotations__)
    assert len(typing.get_overloads(dfx.schedule)) == 4
