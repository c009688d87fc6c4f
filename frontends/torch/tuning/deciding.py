"""``Auto``'s side of a scheduled callable: what was decided for which arguments, and the candidates."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import SeparabilityError
from dynaflow_xla.frontends.torch._compat import failures, modes
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.native import native
from dynaflow_xla.frontends.torch.native.cuda import devices
from dynaflow_xla.frontends.torch.tuning import auto, call_signature, one_thread, variants
from dynaflow_xla.frontends.torch.tuning.size_decisions import Decisions
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.auto import Auto, OneOf
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.identity import identity
from dynaflow_xla.tuning import choice as choosing

_MAX_CHILDREN = 64
_MAX_WAYS = 1024


def options_for(options: Settings, strategy: Strategy, compiler: str) -> Settings:
    """Those of a candidate; what is asked of the one strategy of the user's stays asked of it."""
    check = options.check and isinstance(options.strategy, OneOf)
    given = None if compiler == "eager" != options.compiler else options.compiler_options
    return replace(
        options, strategy=strategy, check=check, compiler=compiler, compiler_options=given
    )


class Deciding:
    """A callable that may be scheduled by ``Auto``, which has one like itself for each candidate.

    Args:
        original: A module or function.
        options: See :class:`Settings`.

    Attributes:
        under_hooks: By signature what the first call ran while hooks on saved tensors were open.
            ``torch.utils.checkpoint`` makes a call again, and takes what that saves, one by one, for what the
            first had saved: all go the same way.
    """

    captured_ahead = False
    """Whether there is one graph from the start, without a backward."""

    def __init__(self, original: Callable[..., Any], options: Settings) -> None:
        if options.compiler == "auto" and not isinstance(options.strategy, Auto):
            options = replace(options, strategy=OneOf(options.strategy))
        self.original = original
        self.options = options
        self.decisions = Decisions(self.unmeasured)
        self.children: Recent[Hashable, Any] = Recent(_MAX_CHILDREN)
        self.under_hooks: Recent[Hashable, auto.Choice] = Recent(_MAX_WAYS)

    def made_for(self, strategy: Strategy, compiler: str) -> Any:
        """One like this, under another strategy, with another compiler."""
        raise NotImplementedError

    def whole(self) -> Any:
        """The original under ``torch.compile``; made once."""
        raise NotImplementedError

    def warn(self, note: str) -> None:
        """Tells the user of something, at the line of the call."""
        raise NotImplementedError

    def with_strategy(self, strategy: Strategy, compiler: str = "") -> Any:
        """The same under another strategy; made once a strategy and compiler.

        Args:
            strategy: The other one.
            compiler: The user's by default; for "auto" none.
        """
        if not compiler:
            asked = self.options.compiler
            compiler = "eager" if asked == "auto" else asked
        key = identity(strategy), compiler
        found = self.children.get(key)
        if found is None:
            found = self.children.setdefault(key, self.made_for(strategy, compiler))
        return found

    def as_written(self, args: Any, kwargs: Any) -> Any:
        """Runs the original; its marks have no effect."""
        if not marks.watched():
            return self.original(*args, **kwargs)
        with marks.ignore():
            return self.original(*args, **kwargs)

    def unmeasured(self, reason: str) -> auto.Choice:
        """What runs where nothing is measured: the original, or operator by operator one's own strategy.

        Args:
            reason: Why nothing is.
        """
        if not isinstance(self.options.strategy, OneOf):
            return auto.Choice(None, reason)
        ((name, strategy),) = self.candidates().items()
        return auto.Choice(self.with_strategy(strategy, "eager"), reason, candidate=name)

    def call_decided(self, args: Any, kwargs: Any, signature: Any = None) -> Any:
        """A call under ``Auto``, which decides if that is still to be done.

        Args:
            args: Of the original.
            kwargs: Of the original.
            signature: Of the call, if it is known.
        """
        if signature is None:
            signature = call_signature.of(self.original, args, kwargs)
        choice = self._choice(args, kwargs, signature)
        if choice is not None and choice.child is not None:
            try:
                return choice.child.call(args, kwargs)
            except SeparabilityError as error:
                if isinstance(self.options.strategy, OneOf):
                    raise  # the user asked for just this
                # Something changed that is no argument, say a module in it is in training mode now.
                self._leave(signature, f"{choice.name} is left: {str(error).splitlines()[0]}")
            except Exception as error:
                if choice.planned or not failures.of_compiling(error) or self._in_parts(choice):
                    raise
                return self._uncompiled(signature, choice, error, args, kwargs)
        return self.as_written(args, kwargs)

    def _choice(self, args: Any, kwargs: Any, signature: Any) -> auto.Choice | None:
        """What a call runs; None: the original, as nothing is decided."""
        if not modes.saved_is_hooked():
            return self._decided(args, kwargs, signature)
        key = call_signature.without_threads(signature)
        if (choice := self.under_hooks.get(key)) is not None:
            return choice
        choice = self._decided(args, kwargs, signature)
        unmade = auto.Choice(None, "hooks on saved tensors were open")
        return self.under_hooks.setdefault(key, choice or unmade)

    def _decided(self, args: Any, kwargs: Any, signature: Any) -> auto.Choice | None:
        """What is decided, by now or by measuring where that can be."""
        strategy = self.options.strategy
        assert isinstance(strategy, Auto)
        choice = self.decisions.decided(signature)
        later = choice is not None and self.decisions.due(signature, choice)
        if not later:
            choice = choice or self.decisions.of_other_sizes(signature)
        if (choice is None or later) and not (
            native.in_lane()
            or modes.modes_active()
            or modes.watched_by_autograd()
            or modes.captured_by_user()
        ):
            if choice is not None:
                self.decisions.once_more(signature, choice)
            choice = self.decisions.now(
                signature, lambda watch: auto.choose(self, args, kwargs, watch), self.decide,
                margin=strategy.margin, warn=lambda text: self.warn(f"{self.options.name!r}: {text}"),
            )  # fmt: skip
        if isinstance(strategy, OneOf) and (choice is None or choice.child is None):
            return self.unmeasured("")
        return choice

    def _in_parts(self, choice: auto.Choice) -> bool:
        """Whether a part of the original may have run where compiling another one failed."""
        return choice.child.in_parts or any(
            getattr(c, "breaks", ()) for c in self.children.values()
        )

    def _uncompiled(
        self, signature: Any, choice: auto.Choice, error: Exception, args: Any, kwargs: Any
    ) -> Any:
        """A call that ``torch.compile`` fails for: often the original fails, too, and tells it better."""
        result = self.as_written(args, kwargs)
        inner = failures.inner_error(error)
        reason = f"{choice.name} fails: {(str(inner) or type(inner).__name__).splitlines()[0]}"
        self._leave(signature, reason)
        self.warn(f"{self.options.name!r}: {reason}; so the original runs")
        return result

    def _leave(self, signature: Any, reason: str) -> None:
        """The original runs from now on."""
        choice = self.decide(signature, auto.Choice(None, reason))
        if modes.saved_is_hooked():  # it runs in this call, too
            self.under_hooks[call_signature.without_threads(signature)] = choice

    def free_calls_under_hooks(self) -> None:
        """Calls under hooks may go another way than before: none waits for its recomputation."""
        self.under_hooks.clear()
        for child in self.children.values():
            child.free_calls_under_hooks()

    def decide(self, signature: Any, choice: auto.Choice) -> auto.Choice:
        """Keeps a decision."""
        return self.decisions.put(signature, choice)

    def candidates(self, *, batched: bool = False, on_gpu: bool = False) -> dict[str, Strategy]:
        """Auto's candidates by name."""
        strategy, lanes = self.options.strategy, self.options.lanes_on(on_gpu)
        made = self.decisions.candidates(
            strategy, lanes, batched=batched, reserved=("original", variants.WHOLE, one_thread.NAME)
        )
        return made if isinstance(strategy, OneOf) else variants.joins_apart(made)

    def target(self, args: Any, kwargs: Any) -> Any:
        """Under ``Auto`` what was chosen for these arguments, or the first candidate; else this."""
        if not isinstance(self.options.strategy, Auto):
            return self
        choice = self.decision(args, kwargs)
        if choice is not None and choice.planned:
            return choice.child
        on_gpu = bool(devices.of(self.original, args, kwargs))
        return self.with_strategy(next(iter(self.candidates(on_gpu=on_gpu).values())), "eager")

    def decision(self, args: Any, kwargs: Any) -> auto.Choice | None:
        """What Auto decided for these arguments, or took for sizes that came once; or None."""
        return self.decisions.get(call_signature.of(self.original, args, kwargs))

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What to know of the plan of these arguments if it is not what a call runs, else ""."""
        strategy = self.options.strategy
        if not isinstance(strategy, Auto) or isinstance(strategy, OneOf):
            return ""  # the one strategy runs in any case
        shown = self.target(args, kwargs).options.strategy
        return choosing.beside_the_plan(self.decision(args, kwargs), shown)
