"""Measuring while nothing else of this process runs, and noticing when something did.

A time that was taken beside other work says nothing about the function alone. So one thread measures at a
time, it begins when the process is idle, and what ran beside it is an error: the decision is made later.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dynaflow_xla.errors import DynaflowError

Choice = TypeVar("Choice")

_PROBE_S = 0.005
_IDLE = 0.2
"""The threads of an idle process want a core for less than this share of a probe."""

PATIENCE_S = 0.4
"""Library threads spin on for so long after a call: OpenBLAS 0.12 s, Intel's OpenMP 0.2 s."""

_RAN_S, _RAN = 2e-3, 0.01
"""Seconds, and the share of a measurement, that other Python threads may run: timers, monitors."""

_WANTED_S, _WANTED = 0.01, 0.1
"""The same for running and waiting for a core: on a busy machine what disturbs seldom runs."""

_FIRST_PAUSE_S = 0.05
_ATTEMPTS = 8
_MAX_PUT_OFF = 1024


class NotNow(DynaflowError, RuntimeError):
    """What would be measured now, or was, tells too little to decide by it."""


class CoresFar(NotNow):
    """The cores are far from each other: what was measured may not hold once they are near."""


class Disturbed(NotNow):
    """Something else of this process ran while ways to run a function were measured."""


class NotMyTurn(Disturbed):
    """Another thread of this process measures."""


class ActivityWatch:
    """What tells during a measurement whether something else runs."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._reason = ""
        self._since = time.perf_counter()
        self._before: dict[int, tuple[float, float]] = {}

    def begin(self) -> None:
        """From now on other threads have to rest."""
        self._since = time.perf_counter()
        self._before = {tid: _seconds(tid) for tid in _python_threads()}

    def disturb(self, reason: str) -> None:
        """Tells that something ran; ``check`` raises from now on."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Has anything else run?

        Raises:
            Disturbed: naming what did.
        """
        elapsed = time.perf_counter() - self._since
        most_ran, most_wanted = _RAN_S + _RAN * elapsed, _WANTED_S + _WANTED * elapsed
        for tid, name in _python_threads().items():
            ran, wanted = (now - then for now, then in zip(
                _seconds(tid), self._before.get(tid, (0.0, 0.0)), strict=True
            ))  # fmt: skip
            if ran > most_ran or wanted > most_wanted:
                self.disturb(f"the thread {name!r} ran beside it, {ran * 1e3:.1f} ms")
        if self._reason:
            raise Disturbed(f"not measured: {self._reason}")

    def settle(self) -> None:
        """Waits until the process is idle.

        Raises:
            Disturbed: it does not get idle.
        """
        until = time.perf_counter() + PATIENCE_S
        while True:
            before, start = _all_threads(), time.perf_counter()
            time.sleep(_PROBE_S)
            after, now = _all_threads(), time.perf_counter()
            busy = sum(wanted - before.get(tid, 0.0) for tid, wanted in after.items())
            if busy < _IDLE * (now - start):
                return
            if now > until:
                self.disturb("other threads of this process are busy")
                self.check()


_changes = threading.Condition()
_current: ActivityWatch | None = None


@contextlib.contextmanager
def turn(wait_s: float = 0.0) -> Iterator[ActivityWatch]:
    """The calling thread's turn to measure; in a process there is one at a time.

    Args:
        wait_s: Wait so long for it. Without waiting, the caller is taken for one that goes on beside
            the measurement, which is then not trusted.

    Raises:
        NotMyTurn: another thread measures.
    """
    global _current
    watch = ActivityWatch()
    with _changes:
        if wait_s > 0:
            _changes.wait_for(lambda: _current is None, wait_s)
        if _current is not None:
            if wait_s <= 0 and _current.thread != watch.thread:
                name = threading.current_thread().name
                _current.disturb(f"the thread {name!r} called beside it")
            raise NotMyTurn("not measured: another thread of this process measures")
        _current = watch
    try:
        watch.begin()
        yield watch
    finally:
        with _changes:
            _current = None
            _changes.notify()


@dataclass
class _Waiting:
    attempts: int = 0
    disturbed: int = 0
    until: float = 0.0
    reason: str = ""


class PutOff:
    """Decisions that were put off because something else ran; each is tried again, later and later.

    Those that wait for the cores to come near are tried as long as these are far, and are disturbed as often
    as others after that.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Any, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def decide(
        self,
        signature: Any,
        choose: Callable[[ActivityWatch], Choice],
        give_up: Callable[[str], Choice],
    ) -> Choice | None:
        """A decision by measuring, unless something else of this process runs.

        Args:
            signature: What is decided for.
            choose: Measures and keeps the decision; another thread may have made it in between.
            give_up: Keeps a decision of which nothing was measured, for this reason.

        Returns:
            The decision; None if it has to wait.
        """
        if not self.due(signature):
            return None
        try:
            with turn() as watch:
                return choose(watch)
        except NotMyTurn:
            return None
        except NotNow as error:
            reason = self.again(signature, error)
            return give_up(reason) if reason else None

    def due(self, signature: Any) -> bool:
        """Whether to try now."""
        with self._lock:
            found = self._known.get(signature)
        return found is None or self._clock() >= found.until

    def again(self, signature: Any, error: NotNow) -> str:
        """Notes a failed attempt.

        Returns:
            "", or why there will be no other attempt.
        """
        with self._lock:
            waiting = self._known.pop(signature, None) or _Waiting()
            waiting.reason = str(error)
            waiting.attempts += 1
            waiting.disturbed += not isinstance(error, CoresFar)
            if waiting.disturbed >= _ATTEMPTS:
                return f"{error}, {_ATTEMPTS} times; dfx.tune measures while nothing else runs"
            pause_s = _FIRST_PAUSE_S * 2 ** min(waiting.attempts, _ATTEMPTS)
            waiting.until = self._clock() + pause_s
            self._known[signature] = waiting
            if len(self._known) > _MAX_PUT_OFF:
                self._known.popitem(last=False)
            return ""

    def reason(self, signature: Any) -> str:
        """Why a decision is put off, or ""."""
        with self._lock:
            found = self._known.get(signature)
        return "" if found is None else f"{found.reason}; a later call tries again"

    def done(self, signature: Any) -> None:
        """It is decided."""
        with self._lock:
            self._known.pop(signature, None)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()


def _python_threads() -> dict[int, str]:
    """System id -> name of the Python threads beside this one.

    Threads that Python did not start are left out: lanes are among them.
    """
    mine = threading.get_native_id()
    found = {}
    for thread in threading.enumerate():
        tid = thread.native_id
        if tid is not None and tid != mine and not isinstance(thread, threading._DummyThread):
            found[tid] = thread.name
    return found


def _all_threads() -> dict[int, float]:
    """System id -> seconds for which each other thread of the process wanted a core."""
    try:
        tids = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return {}
    return {tid: _seconds(tid)[1] for tid in tids if tid != threading.get_native_id()}


def _seconds(tid: int) -> tuple[float, float]:
    """Seconds for which a thread ran, and for which it ran or waited for a core; 0 if nobody knows."""
    try:  # unlike a thread's clock this is safe if the thread is over
        with open(f"/proc/self/task/{tid}/schedstat") as file:
            ran, waited = file.read().split()[:2]
        return int(ran) * 1e-9, (int(ran) + int(waited)) * 1e-9
    except (OSError, ValueError):
        return 0.0, 0.0
