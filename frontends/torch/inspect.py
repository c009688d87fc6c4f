"""``explain``, ``verify`` and ``tune`` for scheduled torch callables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import PlanError, VerificationError
from dynaflow_xla.frontends.torch import auto, marks
from dynaflow_xla.frontends.torch.compare import compare
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.entry import Entry
from dynaflow_xla.plan_text import region_table
from dynaflow_xla.strategies.auto import Auto


def explain(fast: Core, args: Any, kwargs: Any) -> str:
    """See ``dynaflow_xla.explain``."""
    entries = fast.all_planned(args, kwargs)
    target = fast.target(args, kwargs)
    lines: list[str] = []
    for entry in entries:
        lines += _explain_entry(entry)
        later = getattr(entry, "later", None)
        backward = entry.backward if later is None else later()
        if backward is not None:
            lines += _explain_entry(backward)
    if not entries:
        lines.append(f"{fast.options.name}: no graph could be captured; the original runs")
    lines += [f"note: {text}" for text in target.breaks]
    if isinstance(fast.options.strategy, Auto):
        choice = fast.decision(args, kwargs)
        if choice is None:
            lines.append("auto: nothing decided yet for these arguments (a call decides)")
        else:
            lines += choice.lines()
    return "\n".join(lines)


def _explain_entry(entry: Entry) -> list[str]:
    native = entry.options.backend == "torch"
    how = f"torch (cpu), regions {entry.options.compiler}" if native else entry.options.backend
    lines = [
        f"{entry.captured.graph.name} ({entry.kind}): strategy {entry.plan.strategy}, backend {how}"
    ]
    lines += region_table(entry.plan, entry.pg)
    lines += entry.describe()
    lines.append(
        "time to make: "
        + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in entry.seconds.items())
    )
    for region in entry.pg.regions:
        op = entry.pg.graph.ops[region.ops[0]]
        if region.outer:
            lines.append(f"outer: {op.kind} runs on the caller's thread: it {op.outer_reason}")
    notes = (*entry.pg.notes, *entry.plan.notes)
    return lines + [f"note: {note}" for note in notes]


@dataclass(frozen=True)
class Report:
    """Result of ``verify``: per output its path, type and largest differences."""

    rows: tuple[tuple[str, str, float, float, bool], ...]

    @property
    def max_abs(self) -> float:
        """Largest absolute difference over all outputs."""
        return max((row[2] for row in self.rows), default=0.0)

    @property
    def bit_equal(self) -> bool:
        """Whether every output has the same bits."""
        return all(row[4] for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{path}: {kind} max |difference| {diff:.3g} (allowed {bound:.3g})"
            + (" bit-equal" if equal else "")
            for path, kind, diff, bound, equal in self.rows
        )


def verify(fast: Core, args: Any, kwargs: Any) -> Report:
    """See ``dynaflow_xla.verify``. Buffers and random state are as before afterwards.

    The results, what the call wrote into its arguments, and the module's buffers are compared.
    """
    target = fast.target(args, kwargs)

    def run(call: Any) -> tuple[Any, Any, Any]:
        given = auto.copies((args, kwargs))
        with auto.preserved(fast.original, args, kwargs):
            result = call(*given[0], **given[1])
            module = fast.original
            buffers = module.named_buffers() if isinstance(module, torch.nn.Module) else ()
            state = {k: v.clone() for k, v in buffers}
        return result, given, state

    def original(*a: Any, **k: Any) -> Any:
        with marks.ignore():
            return fast.original(*a, **k)

    wants = run(original)
    gots = run(lambda *a, **k: target.call(a, k))
    rows = []
    for what, want, got in zip(("result", "argument", "buffer"), wants, gots, strict=True):
        want_leaves, want_tree = pytree.tree_flatten_with_path(want)
        got_leaves, got_tree = pytree.tree_flatten_with_path(got)
        if want_tree != got_tree:
            raise VerificationError(f"the {what}'s structure must be {want_tree}; got {got_tree}")
        for (path, w), (_, g) in zip(want_leaves, got_leaves, strict=True):
            name = what + pytree.keystr(path)
            if isinstance(w, torch.Tensor):
                rows.append(compare(name, w.detach(), g.detach()))
            elif type(w) is not type(g) or repr(w) != repr(g):
                raise VerificationError(f"{name} must be {w!r}; got {g!r}")
    return Report(tuple(rows))


def tune(fast: Core, args: Any, kwargs: Any, budget_s: float) -> auto.Choice:
    """See ``dynaflow_xla.tune``."""
    strategy = fast.options.strategy
    if not isinstance(strategy, Auto):
        raise PlanError(f"tune measures Auto's candidates; this function has {strategy!r}")
    if not budget_s > 0:
        raise PlanError(f"budget_s must be a positive number of seconds; got {budget_s!r}")
    before = strategy.budget_s
    strategy.budget_s = budget_s
    try:
        choice = auto.choose(fast, args, kwargs)
    finally:
        strategy.budget_s = before
    return fast.decisions.put(auto.signature(fast.original, args, kwargs), choice)
