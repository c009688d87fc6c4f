"""Which calls of a function are made as they are: found where a capture fails, learned from the original.

A capture that fails because Python depends on values is given up before anything has run. The call that the
scheduled function would have made runs as the original instead, watched; from the next one on the innermost
function that can be an operator is one.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import inlining
from dynaflow_xla.frontends.torch._compat.inlining import CannotKeep, Followed, StandIn
from dynaflow_xla.frontends.torch.capture.names import ROOT_FILE, is_internal
from dynaflow_xla.frontends.torch.opaque import calls, regions
from dynaflow_xla.frontends.torch.opaque.shapes import learned
from dynaflow_xla.watching import telling

_VALUES = re.compile(
    r"[Dd]ata.dependent|[Dd]ynamic (output )?shape|Tensor\.(item|tolist)|depends on a tensor's value|"
    r"generic_jump"
)
"""What Dynamo says where Python depends on values."""

_MAX_RUNS = 16
"""So many calls are watched for a callable; what comes after ends the graph as without all this."""

_MAX_SEEN = 8
_GENERATORS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


class Found(BaseException):
    """Ends a capture; no ``Exception``, so that nobody keeps it.

    Attributes:
        functions: Those that may become operators, the innermost first.
        why: Why the capture failed.
        known: How many calls of the innermost were known then.
    """

    def __init__(self, functions: Sequence[types.FunctionType], why: str, known: int = 0) -> None:
        self.functions, self.why, self.known = functions, why, known


@dataclass
class _Known:
    """A function whose calls are made as they are."""

    function: types.FunctionType
    why: str
    calls: list[calls.OpaqueCall] = field(default_factory=list)

    @property
    def where(self) -> str:
        code = self.function.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


class Opaque:
    """The calls of one scheduled function that are made as they are.

    Args:
        original: The scheduled function or module: its own call is what there is to split.

    Attributes:
        refused: Why functions cannot be called as they are, by their code.
        lock: Held while a run is watched. What Dynamo asks meanwhile on another thread does not take it.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.refused: dict[types.CodeType, str] = {}
        self._known: dict[types.CodeType, _Known] = {}
        self._sites: list[regions.CallSite] = []
        self._runs = 0
        self.lock = threading.RLock()

    def is_news(self, found: Found) -> bool:
        """Whether nothing was learned of the function since the capture that it ended."""
        code = found.functions[0].__code__
        return code not in self.refused and found.known == self._count(code)

    def _count(self, code: types.CodeType) -> int:
        known = self._known.get(code)
        return 0 if known is None else len(known.calls)

    def watching(self) -> Any:
        """Context of a call that may be captured."""
        return inlining.watched(self, ROOT_FILE)

    @contextmanager
    def learning(self, found: Found) -> Iterator[list[str]]:
        """Context of a run of the original; adds to the list what is to be told of it afterwards."""
        function = found.functions[0]
        code, told = function.__code__, []  # type: ignore[var-annotated]
        known = self._known.setdefault(code, _Known(function, found.why))
        self._runs += 1
        recorder = calls.CallRecorder(code)
        with recorder.watching():
            yield told
        known.calls += recorder.calls
        if recorder.refused or not known.calls:
            why = recorder.refused or "is not called where it could be watched"
            self._refuse(code, why)
            told.append(
                f"{function.__qualname__} ({known.where}) cannot be captured ({found.why}), and cannot be "
                f"called as it is inside of a split function: it {why}"
            )
        elif len(known.calls) == len(recorder.calls):
            told.append(
                f"{function.__qualname__} ({known.where}) cannot be captured ({found.why}), so the original "
                "ran once and was watched: from the next call on this function is called as it is, once, on "
                "the rows put together, and what comes before and after is split, or an error says why it "
                "cannot be (dfx.explain says so before any call)"
            )

    def _refuse(self, code: types.CodeType, why: str) -> None:
        self.refused[code] = why
        self._known.pop(code, None)

    # -- asked while Dynamo captures ---------------------------------------------------------------

    def entered(self, call: Followed) -> StandIn | None:
        """What stands in the place of a call."""
        known = self._known.get(call.function.__code__)
        if known is None or not call.whole:
            return None
        try:
            return self._stand_in(known, call)
        except CannotKeep as error:
            self._refuse(call.function.__code__, str(error))
            telling.fallback(
                f"{call.function.__qualname__} ({known.where}) cannot be called as it is after all, so the "
                f"graph ends there: it {error}"
            )
            return None

    def failed(self, error: Exception, told: list[Followed]) -> None:
        """Ends the capture if a function inside of the scheduled one may become an operator."""
        why, where = inlining.lines_of(error)
        if self._runs >= _MAX_RUNS or not _VALUES.search(f"{why} {error}"):
            return
        functions = [c.function for c in told[: _own(told, self.original)] if self._fits(c)]
        if functions:
            raise Found(functions, f"{why} at {where}" if where else why)

    def _fits(self, call: Followed) -> bool:
        code = call.function.__code__
        if code in self.refused or code in self._known or not call.whole:
            return False
        return not code.co_flags & _GENERATORS and not is_internal(code.co_filename)

    def _stand_in(self, known: _Known, call: Followed) -> StandIn | None:
        tensors: list[Any] = []
        sizes: list[Any] = []
        try:
            named = calls.bound(call.function, call.args, call.kwargs)
        except TypeError:
            return None  # the original fails, too
        given = {k: call.read(named[k], tensors, sizes) for k in sorted(named)}
        modules = calls.modules_in(given)
        if not tensors:
            raise CannotKeep("takes no tensor")
        if call.changed() & ({-1} | calls.held_by(modules)):
            # It would read what is not written yet: Dynamo changes objects when the graph has run.
            raise CannotKeep("comes behind a change of what it may read, in the same call")
        state = calls.modes_of(modules), calls.thread_state()
        fitting = [
            c for c in known.calls
            if (c.training, c.thread) == state and calls.alike(given, c.given)
        ]  # fmt: skip
        if not fitting:
            if self._runs < _MAX_RUNS:
                raise Found([call.function], known.why, len(known.calls))
            raise CannotKeep("is called in too many ways")
        last = fitting[-1]
        same = [c.seen for c in fitting if (c.results, c.dtypes) == (last.results, last.dtypes)]
        found = learned(same[-_MAX_SEEN:])
        if found is None or len(same) != len(fitting):
            raise CannotKeep("returns shapes that follow no rule")
        owners = inlining.modules_in(list(named.values()))
        paths = _paths(self.original, modules)
        site = regions.CallSite(
            known.function.__qualname__, known.where, known.why, call.function, given, len(tensors),
            modules, paths, calls.thread_state(),
            tuple(bool(inlining.example_of(t).requires_grad) for t in tensors),
            found, last.dtypes, last.results,
        )  # fmt: skip
        self._sites.append(site)
        mine = [owners[id(m)] for m in modules]
        return StandIn(regions.stand_in, (site.number,), tensors, sizes, mine, last.results)


def _paths(original: Any, modules: Sequence[Any]) -> tuple[tuple[Any, str], ...]:
    """The scheduled module, and each module's name in it.

    Dynamo asks in later calls whether a module is of the same type, not whether it is the same one.

    Raises:
        CannotKeep: a module is no part of the scheduled one.
    """
    root = getattr(original, "__self__", original)
    known = root.named_modules() if isinstance(root, torch.nn.Module) else ()
    names = {id(m): name for name, m in known}
    if any(id(m) not in names for m in modules):
        raise CannotKeep("takes a module that is no part of the scheduled one")
    return tuple((root, names[id(m)]) for m in modules)


def _own(told: Sequence[Followed], original: Any) -> int:
    """How many calls, from the innermost on, lie inside of the scheduled function."""
    function = getattr(original, "__func__", original)
    for number, call in enumerate(told):
        if call.function is function or inlining.is_object(call.args, original):
            return number
    return len(told) - 1
