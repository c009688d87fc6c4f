"""The Dynamo backend of a scheduled callable: from Dynamo's graphs to what runs in their place."""

from __future__ import annotations

import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.errors import DynaflowError, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import aot, complex_views, dynamo_graphs, failures
from dynaflow_xla.frontends.torch.backend import Backend, BySizes, Entry
from dynaflow_xla.frontends.torch.batch import handed
from dynaflow_xla.frontends.torch.capture import costs, functions, lazy, marks
from dynaflow_xla.frontends.torch.capture.context import graph_name
from dynaflow_xla.frontends.torch.capture.mutation import effects, overlap
from dynaflow_xla.frontends.torch.capture.names import is_internal, user_name
from dynaflow_xla.frontends.torch.capture.random import draws
from dynaflow_xla.frontends.torch.dynamo import counters, running, uncaptured
from dynaflow_xla.frontends.torch.dynamo.capturing import MAX_CAPTURES
from dynaflow_xla.frontends.torch.rewrite import interpolation, recurrent, taking as taking
from dynaflow_xla.frontends.torch.signature import hooked, open_batch, second_derivatives
from dynaflow_xla.frontends.torch.signature.batched import BatchedGraph
from dynaflow_xla.watching import telling

_WITHOUT_EFFECT = re.compile(
    r"depends on a tensor's value|[Dd]ata.dependent|Tensor\.item|[Dd]ynamic (output )?shape|graph_break\(\)"
)
"""Reasons of graph breaks that are no calls of what may have effects (a print, an optimizer's step)."""

_MAX_ENTRIES = 2 * MAX_CAPTURES
"""Of so many graphs, the last ones, it is known what they are: forwards and backwards."""
_MAX_NOTES = 64


class NoGraph(Exception):
    """AOTAutograd fails on a graph of Dynamo's, before anything of it reaches us."""


@dataclass
class _Graph:
    """A graph of Dynamo's, of which AOTAutograd makes a forward and a backward.

    Attributes:
        number: Which one of the callable it is.
        names: What the user calls its inputs, as far as is known.
        sources: What it writes outside, see ``effects``.
        batch: The offered sizes in it.
        rows: Rows of the batch where it is too small to be split, or not in this graph.
        broken: Whether it ends where Dynamo could not go on.
        forward: What was made of the forward.
        reached: Whether AOTAutograd came to us with anything of it.
        writes: Whether it writes into its inputs.
        uncounted: Inputs that it writes unknown to autograd.
        users: Of several functions those that use each input.
        inputs: Its inputs, if it holds several functions.
    """

    number: int
    names: list[str]
    sources: Any
    batch: Sequence[open_batch.OfferedSize] = ()
    rows: int | None = None
    broken: bool = False
    forward: Any = None
    reached: bool = False
    writes: bool = False
    uncounted: Sequence[int] = ()
    users: dict[Any, set[str]] = field(default_factory=dict)
    inputs: Sequence[Any] = ()


class CapturedGraphs:
    """What Dynamo captured of one callable.

    Args:
        original: The callable. Not owned: compiled graphs lead here, and Dynamo keeps them as long as the
            callable lives.
        backend: Who runs its graphs.
        splits: Whether the strategy can ask for nano-batches.
        parent: Of a candidate of ``Auto``: the graphs of what it is made for, which gets its warnings.

    Attributes:
        entries: What was made of the last graphs.
        breaks: Where graphs broke, and why.
        notes: What the user was warned of.
        changes: What calls change outside.
        writes: Whether a graph writes into an argument.
        shared: Which arguments share memory, known from the first call on.
        catches: Whether code of the user's in it may catch what an operator raises; no graph does.
        draws: Whether a graph may draw random numbers.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        backend: Backend,
        splits: bool,
        parent: CapturedGraphs | None,
    ) -> None:
        self.backend, self.splits, self.parent = backend, splits, parent
        self._original = _weakly(original)
        self.name = backend.settings.name
        self.entries: deque[Entry | BySizes] = deque(maxlen=_MAX_ENTRIES)
        self.breaks: list[str] = []
        self.notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self.changes: effects.Changes = effects.Changes() if parent is None else parent.changes
        self.writes = False
        self.shared: overlap.Pattern | None = None
        self.catches = self.draws = False
        self._count = 0
        self._lock = threading.RLock()

    @property
    def original(self) -> Any:
        """The callable; None if it is gone."""
        return self._original()

    def warn(self, note: str) -> None:
        """Tells the user of something, at the line of the call."""
        if self.parent is not None:
            if note not in self.parent.notes:
                self.parent.warn(note)
            return
        self.notes.append(note)
        with uncaptured.not_told():  # whoever handles warnings is no part of the call
            telling.fallback(note)

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        """What runs in the place of a graph of Dynamo's."""
        users = functions.settle(gm)
        marks.settle(gm)
        self.catches |= dynamo_graphs.may_catch(is_internal)
        running.note_random_state(self.catches)
        given = [x.is_meta for x in example_inputs if isinstance(x, torch.Tensor)]
        if given and all(given):
            running.leave_out("it computes with tensors on the meta device, which have no values")
            return gm.forward  # type: ignore[no-any-return]
        grad = torch.is_grad_enabled() and any(
            getattr(x, "requires_grad", False) for x in example_inputs
        )
        recurrent.keep_whole(gm, grad, cells=self.backend.whole_cells)
        draws.drop_all(gm)
        with_all = counters.without(gm)
        unused = draws.keep(gm)
        gm.recompile()
        sources = effects.sources_of(gm)
        self.changes.found(effects.changed_objects())
        broken = dynamo_graphs.break_reason(gm)
        self._note_break(broken)
        names = [user_name(self.original, source) for source in dynamo_graphs.sources_of_inputs(gm)]
        inputs = list(gm.graph.find_nodes(op="placeholder")) if users else []
        graph = _Graph(
            self._count, names, sources, broken=broken is not None, users=users, inputs=inputs
        )
        if self.splits:
            graph.batch, graph.rows = open_batch.sizes_in(gm), 1
            if not graph.batch:
                told = open_batch.without_batch(self.name, gm, behind_break=self._count > 0)
                if self.parent is not None:
                    raise SeparabilityError(told)
                self.warn(told)
        self._count += 1
        made_of = hooked.made_of_results(gm) if grad else {}
        run = self._with_gradients(gm, example_inputs, graph)
        if graph.uncounted:
            run = aot.Uncounted(run, graph.uncounted)
        if made_of:
            run = hooked.telling(run, made_of, self.name, self.warn)
        if grad:
            parts = graph.batch and self.backend.in_place
            run = second_derivatives.refused(run, self.name, handed.watch if parts else None)
        if graph.writes and (arguments := effects.arguments(sources)):
            run = overlap.SharedAsCaptured(run, arguments)
        run = draws.without_last(run, unused) if unused else run
        return run if with_all is None else with_all(run)

    def _with_gradients(self, gm: Any, example_inputs: Any, graph: _Graph) -> Callable[..., Any]:
        """What AOTAutograd makes of a graph, with our forward and backward."""
        derive = aot.aot_backend(
            self._compiler("forward", graph),
            self._compiler("backward", graph),
            self._compiler("inference", graph),
            draws.draws_numbers if self._own_memory() else None,
        )
        try:
            with interpolation.kept_whole(self.backend.whole_cells):
                return derive(gm, example_inputs)  # type: ignore[no-any-return]
        except failures.says_nothing() as error:  # Dynamo gives the graph up, and tells nobody
            running.leave_out(f"PyTorch can make no graph of it: {failures.told_by_fake(error)}")
            raise
        except failures.of_dynamo():
            raise  # it captures anew, say
        except costs.NoNumber as error:
            raise NoGraph(str(error)) from error
        except Exception as error:
            if isinstance(error, DynaflowError) or graph.reached:
                raise
            raise NoGraph(str(error) or type(error).__name__) from error

    def _own_memory(self) -> bool:
        """Whether results have memory of their own, and random numbers are drawn for the whole batch."""
        return self.splits or not self.backend.in_place

    def _compiler(self, kind: str, graph: _Graph) -> Callable[..., Any]:
        """What AOTAutograd calls with a functional graph."""

        def compile_graph(gm: Any, example_inputs: Any) -> Callable[[list[Any]], Any]:
            graph.reached = True
            gm.meta[aot.LABELS] = graph.names
            # The backward has other operators than the forward, for which the rules were written.
            gm.meta[aot.PART] = bool(self.breaks) or kind == "backward"
            if kind != "backward" and self._own_memory() and aot.needs_places(gm):
                raise UnsupportedError(
                    f"{self.name!r} writes into one of several arguments that share memory, and "
                    "returns a view of one; under XLA and under nano-batches results have memory of their "
                    "own. Pass tensors with memory of their own, or use backend='torch' with a strategy "
                    "that keeps the batch whole"
                )
            if kind != "backward":
                functions.check_apart(graph.users, graph.names, graph.inputs)
            draws.lower_checkpoints(gm)
            self.draws |= draws.may_draw(gm)
            if kind != "backward":
                graph.uncounted = aot.uncounted_writes(gm, len(graph.names))
            with self._lock:
                self.backend.lower(gm, kind)
                made = self._planned(gm, kind, graph)
                self.entries.append(made)
            if kind == "backward":
                aot.allow_second_backward()
                if isinstance(made, BatchedGraph) or not isinstance(graph.forward, BatchedGraph):
                    graph.forward.backward = made
            else:
                aot.mend_views_of_merged(gm)
                graph.writes = aot.writes_inputs()
                self.writes |= graph.writes
                if self.writes and self.shared is not None:
                    overlap.check(self.shared, self.name)
                self.changes.found(effects.written_outside(graph.sources))
                graph.forward = made
            updates = aot.early_updates(gm) if kind == "forward" else []
            run: Callable[[list[Any]], Any] = running.Runner(made, updates)
            if kind != "backward" and self._own_memory() and (found := complex_views.on_real(gm)):
                run = complex_views.Based(run, found)
            return aot.boxed(run)

        return compile_graph

    def _planned(self, gm: Any, kind: str, graph: _Graph) -> Entry | BySizes:
        """A functional graph, split over its batch or whole."""
        if graph.batch:
            made = open_batch.graph_of(
                gm, self.backend, kind, graph.number, graph.batch, graph.forward, self.warn,
                broken=graph.broken,
            )  # fmt: skip
            if made is not None:
                return made
        name = graph_name(self.backend.settings, kind, graph.number)
        return self.backend.by_size(gm, kind, name, graph.rows, self.warn)

    def _note_break(self, broken: tuple[str, Any] | None) -> None:
        """Remembers how a graph ended, if it broke, and warns at the first."""
        if not self.breaks and effects.broke_before(known=broken is not None):
            told = "whatever the code before its first graph does"
            self.changes.found(others=frozenset({told}))
        if broken is None:
            return
        reason, frame = broken
        where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
        text = reason.splitlines()[0]
        if text.startswith("generic_jump"):
            text = "control flow depends on a tensor's value"
        elif text.startswith("step_unsupported"):
            text = "an instruction that Dynamo cannot follow"
        told = f"graph break at {where}: {text}"
        told += way_out(text, self.original)
        known = told in self.breaks or len(self.breaks) == _MAX_NOTES
        if not known:
            self.breaks.append(told)
        if _WITHOUT_EFFECT.search(text) is None:
            told = f"whatever the code between its graphs does, see {where}"
            self.changes.found(others=frozenset({told}))
        if len(self.breaks) == 1 and not known:
            each = "each scheduled on its own"
            if self.backend.settings.rules is not None:
                each += ", by those rules that match in it"
            self.warn(f"{self.name!r} is captured in several graphs, {each}: {self.breaks[0]}")


_OTHER_EXPERTS = (
    " (a loop over experts? there is none after model.set_experts_implementation('grouped_mm'), or "
    "'batched_mm')"
)
_SIZE_OF_DATA = re.compile("Dynamic shape operator|nonzero|data.dependent", re.IGNORECASE)
_TOLD_MASKS = (
    " (a mask of PyTorch's encoder or decoder? it looks whether the mask is causal unless it is told: pass "
    "is_causal=True or False to nn.TransformerEncoder, tgt_is_causal= to nn.TransformerDecoder, "
    "src_is_causal= and tgt_is_causal= to nn.Transformer)"
)
_VALUE = re.compile(r"Tensor\.item|depends on a tensor's value|data.dependent", re.IGNORECASE)
_CONCRETE = "expected to contain only concrete integers"
_DRAWN_OTHERWISE = (
    " (torch.randn and the like take no open sizes beside generator= or layout=, None among them: leave "
    "these out, or write torch.empty(shape).normal_(generator=...))"
)
_LOOK_AT_MASKS = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)


def way_out(reason: str, original: Any) -> str:
    """What to do about code that Dynamo cannot capture for this reason; "" where that is not known."""
    if _SIZE_OF_DATA.search(reason) is not None and _has_expert_loops(original):
        return _OTHER_EXPERTS
    if _CONCRETE in reason:
        return _DRAWN_OTHERWISE
    held = (module for one in lazy.held_modules(original) for module in one.modules())
    if _VALUE.search(reason) is not None and any(isinstance(m, _LOOK_AT_MASKS) for m in held):
        return _TOLD_MASKS
    return ""


def _has_expert_loops(original: Any) -> bool:
    """Whether it is a model of transformers' with experts, whose plain form loops over those that are hit."""
    if not isinstance(original, torch.nn.Module):
        return False
    modules = list(original.modules())
    # All of its models have the method and the setting, also those without experts.
    return any(type(module).__name__.endswith("Experts") for module in modules) and any(
        hasattr(module, "set_experts_implementation")
        and getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        for module in modules
    )


def _weakly(original: Callable[..., Any]) -> Callable[[], Any]:
    """What gives a callable as long as somebody else owns it."""
    try:
        if isinstance(original, types.MethodType):
            return weakref.WeakMethod(original)
        return weakref.ref(original)
    except TypeError:  # nothing can refer to it weakly
        return lambda: original


class Doorway:
    """The backend of ``CapturedGraphs``: Dynamo keeps every backend for good, so this one owns nothing."""

    def __init__(self, graphs: CapturedGraphs) -> None:
        self._graphs = weakref.ref(graphs)

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        """What runs in the place of a graph."""
        graphs = self._graphs()
        return gm.forward if graphs is None else graphs(gm, example_inputs)  # type: ignore[no-any-return]
