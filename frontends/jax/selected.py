"""A JAX function with several plans, of which one runs: chosen in Python, or by a value when it runs."""

from __future__ import annotations

import functools
from typing import Any

import jax

from dynaflow_xla.errors import PlanError, checks
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch import axes
from dynaflow_xla.frontends.jax.capture import tracing
from dynaflow_xla.protocols import LikeAFunction, stands_at
from dynaflow_xla.selection import Recipe, Selection


class Selected(LikeAFunction):
    """What ``schedule(..., select=...)`` returns for a JAX function; it is called like the original.

    A call asks ``select`` once and calls the scheduled function that it names. Where a trace is under way
    and ``select`` returns a traced index or truth value, every plan is in the program, and the value
    decides when it runs.

    Args:
        recipe: What to choose among.
        members: Scheduled functions by name, None for the original.
        base: A scheduled form of the same function, for what all have in common.
        in_axes: As given to ``schedule``.
    """

    def __init__(self, recipe: Recipe, members: dict[str, Any], base: Any, in_axes: Any) -> None:
        self._given = recipe, members, base, in_axes
        self.members = members
        self._base = base
        self._in_axes = in_axes
        name = checks.name_of(base)
        self.selection = Selection(name, recipe, self._rows)
        functools.update_wrapper(self, base, updated=())

    @property
    def original(self) -> Any:
        """The function as given to ``schedule`` (jitted, if it was not)."""
        return self._base.original

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            PlanError: ``select`` raised, or named nothing that there is.
        """
        if tracing.capturing():
            return self._base(*args, **kwargs)  # a part of somebody's plan: the original
        selection = self.selection
        answer = selection.answer(args, kwargs)
        if isinstance(answer, jax.core.Tracer):
            return self._by_value(answer, args, kwargs)
        name = selection.named(answer)
        result = self._run(name, args, kwargs)
        selection.ran(name, traced=bool(_compat.tracing()))
        return result

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        member = self.members[name]
        if member is not None:
            return member(*args, **kwargs)
        return self._base.serving(args, kwargs).original(*args, **kwargs)

    def _by_value(self, answer: Any, args: Any, kwargs: Any) -> Any:
        names = self.selection.names
        branches = [functools.partial(self._run, name, args, kwargs) for name in names]
        truth = answer.dtype == bool
        if answer.shape or not (truth or jax.numpy.issubdtype(answer.dtype, jax.numpy.integer)):
            raise PlanError(
                f"{self.selection.name!r}: a traced choice must be an integer or a truth value without "
                f"axes; got {answer.aval}"
            )
        if truth and len(names) != 2:
            raise PlanError(
                f"{self.selection.name!r}: a truth value chooses between two, and there are "
                f"{len(names)}: {', '.join(names)}. Return an index"
            )
        self.selection.lowered()
        if truth:
            return jax.lax.cond(answer, branches[1], branches[0])
        return jax.lax.switch(answer, branches)

    def _rows(self, args: Any, kwargs: Any) -> int | None:
        """Rows of the batch, if it is known where it is."""
        if self._in_axes is None:
            return None
        nums, names = self._static_of(args)
        return axes.input_axes(
            self.selection.name,
            self._in_axes,
            self._base.__wrapped__,
            args,
            kwargs,
            nums,
            names,
            None,
        )[1]

    def _static_of(self, args: Any) -> tuple[set[int], set[str]]:
        static = getattr(self._base, "_static", None)
        return (set(), set()) if static is None else static(args)

    # -- what is chosen -----------------------------------------------------------------------

    def chosen(self, args: Any, kwargs: Any) -> str:
        """Name of what a call with these arguments would run."""
        selection = self.selection
        return selection.named(selection.answer(args, kwargs))

    # -- as other scheduled functions ---------------------------------------------------------

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time lowering of what ``select`` chooses while this is traced."""
        return self._ahead("lower", args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Ahead-of-time tracing of the same as ``lower``."""
        return self._ahead("trace", args, kwargs)

    def _ahead(self, how: str, args: Any, kwargs: Any) -> Any:
        if (jitted := getattr(self._base, "jitted", None)) is None:
            member = self.members[self.chosen(args, kwargs)]
            return getattr(member or self._base.original, how)(*args, **kwargs)
        # A function that JAX has nothing of: what was chosen once must not serve another time.
        return getattr(jitted(lambda *a, **k: self(*a, **k)), how)(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result."""
        return self._base.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets plans, compiled programs, decisions and counts."""
        for member in (self._base, *self.members.values()):
            if member is not None:
                member.clear_cache()
        self.selection.forget()

    def __reduce__(self) -> Any:
        own: Any = self  # a decorated one has the function's names
        return own.__qualname__ if stands_at(own) else (Selected, self._given)

    def __repr__(self) -> str:
        return f"<scheduled {self.selection.name} with {self.selection.recipe!r}>"
