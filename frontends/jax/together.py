"""Several JAX functions as one: how they are called one after the other, and what they may not share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters import libraries
from dynaflow_xla.frontends.jax.capture import marks
from dynaflow_xla.frontends.jax.capture.mutation import effects
from dynaflow_xla.protocols import Arguments, BoundFunction, Part

# So that a call may be made inside of a jit with these among its arguments.
jax.tree_util.register_pytree_node(
    Arguments,
    lambda x: ((x.args, x.kwargs), None),
    lambda _, parts: Arguments(*parts[0], **parts[1]),
)


def unbound(fn: Any) -> BoundFunction:
    """A function without what it carries along: a library's objects have to stay arguments of the program.

    Raises:
        UnsupportedError: it is compiled or spread over devices already.
    """
    if _compat.is_jitted(fn):
        _compat.jit_options(fn)  # refuses shardings
        return BoundFunction(fn)
    found = libraries.objects_bound_to(fn)
    return BoundFunction(fn) if found is None else BoundFunction(*found)


def combined(parts: Sequence[Part]) -> Callable[..., Any]:
    """One function of all arguments; static and donated ones stay what they are.

    Raises:
        UnsupportedError: two functions were jitted with different options of the compiler.
    """
    calls = [_called(part.function) for part in parts]
    several = [
        Part(p.name, fn, p.positional, p.keywords) for p, fn in zip(parts, calls, strict=True)
    ]

    def together(*flat: Any) -> tuple[Any, ...]:
        results, start = [], 0
        for part in several:
            with marks.function_scope(part.name):
                results.append(part.call(flat[start : start + part.count]))
            start += part.count
        return tuple(results)

    together.__name__ = together.__qualname__ = "_and_".join(part.name for part in parts)
    together._dfx_places = [place for part in parts for place in part.places]  # type: ignore[attr-defined]
    options = _jit_options(parts)
    return jax.jit(together, **options) if options else together


def _called(fn: Any) -> Callable[..., Any]:
    """What is called for a function while all are traced as one."""
    if not _compat.is_jitted(fn):
        return effects.watched(fn)
    # JAX takes options of the compiler for whole programs only.
    return _compat.wrapped_function(fn) if _compat.compiler_options(fn) else fn


def _jit_options(parts: Sequence[Part]) -> dict[str, Any]:
    """What to jit the one function with, so that static and donated arguments of each are; {} if none are."""
    made: dict[str, list[int]] = {"static_argnums": [], "donate_argnums": []}
    compiler: dict[str, Any] = {}
    start = 0
    for part in parts:
        if _compat.is_jitted(part.function):
            options = _compat.jit_options(part.function)
            for how in made:
                places = {
                    n % part.positional
                    for n in options[how]
                    if -part.positional <= n < part.positional
                }
                names = set(options[how.replace("nums", "names")])
                places |= {part.positional + n for n, k in enumerate(part.keywords) if k in names}
                made[how] += [start + n for n in sorted(places)]
            for key, value in (_compat.compiler_options(part.function) or {}).items():
                if compiler.setdefault(key, value) != value:
                    raise UnsupportedError(
                        f"functions of one plan were jitted with different compiler options ({key}): JAX "
                        "takes them for whole programs only. Give together(compiler_options=...) instead"
                    )
        start += part.count
    found: dict[str, Any] = {how: tuple(places) for how, places in made.items() if places}
    return {**found, "compiler_options": compiler} if compiler else found
