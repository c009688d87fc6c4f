"""Calls through what is captured of a callable: how one is found or made, and why there is none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Self

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures, failures, operators
from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture.forwards import why_later
from dynaflow_xla.frontends.torch.capture.mutation import overlap
from dynaflow_xla.frontends.torch.dynamo import capturing, running
from dynaflow_xla.frontends.torch.dynamo.graphs import CapturedGraphs, Doorway, NoGraph, way_out
from dynaflow_xla.frontends.torch.offering import Offering
from dynaflow_xla.frontends.torch.opaque import finding, padded
from dynaflow_xla.frontends.torch.signature import backends
from dynaflow_xla.frontends.torch.tuning import auto, call_signature
from dynaflow_xla.settings import Settings

_MAX_ROOTS = 8
"""So many times captures begin anew after a call that raised."""

_MAX_REASONS = 1024
_MAX_SHARED = 8
"""So many captures differ by which arguments share memory only."""

_MAX_FAILED = 3
"""So often a capture of calls of one kind may fail; the original runs then without another try.

Not at once: what fails may be memory that is gone for a moment.
"""


class Captured(Offering):
    """A callable whose calls run graphs that were captured of it, of which it keeps several.

    Tensors that share memory in another way than at the first call have captures of their own, where the
    callable writes into what it is given.

    Args:
        original: A module or function.
        options: See :class:`Settings`.
        parent: Of a candidate of ``Auto``: what it is made for.
    """

    def __init__(
        self, original: Callable[..., Any], options: Settings, parent: Self | None = None
    ) -> None:
        super().__init__(original, options)
        options = self.options
        self.backend = backends.of(options)
        self.splits = auto.splits(options.strategy)
        self.parent = parent
        of_parent = None if parent is None else parent.graphs
        self.graphs: CapturedGraphs = CapturedGraphs(original, self.backend, self.splits, of_parent)
        self.entries, self.breaks = self.graphs.entries, self.graphs.breaks
        self.changes = self.graphs.changes
        self.opaque = finding.Opaque(original)
        self._padded = padded.PaddedCalls(original, options.name, partial(_kind, original))
        self._later = why_later(original, options.name)
        self._apart: dict[overlap.Pattern, Self] = {}
        self._lock = threading.Lock()
        self._warned = False
        self._told: set[str] = set()
        self._left_out = ""
        self._reasons: Recent[Hashable, str] = Recent(_MAX_REASONS)
        self._nothing: call_signature.Known | None = None  # the last call without a graph
        self._failed: Recent[Hashable, int] = Recent(_MAX_REASONS)
        self._most = sys.maxsize
        self._roots = 0
        self._begin_captures()

    def _begin_captures(self) -> None:
        """With a function for Dynamo to compile of which it knows nothing."""
        self._roots += 1
        self.breaks.clear()
        self._root = capturing.root_function(self.original)
        compiled = captures.compiled(
            self._root,
            capturing.MAX_CAPTURES,
            backend=Doorway(self.graphs),
            **self.backend.capture_options(),
        )
        self._compiled = capturing.settings.for_calls(compiled)
        self._shortcut = captures.Shortcut(self._root)

    def warn(self, note: str) -> None:
        """Tells the user of something once, at the line of the call."""
        if note not in self._told:
            self._told.add(note)
            self.graphs.warn(note)

    # -- running ----------------------------------------------------------------------------------

    def _invoke(self, args: Any, kwargs: Any) -> Any:
        graphs = self.graphs
        if graphs.shared is None:
            graphs.shared = overlap.pattern(args, kwargs)
        elif graphs.writes and (found := overlap.pattern(args, kwargs)) != graphs.shared:
            return self._invoke_apart(found, args, kwargs)
        try:
            return self._invoke_whole(args, kwargs)
        except overlap.SharedOtherwise as error:
            if self.breaks:
                raise UnsupportedError(
                    f"{self.options.name!r} writes into its arguments, or into what it holds, which share "
                    "memory in another way than when it was captured, and it is captured in several graphs, "
                    "of which some have run. Pass tensors with memory of their own, or call the original"
                ) from None
            found = error.pattern
        return self._invoke_apart(found, args, kwargs)

    def _invoke_apart(self, found: overlap.Pattern, args: Any, kwargs: Any) -> Any:
        """A call whose tensors share memory in another way than at the first one."""
        other = self._for_shared(found)
        return self.as_written(args, kwargs) if other is None else other._invoke(args, kwargs)

    def _invoke_whole(self, args: Any, kwargs: Any) -> Any:
        if not self.breaks:
            made = self._shortcut.find(args, kwargs)
            if made is not None:
                result = made(*args, **kwargs)
                if self.splits:
                    axes.check_results(self.options.name, self.options.out_axes, result)
                return result
        if not self._padded.possible:
            return self._captured(args, kwargs)
        with self._padded.watching():
            return self._captured(args, kwargs)

    def _captured(self, args: Any, kwargs: Any) -> Any:
        """Runs what is captured of a call, or captures it."""
        begun = capturing.settings.begun()
        try:
            if not self.backend.whole_layers:
                with operators.unfused_layers():
                    return self._offered(args, kwargs)
            if self.splits:
                return self._offered(args, kwargs)
            return self._compiled(*args, **kwargs)
        except failures.backend_failed() as error:
            inner = failures.inner_error(error)
            if not isinstance(inner, NoGraph):  # ours, or what the code of a strategy raised
                raise inner from inner.__cause__
            if self.breaks:
                raise UnsupportedError(
                    f"PyTorch can make no graph of a part of {self.options.name!r} "
                    f"({str(inner).splitlines()[0]}); call the original"
                ) from None
            failed: BaseException = inner
        except failures.capture_failed() as error:
            if self.breaks:
                raise  # a part of it may have run: not again
            failed = error
        except Exception as error:
            if classes := failures.unknown_tensors(error, args, kwargs):
                raise UnsupportedError(
                    f"{self.options.name!r} is given tensors of a class ({', '.join(classes)}) that "
                    "PyTorch's compiler cannot follow. Pass x.as_subclass(torch.Tensor), or call the original"
                ) from error
            if self.breaks or not failures.raised_by_capture(error):
                if capturing.settings.begun() != begun and self._roots < _MAX_ROOTS:
                    # It is the original's, raised while Dynamo traced it, which then leaves the function as
                    # it is, for good: the next call, of other arguments perhaps, is to be captured.
                    self._begin_captures()
                raise
            failed = error
        return self._uncaptured(failed, args, kwargs)

    def _uncaptured(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """A call that cannot be captured: most often the original fails, too, and tells it better."""
        if running.only_plans():
            raise running.Uncaptured(error)
        result = self.as_written(args, kwargs)
        text = failures.in_words(error)
        self._warned = True
        why = text + way_out(text, self.original)
        self.graphs.warn(f"{self.options.name!r} cannot be captured ({why}), so the original runs")
        running.leave_out(text)
        kind = call_signature.of(self.original, args, kwargs)
        self._failed[kind] = self._failed.get(kind, 0) + 1
        return result

    def _failed_often(self, args: Any, kwargs: Any) -> bool:
        """Whether captures of calls like this one failed, each of which takes longer than many calls."""
        kind = call_signature.of(self.original, args, kwargs)
        return self._failed.get(kind, 0) >= _MAX_FAILED

    def _for_shared(self, found: overlap.Pattern) -> Self | None:
        """The same for arguments that share memory in another way: a capture of its own.

        None: there were too many of these, and the original runs.
        """
        with self._lock:
            if found in self._apart:
                return self._apart[found]
            if len(self._apart) < _MAX_SHARED:
                self._apart[found] = made = type(self)(self.original, self.options, self.parent)
                return made
        self._left_out = (
            "it writes into its arguments, and these share memory in a way that "
            f"{_MAX_SHARED + 1} earlier calls did not, each of which was captured anew: pass tensors with "
            "memory of their own"
        )
        self.warn(f"the original of {self.options.name!r} runs for further calls: {self._left_out}")
        self._warned = True
        return None

    # -- reasons ----------------------------------------------------------------------------------

    def why_original(self, args: Any, kwargs: Any) -> str:
        """Why a call with these arguments ran no graph."""
        if why := self._later or self._padded.why(args, kwargs):
            return why
        name = self.options.name
        count, reason = captures.captures_of(self._root, {"args": args, "kwargs": kwargs})
        if count >= min(capturing.MAX_CAPTURES, self._most):
            self._most = count  # the limit may change; what was given up once is not captured again
            return (
                f"{name!r} was captured {count} times, which is the most that is kept, and these arguments "
                f"need another capture ({reason}), so the original runs for them. Sizes are captured twice, "
                "whatever they are: look for what else changes from call to call (a Python value, a type, "
                "a mode), and pass it as a tensor, or schedule the function once for each"
            )
        # A call that finds its capture captures nothing, and learns no reason.
        kind = _kind(self.original, args, kwargs)
        left_out = running.left_out() or self._reasons.get(kind) or self._left_out
        if self.breaks:
            why = self.breaks[-1]
        elif left_out:
            why = left_out + way_out(left_out, self.original)
        else:
            why = "PyTorch finds nothing in it that computes with the tensors it is given"
            if self.entries:  # of other arguments, or before calls that raised
                why += ", or gave its code up after calls that raised; then torch._dynamo.reset() helps"
        return f"no graph of {name!r} could be captured, so the original runs ({why})"

    def _found_nothing(self, args: Any, kwargs: Any) -> None:
        """Remembers why there is no graph of such calls; "" if PyTorch does not say."""
        kind = _kind(self.original, args, kwargs)
        self._reasons[kind] = running.left_out() or self._reasons.get(kind, "")
        self._nothing = call_signature.Known(self.original, args, kwargs, 0, False)

    def _look_again(self, args: Any, kwargs: Any) -> bool:
        """Before a call: a function in whose first call Dynamo found nothing it leaves as it is, for good.

        Returns:
            Whether it is known that there is no graph of such a call.
        """
        if (last := self._nothing) is None:
            return False
        if last.again(args, kwargs, 0):  # in a row: no signature is read
            return True
        known = _kind(self.original, args, kwargs) in self._reasons
        if not (known or self.entries or self.breaks) and self._roots < _MAX_ROOTS:
            self._begin_captures()
        return known


def _kind(original: Any, args: Any, kwargs: Any) -> Any:
    """What calls that are captured alike have in common."""
    return call_signature.without_sizes(call_signature.of(original, args, kwargs))
