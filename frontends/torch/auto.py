"""Measuring a torch callable's candidates for ``Auto``: forward, without gradients, on copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla import autotune
from dynaflow_xla._version import __version__
from dynaflow_xla.frontends.torch import marks


@dataclass(frozen=True)
class Choice:
    """What Auto decided for one signature.

    Attributes:
        child: The core to call, or None for the original.
        reason: One sentence.
        medians_ms: Candidate -> median milliseconds; empty if nothing was measured.
    """

    child: Any
    reason: str
    medians_ms: dict[str, float] = field(default_factory=dict)


def signature(args: Any, kwargs: Any) -> Any:
    """What a decision is made for: structure, shapes, dtypes, other values, modes."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    parts = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return tree, parts, torch.is_grad_enabled(), torch.get_num_threads()


def copies(tree: Any) -> Any:
    """The same with every tensor cloned."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, tree)


@contextmanager
def preserved(original: Any) -> Iterator[None]:
    """Puts a module's parameters and buffers and the random state back at the end."""
    tensors: list[torch.Tensor] = []
    if isinstance(original, torch.nn.Module):
        tensors = [*original.parameters(), *original.buffers()]
    with torch.no_grad():
        saved = [t.detach().clone() for t in tensors]
    random = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                if not torch.equal(tensor, value):  # autograd counts writes, so none without need
                    tensor.copy_(value)


def choose(core: Any, args: Any, kwargs: Any) -> Choice:
    """Decides for one signature, from the disk cache or by measuring."""
    strategy = core.options.strategy
    candidates = strategy.candidates(core.options.lanes)
    first = core.with_strategy(candidates[0])
    with torch.no_grad():
        entries = first.all_planned(args, kwargs)
    if not entries:
        return Choice(None, "no graph could be captured")
    outer = sorted({op.kind for e in entries for op in e.captured.graph.ops if op.outer})
    if outer:
        return Choice(None, f"the graph communicates ({', '.join(outer)}): it is not measured")
    used = {i.lane for e in entries for i in e.plan.instructions if hasattr(i, "lane")}
    if len(used) < 2:
        return Choice(None, "the plan has one lane: nothing would overlap")
    total_ns = sum(region.cost_ns for e in entries for region in e.pg.regions)
    if total_ns < strategy.min_cost_ns:
        return Choice(
            None,
            f"estimated work {total_ns / 1e3:.0f} us is under {strategy.min_cost_ns / 1e3:.0f} us: "
            "hand-offs would cost more than overlap gains",
        )
    key = autotune.cache_key(
        [e.pg.to_json() for e in entries], core.options.name, __version__, torch.__version__,
        core.options.lanes, torch.get_num_threads(), core.options.compiler, core.options.backend,
        *([repr(core.options.gpu)] if core.options.gpu else []),
    )  # fmt: skip
    cached = autotune.load(key)
    if cached is not None:
        child = _child(core, candidates, cached["choice"])
        return Choice(child, f"cached: {cached['reason']}", cached["medians_ms"])
    given = copies((args, kwargs))

    def runner(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                call(*given[0], **given[1])

        return run

    def original(*a: Any, **k: Any) -> Any:
        with marks.ignore():
            return core.original(*a, **k)

    runs = {"original": runner(original)}
    for candidate in candidates:
        child = core.with_strategy(candidate)
        runs[repr(candidate)] = runner(lambda *a, _child=child, **k: _child.call(a, k))
    try:
        with preserved(core.original):
            medians = autotune.measure(runs, budget_s=strategy.budget_s)
    except autotune.BudgetTooSmall as error:
        return Choice(None, str(error))
    choice, reason = autotune.pick(medians, baseline="original", margin=strategy.margin)
    reason += " (forward, without gradients)"
    autotune.store(key, {"choice": choice, "reason": reason, "medians_ms": medians})
    return Choice(_child(core, candidates, choice), reason, medians)


def _child(core: Any, candidates: list[Any], choice: str) -> Any:
    for candidate in candidates:
        if repr(candidate) == choice:
            return core.with_strategy(candidate)
    return None
