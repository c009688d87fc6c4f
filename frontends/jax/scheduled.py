"""The callable that ``dynaflow_xla.schedule`` returns for a JAX function."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.ffi import _engine, xla
from dynaflow_xla.frontends.jax import _compat, inspect
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.adapters import libraries
from dynaflow_xla.frontends.jax.adapters.lifted import Lifted
from dynaflow_xla.frontends.jax.backend import Backend
from dynaflow_xla.frontends.jax.batch import evidence, split as splitting
from dynaflow_xla.frontends.jax.capture import places, tracing
from dynaflow_xla.frontends.jax.capture.mutation import effects
from dynaflow_xla.frontends.jax.signature import backends, entry
from dynaflow_xla.frontends.jax.signature.by_options import ProgramsByOptions
from dynaflow_xla.frontends.jax.signature.own_options import OtherProgram
from dynaflow_xla.frontends.jax.transform.programs import Captures, Programs
from dynaflow_xla.frontends.jax.tuning import auto, decided, originals
from dynaflow_xla.protocols import LikeAFunction, PassesOn, stands_at
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.identity import identity
from dynaflow_xla.tuning import choice as choosing
from dynaflow_xla.tuning.decisions import Decisions
from dynaflow_xla.watching import telling

_MOST_UNUSED = 64
"""Of decisions: calls that go straight to a program are not seen to come again."""

# What a library's function computes has no line of ours. The frontends may lie elsewhere.
_compat.hide_frames(os.path.dirname(os.path.dirname(telling.__file__)))
_compat.hide_frames(os.path.dirname(os.path.dirname(os.path.dirname(backends.__file__))))

_NOT_TRACED = "it cannot be compared with the original while it is traced: call it once outside"


class _NotLifted(Exception):
    """A trace of a plain function met objects of another library among the arguments."""


class ScheduledFunction(PassesOn, LikeAFunction, _engine.FastCall):  # type: ignore[misc]
    """A JAX function that runs under a schedule; it is called like the original.

    Inspect it with the functions of ``dynaflow_xla`` (``plan``, ``explain``, ...).

    Attributes:
        original: The function as given to ``schedule`` (jitted, if it was not).
    """

    def __init__(self, fn: Callable[..., Any], options: Settings):
        # What jax.jit made loses what it does to its arguments anyway: that is the original's meaning.
        self._plain = not _compat.is_jitted(fn)
        jitted: Any = jax.jit(effects.watched(fn)) if self._plain else fn
        self.original = jitted
        given = self.jit_compiler_options = _compat.compiler_options(jitted)
        if given:
            given = {**given, **(options.compiler_options or {})}
            options = replace(options, compiler_options=given)
        self._given = options
        self._name = options.name
        if options.backend != backends.DECIDED_LATE:
            self.backend = backends.of(options)  # raises now what it has against them
        self._jit_options = _compat.jit_options(jitted)
        self._fallback: str = ""
        self._captures: Captures | None = None
        self.decisions = Decisions(functools.partial(auto.Choice, None), _MOST_UNUSED)
        self.by_decision = decided.ByDecision(self)
        self._children: dict[Hashable, ScheduledFunction] = {}
        self._lifted: dict[str, Lifted] = {}  # by library
        function = fn if self._plain else _compat.wrapped_function(jitted)
        functools.update_wrapper(self, function, updated=())
        self.by_options = ProgramsByOptions(self)
        # JAX takes compiler options for whole programs only.
        self.inner = self.jitted(self.__wrapped__) if given else jitted

    # -- what depends on where JAX computes: asked for when it is needed, as JAX starts its devices then --

    @functools.cached_property
    def _options(self) -> Settings:
        """What the user asked for, with the backend that "auto" stands for here."""
        return backends.settled(self._given)

    @functools.cached_property
    def backend(self) -> Backend:
        """The way to run plans."""
        return backends.of(self._options)

    @functools.cached_property
    def programs(self) -> Programs:
        """The programs by signature."""
        return Programs(
            self.original, self.__wrapped__, self._options, self._jit_options,
            copies_results=self.backend.copies_results, captures=self._captures,
        )  # fmt: skip

    @functools.cached_property
    def has_two(self) -> bool:
        """Whether calls that are programs of their own have another plan than a part of a larger one."""
        return entry.plans_apart(self._options)

    def jitted_anew(self) -> Any:
        """The original, with a trace of its own: a plain function reads what is outside of it at each."""
        return jax.jit(effects.watched(self.__wrapped__)) if self._plain else self.original

    @functools.cached_property
    def _jit(self) -> Any:
        return self.jitted(self._traced_alone if self.has_two else self._traced)

    @functools.cached_property
    def _inside(self) -> Any:
        return self.jitted(self._traced_inside) if self.has_two else self._jit

    # -- calling ------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            """Same values as the original.

            The base class calls the compiled program (``_settle``), ``_call`` before there is one.

            Raises:
                EngineError: a region failed while it ran, or the process was forked.
            """

    def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        """A call for which no program is settled."""
        try:
            return self._unsettled(args, kwargs)
        except TypeError as error:
            raise self.with_way_out(error, args, kwargs)  # noqa: B904  (it is this error, or made from it)

    def _unsettled(self, args: Any, kwargs: Any) -> Any:
        if lifted := self._lift(args, kwargs):
            return lifted(*args, **kwargs)
        if tracing.afresh():
            return self.planning(args, kwargs)._traced_inside(*args, **kwargs)
        if tracing.capturing() or _compat.under_disable_jit() or self._unsupported_platform():
            return self.original(*args, **kwargs)
        xla.check_process()
        if error := self.programs.given_twice(args, kwargs):
            raise error
        if isinstance(self._options.strategy, Auto):
            return self._call_auto(args, kwargs)
        try:
            return self.by_options.call(args, kwargs)
        except splitting.NotCompared as found:
            return self._compare(found.entry, args, kwargs)

    def _recover(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        """A call of the settled program raised ``error``."""
        if isinstance(
            error, decided.NotDecided | splitting.NotCompared | OtherProgram
        ):  # a signature it has not met yet
            return self._call(*args, **kwargs)
        if self._lift(args, kwargs):
            return self._call(*args, **kwargs)
        if isinstance(error, TypeError):
            raise self.with_way_out(error, args, kwargs)
        raise self._explained(error, args, kwargs)

    def with_way_out(self, error: TypeError, args: Any, kwargs: Any) -> TypeError:
        """JAX's error about an argument that it cannot trace, with what can be done about it."""
        if not re.search("abstract array|JAX type|JAX array", str(error)):
            return error  # of another kind; modules of some libraries hold functions, which are no fault
        _, *dynamic = self.programs.split_static(args, kwargs)
        way_out = effects.untraceable(self._name, *dynamic)
        if not way_out or way_out in str(error):
            return error
        made = TypeError(f"{error}\n{way_out}")
        made.__cause__ = error
        return made

    def _lift(self, args: Any, kwargs: Any) -> Lifted | None:
        """What serves a plain function whose arguments hold another library's objects."""
        if not self._plain or not (library := libraries.owner_of(self._name, args, kwargs)):
            return None
        if library.NAME not in self._lifted:
            wrapper, whole = libraries.lifting(library, effects.watched(self.__wrapped__))
            in_axes, out_axes = wrapper.axes(self._options.in_axes, self._options.out_axes)
            options = replace(self._options, in_axes=in_axes, out_axes=out_axes)
            made = ScheduledFunction(wrapper.inside, options)
            self._lifted[library.NAME] = Lifted(wrapper, made, whole)
        return self._lifted[library.NAME]

    def serving(self, args: Any, kwargs: Any) -> Any:
        """What to look at to see what these arguments get."""
        return self._lift(args, kwargs) or self

    def _explained(self, error: BaseException, args: Any, kwargs: Any) -> BaseException:
        """What a call raises when its program raised ``error``."""
        # jaxlib has two types for a failed custom call, by where it notices it.
        if isinstance(error, DynaflowError) or not isinstance(
            error, jax.errors.JaxRuntimeError | ValueError
        ):
            return error
        if (made := xla.engine_error(error)) is not None:
            return made
        if "donate" in str(error) and (twice := self.programs.given_twice(args, kwargs)):
            twice.__cause__ = error
            return twice
        return error

    def _compare(self, made: Any, args: Any, kwargs: Any) -> Any:
        """First call of a split that is not proved: the original's values decide, if they can."""
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) or _compat.tracing():
            raise splitting.unproven_error(made, _NOT_TRACED)
        if why := evidence.undecided(made.split, self.programs.dynamic_leaves(args, kwargs)):
            telling.fallback(f"{self._options.name}: {why}")
            return self.original(*args, **kwargs)
        given = jax.tree_util.tree_map(
            lambda x: x.copy() if isinstance(x, jax.Array) else x, (args, kwargs)
        )
        # A jit of its own: what it keeps must not serve later calls if the values differ.
        once = self.jitted(lambda *a, **k: self._run(a, k, check=False))
        result = self._guarded(once, *given)
        expected = self.original(*args, **kwargs)
        if difference := inspect.first_difference(expected, result):
            raise splitting.unproven_error(made, f"compared with the original, {difference}")
        made.compared = True
        made.notes.append(
            "nobody proved that rows are independent; the first call gave equal values"
        )
        return result

    def jitted(self, call: Callable[..., Any], **options: Any) -> Any:
        """Jits with the original's options; programs, profiles and errors bear its names."""

        def named(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        functools.update_wrapper(named, self.__wrapped__, updated=())
        # Of builtins (``int``) JAX takes no names, not even none of them.
        given = {option: value for option, value in self._jit_options.items() if value}
        return jax.jit(named, **options, **given)

    def options_by_plan(self) -> bool:
        """Whether each plan is compiled with XLA options of its own, so one program cannot serve all."""
        return self.backend.options_by_plan()

    def compiler_options(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The XLA options for these arguments: the table's for this plan, then the user's own."""
        return self.backend.compiler_options(self.planned(args, kwargs))

    def _guarded(self, jitted: Any, args: Any, kwargs: Any) -> Any:
        try:
            return jitted(*args, **kwargs)
        except Exception as error:
            raise self._explained(error, args, kwargs)  # noqa: B904  (it is this error, or made from it)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as ``jax.jit(f).eval_shape``; nothing is planned."""
        return (self._lift(args, kwargs) or self).original.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans, compiled programs and decisions, as ``jax.jit(f).clear_cache`` does."""
        self._settle(None, None)
        ours = [made for name in ("_jit", "_inside") if (made := self.__dict__.get(name))]
        parts = (*ours, *self._children.values(), *self._lifted.values())
        for made in (self.original, self.inner, *parts):
            made.clear_cache()
        self.by_options.clear()
        self._children.clear()
        if "programs" in self.__dict__:
            self.programs.clear()
        self.by_decision.clear()
        self.decisions.clear()

    def __reduce__(self) -> Any:
        if stands_at(self):  # a decorated function, where pickle would look for the original
            return self.__qualname__
        # A jitted function cannot be pickled, what it was made of can.
        if self._plain:
            return ScheduledFunction, (self.__wrapped__, self._given)
        given = self._jit_options | {"compiler_options": self.jit_compiler_options or None}
        return _made_again, (self.__wrapped__, given, self._given)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time lowering, as ``jax.jit(f).lower``: of what a call would run.

        Under ``Auto`` that is what was decided for these arguments, or the original.
        """
        return self._ahead("lower", args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time tracing, as ``jax.jit(f).trace``, of the same as ``lower``."""
        return self._ahead("trace", args, kwargs)

    def _ahead(self, how: str, args: Any, kwargs: Any) -> Any:
        if lifted := self._lift(args, kwargs):
            return getattr(lifted, how)(*args, **kwargs)
        if not isinstance(self._options.strategy, Auto):
            return self.by_options.use(
                lambda program: self._proved(getattr(program, how), args, kwargs), args, kwargs
            )
        try:
            choice = self.decision(args, kwargs)
        except TypeError:  # JAX's own error: a static value has no hash
            choice = None
        if choice is None or (choice.child is None and not choice.otherwise):
            return getattr(self.original, how)(*args, **kwargs)
        if choice.child is not None and self.options_by_plan():
            return getattr(choice.child, how)(*args, **kwargs)
        with self.by_decision.tracing(choice):
            program = self.by_decision.of_choice(choice)
            return self._proved(getattr(program, how), args, kwargs)

    @staticmethod
    def _proved(ahead: Any, args: Any, kwargs: Any) -> Any:
        try:
            return ahead(*args, **kwargs)
        except splitting.NotCompared as found:
            raise splitting.unproven_error(found.entry, _NOT_TRACED) from None

    def __repr__(self) -> str:
        return f"<scheduled {self._name} with {self._given.strategy!r}>"

    # -- planning -----------------------------------------------------------------------------

    def _traced(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.left_alone(args, kwargs):
            return self.original(*args, **kwargs)
        return self._run(args, kwargs, check=self._options.check)

    def _traced_alone(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.by_options.traced((), args, kwargs)

    def _traced_inside(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.left_alone(args, kwargs):
            return self.original(*args, **kwargs)
        return self._run(args, kwargs, check=self._options.check, alone=not self.has_two)

    def left_alone(self, args: Any, kwargs: Any) -> bool:
        """Whether a trace is to hold the original as it is.

        Raises:
            _NotLifted: it cannot hold these arguments.
        """
        if self._lift(args, kwargs):
            raise _NotLifted
        return _compat.operator_by_operator()

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool, alone: bool = True
    ) -> Any:
        if self._symbolic(args, kwargs):
            telling.fallback(
                f"{self._options.name}: a plan is for sizes that are known; with symbolic ones the original "
                "runs, as fast.original does. Schedule the function where its sizes are known",
            )
            return self.original(*args, **kwargs)
        traced, consts, program = self.programs.program(
            args, kwargs, warn=not self._options.candidate, alone=alone
        )
        if program.entry.unproven and check:
            raise splitting.NotCompared(program.entry)
        ins = [*consts, *self.programs.dynamic_leaves(args, kwargs)]
        outs = places.called(program, traced.jaxpr.jaxpr, ins)
        return jax.tree_util.tree_unflatten(traced.out_tree, outs)

    def _symbolic(self, args: Any, kwargs: Any) -> bool:
        """Whether a shape has sizes that ``jax.export`` leaves open."""
        leaves = self.programs.dynamic_leaves(args, kwargs)
        return any(not isinstance(n, int) for leaf in leaves for n in getattr(leaf, "shape", ()))

    def _entry(self, args: Any, kwargs: Any) -> tuple[Any, list[Any], Any]:
        try:
            traced, consts, program = self.programs.program(
                args, kwargs, warn=not self._options.candidate
            )
        except TypeError as error:
            raise self.with_way_out(error, args, kwargs)  # noqa: B904  (as where it is called)
        return traced, consts, program.entry

    def _unsupported_platform(self) -> bool:
        if not self._fallback and (why := self.backend.unavailable()):
            self._fallback = why
            telling.fallback(why)
        return bool(self._fallback)

    # -- automatic choice ---------------------------------------------------------------------

    def _call_auto(self, args: Any, kwargs: Any) -> Any:
        strategy = self._options.strategy
        assert isinstance(strategy, Auto)
        outside = not _compat.tracing()
        signature = self._signature(args, kwargs)
        try:
            choice = self.decisions.decided(signature)
        except TypeError:
            return self.original(*args, **kwargs)  # JAX's own error: a static value has no hash
        # Never measured are a call inside somebody's trace, what no plan could run, and keys for one call.
        measurable = outside and not interpreters.checks_keys()
        calls = self.by_decision.calls_since_the_last() if measurable else 0
        if choice is not None and measurable and self.decisions.due(signature, choice, calls):
            self.decisions.once_more(signature, choice)
            choice = None
        if choice is None and measurable and not self.spans_too_much(args, kwargs):
            choice = self.decisions.now(
                signature, lambda watch: auto.choose(self, args, kwargs, watch), self.decide,
                margin=strategy.margin, warn=self._warn,
            )  # fmt: skip
        if choice is None:
            return self.original(*args, **kwargs)
        if not outside:
            return (choice.child or self.original)(*args, **kwargs)
        if choice.child is not None and self.options_by_plan():
            result = choice.child(*args, **kwargs)
            self.by_decision.settle_as(choice.child)
            return result
        self.by_decision.look_again()
        with self.by_decision.tracing(choice):
            return self._guarded(self.by_decision.called(choice), args, kwargs)

    def _warn(self, text: str) -> None:
        telling.fallback(f"{self._options.name!r}: {text}")

    def spans_too_much(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is a program for several devices, and plans are for one."""
        return not self.backend.on_several_devices and _compat.spans_devices((args, kwargs))

    def decide(self, signature: Any, choice: auto.Choice) -> auto.Choice:
        """Keeps a decision."""
        if signature in self.decisions:  # the decision may be for another child
            self.by_decision.forget("lanes")
        self.decisions.put(signature, choice)
        # What is put off comes again only if calls come here.
        self.by_decision.settle([] if len(self.decisions.put_off) else self.decisions.values())
        return choice

    def stepped_back(self) -> int:
        """For how many calls the original still runs because another Python thread is busy."""
        return self._step_back or self.by_decision.stepped_back()

    def decision(self, args: Any, kwargs: Any) -> auto.Choice | None:
        """What Auto decided for these arguments, or None (also for a fixed strategy)."""
        return self.decisions.decided(self._signature(args, kwargs))

    def with_strategy(self, strategy: Any) -> ScheduledFunction:
        """The same function and options under another strategy; made once a strategy."""
        key = identity(strategy)
        if key not in self._children:
            options = replace(self._options, strategy=strategy, candidate=True)
            child = self._children[key] = ScheduledFunction(self.original, options)
            child._captures = self.programs.captures
        return self._children[key]

    def candidates(self) -> dict[str, Any]:
        """Auto's candidates by name."""
        strategy, lanes = self._options.strategy, self._options.lanes
        batched = self._options.in_axes is not None
        return self.decisions.candidates(
            strategy, lanes, batched=batched, reserved=("original", *originals.NAMES.values()),
            wide=self.backend.cores() > 0,
        )  # fmt: skip

    def planning(self, args: Any, kwargs: Any) -> ScheduledFunction:
        """Whose plan these arguments get: its own; under Auto the chosen or first candidate's."""
        if not isinstance(self._options.strategy, Auto):
            return self
        made = self.decision(args, kwargs)
        child = made.child if made is not None else None
        return child or self.with_strategy(next(iter(self.candidates().values())))

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What to know of the plan of these arguments if it is not what a call runs, else ""."""
        if not isinstance(self._options.strategy, Auto):
            return ""
        shown = self.planning(args, kwargs)._options.strategy
        return choosing.beside_the_plan(self.decision(args, kwargs), shown)

    def planned(self, args: Any, kwargs: Any) -> Any:
        """The planned entry for these arguments, see ``planning``."""
        xla.check_process()
        return self.planning(args, kwargs)._entry(args, kwargs)[2]

    def known_costs(self, args: Any, kwargs: Any) -> dict[int, float] | None:
        """Nanoseconds of the plan's regions that ``dfx.tune`` measured; None if it did not."""
        made = self.decision(args, kwargs)
        if made is None or made.costs is None:
            return None
        return auto.known_costs(made.costs, self.planned(args, kwargs))

    def flat_inputs(self, args: Any, kwargs: Any) -> list[Any]:
        """Values of the graph's inputs, in order."""
        _, consts, _ = self._entry(args, kwargs)
        return [*consts, *self.programs.dynamic_leaves(args, kwargs)]

    def _signature(self, args: Any, kwargs: Any) -> Any:
        """What a decision depends on: structure, abstract values and static arguments."""
        static: Any = ()
        if self.programs.has_static:
            static, args, kwargs = self.programs.split_static(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        array, abstract = _compat.ARRAY, decided.abstract
        return tree, static, tuple([x.aval if type(x) is array else abstract(x) for x in leaves])


def _made_again(fn: Any, jit_options: dict[str, Any], options: Settings) -> ScheduledFunction:
    """What unpickling calls: plans and compiled programs stay behind."""
    return ScheduledFunction(jax.jit(fn, **jit_options), options)
