"""Calls whose batch is split: sizes are offered to the capture, and unknown functions are watched once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.backend import Backend
from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture.mutation import effects
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.opaque import finding
from dynaflow_xla.frontends.torch.signature import open_batch
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.frontends.torch.tuning.deciding import Deciding


class Offering(Deciding):
    """A callable whose captures may know the sizes of a batch, and functions that Dynamo cannot follow.

    Attributes:
        splits: Whether its strategy may split the batch.
        backend: Its captures' own.
        parent: Of a candidate of ``Auto``: what it is made for.
        opaque: Functions that stand as operators in its graphs.
        changes: What calls change outside.
    """

    splits: bool
    backend: Backend
    parent: Any
    opaque: finding.Opaque
    changes: effects.Changes
    _compiled: Callable[..., Any]

    def _offered(self, args: Any, kwargs: Any) -> Any:
        if not self.splits:
            return self._compiled(*args, **kwargs)
        options = self.options
        while True:
            offered = open_batch.offered(options.name, options.in_axes, self.original, args, kwargs)
            try:
                with offered, operators.layers_of_any_size(), self._watching():
                    result = self._compiled(*args, **kwargs)
                break
            except finding.Found as error:
                found = error
            learned, result = self._learned(found, args, kwargs)
            if learned and not running.only_plans():
                running.note_original()
                return result
        axes.check_results(options.name, options.out_axes, result)
        return result

    def _learned(self, found: finding.Found, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Runs the original, watched, and gives its result; not if another thread did meanwhile."""
        told: list[str] = []
        if not self.opaque.lock.acquire(blocking=running.only_plans()):
            # Another thread watches a run; this call need not wait for it.
            return True, self.as_written(args, kwargs)
        try:
            if not self.opaque.is_news(found):
                return False, None
            result = None
            with self.opaque.learning(found) as told:
                if not running.only_plans():
                    result = self.as_written(args, kwargs)
                else:
                    self._watched_run(args, kwargs)
        finally:
            self.opaque.lock.release()
        for note in told:
            self.warn(f"{self.options.name!r}: {note}")
        return True, result

    def _watching(self) -> contextlib.AbstractContextManager[None]:
        """Context of a call whose captures may stand an operator in the place of a call."""
        joins = self.parent is None and self.backend.in_place
        joins &= getattr(self.options.strategy, "joins", True) is not False
        return self.opaque.watching() if joins else contextlib.nullcontext()

    def _watched_run(self, args: Any, kwargs: Any) -> None:
        """Runs the original and leaves no trace."""
        kept = keeping.preserved(self.original, self.changes, args, kwargs)
        with kept, keeping.called_modules_kept():
            given = keeping.copies((args, kwargs))
            self.as_written(*given)
