"""The JAX frontend as ``dynaflow_xla.dispatch`` knows it, see ``dynaflow_xla.protocols.Frontend``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import debug as debugging, given, inspect
from dynaflow_xla.frontends.jax.adapters.lifted import Lifted
from dynaflow_xla.frontends.jax.commands import (
    about as about,
    cases as cases,
    copies as copies,
    example as example,
    opponents as opponents,
    wait as wait,
    works as works,
)
from dynaflow_xla.frontends.jax.readback import cpu_text, deviceless, targets
from dynaflow_xla.frontends.jax.scheduled import ScheduledFunction
from dynaflow_xla.frontends.jax.selected import Selected
from dynaflow_xla.frontends.jax.together import combined as combined, unbound as unbound
from dynaflow_xla.protocols import Chosen, Planned, Scheduled
from dynaflow_xla.settings import Settings
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.verification import Report


def schedule(fn: Any, settings: Settings) -> Any:
    """The scheduled form of a function.

    Raises:
        UnsupportedError: the settings ask for what is PyTorch's.
    """
    if settings.compiler != "eager":
        raise UnsupportedError(f"compiler={settings.compiler!r} is for PyTorch; leave compiler out")
    selection = settings.selection
    base = given.schedule(fn, replace(settings, selection=None))
    if selection is None:
        return base
    members = {
        name: None
        if strategy is None
        else given.schedule(fn, replace(settings, strategy=strategy, selection=None))
        for name, strategy in selection.strategies.items()
    }
    return Selected(selection, members, base, settings.in_axes)


def target(name: object) -> str:
    """The path of the text of a GPU to compile for."""
    return targets.resolve(name)


def serving(fast: Any, args: Any, kwargs: Any) -> Scheduled | None:
    """What serves these arguments inside of a scheduled callable; None if it is not JAX's."""
    if isinstance(fast, Selected):
        name = fast.chosen(args, kwargs)
        each = {key: serving(one, args, kwargs) for key, one in fast.members.items()}
        others = {key: one for key, one in each.items() if one is not None}
        return cast(Scheduled, Chosen(fast.selection, name, each[name], others))
    if isinstance(fast, ScheduledFunction):
        return Serving(fast.serving(args, kwargs))
    return Serving(fast) if isinstance(fast, Lifted) else None


def around(fast: Any) -> Scheduled | None:
    """For ``compile``: a ``jax.jit`` function with scheduled ones inside; None for what cannot be one."""
    return Serving(fast) if hasattr(fast, "trace") else None


def own_transfers() -> contextlib.AbstractContextManager[None]:
    """Around what runs regions one by one: the user's ``transfer_guard`` is not for our small constants."""
    return jax.transfer_guard("allow")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Serving:
    """A scheduled JAX callable, as the public functions ask it (``protocols.Scheduled``)."""

    fast: Any

    def planned(self, args: Any, kwargs: Any) -> Planned:
        """The signature of these arguments."""
        return self.fast.planned(args, kwargs)  # type: ignore[no-any-return]

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What ``Auto`` runs in the plan's place."""
        return self.fast.beside_the_plan(args, kwargs)  # type: ignore[no-any-return]

    def known_costs(self, args: Any, kwargs: Any) -> dict[int, float] | None:
        """What ``tune`` measured."""
        return self.fast.known_costs(args, kwargs)  # type: ignore[no-any-return]

    def explain(self, args: Any, kwargs: Any, *, deep: bool) -> str:
        """``deep``: what became of the plan: in a GPU's program, or in this CPU's without a target."""
        text = inspect.explain(self.fast, args, kwargs)
        return f"{text}\n\n{self._read_back(args, kwargs)}" if deep else text

    def _read_back(self, args: Any, kwargs: Any) -> Any:
        options = self.fast.planned(args, kwargs).options
        if options.backend == "xla" and options.target is None and not targets.has_gpu():
            return cpu_text.text(self.fast, args, kwargs)
        return self.compile(args, kwargs, None)

    def verify(self, args: Any, kwargs: Any) -> Report:
        """On copies."""
        return inspect.verify(self.fast, args, kwargs)

    def profile(self, args: Any, kwargs: Any) -> Timeline:
        """Of a program with time stamps."""
        with own_transfers():
            return inspect.profile(self.fast, args, kwargs)

    def alone(self, args: Any, kwargs: Any, cores: int) -> Timeline | None:
        """Each region compiled on its own."""
        with own_transfers():
            return debugging.alone(self.fast, args, kwargs, cores)

    def timed(self, args: Any, kwargs: Any, rounds: int) -> tuple[list[int], list[int]]:
        """On copies; refused as ``check_determinism`` is."""
        debugging.refused(self.fast, args, kwargs, "why")
        return inspect.timed(self.fast, args, kwargs, rounds)

    def tune(self, args: Any, kwargs: Any, budget_s: float) -> Any:
        """With regions profiled first."""
        with own_transfers():
            return inspect.tune(self.fast, args, kwargs, budget_s)

    def debug(self, args: Any, kwargs: Any, rounds: int, seed: int) -> DebugReport:
        """Regions one by one, and the compiled lane programs."""
        with own_transfers():
            return debugging.debug(self.fast, args, kwargs, rounds, seed)

    def check_determinism(self, args: Any, kwargs: Any, runs: int) -> DeterminismReport:
        """Whole calls, on copies."""
        return debugging.check_determinism(self.fast, args, kwargs, runs)

    def compile(self, args: Any, kwargs: Any, target: object) -> Any:
        """In another process."""
        return deviceless.compile_report(self.fast, args, kwargs, target)

    def compiler_options(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Of the plan, then the user's own."""
        return self.fast.compiler_options(args, kwargs)  # type: ignore[no-any-return]
