"""A captured graph whose batch may be split: one plan for each batch size it is called with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow_xla.batch import evidence
from dynaflow_xla.batch.expansion.specs import OutSpec
from dynaflow_xla.batch.joins import Wanted
from dynaflow_xla.batch.proof import Sum, refusal
from dynaflow_xla.batch.row_orders.orders import at as lies
from dynaflow_xla.batch.states import Late, Partial, Rows, Same, State
from dynaflow_xla.errors import (
    DynaflowError,
    PlanError,
    SeparabilityError,
    UnsupportedError,
)
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch._compat.modes import with_data
from dynaflow_xla.frontends.torch.backend import Backend, Entry
from dynaflow_xla.frontends.torch.batch import (
    drawn,
    handed,
    proof as proving,
    shape_check,
    totals,
)
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches, taken
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.context import context_of
from dynaflow_xla.frontends.torch.capture.sizes import (
    Binding,
    NoSize,
    Sized,
    Symbol,
    at_sizes,
    bindings_of,
    unread,
)
from dynaflow_xla.frontends.torch.opaque import regions
from dynaflow_xla.frontends.torch.signature import compared, numbers
from dynaflow_xla.frontends.torch.signature.compared import MadeEntry
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import sizes_of
from dynaflow_xla.strategies.predicted import fastest

_MAX_PLANS = 256
"""Sizes whose plans are kept: those used last. A plan takes some kilobytes for each operator."""


@dataclass
class BatchedGraph:
    """A graph with an open batch size.

    Attributes:
        captured: The graph.
        backend: Who runs it.
        kind: "inference", "forward" or "backward".
        batch_symbols: The sizes that are the number of rows.
        roles: See ``proof.Question``.
        forward: Of a backward: the graph of its forward.
        warn: Tells the user of something, once.
        described: What each result is, as AOTAutograd says.
        tangents: Of a backward: name of a gradient that comes in -> number of the result it is of.
    """

    captured: Captured
    backend: Backend
    kind: str
    batch_symbols: frozenset[Symbol]
    roles: Sequence[str]
    warn: Callable[[str], None]
    forward: BatchedGraph | None = None
    backward: BatchedGraph | None = None
    described: list[Any] = field(default_factory=list)
    tangents: dict[str, int] = field(default_factory=dict)
    bindings: tuple[Binding, ...] = ()
    _open: frozenset[Symbol] = frozenset()
    """Numbers that plans read at each call, as long as that can be proved; by others there is a plan each."""

    _plans: OrderedDict[tuple[int | None, ...], MadeEntry] = field(default_factory=OrderedDict)
    """By the values of ``bindings``, None for a number that the plan reads."""

    _told: bool = False
    _fit: set[int] = field(default_factory=lambda: {0})
    """Sizes of nano-batches at which every operator is known to run."""

    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.bindings = bindings_of(self.captured)
        if not self.batch_symbols & {b.symbol for b in self.bindings}:
            raise PlanError(
                f"{self.captured.graph.name!r}: no input tells the size of the batch, so it cannot be split"
            )

        if self.backend.in_place and self.options.compiler == "eager":
            self._open = numbers.open_in(self.captured) - self.batch_symbols

    @property
    def options(self) -> Settings:
        """What the user asked for."""
        return self.backend.settings

    def resolve(self, inputs: Sequence[Any]) -> Entry:
        """The plan for the sizes of these inputs.

        Raises:
            SeparabilityError: a split would change what the function computes.
            PlanError: see ``Strategy.split``.
            UnsupportedError: a backward of several gradients at once.
        """
        if self.kind == "backward" and modes.of_several(inputs):
            raise UnsupportedError(
                f"{self.captured.graph.name!r}: nano-batches write their parts of a gradient, and their "
                "backward cannot run for several at once (is_grads_batched=True, jacobian(vectorize=True)). "
                "Ask for them one after another, or differentiate what fast.original returns"
            )
        key = tuple(self._read(b, inputs) for b in self.bindings)
        kept = self._kept(key)
        made = self._plans.get(kept)
        if made is None:
            made = self.at(dict(zip((b.symbol for b in self.bindings), key, strict=True)))
        elif len(self._plans) > _MAX_PLANS // 2:  # else none has to go soon
            with self._lock:
                if kept in self._plans:
                    self._plans.move_to_end(kept)
        if made.compared:
            return made.entry
        # A backward goes by how its forward was split.
        if self.kind == "inference" and (alike := compared.silent(self.captured, made, inputs)):
            if made.whole is None:
                values = dict(zip((b.symbol for b in self.bindings), key, strict=True))
                made.whole = self._whole(values, sum(made.sizes))
                why = evidence.undecided(alike, "the whole batch", "The original's operators run")
                self.warn(f"{self.captured.graph.name!r}: {why}")
            return made.whole
        compared.compare_first(self.captured, made, inputs, self.warn)
        return made.entry

    def release(self) -> None:
        """Gives memory back that later calls take again."""
        for made in tuple(self._plans.values()):
            for entry in (made.entry, made.whole):
                if entry is not None:
                    entry.release()

    def _read(self, binding: Binding, inputs: Sequence[Any]) -> int:
        if binding.dim < 0 or self.kind != "backward":  # whose inputs alone may have come in parts
            return binding.read(inputs)
        return handed.size(inputs[binding.position], binding.dim) // binding.scale

    def at(self, values: dict[Symbol, int]) -> MadeEntry:
        """The plan for these sizes; made once."""
        key = tuple(values[b.symbol] for b in self.bindings)
        with self._lock:
            made = self._plans.get(self._kept(key))
            if made is None:
                made = self._with_open_numbers(values) or self._make(values)
                self._plans[self._kept(key)] = made
                self._tell_of_numbers(key, made)
                made.entry.later = lambda: self._backward_at(values)
                if len(self._plans) > _MAX_PLANS:
                    self._plans.popitem(last=False)
            return made

    def _kept(self, key: tuple[int, ...]) -> tuple[int | None, ...]:
        """Under what a plan for these values of ``bindings`` is kept."""
        if not self._open:
            return key
        pairs = zip(self.bindings, key, strict=True)
        return tuple(None if b.symbol in self._open else n for b, n in pairs)

    def _with_open_numbers(self, values: dict[Symbol, int]) -> MadeEntry | None:
        """A plan that reads numbers at each call; None if there are none, or it cannot be proved for all."""
        if not self._open:
            return None
        with contextlib.suppress(DynaflowError):  # without open numbers it says what is wrong
            made = self._make({s: n for s, n in values.items() if s not in self._open})
            if made.fit is None or (made.fit.proof.status == "separable" and not made.fit.joining):
                return made
        self._open = frozenset()
        return None

    def _tell_of_numbers(self, key: tuple[int, ...], made: MadeEntry) -> None:
        """Says that each value of a number has a plan of its own, where there are many of them."""
        note = numbers.many_values(self.captured, self.bindings, list(self._plans), self._kept(key))
        if not note:
            return
        made.entry.notes = (*made.entry.notes, note)
        if not self._told:
            self._told = True
            self.warn(note)

    def _backward_at(self, values: dict[Symbol, int]) -> Entry | None:
        other = self.backward
        if other is None or any(b.symbol not in values for b in other.bindings):
            return None
        return other.at({b.symbol: values[b.symbol] for b in other.bindings}).entry

    def _make(self, values: dict[Symbol, int]) -> MadeEntry:
        rows = {values[s] for s in self.batch_symbols if s in values}
        if len(rows) != 1:
            raise PlanError(
                f"{self.captured.graph.name!r}: all batched arguments must have the same number of rows; "
                f"got {sorted(rows)}"
            )
        (batch,) = rows
        options = self.options
        if options.batch_size is not None and batch != options.batch_size:
            raise PlanError(
                f"{options.name!r}: batch_size={options.batch_size} was given to schedule; got {batch} rows"
            )
        t0 = time.perf_counter()
        context = context_of(self.captured, options, batch)
        told = ""
        if self.forward is not None:
            of_forward = self.forward.made_for(values, batch)
            sizes, assume, joins = of_forward.sizes, of_forward.assume, of_forward.joins
        else:
            with with_data():
                sizes, asked = sizes_of(options.strategy, context)
            # A call that is made as it is has one record of what autograd needs, not one a nano-batch.
            whole = any(op.kind in regions.KINDS for op in self.captured.graph.ops)
            assume, joins = asked.assume_separable and not whole, asked.joins
            told = asked.conditions.text()
            if len(tried := asked.tried(batch)) > 1:
                each = [self._cut(values, batch, sizes, assume, joins, t0) for sizes in tried]
                number, why = fastest([made.entry for made in each], tried)
                each[number].entry.notes = (
                    *each[number].entry.notes,
                    f"nano-batches are {told}",
                    why,
                )
                return each[number]
        if not sizes:
            return MadeEntry(self._whole(values, batch))
        made = self._cut(values, batch, sizes, assume, joins, t0)
        if told:
            made.entry.notes = (*made.entry.notes, f"nano-batches are {told}")
        return made

    def _cut(
        self,
        values: dict[Symbol, int],
        batch: int,
        sizes: tuple[int, ...],
        assume: bool,
        joins: Wanted,
        t0: float,
    ) -> MadeEntry:
        """The plan of a split into nano-batches of these sizes, proved or to be compared."""
        options = self.options
        fit = self._proved(values, batch, sizes, assume, joins)
        unproven = fit.proof.status == "unproven" and not assume
        if not assume:
            fit.proof.raise_if_refused(allow_unproven=options.check)
            if options.in_axes is None and unproven:
                self._refuse_unproven(fit.proof)
        entry = self._split(values, batch, sizes, fit, t0)
        return MadeEntry(entry, fit, sizes, assume, compared=not unproven, joins=joins)

    def _whole(self, values: dict[Symbol, int], batch: int) -> Entry:
        """The plan without a split."""
        made = at_sizes(self.captured, values, 1.0, frozenset())
        kept = [n for n, v in enumerate(self.captured.graph.inputs) if v not in made.numbers]
        entry = self.backend.fixed(made.captured, self.kind, batch)
        entry.prepare = lambda inputs: taken(inputs, [inputs[n] for n in kept])
        return entry

    def made_for(self, values: Mapping[Symbol, int], batch: int) -> MadeEntry:
        """What was made for these sizes, or a batch of this size, by the call whose backward runs now."""
        with self._lock:
            known = list(self._plans.items())
        symbols = [b.symbol for b in self.bindings]
        for key, made in reversed(known):
            if all(n is None or values.get(s, n) == n for s, n in zip(symbols, key, strict=True)):
                return made
        plans = [made for _, made in known]
        for made in reversed(plans):
            if made.sizes and sum(made.sizes) == batch:
                return made
        for made in plans:
            if not made.sizes:
                return made
        raise PlanError(f"{self.captured.graph.name!r} has no plan for a batch of {batch} rows")

    def _refuse_unproven(self, proof: Any) -> None:
        try:
            proof.raise_if_refused()
        except SeparabilityError as error:
            raise SeparabilityError(
                f"{error}\n  - say where the batch is: with in_axes, what is not proved is compared on the "
                "first call"
            ) from None

    def _proved(
        self,
        values: dict[Symbol, int],
        batch: int,
        sizes: tuple[int, ...],
        assume: bool,
        joins: Wanted,
    ) -> proving.Fit:
        """The proof; what mixes rows runs once if the strategy allows that."""
        fit = self._separable(values, batch, sizes, assume)
        mixed = any(o.status == "mixed" and not o.suggestion for o in fit.proof.outputs)
        if joins.chosen and not self.backend.in_place:
            raise UnsupportedError(
                f"{self.captured.graph.name!r}: only= and join= need a backend that runs PyTorch's own "
                "operators: backend='torch'"
            )
        joinable = joins.allowed and self.backend.in_place  # on XLA what mixes rows is refused
        if assume or not joinable or not (mixed or joins.chosen):
            return fit
        question, _ = self._question(values, batch)
        joined = proving.answer(question, batch, sizes, assume=False, joins=joins)
        if joined.proof.status == "unproven" and fit.proof.status != "separable":
            return fit
        return joined

    def _separable(
        self, values: dict[Symbol, int], batch: int, sizes: tuple[int, ...], assume: bool
    ) -> proving.Fit:
        question, late = self._question(values, batch)
        fit = proving.answer(question, batch, sizes, assume=assume)
        if late and fit.proof.status != "separable":
            # The gradient of what was computed from means is handed out in shares, as of means.
            shared = replace(question, totals=question.totals - late)
            other = proving.answer(shared, batch, sizes, assume=assume)
            if other.proof.status == "separable":
                return other
        return fit

    def _question(
        self, values: dict[Symbol, int], batch: int
    ) -> tuple[proving.Question, frozenset[str]]:
        """The question, and which gradients are of results that were computed from totals."""
        given: dict[str, State] = {}
        sums: set[str] = set()
        cuts: dict[str, OutSpec] = {}
        late: set[str] = set()
        if self.forward is not None:
            of_forward = self.forward.made_for(values, batch).fit
            assert of_forward is not None
            given, sums, late, cuts = self._handed_over(of_forward)
        question = proving.Question(
            captured=self.captured,
            batch_symbols=self.batch_symbols,
            others={
                s: v
                for s, v in {**unread(self.captured), **values}.items()
                if s not in self.batch_symbols
            },
            kind=self.kind,
            roles=self.roles,
            given=given,
            totals=frozenset(sums | late),
            out_axes=self.options.out_axes,
            cuts=cuts,
            open_numbers=numbers.of_symbols(self.captured, self._open - values.keys()),
        )
        return question, frozenset(late)

    def _handed_over(
        self, of_forward: proving.Fit
    ) -> tuple[dict[str, State], set[str], set[str], dict[str, OutSpec]]:
        """What the forward's proof says of the backward's inputs, by name.

        The states of what it computed, which gradients are of sums over the batch and which of what was
        computed from totals, and how what it made was put together.
        """
        forward = self.forward
        assert forward is not None
        before = forward.captured
        names = {value: node.name for node, value in before.ids.items()}
        states = {names[v]: of_forward.states[v] for v in before.ids.values()}
        wanted = set(self.captured.graph.input_names)
        # Totals are complete by now.
        given: dict[str, State] = {
            n: Same() if isinstance(s, Partial | Late) else s
            for n, s in states.items()
            if n in wanted and not n.startswith("tangents")
        }
        specs = {v: spec for v, spec in of_forward.in_specs.items() if isinstance(spec, int)}
        specs.update((v, s) for v, s in of_forward.out_specs.items() if isinstance(s, int))
        cuts: dict[str, OutSpec] = {names[v]: s for v, s in specs.items() if v in names}
        sums: set[str] = set()
        late: set[str] = set()
        results = [v for v, r in zip(before.outputs, forward.roles, strict=True) if r != "saved"]
        for name, result in self.tangents.items():
            value = results[result] if result < len(results) else None
            if isinstance(value, int):
                state = of_forward.states[value]
                if isinstance(of_forward.out_specs.get(value), Sum):
                    sums.add(name)
                if isinstance(state, Late):
                    late.add(name)
                if isinstance(state, Rows):
                    given[name] = Rows(state.axis, state.outer, state.inner)
        return given, sums, late, cuts

    def _split(
        self,
        values: dict[Symbol, int],
        batch: int,
        sizes: tuple[int, ...],
        fit: proving.Fit,
        began: float,
    ) -> Entry:
        slim, out_specs, tail = totals.behind(self.captured, fit.states, dict(fit.out_specs))
        captured, states, draws = drawn.before(slim, fit.states)
        joining = None if fit.joining is None else replace(fit.joining, states=states)
        fit = replace(
            fit, states=states, in_specs=drawn.specs(fit.in_specs, captured, states),
            out_specs=out_specs, joining=joining,
        )  # fmt: skip
        held = frozenset(
            n for n, s in enumerate(fit.states) if isinstance(s, Rows) or lies(s) is not None
        )
        hint = values_hint(captured, self.batch_symbols) or batch

        def sized(rows: int) -> Sized:
            at = {s: rows if s in self.batch_symbols else v for s, v in values.items()}
            try:
                return at_sizes(captured, at, rows / hint, held)
            except NoSize as error:
                part = f"a nano-batch of {rows} row{'s' * (rows != 1)}"
                raise SeparabilityError(
                    f"{captured.graph.name!r} cannot run on {part}: {error}. Ask for other sizes, "
                    "NanoBatch([...])"
                ) from None

        at = {size: sized(size) for size in dict.fromkeys((*sizes, batch))}
        whole = at[batch]
        self._refuse_unfit(at, whole, fit)
        kept = [n for n, v in enumerate(captured.graph.inputs) if v not in whole.numbers]
        nano = NanoBatches(
            captured, self.kind, whole, at, sizes, fit, kept, sized,
            self._handed(captured, out_specs, tail),
            drawn.drawer(draws, whole, captured) if draws else None, began,
        )  # fmt: skip
        return _finished(self.backend.split(nano), tail, whole)

    def _handed(
        self,
        captured: Captured,
        out_specs: Mapping[int, OutSpec],
        tail: totals.Tail | None,
    ) -> handed.Handed:
        """What the forward hands to the backward, or the backward gets, without joining it."""
        if self.forward is not None:
            names = handed.names_of_saved(self.forward.captured, self.forward.roles)
            return handed.Handed(taken=handed.named(captured, names))
        return handed.of_forward(self.captured, self.roles, captured, out_specs, tail)

    def _refuse_unfit(self, at: Mapping[int, Sized], whole: Sized, fit: proving.Fit) -> None:
        """Raises SeparabilityError if the graph cannot run at a nano-batch's sizes.

        A graph of proved operators that runs at one size of several rows runs at all of them.
        """
        proved = fit.proof.status == "separable"
        once = () if fit.joining is None else fit.joining.once
        for size, sized in at.items():
            if sized is whole or size in self._fit or (proved and size > 1 and max(self._fit) > 1):
                continue
            found = shape_check.first_failure(sized, whole, once)
            if found is not None:
                name = self.captured.graph.name
                raise SeparabilityError(
                    refusal(name, fit.proof.batch, fit.proof.sizes, {found: ()})
                )
            if proved:
                self._fit.add(size)


def _finished(entry: Entry, tail: totals.Tail | None, whole: Sized) -> Entry:
    """The entry with what runs behind it."""
    if tail is not None:
        before, behind = entry.finish, tail.finisher(whole)
        entry.finish = behind if before is None else lambda results: behind(before(results))
        entry.notes = (*entry.notes, tail.describe())
    return entry


def values_hint(captured: Captured, symbols: frozenset[Symbol]) -> int:
    """Rows of the batch in the capture, for scaling estimates; 0 if unknown."""
    for value in captured.graph.inputs:
        example = captured.examples[value]
        sizes = example.shape if isinstance(example, torch.Tensor) else [example]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr in symbols:
                return int(size.node.hint or 0)
    return 0
