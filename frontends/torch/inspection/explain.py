"""``explain``, ``verify`` and ``tune`` for scheduled torch callables."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla import machine
from dynaflow_xla.errors import VerificationError
from dynaflow_xla.frontends.torch.backend import Backend, Entry
from dynaflow_xla.frontends.torch.capture import lazy, marks, names
from dynaflow_xla.frontends.torch.compare import compare
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.tuning import auto, call_signature, copying, keeping
from dynaflow_xla.planning.table import region_table, time_to_make, widths
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.base import not_replaced
from dynaflow_xla.tuning import choice as choosing, quiet
from dynaflow_xla.verification import Report, Row


def explain(fast: Core, args: Any, kwargs: Any) -> str:
    """The text that ``dynaflow_xla.explain`` returns for a PyTorch callable."""
    if why := lazy.why_unplanned(fast.original, fast.options.name):
        return f"{fast.options.name}: nothing is planned yet: {why}"
    entries, as_written = fast.all_planned(args, kwargs), fast.why_as_written()
    if as_written and not entries:
        return f"{fast.options.name}: {as_written}"
    target = fast.target(args, kwargs)
    lines = _what_runs(fast, args, kwargs)
    for entry in entries:
        lines += _explain_entry(entry, target.backend)
        later = getattr(entry, "later", None)
        backward = entry.backward if later is None else later()
        if backward is not None:
            lines += _explain_entry(backward, target.backend)
    if not entries:
        lines.append(f"{fast.options.name}: {target.why_original(args, kwargs)}")
    lines += [f"note: {text}" for text in (as_written, *target.breaks) if text]
    return "\n".join(lines)


def _what_runs(fast: Core, args: Any, kwargs: Any) -> list[str]:
    """Under ``Auto`` what a call runs, and why; nothing for a fixed strategy, whose plan runs."""
    if not isinstance(fast.options.strategy, Auto):
        return []
    why = fast.decisions.why_undecided(call_signature.of(fast.original, args, kwargs))
    choice = fast.decision(args, kwargs)
    lines = choosing.what_runs(
        fast.options.name, choice, why or "a call decides", fast.unmeasured("").name
    )
    if aside := fast.beside_the_plan(args, kwargs):
        lines.append(f"{aside}:")
    return lines


def _explain_entry(entry: Entry, backend: Backend) -> list[str]:
    lines = [
        f"{entry.captured.graph.name} ({entry.kind}): strategy {entry.plan.strategy}, backend "
        f"{backend.told(entry)}"
    ]
    lines += region_table(entry.plan, entry.pg)
    lines += entry.describe()
    told = widths(entry.plan, entry.pg, machine.cores(), torch.get_num_threads())
    lines += [f"width: {line}" for line in told]
    lines.append(time_to_make(entry.seconds))
    for region in entry.pg.regions:
        op = entry.pg.graph.ops[region.ops[0]]
        if region.outer:
            lines.append(f"outer: {op.kind} runs on the caller's thread: it {op.outer_reason}")
    labels = getattr(entry.captured, "labels", {})
    notes = [
        re.sub(r"\w+", lambda m: labels.get(m.group(), m.group()), note)
        for note in (*entry.pg.notes, *entry.plan.notes)
    ]
    return lines + [f"note: {note}" for note in notes]


def verify(fast: Core, args: Any, kwargs: Any) -> Report:
    """The report of ``dynaflow_xla.verify``. Buffers and random state are as before afterwards.

    The results, what the call wrote into its arguments, and the module's buffers are compared.
    """
    lazy.check(fast.original, fast.options.name)
    target = fast.target(args, kwargs)

    def run(call: Any) -> tuple[Any, Any, Any]:
        given = copying.copies((args, kwargs))
        with keeping.preserved(fast.original, fast.changes, args, kwargs):
            result = call(*given[0], **given[1])
            module = fast.original
            buffers = module.named_buffers() if isinstance(module, torch.nn.Module) else ()
            state = {k: v.clone() for k, v in buffers}
        return result, given, state

    def original(*a: Any, **k: Any) -> Any:
        with marks.ignore():
            return fast.original(*a, **k)

    wants = run(original)
    gots = run(lambda *a, **k: target.call(a, k, planned=True))
    # It was watched, for the next call to be split.
    while running.ran_original() and not target.why_as_written() and target.current() is target:
        gots = run(lambda *a, **k: target.call(a, k, planned=True))
    rows: list[Row] = []
    rows += _compared("result", wants[0], gots[0], set())
    named = (_by_name(fast.original, *given[1]) for given in (wants, gots))
    for (name, want), (_, got) in zip(*named, strict=True):
        rows += _compared(name, want, got, set())
    rows += _compared("buffer", wants[2], gots[2], set())
    by_sizes = any(hasattr(entry, "resolve") for entry in target.entries)
    known = by_sizes or any(not_replaced(entry.plan.notes) for entry in target.entries)
    entries = target.all_planned(args, kwargs) if known else []
    found = [note for entry in entries for note in not_replaced(entry.plan.notes)]
    notes = [
        f"{note}. Without gradients (torch.no_grad()) it runs, and is compared" for note in found
    ]
    return Report(tuple(rows), tuple(dict.fromkeys(notes)))


def _by_name(fn: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Arguments with the names that the function gives them."""
    if places := getattr(fn, names.PLACES, ()):
        return list(zip(places, args, strict=True))
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        bound = inspect.signature(called).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature to be had, or one that does not tell
        named: list[tuple[str, Any]] = [(f"argument[{n}]", x) for n, x in enumerate(args)]
        return named + [(f"argument {name!r}", x) for name, x in kwargs.items()]
    found = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found += [(f"argument {key!r}", x) for key, x in value.items()]
        else:
            found.append((f"argument {name!r}", value))
    return found


def _compared(name: str, want: Any, got: Any, seen: set[int]) -> list[Row]:
    """Rows for all tensors in a tree, those in attributes of objects included."""
    want_tree, got_tree = pytree.tree_structure(want), pytree.tree_structure(got)
    if want_tree != got_tree:
        raise VerificationError(f"the structure of {name} must be {want_tree}; got {got_tree}")
    want_leaves, got_leaves = names.leaves_with_paths(want), names.leaves_with_paths(got)
    rows: list[Row] = []
    for (path, w), (_, g) in zip(want_leaves, got_leaves, strict=True):
        which = name + pytree.keystr(path)
        if isinstance(w, torch.Tensor):
            rows.append(compare(which, w.detach(), g.detach()))
        elif type(w) is not type(g):
            raise VerificationError(f"{which} must be a {type(w).__name__}; got {type(g).__name__}")
        elif not copying.is_object(w):
            if repr(w) != repr(g):
                raise VerificationError(f"{which} must be {w!r}; got {g!r}")
        elif hasattr(w, "__dict__") and id(w) not in seen:
            seen.add(id(w))
            rows += _compared(which + ".", vars(w), vars(g), seen)
    return rows


def tune(fast: Core, args: Any, kwargs: Any, budget_s: float) -> auto.Choice:
    """Decides as ``dynaflow_xla.tune`` says, within the given seconds; returns what was chosen."""
    lazy.check(fast.original, fast.options.name)
    signature = call_signature.of(fast.original, args, kwargs)

    def choose(watch: quiet.ActivityWatch) -> auto.Choice:
        made = auto.choose(fast, args, kwargs, watch, budget_s=budget_s)
        before = fast.decisions.measured(signature)  # now: a call may have changed it meanwhile
        choice = choosing.instead_of(before, made, fast.options.name)
        if choice is fast.decisions.decided(signature):
            return choice
        fast.free_calls_under_hooks()
        return fast.decide(signature, choice)

    return choosing.tuned(fast.options.strategy, budget_s, choose)
