"""What every scheduled torch callable shares: how a call finds what was made for it, and what is planned."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import EngineError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures, failures, modes, operators
from dynaflow_xla.frontends.torch.backend import Entry
from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture import lazy
from dynaflow_xla.frontends.torch.capture.forwards import (
    Forwards,
    class_forward as class_forward,
    why_later,
)
from dynaflow_xla.frontends.torch.capture.mutation import overlap
from dynaflow_xla.frontends.torch.dynamo import capturing, caught, running
from dynaflow_xla.frontends.torch.dynamo.graphs import CapturedGraphs, Doorway, NoGraph, way_out
from dynaflow_xla.frontends.torch.dynamo.whole import CompiledOriginal
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.offering import Offering
from dynaflow_xla.frontends.torch.opaque import finding, padded
from dynaflow_xla.frontends.torch.signature import backends
from dynaflow_xla.frontends.torch.tuning import (
    auto,
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

_MAX_ROOTS = 8
"""So many times captures begin anew after a call that raised."""

_MAX_WAYS = 1024
_MAX_SHARED = 8
"""So many captures differ by which arguments share memory only."""

_MAX_FAILED = 3
"""So often a capture of calls of one kind may fail; the original runs then without another try.

Not at once: what fails may be memory that is gone for a moment.
"""


class Core(Offering):
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
        super().__init__(original, options)
        options = self.options
        self.backend = backends.of(options)
        self.splits = auto.splits(options.strategy)
        self.parent = parent
        self._decides = isinstance(options.strategy, Auto) and not isinstance(
            options.strategy, OneOf
        )
        of_parent = None if parent is None else parent.graphs
        self.graphs: CapturedGraphs = CapturedGraphs(original, self.backend, self.splits, of_parent)
        self.entries, self.breaks = self.graphs.entries, self.graphs.breaks
        self.changes = self.graphs.changes
        self.opaque = finding.Opaque(original)
        self._originals = originals.SameAsOriginal(options.strategy)
        self._padded = padded.PaddedCalls(original, options.name, partial(_kind, original))
        self._whole: CompiledOriginal | None = None
        self.on_one_thread = one_thread.OneThread(original)
        self._warned = False
        self._told: set[str] = set()
        self._left_out = ""
        self._reasons: Recent[Hashable, str] = Recent(_MAX_WAYS)
        self._nothing: call_signature.Known | None = (
            None  # the last call of which there was no graph
        )
        self._initialized = False
        self._apart: dict[overlap.Pattern, Core] = {}
        self._forwards = Forwards(original)
        self._later = why_later(original, options.name)
        self._renewed: list[tuple[list[Any], Core]] = []
        self._as_original: Recent[Hashable, bool] = Recent(_MAX_WAYS)
        self._failed: Recent[Hashable, int] = Recent(_MAX_WAYS)
        self._known: call_signature.Known | None = None  # calls in a row that ran the original
        self._last_plain: Any = None
        self._lock = threading.Lock()
        self._for_arrays: Callable[..., Any] | None = None
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

    def warn(self, note: str) -> None:
        """Tells the user of something once, at the line of the call."""
        if note not in self._told:
            self._told.add(note)
            self.graphs.warn(note)

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
        for other in (*self._apart.values(), *(made for _, made in self._renewed)):
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
        self.graphs.warn(f"{self.options.name!r} cannot be captured ({text}), so the original runs")
        running.leave_out(text)
        kind = call_signature.of(self.original, args, kwargs)
        self._failed[kind] = self._failed.get(kind, 0) + 1
        return result

    def _failed_often(self, args: Any, kwargs: Any) -> bool:
        """Whether captures of calls like this one failed, each of which takes longer than many calls."""
        kind = call_signature.of(self.original, args, kwargs)
        return self._failed.get(kind, 0) >= _MAX_FAILED

    def _for_shared(self, found: overlap.Pattern) -> Core | None:
        """The same for arguments that share memory in another way: a capture of its own.

        None: there were too many of these, and the original runs.
        """
        with self._lock:
            if found in self._apart:
                return self._apart[found]
            if len(self._apart) < _MAX_SHARED:
                self._apart[found] = made = Core(self.original, self.options, self.parent)
                return made
        self._left_out = (
            "it writes into its arguments, and these share memory in a way that "
            f"{_MAX_SHARED + 1} earlier calls did not, each of which was captured anew: pass tensors with "
            "memory of their own"
        )
        self.warn(f"the original of {self.options.name!r} runs for further calls: {self._left_out}")
        self._warned = True
        return None

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


def _kind(original: Any, args: Any, kwargs: Any) -> Any:
    """What calls that are captured alike have in common."""
    return call_signature.without_sizes(call_signature.of(original, args, kwargs))


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
