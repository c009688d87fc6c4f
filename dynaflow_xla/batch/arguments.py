"""Which batch axes belong to which argument of a call, and to which result: by place or by name."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.errors import PlanError, PlanTypeError, checks

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class CallAxes:
    """Batch axes of the arguments of one call.

    Attributes:
        positional: For each positional argument an axis, None, or a tree of these that is its prefix.
        keyword: The same by keyword.
    """

    positional: tuple[Any, ...]
    keyword: dict[str, Any]


def call_axes(
    name: str,
    in_axes: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Collection[int] = (),
) -> CallAxes:
    """Spreads ``in_axes`` over the arguments of a call.

    Args:
        name: Of the function, for messages.
        in_axes: One of

            - a mapping by parameter name, which holds however an argument is passed; arguments that it
              leaves out have no batch;
            - a pair of a tuple for the positional arguments and a mapping for those by keyword;
            - an integer, or a tuple with an entry for each positional argument, as for ``jax.vmap``:
              arguments by keyword are then cut along axis 0.

            A tuple of a tuple and a mapping may be the second, or the third for two positional
            arguments that are a tuple and a mapping themselves: it is what fits the call, and an error
            where both fit.
        function: Whose parameters are named.
        args: Positional arguments.
        kwargs: Keyword arguments.
        static: Numbers of positional arguments that an integer does not mean.

    Raises:
        PlanError: it does not fit the call, or fits it in two ways.
    """
    if isinstance(in_axes, Mapping):
        return _by_name(name, in_axes, function, args, kwargs)
    if (one := checks.integer(in_axes)) is not None:
        places = tuple(None if n in static else one for n in range(len(args)))
        return CallAxes(places, dict.fromkeys(kwargs, 0))
    if not isinstance(in_axes, tuple | list):
        raise PlanTypeError(
            f"{name!r}: in_axes must be an integer or a tuple with an entry for each positional argument, "
            f"a mapping by parameter name, or a pair of a tuple and a mapping; got {in_axes!r}"
        )
    if _may_be_pair(in_axes) and _is_pair(name, in_axes, function, args, kwargs):
        places = tuple(in_axes[0])
        return CallAxes(
            _checked(name, places, in_axes, args), _keywords(name, in_axes[1], function, kwargs)
        )
    return CallAxes(_checked(name, tuple(in_axes), in_axes, args), dict.fromkeys(kwargs, 0))


def _checked(name: str, places: tuple[Any, ...], in_axes: Any, args: Sequence[Any]) -> Any:
    if len(places) != len(args):
        raise PlanError(
            f"{name!r}: in_axes must have an entry for each of {len(args)} positional arguments; got "
            f"{in_axes!r}. A mapping by parameter name, in_axes={{'x': 0}}, holds for arguments passed "
            "either way"
        )
    return places


def _may_be_pair(in_axes: Sequence[Any]) -> bool:
    return (
        len(in_axes) == 2
        and isinstance(in_axes[0], tuple | list)
        and isinstance(in_axes[1], Mapping)
    )


def _is_pair(
    name: str,
    in_axes: Sequence[Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether a tuple and a mapping are for all positional and for keyword arguments, and not for two."""
    first, second = in_axes
    if len(args) != 2:
        return True
    prefixes = (
        isinstance(args[0], tuple | list)
        and len(args[0]) == len(first)
        and isinstance(args[1], Mapping)
        and bool(second)
        and set(second) <= set(args[1])
    )
    pair = len(first) == 2 and set(second) <= _known(function, kwargs)
    if prefixes and pair:
        raise PlanError(
            f"{name!r}: in_axes={in_axes!r} may be a pair, for positional and for keyword arguments, or be "
            "for two positional arguments that are a tuple and a mapping. Give a mapping by parameter name"
        )
    return pair or not prefixes


_parameters_of: weakref.WeakKeyDictionary[Any, dict[bool, list[inspect.Parameter]]] = (
    weakref.WeakKeyDictionary()
)
"""Function -> its parameters, as a function and as a method of some object."""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a function, none if they cannot be known.

    Python takes half a millisecond to find them, so this is done once for each function.
    """
    # A bound method is an object that each access makes anew.
    plain: Any = getattr(function, "__func__", function)
    bound = plain is not function
    kind: Any = type(plain)
    if kind.__hash__ is not object.__hash__:  # equal objects may have other parameters
        return _found(function)
    try:
        known = _parameters_of.setdefault(plain, {})
    except TypeError:  # nothing can refer to it weakly
        return _found(function)
    if bound not in known:
        known[bound] = _found(function)
    return known[bound]


def _found(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _known(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> set[str]:
    return {p.name for p in _parameters(function)} | set(kwargs)


def _by_name(
    name: str,
    in_axes: Mapping[Any, Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> CallAxes:
    parameters = _parameters(function)
    if args and not parameters:
        raise PlanError(
            f"{name!r}: nothing is known of its parameters, so in_axes={in_axes!r} cannot name positional "
            "arguments; give a tuple with an entry for each"
        )
    only = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY}
    if twice := sorted(only & set(kwargs) & set(in_axes)):
        raise PlanError(
            f"{name!r}: in_axes names {twice[0]!r}, which is a positional argument and one by keyword; "
            "give a pair, ((axes of positional arguments), {axes by keyword})"
        )
    places = [p.name for p in parameters if p.kind in _BY_PLACE]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    positional = [in_axes.get(place) for place in places[: len(args)]]
    more = len(args) - len(positional)
    if more > 0:
        given = in_axes.get(rest[0]) if rest else None
        each = list(given) if isinstance(given, tuple | list) else [given] * more
        if len(each) != more:
            raise PlanError(
                f"{name!r}: in_axes[{rest[0]!r}] must have an entry for each of {more} arguments; got "
                f"{given!r}"
            )
        positional += each
    return CallAxes(tuple(positional), _keywords(name, in_axes, function, kwargs))


def _keywords(
    name: str, given: Mapping[Any, Any], function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Axes of the arguments by keyword; PlanError for names that the function does not know."""
    parameters = _parameters(function)
    if unknown := set(given) - _known(function, kwargs):
        raise PlanError(
            f"{name!r}: in_axes names {', '.join(sorted(map(repr, unknown)))}; the function has "
            f"{', '.join(sorted(_known(function, kwargs))) or 'no parameters'}"
        )
    extra = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    declared = {p.name for p in parameters}
    others = given.get(extra[0]) if extra and extra[0] not in kwargs else None
    made = {}
    for key in kwargs:
        if key in given or key in declared or not extra:
            made[key] = given.get(key)
        else:
            made[key] = others.get(key) if isinstance(others, Mapping) else others
    return made


def named_results(name: str, out_axes: Mapping[Any, Any], names: Collection[Any]) -> dict[Any, Any]:
    """``out_axes`` by name, for a result with fields or keys of these names.

    Those left out have the default, axis 0.

    Raises:
        PlanError: it names what the result has not.
    """
    if unknown := set(out_axes) - set(names):
        raise PlanError(
            f"{name!r}: out_axes names {', '.join(sorted(map(repr, unknown)))}; the result has "
            f"{', '.join(map(repr, names)) or 'no names'}"
        )
    return {each: out_axes.get(each, 0) for each in names}
