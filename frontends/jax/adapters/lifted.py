"""A scheduled function with something of another library around it, called like the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from dynaflow_xla.frontends.jax.adapters.wrapper import Seat, Wrapper
from dynaflow_xla.protocols import LikeAFunction

T = TypeVar("T")


class _Found(Exception):
    """Ends a call that was only to say what the function inside gets."""


class Lifted(LikeAFunction):
    """A scheduled function inside ``nnx.jit``, ``eqx.filter_jit`` or bound arguments.

    Args:
        wrapper: What is around.
        inner: The scheduled function inside.
        original: What was given to ``schedule``.
        again: Makes the same for another process, as ``__reduce__`` says it; a part of another function
            needs none.

    Attributes:
        original: As given.
        inner: As given.
    """

    def __init__(
        self, wrapper: Wrapper, inner: Any, original: Any, again: tuple[Any, ...] | str = ""
    ) -> None:
        self.original, self.inner = original, inner
        self.wrapper = wrapper
        self._seat = Seat(inner)
        self._call = wrapper.around(self._seat)
        self._again = again
        functools.update_wrapper(self, original, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original, and the same effects on modules among the arguments."""
        return self._call(*args, **kwargs)

    def inside(self, work: Callable[[Any, Any, Any], T], args: Any, kwargs: Any) -> T:
        """What ``work`` says of the scheduled function inside and what a call gives it.

        Args:
            work: Takes the function, its arguments and its keyword arguments.
            args: Of a call.
            kwargs: Of a call.
        """
        found: list[T] = []

        def look(*inner_args: Any, **inner_kwargs: Any) -> None:
            inner = self.inner.serving(inner_args, inner_kwargs)
            found.append(work(inner, inner_args, inner_kwargs))
            raise _Found

        try:
            with self._seat.next_call(look):
                self._call(*args, **kwargs)
        except _Found:
            pass
        return found[0]

    def serving(self, args: Any, kwargs: Any) -> Lifted:
        """What to look at to see what these arguments get."""
        return self

    def planned(self, args: Any, kwargs: Any) -> Any:
        """What ``ScheduledFunction.planned`` says of the function inside."""
        return self.inside(lambda fast, a, k: fast.planned(a, k), args, kwargs)

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What ``ScheduledFunction.beside_the_plan`` says of the function inside."""
        return self.inside(lambda fast, a, k: fast.beside_the_plan(a, k), args, kwargs)

    def known_costs(self, args: Any, kwargs: Any) -> Any:
        """What ``ScheduledFunction.known_costs`` says of the function inside."""
        return self.inside(lambda fast, a, k: fast.known_costs(a, k), args, kwargs)

    def compiler_options(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """What ``ScheduledFunction.compiler_options`` says of the function inside."""
        return self.inside(lambda fast, a, k: fast.compiler_options(a, k), args, kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time lowering, as the original's."""
        return self._ahead("lower", args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time tracing, as the original's."""
        return self._ahead("trace", args, kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result."""
        return self._ahead("eval_shape", args, kwargs)

    def _ahead(self, what: str, args: Any, kwargs: Any) -> Any:
        if isinstance(self._call, functools.partial):
            bound = self._call
            return getattr(self.inner, what)(*bound.args, *args, **{**bound.keywords, **kwargs})
        return getattr(self._call, what)(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans, compiled programs and decisions."""
        self.inner.clear_cache()

    def __reduce__(self) -> Any:
        return self._again

    def __repr__(self) -> str:
        return f"<{self.inner!r} inside {self.wrapper.name}>"


def looks_inside(work: Callable[..., T]) -> Callable[..., T]:
    """For functions of a scheduled function, args and kwargs: a lifted one is looked at from inside."""

    @functools.wraps(work)
    def look(fast: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> T:
        if isinstance(fast, Lifted):
            return fast.inside(lambda f, a, k: look(f, a, k, *more, **options), args, kwargs)
        return work(fast, args, kwargs, *more, **options)

    return look
