"""Scheduled torch callables as the public functions see them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.errors import optional
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.inspection import (
    debug as debugging,
    explain as explaining,
    profile as profiling,
)
from dynaflow_xla.frontends.torch.selected import SelectCore
from dynaflow_xla.protocols import Chosen, Planned, Scheduled
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.verification import Report

_OURS = (torch.Tensor, torch.nn.Module)
_SIMPLE = (int, float, str, type(None))
_LEVELS = 4
"""Containers inside of containers that are looked into before pytree is asked."""


def kinds(args: Any, kwargs: Any) -> tuple[bool, bool]:
    """Whether tensors or modules, and whether JAX arrays, are among the arguments of a call."""
    jax = sys.modules.get("jax")
    array: Any = () if jax is None else getattr(jax, "Array", ())  # half imported it has none yet
    has_tensor = has_array = False
    level, others = [*args, *kwargs.values()], []
    for _ in range(_LEVELS):  # by hand, as every call does it: pytree takes ten times as long
        inner: list[Any] = []
        for x in level:
            kind = type(x)
            if kind is dict:
                inner += x.values()
            elif kind is list or kind is tuple:
                inner += x
            elif isinstance(x, _OURS):
                has_tensor = True
            elif isinstance(x, array):
                has_array = True
            elif not isinstance(x, _SIMPLE):
                others.append(x)
        level = inner
        if not level:
            break
    if level or others:
        for leaf in pytree.tree_leaves((level, others)):
            if isinstance(leaf, _OURS):
                has_tensor = True
            elif isinstance(leaf, array):
                has_array = True
    return has_tensor, has_array


def inlines() -> bool:
    """Whether Dynamo traces what is called now."""
    return torch.compiler.is_compiling()


def serving(fast: Any, args: Any, kwargs: Any) -> Scheduled | None:
    """What serves these arguments inside of a scheduled callable; None if it is not PyTorch's."""
    core = getattr(fast, "_dfx_core", None)  # a module keeps its own attribute names
    if isinstance(core, SelectCore):
        name = core.chosen(args, kwargs)
        member = core.members[name]
        serves = None if member is None else Serving(member.current() or member)
        return cast(Scheduled, Chosen(core.selection, name, serves))
    return Serving(core.current() or core) if isinstance(core, Core) else None


@dataclass(frozen=True)
class Serving:
    """A scheduled PyTorch callable, as the public functions ask it (``protocols.Scheduled``)."""

    core: Core

    def planned(self, args: Any, kwargs: Any) -> Planned:
        """The one graph of these arguments."""
        return self.core.planned(args, kwargs)

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What ``Auto`` runs in the plan's place."""
        return self.core.beside_the_plan(args, kwargs)

    def known_costs(self, args: Any, kwargs: Any) -> dict[int, float] | None:
        """``tune`` measures whole calls here."""
        return None

    def explain(self, args: Any, kwargs: Any, *, deep: bool) -> str:
        """All graphs of a call; ``deep``: what became of the plan of a program."""
        text = explaining.explain(self.core, args, kwargs)
        return f"{text}\n\n{self.compile(args, kwargs, None)}" if deep else text

    def verify(self, args: Any, kwargs: Any) -> Report:
        """On copies."""
        return explaining.verify(self.core, args, kwargs)

    def profile(self, args: Any, kwargs: Any) -> Timeline:
        """On copies."""
        return profiling.profile(self.core, args, kwargs)

    def alone(self, args: Any, kwargs: Any, cores: int) -> Timeline | None:
        """On copies."""
        return profiling.alone(self.core, args, kwargs, cores)

    def timed(self, args: Any, kwargs: Any, rounds: int) -> tuple[list[int], list[int]]:
        """On copies."""
        return profiling.timed(self.core, args, kwargs, rounds)

    def tune(self, args: Any, kwargs: Any, budget_s: float) -> Any:
        """On copies."""
        return explaining.tune(self.core, args, kwargs, budget_s)

    def debug(self, args: Any, kwargs: Any, rounds: int, seed: int) -> DebugReport:
        """On copies."""
        return debugging.debug(self.core, args, kwargs, rounds, seed)

    def check_determinism(self, args: Any, kwargs: Any, runs: int) -> DeterminismReport:
        """On copies."""
        return debugging.check_determinism(self.core, args, kwargs, runs)

    def compile(self, args: Any, kwargs: Any, target: object) -> Any:
        """Of the program that the plan is."""
        return _program().compile_report(self.core, args, kwargs, target)

    def compiler_options(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Of the program that the plan is."""
        return _program().compiler_options(self.core, args, kwargs)  # type: ignore[no-any-return]


def _program() -> Any:
    """JAX is optional, and only programs need it."""
    optional.require("jax", "running a PyTorch model on XLA", "jax")
    from dynaflow_xla.frontends.torch.inspection import compiled

    return compiled
