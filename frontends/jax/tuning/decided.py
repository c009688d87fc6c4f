"""What runs once ``Auto`` has decided: programs by kind of decision, and when lanes step back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.regions import on_caller
from dynaflow_xla.frontends.jax.tuning import originals


class Watched(_engine.FastCall):  # type: ignore[misc]
    """A program of lanes; calls step back to the original while another Python thread is busy.

    While another thread is busy with Python, lanes wait for the interpreter up to a switch interval
    each. The original waits less often.

    Args:
        program: The jitted program.
        original: The original.
    """

    def __init__(self, program: Any, original: Any):
        self._call = program
        self._settle(program, original)

    def _recover(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        raise error


class NotDecided(Exception):
    """A signature that Auto has not met yet."""


class ByDecision:
    """The compiled programs of a function under ``Auto``: one for each kind of decision.

    What was compiled to be measured serves the calls.

    Args:
        fast: The scheduled function.
    """

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._programs: dict[str, Any] = {}
        self._watched: Watched | None = None
        self._only: Any = None
        self._every = 0  # calls of those that go straight to a program, this one comes here
        self._earlier: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._raised: set[str] = set()
        self._on_this_thread = threading.local()

    @contextlib.contextmanager
    def tracing(self, choice: Any) -> Iterator[None]:
        """A block in which the programs are traced as this decision says."""
        before = self._choice()
        self._on_this_thread.choice = choice
        try:
            yield
        finally:
            self._on_this_thread.choice = before

    def _choice(self) -> Any:
        return getattr(self._on_this_thread, "choice", None)

    def _traced(self, kind: str, args: Any, kwargs: Any) -> Any:
        fast = self._fast
        if fast.left_alone(args, kwargs):
            return fast.original(*args, **kwargs)
        choice = self._choice()
        if choice is None:
            self._renew()
            self._raised.add(kind)
            raise NotDecided
        if choice.child is None:
            return fast.inner(*args, **kwargs)
        return choice.child._traced(*args, **kwargs)

    def _renew(self) -> None:
        """What is decided from now on has programs of its own, and calls find theirs in Python.

        JAX runs in Python, for ever, what a jitted function raised for when it was first called with it.
        """
        if not self._fast.options_by_plan():
            return
        for choice in self._fast.decisions.values():
            self._earlier.setdefault(id(choice), (choice, self._programs))
        self._programs = {}

    def look_again(self) -> None:
        """Programs are called without Python again that raised for signatures that are decided now.

        Not while one is not: the others' next calls pass through Python once.
        """
        for kind in list(self._raised):
            self._raised.discard(kind)  # first: another thread's program may raise meanwhile
            if program := self._programs.get(kind):
                _compat.look_again(program)

    def of_choice(self, choice: Any) -> Any:
        """The jitted program of what has this decision."""
        _, programs = self._earlier.get(id(choice), (None, {}))
        return programs.get(choice.kind) or self.program(choice.kind)

    def program(self, kind: str) -> Any:
        """The jitted program of all signatures with such a decision, see ``Choice.kind``."""
        if kind not in self._programs:
            # A new function each time: JAX keeps what it traced by function.
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._traced(kind, args, kwargs)

            options = originals.options(kind, self._fast.jit_compiler_options)
            self._programs[kind] = (
                self.on_caller(call, shares=kind == "waited")
                if kind in on_caller.NAMES
                else self._fast.jitted(call, compiler_options=options or None)
            )
        return self._programs[kind]

    def on_caller(self, call: Callable[..., Any], *, shares: bool = False) -> Any:
        """Jits what the original would do, to run on the thread that calls it, at top level only.

        Args:
            call: What it does.
            shares: Whether XLA shares out loops and products in it as ever.
        """
        options = originals.options(
            "waited" if shares else "caller", self._fast.jit_compiler_options
        )
        return self._fast.jitted(
            lambda *a, **k: on_caller.marked(call(*a, **k), (a, k)),
            compiler_options=options or None,
        )

    def called(self, choice: Any) -> Any:
        """What a call with this decision runs."""
        if self._watched is not None and choice.child is not None:
            return self._watched
        return self.of_choice(choice)

    def settle(self, choices: Iterable[Any]) -> None:
        """Sends the function's calls straight to the program that serves all decisions, if one does.

        Where decisions are of several kinds, calls find their program in Python.

        Args:
            choices: What was decided; none: every call asks again.
        """
        fast = self._fast
        self._watched = self._only = None
        self._every = 0
        made = list(choices)
        kinds = {choice.kind for choice in made}
        by_plan = "lanes" in kinds and fast.options_by_plan()  # the call looks for its plan
        if by_plan and all(choice.child is made[0].child for choice in made):
            self._only = made[0].child
        if len(kinds) != 1 or by_plan or self._earlier:
            fast._settle(None, None)
            if "lanes" in kinds and not by_plan:
                self._watched = Watched(self.program("lanes"), fast.original)
            return
        (kind,) = kinds
        # What has compiler options cannot become a part of another program; there are plans, too, that are
        # others in there.
        apart = kind in originals.NAMES or any(
            c.child is not None and c.child.has_two for c in made
        )
        alone = _compat.at_top_level if fast.jit_compiler_options or apart else None
        fast._settle(self.program(kind), fast.original if kind == "lanes" else None, alone)
        self._every = fast.decisions.look_every()
        fast._look_every(self._every)

    def calls_since_the_last(self) -> int:
        """For how many calls this one stands, of which the others did not come here."""
        return self._every or 1

    def settle_as(self, child: Any) -> None:
        """Sends calls where those of a child go that was just called, if all decisions are for that one.

        What the child's program was not compiled for yet comes back (``OtherProgram``).
        """
        if (
            child is self._only
            and not self._earlier
            and (program := child.by_options.settled) is not None
        ):
            self._fast._settle(program, None, _compat.at_top_level)
        else:
            self._fast._settle(None, None)

    def stepped_back(self) -> int:
        """For how many calls the original still runs in the place of lanes."""
        return 0 if self._watched is None else self._watched._step_back

    def forget(self, kind: str) -> None:
        """The next decision of this kind has a program of its own."""
        self._programs.pop(kind, None)

    def clear(self) -> None:
        """Forgets programs and what they compiled."""
        self._watched = self._only = None
        for made in (self._programs, *(programs for _, programs in self._earlier.values())):
            for program in made.values():
                program.clear_cache()
        self._programs.clear()
        self._earlier.clear()
        self._raised.clear()


@dataclass(frozen=True)
class WithoutPlan:
    """Stands for a decision while the original is measured.

    Attributes:
        child: None, as in a decision for the original.
    """

    child: None = None


ORIGINAL = WithoutPlan()


def abstract(leaf: Any) -> Any:
    """What a decision depends on of an argument's leaf: the same for an array and for its shape."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    try:
        return jax.typeof(leaf)
    except TypeError:  # nothing that JAX takes: its own error comes with the call
        return type(leaf)
