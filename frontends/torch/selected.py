"""A torch callable with several plans, of which one runs: chosen at each call with the real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.selection import Selection
from dynaflow_xla.settings import Settings


class SelectCore:
    """What stands in the place of a ``Core`` where ``select`` was given.

    Args:
        original: A module or function.
        options: With ``selection``.
    """

    def __init__(self, original: Callable[..., Any], options: Settings) -> None:
        assert options.selection is not None
        self.original, self.options = original, options
        self.members = {
            name: None
            if strategy is None
            else Core(original, replace(options, strategy=strategy, selection=None))
            for name, strategy in options.selection.strategies.items()
        }
        self.selection = Selection(options.name, options.selection, self._rows)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs what ``select`` names.

        Raises:
            PlanError: ``select`` raised, or named nothing that there is.
        """
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # inlined into somebody's graph
        name = self.chosen(args, kwargs)
        member = self.members[name]
        if member is not None:
            result = member.call(args, kwargs)
        else:
            with marks.ignore():
                result = self.original(*args, **kwargs)
        self.selection.ran(name)
        return result

    def chosen(self, args: Any, kwargs: Any) -> str:
        """Name of what a call with these arguments would run."""
        return self.selection.named(self.selection.answer(args, kwargs))

    def _rows(self, args: Any, kwargs: Any) -> int | None:
        options = self.options
        if options.in_axes is None:
            return None
        dims = axes.batch_dims(options.name, options.in_axes, self.original, args, kwargs)
        return int(dims[0][0].shape[dims[0][1]])


def core_of(original: Callable[..., Any], options: Settings) -> Any:
    """A ``Core``, or what chooses among several."""
    return Core(original, options) if options.selection is None else SelectCore(original, options)
