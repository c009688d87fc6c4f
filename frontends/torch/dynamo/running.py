"""What a scheduled call of this thread runs, and why it runs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dynaflow_xla.frontends.torch._compat import aot, modes
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.capture.mutation import effects
from dynaflow_xla.frontends.torch.capture.random import states
from dynaflow_xla.frontends.torch.dynamo import uncaptured

Run = Callable[[Any], list[Any]]


class _CurrentCall(threading.local):
    ran: list[Any] | None = None
    left_out: str = ""
    original = False
    stop = False
    random: Any = None
    observed: Callable[[Any], Run | None] | None = None


_state = _CurrentCall()


def note_random_state(wanted: bool) -> None:
    """Remembers the generators' states of a call that may have to begin anew; or forgets them."""
    _state.random = states.Generators((), {}).states() if wanted else None


def begin_anew() -> None:
    """Puts generators back to what was remembered."""
    if _state.random is not None:
        states.Generators((), {}).put_back(_state.random)


class FirstGraphPlanned(BaseException):
    """Ends a call as soon as its first graph is planned; no ``Exception``, so that nobody keeps it."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry


class EndedInFront(BaseException):
    """Ends a call in front of its first graph."""


class Uncaptured(BaseException):
    """Ends a call that cannot be captured, where only planning is wanted.

    Args:
        error: Why not.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Running(marks.MarkWatch):
    """Context of a scheduled call: collects the entries that it runs, or stops at the first.

    A class: what ``contextlib`` makes of a generator costs some microseconds a call.
    """

    __slots__ = ("saved", "stop")

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop

    def __enter__(self) -> list[Any]:
        state = _state
        self.saved = state.ran, state.stop
        ran: list[Any] = []
        state.ran, state.stop, state.original = ran, self.stop, False
        marks.MarkWatch.__enter__(self)
        return ran

    def __exit__(self, *error: object) -> None:
        marks.MarkWatch.__exit__(self)
        _state.ran, _state.stop = self.saved


@contextmanager
def ends_at_lasting(changes: effects.Changes, original: Any, entry: Any) -> Iterator[None]:
    """Ends a call of this thread before something runs that changes what cannot be put back.

    What code in or behind a graph changes is known when that graph is captured, not before; what code in no
    graph does is not known at all.

    Args:
        changes: What is known, and is told meanwhile.
        original: What is called.
        entry: Of ``FirstGraphPlanned``.
    """

    def found(_: Any) -> None:
        if changes.lasting(original):
            raise FirstGraphPlanned(entry)

    def in_no_graph(where: str) -> None:
        changes.found(others=frozenset({f"whatever the code between its graphs does, see {where}"}))

    with changes.watched(found), _in_no_graph(in_no_graph):
        yield


def ends_in_front(changes: effects.Changes) -> AbstractContextManager[None]:
    """Ends a call of this thread in front of its first graph if code in none is to run there.

    Args:
        changes: Are told of that.
    """

    def in_no_graph(where: str) -> None:
        text = f"whatever the code in front of its first graph does, see {where}"
        changes.found(others=frozenset({text}))
        raise EndedInFront

    return _in_no_graph(in_no_graph)


def kept_in_front(keep: Callable[[], None]) -> AbstractContextManager[None]:
    """While open, ``keep`` is called before code in no graph runs on this thread."""
    return _in_no_graph(lambda where: keep())


def _in_no_graph(tell: Callable[[str], None]) -> AbstractContextManager[None]:
    return uncaptured.told(tell, Runner.__call__.__code__)


def note_run(entry: Any) -> None:
    """Notes that a call of this thread runs a graph; ends the call if only planning is wanted."""
    if _state.ran is not None:
        _state.ran.append(entry)
    if _state.stop:
        raise FirstGraphPlanned(entry)


def only_plans() -> bool:
    """Whether the call of this thread is to end as soon as its first graph is planned."""
    return _state.stop


def note_original() -> None:
    """Notes that the call of this thread ran the original, to learn from it."""
    _state.original = True


def ran_original() -> bool:
    """Whether the last call of this thread did."""
    return _state.original


@contextmanager
def observing(entry: Any, run: Run) -> Iterator[None]:
    """While open, calls on this thread do ``run`` in place of ``entry``."""
    with observing_each(lambda other: run if other is entry else None):
        yield


@contextmanager
def observing_each(observer: Callable[[Any], Run | None]) -> Iterator[None]:
    """While open, calls on this thread do in place of an entry what this says; None: the entry."""
    before, _state.observed = _state.observed, observer
    try:
        yield
    finally:
        _state.observed = before


def observes() -> bool:
    """Whether this thread is inside of ``observing``."""
    return _state.observed is not None


def observer(entry: Any) -> Run | None:
    """What is to be done on this thread in place of this entry."""
    observed = _state.observed
    return None if observed is None else observed(entry)


def left_out() -> str:
    """Why Dynamo ended or gave up a graph in a call of this thread; "" if it did not."""
    return _state.left_out


def leave_out(reason: str) -> None:
    """Remembers such a reason."""
    _state.left_out = reason


class Runner:
    """A compiled graph: counts itself among what a call ran, then runs.

    Args:
        graph: Made of one of AOTAutograd's.
        updates: Numbers of inputs and of the outputs that they are to hold before the call's last operator.
    """

    def __init__(self, graph: Any, updates: Sequence[tuple[int, int]] = ()) -> None:
        self.graph, self._updates = graph, updates
        self.resolves = hasattr(graph, "resolve")  # plans by sizes

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs it, or what is to be done in its place."""
        entry = self._resolve(inputs) if self.resolves else self.graph
        observed = observer(entry)
        if observed is not None:
            return observed(inputs)
        if entry.kind != "backward":
            note_run(entry)
            if self._updates and modes.saved_is_hooked():
                return self._updated(entry, inputs)
        return entry(inputs)  # type: ignore[no-any-return]

    def _updated(self, entry: Any, inputs: list[Any]) -> list[Any]:
        """Runs it and writes its inputs: what recomputes for a checkpoint ends before AOTAutograd does."""
        targets = [inputs[number] for number, _ in self._updates]
        outputs: list[Any] = entry(inputs)
        aot.write(targets, [outputs[number] for _, number in self._updates])
        return outputs

    def _resolve(self, inputs: list[Any]) -> Any:
        if not modes.modes_active():
            return self.graph.resolve(inputs)
        # A mode of the user's (that of a selective checkpoint) is to see what runs, not how it is planned.
        with modes.apart():
            return self.graph.resolve(inputs)
