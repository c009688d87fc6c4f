"""The programs of a JAX function: for each signature its trace, its plan, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import jax

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import DynaflowError, PlanError, SeparabilityError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch import axes, split as splitting
from dynaflow_xla.frontends.jax.capture import capture, equal, tracing
from dynaflow_xla.frontends.jax.capture.mutation import sharing
from dynaflow_xla.frontends.jax.signature import donation, entry
from dynaflow_xla.frontends.jax.transform import (
    derivatives as derivatives,
    interpreted,
)  # their rules
from dynaflow_xla.frontends.jax.transform.in_xla import XlaProgram
from dynaflow_xla.frontends.jax.transform.primitive import ScheduledProgram
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry
from dynaflow_xla.settings import Settings

_MAX_ENTRIES = 128
_MAX_CAPTURES = 16

Captures: TypeAlias = Recent[tuple[int, bool], tuple[Any, capture.Captured]]
"""By the number of a jaxpr, which is kept beside so that no other one gets it."""


class Programs:
    """From the arguments of a call to the program that is planned for such.

    Args:
        original: The jitted function.
        function: What was jitted, for the names of its arguments.
        options: What the user asked for.
        jit_options: What was given to ``jax.jit``.
        copies_results: Whether the backend makes results in memory of its own.
        captures: What was captured of the original so far: candidates of ``Auto`` have the same.
    """

    def __init__(
        self,
        original: Any,
        function: Callable[..., Any],
        options: Settings,
        jit_options: dict[str, Any],
        *,
        copies_results: bool,
        captures: Captures | None = None,
    ):
        self._original, self._function = original, function
        self.options = options
        self._jit_options = jit_options
        self._copies_results = copies_results
        self.has_static = bool(jit_options["static_argnums"] or jit_options["static_argnames"])
        self.donates = bool(jit_options["donate_argnums"] or jit_options["donate_argnames"])
        self._entries: Recent[Any, tuple[Any, Any]] = Recent(_MAX_ENTRIES)
        self.captures: Captures = Recent(_MAX_CAPTURES) if captures is None else captures

    def clear(self) -> None:
        """Forgets them all."""
        self._entries.clear()
        self.captures.clear()

    def static(self, args: Any) -> tuple[set[int], set[str]]:
        """Numbers and names of static arguments."""
        nums = {n % len(args) if n < 0 else n for n in self._jit_options["static_argnums"] if args}
        return nums, set(self._jit_options["static_argnames"])

    def split_static(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Static values with their places, and the dynamic positional and keyword arguments."""
        nums, names = self.static(args)
        static = tuple((i, a) for i, a in enumerate(args) if i in nums)
        static += tuple(sorted((k, v) for k, v in kwargs.items() if k in names))
        dynamic = tuple(a for i, a in enumerate(args) if i not in nums)
        return static, dynamic, {k: v for k, v in kwargs.items() if k not in names}

    def dynamic_leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments without static ones."""
        _, dynamic, keyword = self.split_static(args, kwargs)
        return jax.tree_util.tree_leaves((dynamic, keyword))

    def donated_leaves(self, args: Any, kwargs: Any) -> list[int]:
        """Which of the flat arguments are donated."""
        info = self._original.trace(*args, **kwargs).args_info
        return [i for i, leaf in enumerate(jax.tree_util.tree_leaves(info)) if leaf.donated]

    def given_twice(self, args: Any, kwargs: Any) -> PlanError | None:
        """The error for an array that is donated and given a second time, if there is one."""
        if not self.donates:
            return None
        places = getattr(self._function, "_dfx_places", ())
        return donation.given_twice(self.options.name, self._jit_options, args, kwargs, places)

    def program(
        self, args: Any, kwargs: Any, *, warn: bool = True, alone: bool = True
    ) -> tuple[Any, list[Any], Any]:
        """The traced original, its closed-over values, and the program for these arguments.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            warn: Say at once what a new plan costs in copies of donated arguments.
            alone: Whether it runs as a program of its own, not as a part of a larger one.
        """
        interpreted.look_for_sparsify()
        traced, captured, consts = self._captured(args, kwargs, known=alone)
        found = self._entries.get((id(traced.jaxpr), alone))
        if found is None:
            if captured is None:
                _, captured, _ = self._captured(args, kwargs)
            sharing.check_apart(captured.graph, captured.avals)
            batched = self._batched(traced, captured, consts, args, kwargs)
            made = entry.build_entry(
                captured, self.options, batched, alone=alone, donates=self.donates
            )
            if self.donates and self._copies_results and not made.on_caller:
                donation.copied(made, traced, warn=warn)
            found = (traced, self._differentiable(made, captured, traced))
            self._entries[id(traced.jaxpr), alone] = found
        return traced, consts, found[1]

    def _differentiable(self, made: Any, captured: Any, traced: Any) -> Any:
        jaxpr = traced.jaxpr.jaxpr
        if isinstance(made, XlaEntry) and (
            made.split is None
            or not (capture.holds_custom_rules(jaxpr) or capture.has_own_rules(jaxpr))
        ):
            return XlaProgram(made, traced)
        return ScheduledProgram(made, captured, made.split)

    def _captured(
        self, args: Any, kwargs: Any, *, known: bool | None = None
    ) -> tuple[Any, Any, list[Any]]:
        """The traced original, its graph (None if ``known``), closed-over values.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            known: Whether no graph is needed if there is a program for them: one that is alone (True),
                or is not (False).
        """
        with tracing.Capturing():
            traced = _compat.trace(self._original, args, kwargs)
        consts = _const_order(traced, _compat.traced_consts(traced))
        if known is not None and (id(traced.jaxpr), known) in self._entries:
            return traced, None, consts
        merge = equal.merges(self.options)
        kept = self.captures.get((id(traced.jaxpr), merge))
        if kept is None:
            made = capture.capture(
                traced.jaxpr, len(traced._consts), self.options.name, merge=merge
            )
            kept = self.captures[id(traced.jaxpr), merge] = traced.jaxpr, made
        return traced, replace(kept[1], loops={}), consts  # each plans the bodies of loops itself

    def _batched(
        self, traced: Any, captured: Any, consts: list[Any], args: Any, kwargs: Any
    ) -> splitting.BatchedFunction | None:
        """What a split needs to know, if the user named batch axes."""
        options = self.options
        if options.in_axes is None:
            return None
        nums, names = self.static(args)
        in_axes, batch = axes.input_axes(
            options.name, options.in_axes, self._function, args, kwargs, nums, names,
            options.batch_size,
        )  # fmt: skip
        results = jax.tree_util.tree_unflatten(traced.out_tree, list(traced.jaxpr.out_avals))
        out_axes = axes.output_specs(options.name, options.out_axes, results)
        # What captures at other sizes lives as long as the plan: longer than arrays and tracers may.
        args = tuple(
            value if number in nums else jax.tree_util.tree_map(_abstract, value)
            for number, value in enumerate(args)
        )
        kwargs = {
            k: v if k in names else jax.tree_util.tree_map(_abstract, v) for k, v in kwargs.items()
        }

        def capture_at(size: int) -> tuple[capture.Captured, list[Any]]:
            resized = iter(in_axes)

            def resize(leaf: Any) -> Any:
                axis = next(resized)
                return leaf if axis is None else _resized(leaf, axis, size)

            def resize_argument(number: int, value: Any) -> Any:
                return value if number in nums else jax.tree_util.tree_map(resize, value)

            new_args = [resize_argument(n, value) for n, value in enumerate(args)]
            dynamic = {k: v for k, v in kwargs.items() if k not in names}
            new_kwargs = {**kwargs, **jax.tree_util.tree_map(resize, dynamic)}
            try:
                _, part, values = self._captured(new_args, new_kwargs)
            except DynaflowError:
                raise  # a built-in error, too, but not one of those meant here
            except (
                Exception
            ) as error:  # JAX's for shapes that do not fit, or the function's own check
                said = (str(error).splitlines() or [""])[0] or type(error).__name__
                said += _compat.raised_at(error)
                raise SeparabilityError(
                    f"{options.name!r} cannot be traced with {size} instead of {batch} rows "
                    f"({said}). Write shapes in terms of the arguments' shapes"
                ) from error
            return part, values

        return splitting.BatchedFunction(captured, consts, batch, in_axes, out_axes, capture_at)


def _const_order(traced: Any, consts: list[Any]) -> list[Any]:
    """Closed-over values in the order of the captured inputs: jaxpr constants, then hoisted ones."""
    hoisted = len(traced._consts)
    return consts[hoisted:] + consts[:hoisted]


def _abstract(leaf: Any) -> Any:
    """What to trace with instead of a value."""
    aval = jax.typeof(leaf)
    return _compat.struct_like(aval) if isinstance(aval, jax.core.ShapedArray) else leaf


def _resized(leaf: Any, axis: int, size: int) -> jax.ShapeDtypeStruct:
    """Another number of rows."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return _compat.struct_like(aval, (*aval.shape[:axis], size, *aval.shape[axis + 1 :]))
