"""Measuring a torch callable's candidates for ``Auto``, on copies; with the backward where it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dynaflow_xla._version import __version__
from dynaflow_xla.errors import (
    DynaflowError,
    SeparabilityError,
    UnsupportedError,
    VerificationError,
)
from dynaflow_xla.frontends.torch.batch import axes
from dynaflow_xla.frontends.torch.capture import marks, own
from dynaflow_xla.frontends.torch.native.cuda import devices
from dynaflow_xla.frontends.torch.tuning import keeping, one_thread, variants
from dynaflow_xla.frontends.torch.tuning.trial import Trial, hooked
from dynaflow_xla.strategies import identity
from dynaflow_xla.strategies.auto import OneOf, too_large
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.tuning import (
    autotune,
    budget,
    choice as choice_of,
    quiet,
    ways as ways_to_run,
)
from dynaflow_xla.tuning.autotune import the
from dynaflow_xla.tuning.choice import Choice as Choice

_OPERATOR_S = 1e-3
"""Capturing takes at least so long for each operator: for what was captured before."""

_WORTH_WHILE = 16
"""So many operators without Python between them outweigh what a captured graph adds to a call."""

_SPLITS, _COMPILES = 4, 2
"""Planning nano-batches, and compiling, are taken for so many captures until the first time tells."""


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
    if core.captured_ahead or isinstance(options.strategy, OneOf):  # the one runs in any case
        return core.candidates()  # type: ignore[no-any-return]
    dims = axes.batch_dims(options.name, options.in_axes, core.original, args, kwargs)
    rows = dims[0][0].shape[dims[0][1]] if dims and not dims[0][0].is_nested else 0
    on_gpu = bool(devices.of(core.original, args, kwargs))
    made = core.candidates(batched=rows > 1, on_gpu=on_gpu)
    return {name: c for name, c in made.items() if not splits(c) or _nano_batches(c) <= rows}


def _nano_batches(candidate: Strategy) -> int:
    """How many a candidate asks for, as far as is known before it is planned."""
    count = getattr(candidate, "n", 1)
    return count if isinstance(count, int) else 1


def choose(
    core: Any, args: Any, kwargs: Any, watch: quiet.ActivityWatch, *, budget_s: float | None = None
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
    try:
        with budget.Budget(core.decisions.purse, asked) as spending:
            return _choose(core, args, kwargs, watch, spending, tuned=budget_s is not None)
    except Exception as error:
        if not devices.out_of_memory(error):
            raise
        reason = f"not measured: {_NO_ROOM}"
        core.warn(f"{core.options.name!r}: {reason}, so {the(core.unmeasured('').name)} runs")
        return core.unmeasured(reason)  # type: ignore[no-any-return]


def _choose(
    core: Any,
    args: Any,
    kwargs: Any,
    watch: quiet.ActivityWatch,
    spending: budget.Budget,
    *,
    tuned: bool,
) -> Choice:
    start = time.perf_counter()
    strategy, compiler = core.options.strategy, core.options.compiler
    candidates = candidates_of(core, args, kwargs)
    on_gpu = bool(devices.of(core.original, args, kwargs))
    forms = variants.of(core.options, candidates, on_gpu)
    child_of = partial(_child, core, forms)
    # One strategy of the user's runs in any case, operator by operator where nothing is measured.
    default = next(iter(forms)) if isinstance(strategy, OneOf) else ""

    def as_it_is(reason: str, **told: Any) -> Choice:
        return Choice(child_of(default), reason, **told, candidate=default)

    if not core.captured_ahead and (with_hooks := hooked(core.original)) is not None:
        return as_it_is(f"{with_hooks} has hooks, which measuring would call: it is not measured")
    try:  # before anything is called with what cannot be copied, say a generator
        run = Trial(core, args, kwargs)
    except UnsupportedError as error:
        return as_it_is(f"not measured: {error}")
    first = core.with_strategy(
        next(iter(candidates.values())), "" if compiler == "eager" else "eager"
    )
    began = budget.clock()
    entries = first.all_planned(args, kwargs, front=False)
    capture_s = budget.clock() - began
    spending.original(capture_s)  # under every strategy there is one
    changed = core.changes.lasting(core.original)
    if changed:
        named = [core.options.name if name == "itself" else name for name in changed]
        return as_it_is(
            f"a call changes what can neither be copied nor put back ({', '.join(named)}): it is not "
            "measured",
        )
    if not entries:
        return as_it_is("no graph could be captured")
    if outer := sorted({op.kind for e in entries for op in e.captured.graph.ops if op.outer}):
        return as_it_is(f"the graph communicates ({', '.join(outer)}): it is not measured")
    if found := own.names_in(entries):
        return as_it_is(
            f"operators of your own may keep state ({', '.join(found)}): it is not measured"
        )
    if small := choice_of.too_small((r for e in entries for r in e.pg.regions), strategy):
        return as_it_is(small)
    key = _key(core, entries, candidates.values(), len(run.wanted))
    if not (tuned or spending.checks) and (kept := choice_of.from_disk(key, child_of, Choice)):
        return kept
    captured = not any(getattr(child, "breaks", ()) for child in core.children.values())
    kept_apart = keeping.own_runs(
        core.original, core.changes, args, kwargs, watch, captured=captured
    )
    with _given_back(core), kept_apart as run.runs:
        ways = ways_to_run.Ways(spending)
        anew = _OPERATOR_S * sum(len(e.captured.graph.ops) for e in entries)
        capture_s = max(capture_s, anew, spending.anew_s)
        left_out: dict[str, str] = {}
        whole_s = _plain(core, forms, run, ways, anew, left_out, strict=tuned)
        predicted = _planned(
            core, forms, entries, run, args, kwargs, ways, capture_s, whole_s, left_out
        )
        # What was planned so far is the forward; with gradients a call is more than that.
        call_s = 0.0 if run.wanted else ways.call_s
        if not isinstance(strategy, OneOf) and one_thread.may_help(entries, call_s):
            if why := _on_one_thread(core, run, ways):
                left_out[one_thread.NAME] = why
        if ways.refused and tuned and len(ways.runs) == len(ways.plain):
            raise ways.too_small()
        if len(ways.runs) == 1:
            (alone,) = ways.runs
            seconds = time.perf_counter() - start
            reason = "; ".join(dict.fromkeys(left_out.values())) or "there is nothing else to run"
            return Choice(
                child_of(alone), reason, {}, predicted, left_out, seconds, None,
                "" if alone == "original" else alone, ways.fresh_memory(),
                later=spending.later(ways.call_s),
            )  # fmt: skip
        while True:
            try:
                runs = _named(ways.runs, ways.plain)
                medians = ways.medians(runs, watch, strict=tuned, margin=strategy.margin)
                if on_gpu:  # how far cores are from each other says nothing about streams
                    medians = autotune.Medians(medians.samples, False, medians.in_rows)
                break
            except _CandidateError as failed:  # Dynamo may capture anew at a later call
                left_out[failed.name] = _short(failed.error)
                ways.drop(failed.name)
                _failed(core, ways, child_of(failed.name), failed.error, failed.name)
    baseline = medians.fastest(ways.plain)
    cautious = {one_thread.NAME: max(strategy.margin, one_thread.MARGIN)}
    choice, reason = autotune.pick(medians, baseline, strategy.margin, cautious)
    reason += " (forward and backward)" if run.wanted else " (forward, without gradients)"
    seconds = time.perf_counter() - start
    stays = choice in ways.plain
    later = spending.later(ways.call_s) if stays else None
    made = Choice(
        child_of(choice), reason, dict(medians), predicted, left_out, seconds, None, choice,
        ways.fresh_memory(), medians.far, later=later,
    )  # fmt: skip
    if not (stays or on_gpu):
        made = choice_of.checked_later(made, baseline, spending)
    # A later process may have more time, or more memory.
    if not ((ways.refused or ways.without_room) and stays):
        choice_of.to_disk(key, made)
    return made


@contextmanager
def _given_back(core: Any) -> Iterator[None]:
    """Frees the memory of CUDA graphs at the end, however it comes: they read the copies that were tried."""
    try:
        yield
    finally:
        for child in tuple(core.children.values()):
            child.release()


_NO_ROOM = "the device had no memory for trying it"


def _failed(core: Any, ways: ways_to_run.Ways, child: Any, error: Exception, name: str) -> None:
    """A candidate is out: its memory is for the others.

    The user is told once where memory was lacking, and of who computes something else than the original.
    """
    if isinstance(error, VerificationError):
        core.warn(f"{core.options.name!r}: {name} is left out: {error}")
    if hasattr(child, "release"):  # it is one with plans
        child.release()
    if devices.out_of_memory(error):
        ways.without_room = True
        core.warn(
            f"{core.options.name!r}: what the device had no memory for trying is not measured, "
            "dfx.explain says what it was"
        )


def _plain(
    core: Any,
    forms: dict[str, variants.Variant],
    run: Trial,
    ways: ways_to_run.Ways,
    anew: float,
    left_out: dict[str, str],
    *,
    strict: bool,
) -> float:
    """Calls what one would run instead.

    That is the original and, where a compiler is asked for, the original under ``torch.compile``. Of a
    strategy that runs in any case it is a form without a compiler and one with.

    Returns:
        Seconds that ``torch.compile`` took, or 0 without it.
    """
    if isinstance(core.options.strategy, OneOf):
        first = next(iter(forms))
        child = core.with_strategy(forms[first].strategy, forms[first].compiler)
        ways.original(run.of(_caller(child)), anew, first)
    else:

        def original(*a: Any, **k: Any) -> Any:
            with marks.ignore():
                return core.original(*a, **k)

        ways.original(run.of_original(original, strict=strict), anew)
    if core.options.compiler == "eager":
        return 0.0
    run.put_back()
    began = budget.clock()
    try:
        if isinstance(core.options.strategy, OneOf):
            # What the user's wish to compile takes in any case: the first compiled form.
            last = next(reversed(forms.values()))
            child = core.with_strategy(last.strategy, last.compiler)
            return ways.original(run.of(_caller(child)), anew, last.name)
        return ways.original(run.of(_caller(core.whole())), anew, variants.WHOLE)
    except Exception as error:  # the compiler's own; what the original raises it has raised before
        name = variants.WHOLE
        if isinstance(core.options.strategy, OneOf):
            name = next(reversed(forms))
        left_out[name] = _short(error)
        _failed(core, ways, None, error, name)
        ways.failed(name, budget.clock() - began)
        return 0.0


def _on_one_thread(core: Any, run: Trial, ways: ways_to_run.Ways) -> str:
    """Calls the original on one thread for the first times; or says why it is not measured."""
    if why := ways.refuses(one_thread.NAME, 0.0):
        return why
    run.put_back()
    try:
        ways.compiled(one_thread.NAME, run.of(_caller(core.on_one_thread)))
    except Exception as error:  # of something scheduled in it, say, which one thread cannot run
        return _short(error)
    return ways.too_slow(one_thread.NAME)


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
        variants.WHOLE if options.compiler != "eager" else "", type(options.strategy).__name__,
        *core.backend.place(entries),
    )  # fmt: skip


class _CandidateError(Exception):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


def _named(runs: dict[str, Any], plain: list[str]) -> dict[str, autotune.Fresh]:
    """The same; an error of a candidate tells which it is. The first plain way's pass through."""

    def named(name: str, run: Callable[[Any], None]) -> Callable[[Any], None]:
        def candidate(given: Any) -> None:
            try:
                run(given)
            except Exception as error:
                raise _CandidateError(name, error) from error

        return run if name == plain[0] else candidate

    return {name: replace(run, run=named(name, run.run)) for name, run in runs.items()}


def _planned(
    core: Any,
    forms: dict[str, variants.Variant],
    entries: list[Any],
    run: Trial,
    args: Any,
    kwargs: Any,
    ways: ways_to_run.Ways,
    capture_s: float,
    whole_s: float,
    left_out: dict[str, str],
) -> dict[str, float]:
    """What is predicted of candidates; ``ways`` gets those worth measuring.

    Args:
        core: What is scheduled.
        forms: The candidates in all their forms.
        entries: Of the first candidate, operator by operator.
        run: A call that is tried.
        args: Of the call.
        kwargs: Of the call.
        ways: To run the function.
        capture_s: Seconds of a capture.
        whole_s: Seconds of ``torch.compile``, or 0.
        left_out: Gets why some are left out.
    """
    first = next(iter(forms.values()))
    predicted: dict[str, float] = {}
    mixing: set[str] = set()
    overlaps = any(len(e.plan.lanes_used) > 1 for e in entries)
    for name, form in variants.in_order(forms, predicted):
        if name in ways.runs or name in left_out:
            continue
        if form.without_joins not in {name, *mixing}:
            continue  # it would be the same plan, or is left out for the same reason
        reason = _not_worth(core, form, first, entries, overlaps, variants.WHOLE in ways.runs)
        if reason:
            left_out[name] = reason
            continue
        eager = form.compiler == "eager"
        captured = eager and form.of == first.of
        captures = _SPLITS if splits(form.strategy) else int(not captured)
        compile_s = captures * capture_s * ways.spending.rate
        if not eager:
            compile_s += variants.COSTS[form.compiler] * whole_s or _COMPILES * capture_s
        if reason := ways.refuses(name, compile_s):
            left_out[name] = reason
            continue
        child = core.with_strategy(form.strategy, form.compiler)
        run.put_back()
        began = budget.clock()
        try:
            made = entries if captured else child.all_planned(args, kwargs)
            if reason := variants.joins_cost(made, entries):
                left_out[name] = reason
                continue
            if not captured and form.of != first.of and _same_plans(made, entries):
                left_out[name] = f"the plan is that of {first.of}"
                continue
            if splits(form.strategy):
                run.check(child)
            planned_s = budget.clock() - began
            # What a replacement computes is the user's matter.
            compared = not any(e.plan.replaces for e in made)
            took = planned_s + ways.compiled(name, run.of(_caller(child), compared=compared))
        except DynaflowError as error:
            left_out[name] = _short(error)
            _failed(core, ways, child, error, name)
            if isinstance(error, SeparabilityError):
                mixing.add(name)
            continue
        except Exception as error:  # the original did not raise it
            left_out[name] = f"{'it' if eager else form.compiler} fails: {_short(error)}"
            _failed(core, ways, child, error, name)
            continue
        if captured:
            capture_s += took  # what its first call planned and compiled, the others' will, too
        elif eager:
            ways.spending.compiled(compile_s, took)
        predicted[name] = variants.predicted_ns(made) / 1e6
        if reason := ways.too_slow(name):
            left_out[name] = reason
            child.release()
    return predicted


def _not_worth(
    core: Any,
    form: variants.Variant,
    first: variants.Variant,
    entries: list[Any],
    overlaps: bool,
    compiled: bool,
) -> str:
    """Why a form is not compiled and measured, or ""."""
    if splits(form.strategy):
        if len(entries) > 1:
            return "the function runs as several graphs, which are not split together"
        return ""
    if why := too_large(form.strategy, max(len(e.pg.regions) for e in entries)):
        return why
    if overlaps or isinstance(core.options.strategy, OneOf):
        return ""
    if form.of != first.of:
        return f"the plan is that of {first.of}"
    if any(e.graphed for e in entries):
        return ""  # one launch for all its kernels, which torch.compile has by another mode only
    if form.compiler != "eager" and compiled:
        return (
            f"the plan has one lane: nothing would overlap, and {variants.WHOLE} compiles the same"
        )
    if form.compiler == "eager" and sum(e.without_python for e in entries) < _WORTH_WHILE:
        return "the plan has one lane: nothing would overlap"
    return ""


def _same_plans(made: list[Any], others: list[Any]) -> bool:
    """Whether they do the same."""
    if any(e.plan.replaces for e in made):
        return False
    return [e.plan.instructions for e in made] == [e.plan.instructions for e in others]


def _short(error: Exception) -> str:
    """The error's first finding, without the ways out."""
    first, *others = (str(error) or type(error).__name__).splitlines()
    return f"{first} {others[0].strip(' -')}" if first.endswith(":") and others else first


def _caller(child: Any) -> Callable[..., Any]:
    return lambda *a, **k: child.call(a, k)


def _child(core: Any, forms: dict[str, variants.Variant], choice: str) -> Any:
    if choice == variants.WHOLE:
        return core.whole()
    if choice == one_thread.NAME:
        return core.on_one_thread
    form = forms.get(choice)
    return None if form is None else core.with_strategy(form.strategy, form.compiler)
