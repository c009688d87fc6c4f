"""What every scheduled torch callable shares: the Dynamo backend, its entries, automatic choice."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.errors import DynaflowError, FallbackWarning, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch import _compat, second_derivatives
from dynaflow_xla.frontends.torch.backend import BySizes, Entry
from dynaflow_xla.frontends.torch.batch import axes, handed
from dynaflow_xla.frontends.torch.capture import draws, effects, marks, overlap
from dynaflow_xla.frontends.torch.capture.capture import ROOT_FILE, ROOT_NAME, user_name
from dynaflow_xla.frontends.torch.capture.context import graph_name
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.rewrite import recurrent
from dynaflow_xla.frontends.torch.signature import backends, open_batch as batch
from dynaflow_xla.frontends.torch.tuning import auto, keeping
from dynaflow_xla.recent import Recent
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.identity import candidates as named_candidates, identity
from dynaflow_xla.tuning import autotune, budget, choice as choosing, quiet

_WITHOUT_EFFECT = re.compile(
    r"depends on a tensor's value|[Dd]ata.dependent|Tensor\.item|[Dd]ynamic (output )?shape|graph_break\(\)"
)
"""Reasons of graph breaks that are no calls of what may have effects (a print, an optimizer's step)."""


class _State(threading.local):
    ran: list[Entry] | None = None
    left_out: str = ""  # why Dynamo ended or gave up a graph in this call
    stop = False
    observed: tuple[Entry, Callable[[list[Any]], list[Any]]] | None = None


_state = _State()
_INTERNAL = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
    "<dynaflow_xla",
)


@contextmanager
def _capture() -> Iterator[None]:
    """What is open while Dynamo captures for us."""
    before = _compat.break_counts()
    with recurrent.lengths_open(), batch.around():
        yield
    _state.left_out = _compat.reason_of_break(before) or _state.left_out


_settings = _compat.CompilationSettings(marks.watched, _capture)
_schedules = itertools.count()


MAX_CAPTURES = 64
"""So many captures of one callable are kept. What comes after runs as the original, with a warning."""

_MAX_SHARED = 8
"""So many captures differ by which arguments share memory only."""
_MAX_ENTRIES = 2 * MAX_CAPTURES
"""Of so many graphs, the last ones, it is known what they are: forwards and backwards."""
_MAX_CHILDREN = 64
_MAX_NOTES = 64


class _NoGraph(Exception):
    """AOTAutograd fails on a graph of Dynamo's, before anything of it reaches us."""


class Planned(BaseException):
    """Ends a call as soon as its first graph is planned; no ``Exception``, so that nobody keeps it."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry


class _Running(marks.Watch):
    """Context of a scheduled call: collects the entries that it runs, or stops at the first.

    A class: what ``contextlib`` makes of a generator costs some microseconds a call.
    """

    __slots__ = ("saved", "stop")

    def __init__(self, stop: bool = False) -> None:
        self.stop = stop

    def __enter__(self) -> list[Entry]:
        state = _state
        self.saved = state.ran, state.stop
        ran: list[Entry] = []
        state.ran, state.stop = ran, self.stop
        marks.Watch.__enter__(self)
        return ran

    def __exit__(self, *error: object) -> None:
        marks.Watch.__exit__(self)
        _state.ran, _state.stop = self.saved


class Core:
    """Schedules what ``original`` does; ``call`` has the original's arguments and results.

    Args:
        original: A module or function.
        options: See :class:`Settings`.
        parent: Of a candidate of ``Auto``: what it is made for. Its batch is split only if there is
            a proof, and its warnings are the parent's.
    """

    captured_ahead = False
    """Whether there is one graph from the start, without a backward."""

    def __init__(
        self, original: Callable[..., Any], options: Settings, parent: Core | None = None
    ) -> None:
        self.original = original
        self.options = options
        self.backend = backends.of(options)
        self.entries: deque[Entry | BySizes] = deque(maxlen=_MAX_ENTRIES)
        self.splits = auto.splits(options.strategy)
        self.parent = parent
        self.breaks: list[str] = []
        self.notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self.changes: effects.Changes = effects.Changes() if parent is None else parent.changes
        self.decisions = auto.Decisions()
        self.purse = budget.Purse()
        self.put_off = quiet.PutOff()
        self.children: Recent[Hashable, Core] = Recent(_MAX_CHILDREN)
        self._candidates: dict[bool, dict[str, Strategy]] = {}
        self._warned = False
        self._told: set[str] = set()
        self._writes = False
        self._shared: overlap.Pattern | None = None
        self._apart: dict[overlap.Pattern, Core] = {}
        self._graphs = 0
        self._lock = threading.RLock()
        self._for_arrays: Callable[..., Any] | None = None
        root = _root_function(original)
        self._compiled: Callable[..., Any] = torch.compile(
            root,
            backend=_Backend(self),
            **self.backend.capture_options(),
            **_compat.captures_kept(MAX_CAPTURES),
        )
        self._root = root
        plain = self.backend.whole_layers and not self.splits
        self._shortcut = _compat.Shortcut(root) if plain else None

    # -- calling ----------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs scheduled; see ``Native`` for what is raised."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # inlined into somebody's graph
        if "jax" in sys.modules and _has_arrays((*args, *kwargs.values())):
            return self._with_arrays(args, kwargs)
        native.check_process()
        if (around := _compat.tracer_around()) is not None:
            return self._under(around, args, kwargs)
        if isinstance(self.options.strategy, Auto):
            return self._call_auto(args, kwargs)
        if not self.entries:
            _state.left_out = ""
        with _Running() as ran:
            result = self._invoke(args, kwargs)
        if not ran and not self._warned and self.observed(None) is None:
            self._warned = True
            self._warn(self.why_original(args, kwargs))
        return result

    def _under(self, around: str, args: Any, kwargs: Any) -> Any:
        """A call inside of somebody's transform or trace, which looks into every operator."""
        if around not in self._told:
            self._told.add(around)
            self._warn(
                f"{self.options.name!r} is called under {around}, which has to see every operator, so the "
                "original runs"
            )
        with marks.ignore():
            return self.original(*args, **kwargs)

    def why_original(self, args: Any, kwargs: Any) -> str:
        """Why a call with these arguments ran no graph."""
        name = self.options.name
        count, reason = _compat.captures_of(self._root, {"args": args, "kwargs": kwargs})
        if count >= _compat.capture_limit(MAX_CAPTURES):
            return (
                f"{name!r} was captured {count} times, which is the most that is kept, and these arguments "
                f"need another capture ({reason}), so the original runs for them. Sizes are captured twice, "
                "whatever they are: look for what else changes from call to call (a Python value, a type, "
                "a mode), and pass it as a tensor, or schedule the function once for each"
            )
        why = (
            self.breaks[-1]
            if self.breaks
            else _state.left_out
            or "PyTorch finds nothing in it that computes with the tensors it is given"
        )
        return f"no graph of {name!r} could be captured, so the original runs ({why})"

    def _invoke(self, args: Any, kwargs: Any) -> Any:
        if self._shared is None:
            self._shared = overlap.pattern(args, kwargs)
        elif self._writes and (found := overlap.pattern(args, kwargs)) != self._shared:
            return self._for_shared(found)._invoke(args, kwargs)
        if self._shortcut is not None and not self.breaks:
            made = self._shortcut.find(args, kwargs)
            if made is not None:
                return made(*args, **kwargs)
        try:
            _settings.ensure()
            if not self.backend.whole_layers:
                with _compat.unfused_layers():
                    return self._offered(args, kwargs)
            if self.splits:
                return self._offered(args, kwargs)
            return self._compiled(*args, **kwargs)
        except _compat.backend_failed() as error:
            inner = _compat.inner_error(error)
            if isinstance(inner, DynaflowError):
                raise inner from None
            if not isinstance(inner, _NoGraph):
                raise
            if self.breaks:
                raise UnsupportedError(
                    f"PyTorch can make no graph of a part of {self.options.name!r} "
                    f"({str(inner).splitlines()[0]}); call the original"
                ) from None
            failed: BaseException = inner
        except _compat.capture_failed() as error:
            if self.breaks:
                raise  # a part of it may have run: not again
            failed = error
        except Exception as error:
            if self.breaks or not _compat.raised_by_capture(error):
                raise
            failed = error
        return self._uncaptured(failed, args, kwargs)

    def _uncaptured(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """A call that cannot be captured: most often the original fails, too, and tells it better."""
        with marks.ignore():
            result = self.original(*args, **kwargs)
        text = (str(error) or type(error).__name__).splitlines()[0]
        self._warned = True
        self._warn(f"{self.options.name!r} cannot be captured ({text}), so the original runs")
        return result

    def _for_shared(self, found: overlap.Pattern) -> Core:
        """The same for arguments that share memory in another way: a capture of its own."""
        with self._lock:
            if found not in self._apart:
                if len(self._apart) == _MAX_SHARED:
                    raise UnsupportedError(
                        f"{self.options.name!r} writes into its arguments, and these share memory in a way "
                        f"that {_MAX_SHARED + 1} earlier calls did not; pass tensors with memory of their "
                        "own, or call the original"
                    )
                self._apart[found] = Core(self.original, self.options, self.parent)
                self._apart[found]._shared = found
            return self._apart[found]

    def _offered(self, args: Any, kwargs: Any) -> Any:
        if not self.splits:
            return self._compiled(*args, **kwargs)
        options = self.options
        offered = batch.offered(options.name, options.in_axes, self.original, args, kwargs)
        with offered, _compat.layers_of_any_size():
            result = self._compiled(*args, **kwargs)
        axes.check_results(options.name, options.out_axes, result)
        return result

    def _with_arrays(self, args: Any, kwargs: Any) -> Any:
        if self._for_arrays is None:
            self._for_arrays = self.backend.for_arrays(self.original)
        return self._for_arrays(args, kwargs)

    def _call_auto(self, args: Any, kwargs: Any) -> Any:
        signature = auto.signature(self.original, args, kwargs)
        choice = self.decisions.decided(signature) or self.decisions.of_other_sizes(signature)
        if choice is None:
            if native.in_lane() or _compat.modes_active() or _compat.watched_by_autograd():
                return self.original(*args, **kwargs)
            choice = self._decided_now(signature, args, kwargs)
        if choice is not None and choice.child is not None:
            try:
                return choice.child.call(args, kwargs)
            except SeparabilityError as error:
                # Something changed that is no argument, say a module in it is in training mode now.
                reason = f"{choice.name} is left: {str(error).splitlines()[0]}"
                self.decide(signature, auto.Choice(None, reason))
        with marks.ignore():
            return self.original(*args, **kwargs)

    def _decided_now(self, signature: Any, args: Any, kwargs: Any) -> auto.Choice | None:
        """Decides, unless something else of this process runs."""

        def choose(watch: quiet.Watch) -> auto.Choice:
            if (made := self.decisions.decided(signature)) is not None:
                return made
            try:
                made = auto.choose(self, args, kwargs, watch)
            except autotune.BudgetTooSmall as error:
                made = auto.Choice(None, str(error))
            return self.decide(signature, made)

        def give_up(reason: str) -> auto.Choice:
            return self.decide(signature, auto.Choice(None, reason))

        return self.put_off.decide(signature, choose, give_up)

    def decide(self, signature: Any, choice: auto.Choice) -> auto.Choice:
        """Keeps a decision."""
        self.put_off.done(signature)
        return self.decisions.put(signature, choice)

    def with_strategy(self, strategy: Strategy) -> Core:
        """The same under another strategy; made once a strategy."""
        key = identity(strategy)
        found = self.children.get(key)
        if found is None:
            options = replace(self.options, strategy=strategy, check=False)
            found = self.children.setdefault(key, Core(self.original, options, parent=self))
        return found

    def candidates(self, *, batched: bool = False) -> dict[str, Strategy]:
        """Auto's candidates by name; asked for once, since a strategy may be known by its object only."""
        if batched not in self._candidates:
            made = self.options.strategy.candidates(self.options.lanes, batched=batched)  # type: ignore[attr-defined]
            self._candidates[batched] = named_candidates(made, ("original",))
        return self._candidates[batched]

    def target(self, args: Any, kwargs: Any) -> Core:
        """Under ``Auto`` what was chosen for these arguments, or the first candidate; else this."""
        strategy = self.options.strategy
        if not isinstance(strategy, Auto):
            return self
        choice = self.decision(args, kwargs)
        if choice is not None and choice.child is not None:
            return choice.child  # type: ignore[no-any-return]
        return self.with_strategy(next(iter(self.candidates().values())))

    def decision(self, args: Any, kwargs: Any) -> auto.Choice | None:
        """What Auto decided for these arguments, or took for sizes that came once; or None."""
        return self.decisions.get(auto.signature(self.original, args, kwargs))

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What to know of the plan of these arguments if it is not what a call runs, else ""."""
        if not isinstance(self.options.strategy, Auto):
            return ""
        shown = self.target(args, kwargs).options.strategy
        return choosing.beside_the_plan(self.decision(args, kwargs), shown)

    # -- planning ---------------------------------------------------------------------------------

    def all_planned(self, args: Any, kwargs: Any) -> list[Entry]:
        """Entries of every graph that these arguments run, in order.

        One graph is planned without running it. If the graph breaks, the rest can only be found by
        running: on copies, with whatever else it changes put back. Where that cannot be, the first graph
        is all.
        """
        target = self.target(args, kwargs)
        try:
            with keeping.random_kept(args, kwargs), _Running(stop=True):
                target._invoke(args, kwargs)
        except Planned as planned:
            if not target.breaks or target.changes.lasting(target.original):
                return [planned.entry]
        kept = keeping.preserved(target.original, target.changes, args, kwargs)
        with kept, _Running() as ran:
            target._invoke(*keeping.copies((args, kwargs)))
        return list(ran)

    def planned(self, args: Any, kwargs: Any) -> Entry:
        """The one entry of these arguments.

        Raises:
            UnsupportedError: the arguments run several graphs, or none.
        """
        entries = self.all_planned(args, kwargs)
        if len(entries) == 1:
            return entries[0]
        if not entries:
            raise UnsupportedError(f"no graph of {self.options.name!r} could be captured")
        raise UnsupportedError(
            f"{self.options.name!r} runs as {len(entries)} graphs for these arguments, each with a "
            f"plan of its own ({'; '.join(self.breaks)}); dfx.explain shows all of them"
        )

    @contextmanager
    def observing(self, entry: Entry, run: Callable[[list[Any]], list[Any]]) -> Any:
        """While open, calls on this thread do ``run`` in place of ``entry``."""
        _state.observed = (entry, run)
        try:
            yield
        finally:
            _state.observed = None

    @staticmethod
    def note_run(entry: Entry) -> None:
        """Notes that a call of this thread runs a graph; ends the call if only planning is wanted."""
        if _state.ran is not None:
            _state.ran.append(entry)
        if _state.stop:
            raise Planned(entry)

    @staticmethod
    def observed(entry: Entry | None) -> Any:
        """What ``observing`` was opened with on this thread, for this entry (None: for any)."""
        observed = _state.observed
        if observed is None:
            return None
        wanted = entry is None or observed[0] is entry
        return observed if wanted else None

    # -- the backend ------------------------------------------------------------------------------

    def _warn(self, note: str) -> None:
        if self.parent is not None:
            if note not in self.parent.notes:
                self.parent._warn(note)
            return
        self.notes.append(note)
        # The line of the user's call: neither this package's nor PyTorch's.
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
            level, frame = level + 1, frame.f_back
        warnings.warn(note, FallbackWarning, stacklevel=level)

    def note_break(self, reason: str, frame: Any) -> None:
        """Remembers a graph break, and warns at the first."""
        where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
        text = reason.splitlines()[0]
        if text.startswith("generic_jump"):
            text = "control flow depends on a tensor's value"
        elif text.startswith("step_unsupported"):
            text = "an instruction that Dynamo cannot follow"
        told = f"graph break at {where}: {text}"
        known = told in self.breaks or len(self.breaks) == _MAX_NOTES
        if not known:
            self.breaks.append(told)
        if _WITHOUT_EFFECT.search(text) is None:
            self.changes.others |= {f"whatever the code between its graphs does, see {where}"}
        if len(self.breaks) == 1 and not known:
            self._warn(
                f"{self.options.name!r} is captured in several graphs, each scheduled on its own: "
                f"{self.breaks[0]}"
            )

    def compiler(self, kind: str, state: dict[str, Any]) -> Callable[..., Any]:
        """What AOTAutograd calls with a functional graph."""

        def compile_graph(gm: Any, example_inputs: Any) -> Callable[[list[Any]], Any]:
            state["reached"] = True
            gm.meta[_compat.LABELS] = state["names"]
            own_memory = not self.backend.in_place or self.splits
            if kind != "backward" and own_memory and _compat.needs_places(gm):
                raise UnsupportedError(
                    f"{self.options.name!r} writes into one of several arguments that share memory, and "
                    "returns a view of one; under XLA and under nano-batches results have memory of their "
                    "own. Pass tensors with memory of their own, or use backend='torch' with a strategy "
                    "that keeps the batch whole"
                )
            draws.lower_checkpoints(gm, native=not own_memory)
            with self._lock:
                self.backend.lower(gm, kind)
                entry: Any = None
                if state["batch"]:
                    entry = batch.graph_of(
                        gm, self.backend, kind, state["number"], state["batch"],
                        state.get("forward"), self._warn,
                    )  # fmt: skip
                if entry is None:
                    name = graph_name(self.options, kind, state["number"])
                    entry = self.backend.by_size(gm, kind, name, state["whole"], self._warn)
                self.entries.append(entry)
            if kind == "backward":
                _compat.allow_second_backward()
                state["forward"].backward = entry
            else:
                _compat.mend_views_of_merged(gm)
                self._writes |= _compat.writes_inputs()
                if self._writes and self._shared is not None:
                    overlap.check(self._shared, self.options.name)
                self.changes.places |= effects.written_outside(state["sources"])
                state["forward"] = entry
            return _compat.boxed(_Runner(entry))

        return compile_graph


class _Runner:
    """A compiled graph: counts itself among what a call ran, then runs."""

    def __init__(self, graph: Entry | BySizes) -> None:
        self.graph: Any = graph
        self.resolves = hasattr(graph, "resolve")  # plans by sizes

    def __call__(self, inputs: list[Any]) -> list[Any]:
        graph = self.graph
        entry = graph.resolve(inputs) if self.resolves else graph
        observed = Core.observed(entry)
        if observed is not None:
            return observed[1](inputs)  # type: ignore[no-any-return]
        if entry.kind != "backward":
            Core.note_run(entry)
        return entry(inputs)


class _Backend:
    """The Dynamo backend of one core."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        core = self.core
        marks.settle(gm)
        grad = torch.is_grad_enabled() and any(
            getattr(x, "requires_grad", False) for x in example_inputs
        )
        recurrent.keep_whole(gm, grad, cells=core.backend.whole_cells)
        unused = draws.keep(gm)
        gm.recompile()
        sources = effects.sources_of(gm)
        core.changes.places |= effects.changed_objects()
        broken = _compat.break_reason(gm)
        if not core.breaks and effects.broke_before(known=broken is not None):
            core.changes.others |= {"whatever the code before its first graph does"}
        if broken is not None:
            core.note_break(*broken)
        names = [user_name(core.original, source) for source in _compat.sources_of_inputs(gm)]
        state = {
            "names": names,
            "number": core._graphs,
            "batch": (),
            "whole": None,
            "sources": sources,
            "reached": False,
        }
        if core.splits:
            state["batch"], state["whole"] = batch.sizes_in(gm), 1
            if not state["batch"]:
                told = f"a graph of {core.options.name!r} takes no argument with a batch, so it is not split"
                if core.parent is not None:
                    raise SeparabilityError(told)
                core._warn(told)
        core._graphs += 1
        aot = _compat.aot_backend(
            core.compiler("forward", state),
            core.compiler("backward", state),
            core.compiler("inference", state),
        )
        try:
            run: Callable[..., Any] = aot(gm, example_inputs)
        except _compat.says_nothing() as error:  # Dynamo gives the graph up, and tells nobody
            _state.left_out = f"PyTorch can make no graph of it: {_compat.told_by_fake(error)}"
            raise
        except _compat.of_dynamo():
            raise  # it captures anew, say
        except Exception as error:
            if isinstance(error, DynaflowError) or state["reached"]:
                raise
            raise _NoGraph(str(error) or type(error).__name__) from error
        if grad:
            parts = state["batch"] and core.backend.in_place
            watched = handed.watch if parts else None
            run = second_derivatives.refused(run, core.options.name, watched)
        return draws.without_last(run, unused) if unused else run


def _has_arrays(values: Any) -> bool:
    """Whether JAX arrays are among some values (looked for inside of containers too)."""
    array = getattr(sys.modules["jax"], "Array", ())  # a package half imported has none yet
    return any(
        isinstance(x, array)
        or (isinstance(x, list | tuple) and _has_arrays(x))
        or (isinstance(x, dict) and _has_arrays(x.values()))
        for x in values
        if not isinstance(x, torch.Tensor)
    )


def _root_function(original: Callable[..., Any]) -> types.FunctionType:
    """A function of its own code that calls the original.

    Dynamo keeps what it compiled, and counts recompilations, by code object, and remembers by file
    and line which sizes changed; two schedules must not count against each other. The text is where
    ``inspect`` finds it: functions without a source get one code object for all before torch 2.13.
    """
    scope: dict[str, Any] = {}
    text = (
        f"def make({ROOT_NAME}):\n"
        f"    def scheduled(*args, **kwargs):\n"
        f"        return {ROOT_NAME}(*args, **kwargs)\n"
        f"    return scheduled\n"
    )
    file = f"{ROOT_FILE} {next(_schedules)}>"
    exec(compile(text, file, "exec"), scope)
    made: types.FunctionType = scope["make"](original)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(made, linecache.cache.pop, file, None)
    return made
