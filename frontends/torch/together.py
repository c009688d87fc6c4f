"""Several PyTorch functions or modules as one module, which calls them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.capture import functions
from dynaflow_xla.frontends.torch.capture.names import FUNCTION_NAME, PLACES
from dynaflow_xla.protocols import BoundFunction, Part


def unbound(fn: Any) -> BoundFunction:
    """What is called for a function; a scheduled one's original.

    Raises:
        UnsupportedError: there is no Python code to capture.
    """
    if isinstance(fn, torch.export.ExportedProgram):
        raise UnsupportedError(
            "together takes modules and functions; of an exported program take program.module()"
        )
    if isinstance(fn, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise UnsupportedError(
            "a TorchScript module has no Python code to capture; take the module it was made from"
        )
    fn = captures.without_compile(fn)
    core = getattr(fn, "_dfx_core", None)
    return BoundFunction(fn if core is None else core.original)


class Combined(torch.nn.Module):
    """Calls each function with its part of all arguments; modules are its children, and stay the user's.

    Args:
        parts: The functions.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = tuple((p.name, p.positional, p.keywords, p.count) for p in parts)
        setattr(self, PLACES, [place for part in parts for place in part.places])
        self._plain: list[Callable[..., Any] | None] = []
        for number, part in enumerate(parts):
            module = isinstance(part.function, torch.nn.Module)
            if module:
                self.add_module(FUNCTION_NAME.format(number), part.function)  # type: ignore[arg-type]
            self._plain.append(None if module else part.function)

    def forward(self, *flat: Any) -> tuple[Any, ...]:
        """A tuple of the functions' results."""
        results, start = [], 0
        for number, (name, positional, keywords, count) in enumerate(self._parts):
            plain = self._plain[number]
            function = getattr(self, FUNCTION_NAME.format(number)) if plain is None else plain
            args = flat[start : start + positional]
            named = dict(zip(keywords, flat[start + positional : start + count]))  # noqa: B905
            functions.begin(name)
            results.append(function(*args, **named))
            functions.end(name)
            start += count
        return tuple(results)


def combined(parts: Sequence[Part]) -> Combined:
    """One module of all arguments."""
    return Combined(parts)
