"""Several functions as one plan: whose arguments a call's are, and the one function that all of them make."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from dynaflow_xla import dispatch
from dynaflow_xla.batch.arguments import call_axes
from dynaflow_xla.errors import PlanError, PlanTypeError, UnsupportedError, checks
from dynaflow_xla.protocols import Arguments as Arguments, BoundFunction, Fixed, Part, Scheduled
from dynaflow_xla.selection import Call, Recipe
from dynaflow_xla.settings import Settings


def apart(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that one function was given."""
    if isinstance(call, Arguments):
        return call.args, call.kwargs
    # A named tuple, or a mapping of another type, is a value as any other.
    if type(call) is tuple:
        return call, {}
    if type(call) is dict and all(isinstance(key, str) for key in call):
        return (), call
    return (call,), {}


class Together:
    """Several functions that run as one plan: what ``dfx.together`` returns.

    A call has an entry for each function: a tuple of its positional arguments, a dictionary of its
    keyword arguments, or ``dfx.Arguments(...)`` of both; anything else is the only argument. It returns
    a tuple of their results.

    Attributes:
        functions: The functions as given.
        names: What strategies and ``explain`` call each (``op.function``).
    """

    def __init__(
        self, functions: Sequence[Any], names: Sequence[str] | None, settings: Settings
    ) -> None:
        self._given = (functions, names, settings)
        self.functions = tuple(functions)
        if len(self.functions) < 2:
            raise PlanError(
                f"together takes two or more functions; got {len(self.functions)}. dfx.schedule takes one"
            )
        self.names = _names(self.functions, names)
        frameworks = [dispatch.framework_of(fn, settings) for fn in self.functions]
        found = set(frameworks) - {"either"}
        if len(found) > 1:
            whose = [f"{n!r} is {f}'s" for n, f in zip(self.names, frameworks, strict=True)]
            raise UnsupportedError(
                f"together takes functions of one framework, and {', '.join(whose)}. A plan runs one "
                "framework: schedule those of the other one apart"
            )
        self._framework = found.pop() if found else ""
        self.__name__ = "_and_".join(self.names)
        self._settings = replace(settings, name=self.__name__)
        self._made: dict[Any, tuple[Any, list[BoundFunction]]] = {}
        self._lock = threading.RLock()
        self._ordered = [_sees_order(fn) for fn in self.functions]

    # -- calling ------------------------------------------------------------------------------

    def __call__(self, *calls: Any) -> Any:
        """The functions' results, as a tuple.

        Args:
            *calls: The arguments of each function.

        Raises:
            PlanError: arguments that a function cannot have, or that two of them may not share.
        """
        fast, flat = self._inside(calls)
        return fast(*flat)

    @property
    def original(self) -> Callable[..., tuple[Any, ...]]:
        """Calls the functions one after the other; it takes and returns the same."""

        def original(*calls: Any) -> tuple[Any, ...]:
            given = self._apart(calls)
            each = zip(self.functions, given, strict=True)
            return tuple(fn(*args, **kwargs) for fn, (args, kwargs) in each)

        return original

    def _apart(self, calls: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        if len(calls) != len(self.functions):
            raise PlanTypeError(
                f"{self.__name__!r} takes an entry for each of {len(self.functions)} functions "
                f"({', '.join(self.names)}): a tuple of its arguments, a dictionary of those by keyword, or "
                f"dfx.Arguments(...); got {len(calls)}"
            )
        return [apart(call) for call in calls]

    def _inside(self, calls: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """The scheduled function that serves a call, and the arguments that it takes."""
        # Keywords in another order are the same call, but where a function may look at their order.
        given = [
            (args, kwargs if ordered else dict(sorted(kwargs.items())))
            for (args, kwargs), ordered in zip(self._apart(calls), self._ordered, strict=True)
        ]
        framework = self._framework
        if not framework:
            each = [x for args, kwargs in given for x in (*args, *kwargs.values())]
            framework = dispatch.of_call(self.__name__, self.functions, each)
        key = (framework, tuple((len(args), tuple(kwargs)) for args, kwargs in given))
        found = self._made.get(key)
        if found is None:
            with self._lock:  # two threads' first calls get one, which plans and measures once
                found = self._made.get(key)
                if found is None:
                    found = self._made[key] = self._scheduled(framework, given)
        fast, bound = found
        flat: list[Any] = []
        for (args, kwargs), of in zip(given, bound, strict=True):
            flat += (*of.args, *args, *{**of.kwargs, **kwargs}.values())
        return fast, flat

    def _scheduled(self, framework: str, given: Sequence[Any]) -> tuple[Any, list[BoundFunction]]:
        """The schedule of one function of all arguments, for calls with as many; and what is bound."""
        frontend = dispatch.frontend(framework)
        bound = [frontend.unbound(dispatch.given(fn)) for fn in self.functions]
        parts = []
        for name, fn, of, (args, kwargs) in zip(
            self.names, self.functions, bound, given, strict=True
        ):
            _check_call(name, fn, args, kwargs)
            keywords = tuple({**of.kwargs, **kwargs})
            parts.append(Part(name, of.function, len(of.args) + len(args), keywords))
        settings = self._for_calls(given, bound)
        return frontend.schedule(frontend.combined(parts), settings), bound

    # -- what the user said of each function ---------------------------------------------------

    def _for_calls(self, given: Sequence[Any], bound: Sequence[BoundFunction]) -> Settings:
        """The settings of the one function."""
        settings = self._settings
        if settings.in_axes is not None:
            axes = self._of_each("in_axes", settings.in_axes)
            results = self._of_each("out_axes", settings.out_axes)
            flat: list[Any] = []
            for name, fn, of, one, (args, kwargs) in zip(
                self.names, self.functions, bound, axes, given, strict=True
            ):
                flat += self._flat_axes(name, fn, of, one, args, kwargs)
            out = [None if a is None else r for a, r in zip(axes, results, strict=True)]
            settings = replace(settings, in_axes=tuple(flat), out_axes=tuple(out))
        if settings.selection is not None:
            settings = replace(settings, selection=self._choosing(settings.selection, bound, given))
        return settings

    def _of_each(self, what: str, given: Any) -> list[Any]:
        """``in_axes`` or ``out_axes``: an entry for each function, by place or by name."""
        if isinstance(given, Mapping):
            if unknown := sorted(set(given) - set(self.names), key=str):
                raise PlanError(
                    f"{self.__name__!r}: {what} names {unknown[0]!r}; the functions are "
                    f"{', '.join(map(repr, self.names))}"
                )
            return [given.get(name, None if what == "in_axes" else 0) for name in self.names]
        if isinstance(given, tuple | list):
            if len(given) != len(self.names):
                raise PlanError(
                    f"{self.__name__!r}: {what} must have an entry for each of {len(self.names)} functions "
                    f"({', '.join(self.names)}), None for one without a batch; got {given!r}"
                )
            return list(given)
        return [given] * len(self.names)

    @staticmethod
    def _flat_axes(
        name: str,
        fn: Any,
        of: BoundFunction,
        axes: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        names = {**of.kwargs, **kwargs}
        if axes is None:
            return [None] * (len(of.args) + len(args) + len(names))
        called = getattr(fn, "forward", fn)
        made = call_axes(name, axes, called, args, kwargs)
        keyword = [made.keyword.get(key) for key in names]
        return [*[None] * len(of.args), *made.positional, *keyword]

    def _choosing(
        self, recipe: Recipe, bound: Sequence[BoundFunction], given: Sequence[Any]
    ) -> Recipe:
        """``select`` sees the arguments as the caller gave them, each function's apart."""
        counts = [
            (len(of.args), len(args), tuple({**of.kwargs, **kwargs}), tuple(kwargs))
            for of, (args, kwargs) in zip(bound, given, strict=True)
        ]

        def choose(call: Call) -> Any:
            flat, calls, start = call.args, [], 0
            for first, count, names, own in counts:
                args = flat[start + first : start + first + count]
                start += first + count
                kwargs = dict(zip(names, flat[start : start + len(names)], strict=True))
                start += len(names)
                calls.append(Arguments(*args, **{key: kwargs[key] for key in own}))
            return recipe.choose(call.given(tuple(calls)))

        return replace(recipe, choose=choose)

    # -- as other scheduled functions ----------------------------------------------------------

    def _dfx_serving(self, args: Any, kwargs: Any) -> Scheduled:
        """For the functions of ``dynaflow_xla`` that inspect a callable."""
        if kwargs:
            raise PlanTypeError(
                f"{self.__name__!r} takes an entry for each function ({', '.join(self.names)}), and nothing "
                f"by keyword; got {', '.join(sorted(kwargs))}. A function's own arguments by keyword go into "
                "its entry: a dictionary, or dfx.Arguments(...)"
            )
        fast, flat = self._inside(args)
        member = dispatch.serving(fast, "together", flat, {})
        return cast(Scheduled, Fixed(member, tuple(flat)))

    def lower(self, *calls: Any) -> Any:
        """Ahead-of-time lowering, as ``jax.jit(f).lower``; of JAX functions."""
        return self._ahead("lower", calls)

    def trace(self, *calls: Any) -> Any:
        """Ahead-of-time tracing of the same as ``lower``."""
        return self._ahead("trace", calls)

    def _ahead(self, how: str, calls: tuple[Any, ...]) -> Any:
        fast, flat = self._inside(calls)
        if not hasattr(fast, how):
            raise UnsupportedError(f"{how} is JAX's; {self.__name__!r} holds PyTorch's functions")
        return getattr(fast, how)(*flat)

    def clear_cache(self) -> None:
        """Forgets plans, compiled programs and decisions."""
        self._made.clear()

    def __reduce__(self) -> Any:
        return Together, self._given

    def __repr__(self) -> str:
        return f"<scheduled together: {', '.join(self.names)}, with {self._settings.how!r}>"


def _names(functions: Sequence[Any], given: Sequence[str] | None) -> tuple[str, ...]:
    """A name for each function: as given, else its own, numbered where several have the same."""
    if given is not None:
        names = checks.items(given) if not isinstance(given, str) else None
        if names is None or len(names) != len(functions) or len(set(names)) < len(names):
            raise PlanError(
                f"names must be {len(functions)} texts that differ, one for each function; got {given!r}"
            )
    else:
        own = [checks.name_of(fn) for fn in functions]
        names = tuple(
            name if own.count(name) == 1 else f"{name}_{own[:n].count(name)}"
            for n, name in enumerate(own)
        )
        if len(set(names)) < len(names):
            names = tuple(f"{name}.{n}" for n, name in enumerate(own))
    for name in names:
        if not isinstance(name, str) or not name or set(name) & set('/()"\n'):
            raise PlanError(
                f"a function's name must be a text without / ( ) and quotes; got {name!r}"
            )
    return tuple(names)


def _sees_order(fn: Any) -> bool:
    """Whether a function has ``**kwargs``, or nobody knows."""
    try:
        taken = inspect.signature(getattr(fn, "forward", fn)).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in taken)


def _check_call(name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """That a function can take these arguments.

    Raises:
        PlanTypeError: it cannot.
    """
    try:
        signature = inspect.signature(getattr(fn, "forward", fn))
    except (TypeError, ValueError):
        return  # nobody knows
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        told = [f"{len(args)} by position"] * bool(args) + [
            f"by keyword {', '.join(kwargs)}"
        ] * bool(kwargs)
        raise PlanTypeError(
            f"{name!r} cannot be called like this: {error}. It got {' and '.join(told) or 'nothing'} and has "
            f"{signature}. An entry of a call is a tuple of a function's positional arguments, a dictionary "
            "of those by keyword, or dfx.Arguments(...); a dictionary that is an argument itself goes into a "
            "tuple: ({...},)"
        ) from None
