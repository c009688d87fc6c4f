"""What every scheduled torch callable shares: how a call finds what was made for it, and what is planned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import EngineError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch.backend import Entry
from dynaflow_xla.frontends.torch.capture import lazy
from dynaflow_xla.frontends.torch.capture.forwards import (
    Forwards,
    class_forward as class_forward,
)
from dynaflow_xla.frontends.torch.captured import Captured
from dynaflow_xla.frontends.torch.dynamo import caught, running
from dynaflow_xla.frontends.torch.dynamo.whole import CompiledOriginal
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.opaque import padded
from dynaflow_xla.frontends.torch.tuning import (
    call_signature,
    keeping,
    one_thread,
    originals,
)
from dynaflow_xla.frontends.torch.tuning.deciding import options_for
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.auto import Auto, OneOf
from dynaflow_xla.strategies.base import Strategy

_MAX_FORWARDS = 16
"""So many times classes of modules may get another ``forward``."""

_MAX_WAYS = 1024


class Core(Captured):
    """Schedules what ``original`` does; ``call`` has the original's arguments and results.

    Args:
        original: A module or function.
        options: See :class:`Settings`.
        parent: Of a candidate of ``Auto``: what it is made for. Its batch is split only if there is
            a proof, and its warnings are the parent's.
    """

    def __init__(
        self, original: Callable[..., Any], options: Settings, parent: Core | None = None
    ) -> None:
        super().__init__(original, options, parent)
        options = self.options
        self._decides = isinstance(options.strategy, Auto) and not isinstance(
            options.strategy, OneOf
        )
        self._originals = originals.SameAsOriginal(options.strategy)
        self._whole: CompiledOriginal | None = None
        self.on_one_thread = one_thread.OneThread(original)
        self._initialized = False
        self._forwards = Forwards(original)
        self._renewed: list[tuple[list[Any], Core]] = []
        self._as_original: Recent[Hashable, bool] = Recent(_MAX_WAYS)
        self._known: call_signature.Known | None = None  # calls in a row that ran the original
        self._last_plain: Any = None
        self._for_arrays: Callable[..., Any] | None = None

    def made_for(self, strategy: Strategy, compiler: str) -> Core:
        """A candidate of ``Auto``."""
        options = options_for(self.options, strategy, compiler)
        return Core(self.original, options, parent=self)

    def whole(self) -> CompiledOriginal:
        """The original under ``torch.compile``, with the options that are for Inductor."""
        if self._whole is None:
            given = dict(self.options.compiler_options or {})
            self._whole = CompiledOriginal(
                self.original, {k: v for k, v in given.items() if k != "dynamic"}
            )
        return self._whole

    def current(self) -> Core | None:
        """This, or one for a module of which a class has another ``forward`` by now, see ``Forwards``.

        None: there were too many of these, and the original runs.
        """
        if (now := self._forwards.now()) == self._forwards.known:
            return self
        with self._lock:
            for found, made in self._renewed:
                if found == now:
                    return made
            if len(self._renewed) < _MAX_FORWARDS:
                made = Core(self.original, self.options, self.parent)
                self._renewed.append((now, made))
                return made
        self.warn(
            f"the class of {self.options.name!r}, or of modules in it, got more than {_MAX_FORWARDS} other "
            "functions for its forward, each of which is captured anew, so the original runs for further "
            "ones. Schedule a function that calls what changes"
        )
        return None

    def free_calls_under_hooks(self) -> None:
        """As its base class does."""
        super().free_calls_under_hooks()
        self._as_original.clear()

    def release(self) -> None:
        """Gives the memory of plans' CUDA graphs back; later calls make them anew."""
        for entry in tuple(self.entries):
            entry.release()
        others: list[Core] = [*self._apart.values(), *(made for _, made in self._renewed)]
        for other in others:
            other.release()

    # -- calling ----------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Any, *, planned: bool = False) -> Any:
        """Runs scheduled; see ``Native`` for what is raised.

        Args:
            args: Of the original.
            kwargs: Of the original.
            planned: Its plan runs also where it is the original program.
        """
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # inlined into somebody's graph
        if (current := self.current()) is None:
            return self.as_written(args, kwargs)
        if current is not self:
            return current.call(args, kwargs, planned=planned)
        # First of all, and as little as can be: after some milliseconds of work a line of Python that was
        # not in a cache takes microseconds.
        signature = None
        hooked = not planned and modes.saved_is_hooked()
        if self._decides or hooked or self._originals.any():
            changes = self.decisions.changes  # another thread may decide meanwhile
            may_be_plain = not (planned or hooked)
            if may_be_plain and (known := self._known) is not None:
                if not modes.profiler_enabled() and known.again(args, kwargs, changes):
                    run = self.on_one_thread.call if known.narrow else self.as_written
                    return run(args, kwargs)
            signature = call_signature.of(self.original, args, kwargs)
            if may_be_plain and (plain := self._plain(signature)) is not None:
                self._note_plain(signature, plain, changes, args, kwargs)
                return plain(args, kwargs)
        if "jax" in sys.modules and _has_arrays((*args, *kwargs.values())):
            return self._with_arrays(args, kwargs)
        native.check_process()
        if not self._initialized:
            if lazy.uninitialized(self.original):
                return self.as_written(args, kwargs)
            # Lazy modules are of other classes by now.
            self._forwards = Forwards(self.original)
            self._initialized = True
        if why := self.why_as_written() or self._padded.why(args, kwargs):
            self.warn(why)
            return self.as_written(args, kwargs)
        if isinstance(self.options.strategy, Auto):
            return self.call_decided(args, kwargs, signature)
        way = call_signature.without_threads(signature) if hooked else None
        if hooked and self._as_original.get(way):
            return self.as_written(args, kwargs)
        if len(self._failed) and self._failed_often(args, kwargs):
            return self.as_written(args, kwargs)
        running.leave_out("")  # what this thread remembers may be another function's
        graphless = self._look_again(args, kwargs)
        running.note_random_state(self.graphs.catches and self.graphs.draws)
        try:
            with running.Running() as ran:
                result = self._invoke(args, kwargs)
        except EngineError as error:
            if not caught.may_be(self, error):
                raise
            return caught.by_original(self, error, args, kwargs)
        except padded.LeavesOut:
            self._note_padded(args, kwargs)
            return self.as_written(args, kwargs)
        if not ran and not running.observes() and not running.ran_original():
            if not self._warned:
                self._warned = True
                self.graphs.warn(self.why_original(args, kwargs))
            if not graphless:
                self._found_nothing(args, kwargs)
        if hooked:
            self._as_original.setdefault(way, not ran or running.ran_original())
        self._originals.learn(ran, self.original, args, kwargs)
        return result

    def _plain(self, signature: Any) -> Callable[[Any, Any], Any] | None:
        """What runs such a call if it is known to be the original, which needs no lane and no process's."""
        if not self._decides:
            return self.as_written if self._originals.has(signature) else None
        choice = self.decisions.decided(signature) or self.decisions.of_other_sizes(
            signature, original=True
        )
        if choice is None or choice.child not in (None, self.on_one_thread):
            return None
        if choice.later is not None and self.decisions.due(signature, choice):
            return None
        return self.as_written if choice.child is None else self.on_one_thread.call

    def _note_plain(self, signature: Any, plain: Any, changes: int, args: Any, kwargs: Any) -> None:
        """After the second call in a row of a kind that runs the original: what the next one looks like."""
        last, self._last_plain = self._last_plain, signature
        known = self._known
        if last != signature:
            self._known = None
        elif known is None or known.changes != changes:
            # What was decided for other sizes holds for this call only: the next one may decide.
            if not self._decides or self.decisions.is_final(signature):
                narrow = plain != self.as_written
                self._known = call_signature.Known(self.original, args, kwargs, changes, narrow)

    def _note_padded(self, args: Any, kwargs: Any) -> None:
        self._padded.add(args, kwargs)
        self.warn(self._padded.why(args, kwargs))

    def why_as_written(self) -> str:
        """Why no plan may run for what is around a call, or for what a call is; "" if one may."""
        if self._later:
            return self._later
        if (around := modes.tracer_around()) is not None:
            return (
                f"{self.options.name!r} is called under {around}, which has to see every operator, so the "
                "original runs"
            )
        if operators.hooks_on_all_modules():
            return (
                f"{self.options.name!r} is called while hooks are registered on every module of the process "
                "(register_module_forward_hook and the like), which no plan calls, so the original runs"
            )
        return ""

    def _with_arrays(self, args: Any, kwargs: Any) -> Any:
        if self._for_arrays is None:
            self._for_arrays = self.backend.for_arrays(self.original)
        return self._for_arrays(args, kwargs)

    # -- planning ---------------------------------------------------------------------------------

    def all_planned(self, args: Any, kwargs: Any, *, front: bool = True) -> list[Entry]:
        """Entries of every graph that these arguments run, in order.

        One graph is planned without running it. If the graph breaks, the rest can only be found by
        running: on copies, with whatever else it changes put back. Where that cannot be, the first graph
        is all.

        Args:
            args: Of the call.
            kwargs: Of the call.
            front: Run what stands in front of the first graph, in none. Else there are no entries then, and
                ``changes`` are told.

        Raises:
            UnsupportedError: lazy modules of it have no parameters yet, or it is given JAX arrays.
        """
        lazy.check(self.original, self.options.name)
        if self._later:
            return []
        if "jax" in sys.modules and _has_arrays((*args, *kwargs.values())):
            self.backend.for_arrays(self.original)  # only a program of JAX's takes them
        if (current := self.current()) is not self:
            return [] if current is None else current.all_planned(args, kwargs, front=front)
        target = self.target(args, kwargs)
        running.leave_out("")
        target._look_again(args, kwargs)
        try:
            found = self._all_planned(target, args, kwargs, front)
        except padded.LeavesOut:
            target._note_padded(args, kwargs)
            return []
        if not found:
            target._found_nothing(args, kwargs)
        return found

    def _all_planned(self, target: Core, args: Any, kwargs: Any, front: bool) -> list[Entry]:
        first: list[Entry] = []
        try:
            with keeping.arguments_kept(target.original, args, kwargs) as (given, keep_state):
                in_front = (
                    running.kept_in_front(keep_state)
                    if front
                    else running.ends_in_front(target.changes)
                )
                try:
                    with in_front, running.Running(stop=True):
                        target._invoke(*given)
                except running.Uncaptured as failed:
                    keep_state()
                    target._uncaptured(failed.error, *given)
        except running.FirstGraphPlanned as planned:
            first = [planned.entry]
        except running.EndedInFront:
            return []
        if not first or not target.breaks or target.changes.lasting(target.original):
            return first
        kept = keeping.preserved(target.original, target.changes, args, kwargs)
        ends = running.ends_at_lasting(target.changes, target.original, first[0])
        try:
            with kept, ends, running.Running() as ran:
                target._invoke(*keeping.copies((args, kwargs)))
        except running.FirstGraphPlanned:
            return first
        return list(ran)

    def planned(self, args: Any, kwargs: Any) -> Entry:
        """The one entry of these arguments.

        Raises:
            UnsupportedError: the arguments run several graphs, or none, or there can be none yet.
        """
        entries = self.all_planned(args, kwargs)
        if len(entries) == 1:
            return entries[0]
        if not entries:
            why = self.target(args, kwargs).why_original(args, kwargs)
            raise UnsupportedError(f"there is no plan: {why}")
        breaks = f" ({'; '.join(self.breaks)})" if self.breaks else ""
        raise UnsupportedError(
            f"{self.options.name!r} runs as {len(entries)} graphs for these arguments, each with a "
            f"plan of its own{breaks}; dfx.explain shows all of them"
        )


_NEVER_ARRAYS = frozenset((torch.nn.Parameter, type(None), bool, int, float, str))


def _has_arrays(values: Any) -> bool:
    """Whether JAX arrays are among some values (looked for inside of containers too)."""
    array = getattr(sys.modules["jax"], "Array", ())  # a package half imported has none yet
    for x in values:
        kind = type(x)
        if kind is torch.Tensor or kind in _NEVER_ARRAYS:
            continue
        if isinstance(x, array):
            return True
        if isinstance(x, list | tuple | dict) and _has_arrays(
            x.values() if isinstance(x, dict) else x
        ):
            return True
    return False
