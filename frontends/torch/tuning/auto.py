"""Measuring a torch callable's candidates for ``Auto``, on copies; with the backward where it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dynaflow_xla._version import __version__
from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import DynaflowError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.tuning import call_signature, keeping
from dynaflow_xla.frontends.torch.tuning.trial import Trial
from dynaflow_xla.strategies import identity
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.timelines.simulator import simulate
from dynaflow_xla.tuning import (
    autotune,
    budget,
    choice as choice_of,
    decisions,
    quiet,
    ways as ways_to_run,
)
from dynaflow_xla.tuning.choice import Choice as Choice, the

_OPERATOR_S = 1e-3
"""Capturing takes at least so long for each operator: for what was captured before."""

_WORTH_WHILE = 16
"""So many operators without Python between them outweigh what a captured graph adds to a call."""

_SPLITS, _COMPILES = 4, 2
"""Planning nano-batches, and compiling, are taken for so many captures until the first time tells."""


_MAX_KINDS = 1024
_MAX_ONCE = 4096


class Decisions(decisions.Decisions[Choice]):
    """Auto's decisions of one callable, by signature.

    Sizes that come for the first time take what was decided for others, and are decided for when they
    come again: a cache of keys and values that grows has new sizes at every call, each of which would
    pay for a decision and none gain by it. For the same reason they take no nano-batches, which are
    planned for each size.
    """

    def __init__(self) -> None:
        super().__init__(Choice)
        self._kinds: Recent[Any, Choice] = Recent(_MAX_KINDS)  # without sizes: the last decision
        self._once: Recent[Any, Choice] = Recent(_MAX_ONCE)

    def get(self, signature: Any) -> Choice | None:
        """What was decided, or what the one call so far took; None before the first call."""
        return self.decided(signature) or self._once.get(signature)

    def of_other_sizes(self, signature: Any) -> Choice | None:
        """For sizes that come for the first time: the decision for others, if there is one."""
        found = self._kinds.get(call_signature.without_sizes(signature))
        if signature in self._once or found is None:
            return None
        split = found.child is not None and found.child.splits
        what = "the original" if split else the(found.name)
        reason = f"these sizes came once: {what} runs, after {the(found.name)} for other sizes"
        child = None if split else found.child
        self._once[signature] = made = Choice(child, reason, candidate=found.candidate)
        return made

    def put(self, signature: Any, choice: Choice) -> Choice:
        """Keeps a decision."""
        self._once.pop(signature)
        self._kinds[call_signature.without_sizes(signature)] = choice
        return super().put(signature, choice)


def splits(strategy: Strategy) -> bool:
    """Whether a strategy can ask for nano-batches."""
    return type(strategy).split is not Strategy.split


def candidates_of(core: Any, args: Any, kwargs: Any) -> dict[str, Strategy]:
    """Auto's candidates for these arguments, by name.

    Nano-batches are among them where the arguments have a batch of several rows: one that ``in_axes``
    names, or the first dimension of the first tensor, which then has to be proved.

    Raises:
        PlanError: ``in_axes`` does not fit the arguments.
    """
    options = core.options
    if core.captured_ahead:
        return core.candidates()  # type: ignore[no-any-return]
    dims = axes.batch_dims(options.name, options.in_axes, core.original, args, kwargs)
    rows = dims[0][0].shape[dims[0][1]] if dims else 0
    made = core.candidates(batched=rows > 1)
    return {name: c for name, c in made.items() if not splits(c) or _nano_batches(c) <= rows}


def _nano_batches(candidate: Strategy) -> int:
    """How many a candidate asks for, as far as is known before it is planned."""
    count = getattr(candidate, "n", 1)
    return count if isinstance(count, int) else 1


def choose(
    core: Any, args: Any, kwargs: Any, watch: quiet.Watch, *, budget_s: float | None = None
) -> Choice:
    """Decides for one signature, from the disk cache or by measuring.

    Args:
        core: What is scheduled, with ``Auto`` as its strategy.
        args: Of the call.
        kwargs: Of the call.
        watch: Of this thread's turn to measure.
        budget_s: Seconds that it may take, see ``Budget``; the disk cache is not asked then. None: the
            strategy's budget.

    Raises:
        PlanError: ``in_axes`` does not fit the arguments.
        autotune.BudgetTooSmall: nothing is decided then.
        quiet.Disturbed: something else ran; nothing is decided.
    """
    asked = core.options.strategy.budget_s if budget_s is None else budget_s
    spending = budget.Budget(core.decisions.purse, asked)
    try:
        return _choose(core, args, kwargs, watch, spending, tuned=budget_s is not None)
    except quiet.Disturbed:
        spending.forget()  # what was captured is there when it is tried again
        raise
    finally:
        spending.close()


def _choose(
    core: Any, args: Any, kwargs: Any, watch: quiet.Watch, spending: budget.Budget, *, tuned: bool
) -> Choice:
    start = time.perf_counter()
    strategy = core.options.strategy
    if not core.captured_ahead and (hooked := _hooked(core.original)) is not None:
        return Choice(None, f"{hooked} has hooks, which measuring would call: it is not measured")
    candidates = candidates_of(core, args, kwargs)
    first = core.with_strategy(next(iter(candidates.values())))
    began = budget.clock()
    entries = first.all_planned(args, kwargs)
    capture_s = budget.clock() - began
    spending.original(capture_s)  # under every strategy there is one
    if not entries:
        return Choice(None, "no graph could be captured")
    if changed := core.changes.lasting(core.original):
        named = [core.options.name if name == "itself" else name for name in changed]
        return Choice(
            None,
            f"a call changes what can neither be copied nor put back ({', '.join(named)}): it is not "
            "measured",
        )
    outer = sorted({op.kind for e in entries for op in e.captured.graph.ops if op.outer})
    if outer:
        return Choice(None, f"the graph communicates ({', '.join(outer)}): it is not measured")
    if small := choice_of.too_small((r for e in entries for r in e.pg.regions), strategy):
        return Choice(None, small)
    try:
        run = Trial(core, args, kwargs)
    except UnsupportedError as error:
        return Choice(None, f"not measured: {error}")
    key = _key(core, entries, candidates.values(), len(run.wanted))
    child_of = partial(_child, core, candidates)
    if not tuned and (kept := choice_of.from_disk(key, child_of, Choice)):
        return kept
    with keeping.preserved(core.original, core.changes, args, kwargs) as run.put_back:

        def original(*a: Any, **k: Any) -> Any:
            with marks.ignore():
                return core.original(*a, **k)

        ways = ways_to_run.Ways(spending)
        anew = _OPERATOR_S * sum(len(e.captured.graph.ops) for e in entries)
        ways.original(run.of(original), anew)
        capture_s = max(capture_s, anew)
        predicted, left_out = _planned(
            core, candidates, entries, run, args, kwargs, ways, capture_s
        )
        if ways.refused and tuned and len(ways.runs) == 1:
            raise ways.too_small()
        if len(ways.runs) == 1:
            seconds = time.perf_counter() - start
            reason = "; ".join(dict.fromkeys(left_out.values()))
            return Choice(None, reason, {}, predicted, left_out, seconds)
        while True:
            try:
                medians = ways.medians(_named(ways.runs), watch, strict=tuned)
                break
            except _CandidateError as failed:  # Dynamo may capture anew at a later call
                left_out[failed.name] = _short(failed.error)
                ways.drop(failed.name)
    choice, reason = autotune.pick(medians, baseline="original", margin=strategy.margin)
    reason += " (forward and backward)" if run.wanted else " (forward, without gradients)"
    seconds = time.perf_counter() - start
    made = Choice(child_of(choice), reason, medians, predicted, left_out, seconds, None, choice)
    if not (ways.refused and choice == "original"):  # a later process may have more time
        choice_of.to_disk(key, made)
    return made


def _key(core: Any, entries: list[Any], candidates: Iterable[Strategy], wanted: int) -> str | None:
    """The name of a decision on disk: everything that it depends on; None if that cannot be told."""
    options = core.options
    lasting = identity.on_disk(candidates, options.user)
    if lasting is None:
        return None
    return autotune.cache_key(
        [e.pg.to_json() for e in entries], options.name, lasting,
        options.strategy.margin, __version__, torch.__version__, torch.get_num_threads(),
        options.lanes, options.gpu, options.in_axes, options.out_axes, options.batch_size,
        options.backend, options.compiler, options.compiler_options or {}, wanted,
        *core.backend.place(entries),
    )  # fmt: skip


class _CandidateError(Exception):
    def __init__(self, name: str, error: DynaflowError) -> None:
        super().__init__(name)
        self.name, self.error = name, error


def _named(runs: dict[str, Any]) -> dict[str, autotune.Fresh]:
    """The same; an error of a candidate tells which it is. The original's pass through."""

    def named(name: str, run: Callable[[Any], None]) -> Callable[[Any], None]:
        def candidate(given: Any) -> None:
            try:
                run(given)
            except DynaflowError as error:
                raise _CandidateError(name, error) from error

        return run if name == "original" else candidate

    return {name: replace(run, run=named(name, run.run)) for name, run in runs.items()}


def _planned(
    core: Any,
    candidates: dict[str, Strategy],
    entries: list[Any],
    run: Trial,
    args: Any,
    kwargs: Any,
    ways: ways_to_run.Ways,
    capture_s: float,
) -> tuple[dict[str, float], dict[str, str]]:
    """What is predicted of candidates, and why some are left out; ``ways`` gets those worth measuring."""
    first = next(iter(candidates))
    predicted: dict[str, float] = {}
    left_out: dict[str, str] = {}
    overlaps = any(len(e.plan.lanes_used) > 1 for e in entries)
    for name, candidate in candidates.items():
        child = core.with_strategy(candidate)
        run.put_back()
        if not splits(candidate) and not overlaps:
            if name != first:
                left_out[name] = f"the plan is that of {first}"
                continue
            if sum(e.without_python for e in entries) < _WORTH_WHILE:
                left_out[name] = "the plan has one lane: nothing would overlap"
                continue
        if splits(candidate) and len(entries) > 1:
            left_out[name] = "the function runs as several graphs, which are not split together"
            continue
        captures = _SPLITS if splits(candidate) else int(name != first)
        if first not in ways.runs and core.backend.compiles:
            captures += _COMPILES
        compile_s = captures * capture_s * ways.spending.rate
        if reason := ways.refuses(name, compile_s):
            left_out[name] = reason
            continue
        began = budget.clock()
        try:
            made = entries if name == first else child.all_planned(args, kwargs)
            if splits(candidate):
                run.check(child)
            planned_s = budget.clock() - began
            took = planned_s + ways.compiled(name, run.of(_caller(child)))
        except DynaflowError as error:
            left_out[name] = _short(error)
            continue
        if name == first:
            capture_s += took  # what its first call planned and compiled, the others' will, too
        else:
            ways.spending.compiled(compile_s, took)
        predicted[name] = sum(simulate(e.plan, e.pg).total_ns for e in made) / 1e6
        if reason := ways.too_slow(name):
            left_out[name] = reason
    return predicted, left_out


def _short(error: DynaflowError) -> str:
    """The error's first finding, without the ways out."""
    first, *others = str(error).splitlines()
    return f"{first} {others[0].strip(' -')}" if first.endswith(":") and others else first


def _caller(child: Any) -> Callable[..., Any]:
    return lambda *a, **k: child.call(a, k)


def _hooked(original: Any) -> str | None:
    """Path of a module with hooks, if there is one: they may have effects."""
    if isinstance(original, torch.nn.Module):
        for name, module in original.named_modules():
            if operators.has_hooks(module):
                return f"the module {name!r}" if name else "the module"
    return None


def _child(core: Any, candidates: dict[str, Strategy], choice: str) -> Any:
    candidate = candidates.get(choice)
    return None if candidate is None else core.with_strategy(candidate)
