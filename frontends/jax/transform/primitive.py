"""A scheduled flat function as one primitive, ``dfx_program``: JAX's transformations are rules of it.

Its derivatives are primitives of their own (``derivatives``). JAX's ``custom_vjp`` would do less: it has no
forward mode, and it mixes up residuals when one traced function is differentiated for different arguments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import jet
from jax.extend import core as jcore
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval as pe

from dynaflow_xla.batch.expansion.specs import PARTS
from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.batch.own_rules import OwnRules, of_split
from dynaflow_xla.frontends.jax.batch.split import Resolved, SplitCapture
from dynaflow_xla.frontends.jax.capture import capture, dependence, sharding
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.transform.by_parts import ByParts
from dynaflow_xla.frontends.jax.transform.passes import (
    Flat,
    Passes,
    Primal,
    alone,
    flat_function,
    forward_mode,
    inexact,
    out_avals,
)
from dynaflow_xla.ir.partition import live
from dynaflow_xla.strategies.identity import ours
from dynaflow_xla.watching import telling

_MAX_BATCHED = 64
"""Sizes and axes of ``jax.vmap`` for which a program is kept."""

_WORTH_A_PLAN_NS = 1000.0
"""Work of results that nobody reads, for which the others are planned again."""

_LOOPS = frozenset({"scan", "while", "cond"})

program_p = Primitive("dfx_program")
program_p.multiple_results = True


@_compat.weak_parameter
class ScheduledProgram:
    """A scheduled flat function with scheduled derivatives, which are made when first needed.

    Args:
        made: The plan of the function itself.
        whole: The function at its full size.
        split: Its split, if its derivatives are to be split, too.
        expanded: The plan's inputs and outputs are those of the expanded graph, not of ``whole``.

    Attributes:
        entry, whole, split: As given.
        in_avals, out_avals: Of the flat inputs and outputs.
        plain: The function without schedule.
    """

    def __init__(
        self,
        made: Planned,
        whole: capture.Captured,
        split: SplitCapture | None = None,
        *,
        expanded: bool = False,
    ):
        self.entry, self.whole, self.split = made, whole, split
        self._outer = made.captured if expanded else whole
        self._takes = made.split if expanded else None
        # A closed-over value that differs by nano-batch is one input here, and several of the plan.
        constant = self._takes is not None and bool(self._takes.resolved.const_parts)
        inner = whole if constant else self._outer
        self.in_avals = [inner.avals[v] for v in inner.graph.inputs]
        self.out_avals = out_avals(self._outer)
        self._own = of_split(split, whole.jaxpr)
        self._rules: OwnRules | None = None
        self._order = 0
        self._is_part = False  # of what the user scheduled
        self._by_parts: ByParts | None = None
        if self._takes is not None and _stays_in_parts(self._takes.resolved):
            self._by_parts = ByParts(self._takes, whole, flat_function)
        # Nothing here may hold the program itself: who made its derivatives does.
        self.plain: Flat = self._by_parts or flat_function(whole)
        self._pairs: dict[tuple[int, ...], DerivativePasses] = {}
        self._transposes: dict[tuple[tuple[int, ...], tuple[int, ...]], ScheduledProgram] = {}
        self._series: dict[int, ScheduledProgram] = {}
        self._parts: dict[tuple[int, ...], tuple[ScheduledProgram, list[int]]] = {}
        self._late: dict[frozenset[int], tuple[int, ...]] = {}
        self._batched: Recent[Any, tuple[ScheduledProgram, list[int | None]]] = Recent(_MAX_BATCHED)

    def _plan_inputs(self, flat: Sequence[Any]) -> Sequence[Any]:
        return flat if self._takes is None else self._takes.inputs(flat)

    def __call__(self, *flat: Any) -> list[Any]:
        """Flat inputs (closed-over values first) to flat outputs."""
        return self.bind(*self.whole.consts, *flat)

    @property
    def in_parts(self) -> bool:
        """Whether some inputs or results are one for each nano-batch: residuals."""
        return self._by_parts is not None

    def bind(self, *flat: Any) -> list[Any]:
        """The same; constants that only the trace met are given, too."""
        return program_p.bind(*flat, program=self)  # type: ignore[no-any-return]

    def primal(self) -> Primal:
        """What its derivatives are made of."""
        return Primal(
            self.plain, self.in_avals, self.out_avals, self.split, self.entry.options, self._own
        )

    def pairs(self) -> list[DerivativePasses]:
        """Derivatives made so far."""
        return list(self._pairs.values())

    def pair(self, wanted: tuple[int, ...]) -> DerivativePasses:
        """The passes of derivatives with respect to the inputs ``wanted``."""
        if wanted not in self._pairs:
            self._require_rules(self._order + 1)
            self._pairs[wanted] = DerivativePasses(self, wanted)
        return self._pairs[wanted]

    def _require_rules(self, order: int) -> None:
        """A derivative of residuals is one of nano-batches: rules must keep these apart.

        Raises:
            UnsupportedError: one combines rows, and only in this derivative.
        """
        if self._rules is not None and (why := self._rules.mixing(order)):
            raise UnsupportedError(
                f"{self!r} is a derivative of a function in nano-batches and has no derivative itself: "
                f"{why}. Schedule the higher derivative itself, dfx.schedule(jax.hessian(f), ...), or "
                "differentiate fast.original"
            )

    def _like(self, made: ScheduledProgram, more: int = 0) -> ScheduledProgram:
        """A program made of this one's operators, and of derivatives of them if ``more``."""
        made._rules, made._order = self._rules, self._order + more
        return made

    def moving(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The outputs that have derivatives with respect to the inputs ``wanted``."""
        moved = frozenset(wanted)
        return tuple(
            i
            for i, (aval, reads) in enumerate(zip(self.out_avals, self.depends(), strict=True))
            if inexact(aval) and moved & reads
        )

    @property
    def is_split(self) -> bool:
        """Whether it, or what it is a pass of, runs in nano-batches."""
        return self.split is not None or self._takes is not None

    def moved(self, wanted: tuple[int, ...]) -> jcore.ClosedJaxpr:
        """The inputs and the tangents of ``wanted`` to the results and theirs, without schedule."""
        moved = forward_mode(self.plain, wanted, self.moving(wanted), len(self.in_avals))
        avals = [*self.in_avals, *(self.in_avals[i] for i in wanted)]
        return jax.make_jaxpr(moved)(*map(spec, avals))

    def part(self, closed: jcore.ClosedJaxpr, what: str) -> ScheduledProgram:
        """A part of it, or of its derivative, scheduled by itself."""
        specs = list(map(spec, closed.in_avals))
        made = alone(jcore.jaxpr_as_fun(closed), specs, self.entry.options, what)
        return self._like(ScheduledProgram(*made), 1)

    def only(self, numbers: tuple[int, ...]) -> tuple[ScheduledProgram, list[int]]:
        """The outputs ``numbers`` alone, and the positions of the inputs that they depend on."""
        if numbers not in self._parts:
            traced = jax.make_jaxpr(self.plain)(*map(spec, self.in_avals))
            wanted = [i in numbers for i in range(len(self.out_avals))]
            jaxpr, needed = pe.dce_jaxpr(traced.jaxpr, wanted)
            part = jcore.jaxpr_as_fun(jcore.ClosedJaxpr(jaxpr, traced.consts))
            read = [i for i, used in enumerate(needed) if used]
            specs = [spec(self.in_avals[i]) for i in read]
            made = ScheduledProgram(*alone(part, specs, self.entry.options, "part"))
            made._is_part = True
            self._parts[numbers] = self._like(made), read
        return self._parts[numbers]

    def without(self, unread: frozenset[int]) -> tuple[ScheduledProgram, list[int]] | None:
        """The same without results that nobody reads, see ``only``; None where the plan stays as it is.

        It stays where it would save nothing worth a plan, and where it is not ours to make another one:
        rules, splits and strategies may count on all that the user wrote.
        """
        kept = tuple(i for i in range(len(self.out_avals)) if i not in unread)
        if not unread or not kept or self.is_split:
            return None
        options = self.entry.options
        if options.rules is not None or not ours(type(options.strategy)):
            return None
        if effects_of(self):  # what prints or writes does so whoever reads the results
            return None
        return self.only(kept) if self._saves(kept) else None

    def _saves(self, numbers: tuple[int, ...]) -> bool:
        """Whether the outputs ``numbers`` alone take noticeably less than all of them."""
        whole = self.whole
        outputs = tuple(whole.outputs[i] for i in numbers if whole.output_is_value[i])
        fewer = live(replace(whole.graph, outputs=outputs))
        saved = {*live(whole.graph)} - {*fewer}
        return sum(whole.graph.ops[i].cost_ns for i in saved) >= _WORTH_A_PLAN_NS

    def transposed(self, linear: tuple[int, ...], given: tuple[int, ...]) -> ScheduledProgram:
        """The transpose of the function, which is linear in the inputs ``linear``.

        It takes the other inputs and the cotangents of the outputs ``given``, and is not split.
        """
        key = linear, given
        if key not in self._transposes:
            known = [i for i in range(len(self.in_avals)) if i not in linear]
            moved = [spec(self.in_avals[i]) for i in linear]

            def transpose(*flat: Any) -> list[Any]:
                full: dict[int, Any] = dict(zip(known, flat, strict=False))

                def of_linear(*xs: Any) -> list[Any]:
                    values = full | dict(zip(linear, xs, strict=True))
                    outs = self.plain(*[values[i] for i in range(len(self.in_avals))])
                    return [outs[i] for i in given]

                return list(jax.linear_transpose(of_linear, *moved)([*flat[len(known) :]]))

            avals = [self.in_avals[i] for i in known] + [self.out_avals[i] for i in given]
            made = alone(transpose, list(map(spec, avals)), self.entry.options, "transpose")
            self._transposes[key] = self._like(ScheduledProgram(*made))
        return self._transposes[key]

    def taylor(self, order: int) -> ScheduledProgram:
        """Inputs and the terms of their series to outputs and theirs, as ``jax.experimental.jet``.

        Terms come after all inputs, those of one input together; integers have none.
        """
        if order not in self._series:
            self._require_rules(self._order + order)
            moved = [i for i, aval in enumerate(self.in_avals) if inexact(aval)]
            count = len(self.in_avals)

            def series(*flat: Any) -> list[Any]:
                terms = iter(flat[count:])

                def of_moved(*xs: Any) -> list[Any]:
                    values = dict(enumerate(flat[:count])) | dict(zip(moved, xs, strict=True))
                    return self.plain(*[values[i] for i in range(count)])

                primals = [flat[i] for i in moved]
                given = [[next(terms) for _ in range(order)] for _ in moved]
                outs, made = jet.jet(of_moved, primals, given, factorial_scaled=False)
                return [*outs, *itertools.chain.from_iterable(made)]

            avals = self.in_avals + [self.in_avals[i] for i in moved for _ in range(order)]
            made = alone(series, list(map(spec, avals)), self.entry.options, "jet")
            self._series[order] = self._like(ScheduledProgram(*made), order)
        return self._series[order]

    def batched(
        self, dims: tuple[int | None, ...], args: Sequence[Any], axis: Mapping[str, Any]
    ) -> tuple[ScheduledProgram, list[int | None]]:
        """The same for many: scheduled anew. User rules may not fit its graph: default cut.

        Args:
            dims: For each input the axis that ``jax.vmap`` maps, or None.
            args: The inputs, for their types.
            axis: Name and size of the mapped axis if the function communicates over it, else empty.
        """
        key = dims, tuple(jax.typeof(x) for x in args), *axis.items()
        found = self._batched.get(key)
        if found is None:
            out_dims = [0 if mapped else None for mapped in self._mapped_outputs(dims, args, axis)]
            many = jax.vmap(self.plain, in_axes=dims, out_axes=out_dims, **axis)
            specs = [spec(jax.typeof(x)) for x in args]
            made = alone(many, specs, self.entry.options, "vmap")
            found = self._batched[key] = self._like(ScheduledProgram(*made)), out_dims
        return found

    def unread(self) -> list[int]:
        """Positions of inputs that no operator reads and that are no results; of a split nobody asks."""
        if self.is_split:
            return []
        graph = self.whole.graph
        read = {*graph.outputs, *(view.input for view in graph.views)}
        read.update(*(op.inputs for op in graph.ops))
        read.update(
            out
            for out, is_value in zip(self.whole.outputs, self.whole.output_is_value, strict=True)
            if is_value
        )
        return [i for i, value in enumerate(graph.inputs) if value not in read]

    def depends(self) -> list[frozenset[int]]:
        """For each flat output the positions of the inputs that it depends on."""
        positions = [frozenset([i]) for i in range(len(self.in_avals))]
        # What is closed over stands in the plan's inputs as itself, not as an input's position.
        given = [
            x if isinstance(x, frozenset) else frozenset() for x in self._plan_inputs(positions)
        ]
        if capture.has_own_rules(self.whole.jaxpr):
            if self._by_parts is not None:
                return self._by_parts.depends(given)
            return dependence.of_results(self.whole.jaxpr, positions)
        graph = self._outer.graph
        sets = dict(zip(graph.inputs, given, strict=True))
        for view in graph.views:
            sets[view.value] = given[view.input]
        for op in graph.ops:
            mine = frozenset[int]().union(*(sets[v] for v in op.inputs))
            sets.update(dict.fromkeys(op.outputs, mine))
        for join in graph.joins:
            sets[join.value] = frozenset[int]().union(*(sets[v] for v in join.parts))
        return [
            sets[out] if is_value else frozenset()
            for out, is_value in zip(self._outer.outputs, self._outer.output_is_value, strict=True)
        ]

    def late(self, unknown: frozenset[int]) -> tuple[int, ...]:
        """The outputs that depend on the inputs ``unknown``.

        JAX knows of loops, whose results need not depend on all that they read.
        """
        if unknown not in self._late:
            found = tuple(i for i, reads in enumerate(self.depends()) if reads & unknown)
            loops = any(op.kind in _LOOPS for op in self.whole.graph.ops)
            if loops and not self.is_split and not effects_of(self):
                traced = jax.make_jaxpr(self.plain)(*map(spec, self.in_avals))
                flags = [i in unknown for i in range(len(self.in_avals))]
                keeps = jax.checkpoint_policies.everything_saveable
                known = interpreters.by_policy(traced, flags, keeps).unknown
                found = tuple(i for i in found if known[i])
            self._late[unknown] = found
        return self._late[unknown]

    def _mapped_outputs(
        self, dims: tuple[int | None, ...], args: Sequence[Any], axis: Mapping[str, Any]
    ) -> tuple[bool, ...]:
        """Which results differ along the mapped axis.

        JAX knows: it looks into loops, whose results need not depend on all that they read (primals and
        tangents of one scan), and what communicates over the axis is the same along it.
        """
        mapped: tuple[bool, ...] = (False,) * len(self.out_avals)  # unless the rule is asked
        look = jax.custom_batching.custom_vmap(lambda *results: results)

        @look.def_vmap
        def rule(size: int, in_batched: Any, *results: Any) -> Any:
            nonlocal mapped
            mapped = tuple(in_batched)
            return results, tuple(in_batched)

        jax.eval_shape(jax.vmap(lambda *xs: look(*self.plain(*xs)), dims, **axis), *args)
        return mapped

    def communicates(self, name: Any) -> bool:
        """Whether the function communicates over a named axis."""
        return capture.uses_axis(self.whole.jaxpr, name)

    def __repr__(self) -> str:
        return self.entry.options.name


@_compat.weak_parameter
class DerivativePasses:
    """Passes for derivatives with respect to some of the inputs, made when first needed.

    Attributes:
        name: Name of the function.
        tangent_avals: Of the results that have derivatives, their tangents' types.
        moving: Positions of these results.
    """

    def __init__(self, primal: ScheduledProgram, wanted: tuple[int, ...]):
        self.name = primal.entry.options.name
        self.moving = primal.moving(wanted)
        self.tangent_avals = [primal.out_avals[i].to_tangent_aval() for i in self.moving]
        self._passes = Passes(primal.primal(), wanted, self.moving)
        self._of_pass = functools.partial(_of_pass, primal._own, primal._rules, primal._order)
        self._backwards: dict[tuple[int, ...], ScheduledProgram] = {}

    @functools.cached_property
    def jvp(self) -> ScheduledProgram:
        """The inputs and the wanted tangents to the results and the tangents of those that move."""
        return self._of_pass(*self._passes.jvp())

    @functools.cached_property
    def forward(self) -> ScheduledProgram:
        """The inputs to the results and residuals."""
        return self._of_pass(*self._passes.forward())

    @functools.cached_property
    def tangent(self) -> ScheduledProgram:
        """Residuals and the wanted tangents to the tangents of the results that move."""
        return self._of_pass(*self._passes.tangent())

    @functools.cached_property
    def results(self) -> ScheduledProgram:
        """The inputs to the results, as a derivative leaves them: rules may make them anew."""
        return self._of_pass(*self._passes.results())

    def backward(self, given: tuple[int, ...]) -> ScheduledProgram:
        """Residuals and the given cotangents to the gradients."""
        if given not in self._backwards:
            self._backwards[given] = self._of_pass(*self._passes.backward(given))
        return self._backwards[given]


def _of_pass(
    own: OwnRules | None, rules: OwnRules | None, order: int, made: Planned, whole: capture.Captured
) -> ScheduledProgram:
    """A pass of the derivatives of a program with such rules."""
    program = ScheduledProgram(made, whole, expanded=made.split is not None)
    program._rules, program._order = (own, 1) if program.in_parts else (rules, order + 1)
    return program


def _stays_in_parts(resolved: Resolved) -> bool:
    """Whether inputs that callers give, or results, are one for each nano-batch."""
    given = (spec for n, spec in enumerate(resolved.in_specs) if n not in resolved.const_parts)
    return any(spec is PARTS for spec in (*given, *resolved.out_specs))


@program_p.def_impl
def _impl(*args: Any, program: ScheduledProgram) -> list[Any]:
    if _compat.names_culprits():
        return list(program.plain(*args))
    return jax.jit(lambda *xs: program_p.bind(*xs, program=program))(*args)  # type: ignore[no-any-return]


@program_p.def_effectful_abstract_eval
def _abstract(*_: Any, program: ScheduledProgram) -> tuple[Sequence[Any], set[Any]]:
    return program.out_avals, effects_of(program)


def effects_of(program: ScheduledProgram) -> set[Any]:
    """Effects of a program that order it among others."""
    return set(capture.ordering_effects(program.whole.jaxpr.effects))


def _lower(ctx: Any, *operands: Any, program: ScheduledProgram) -> Any:
    run: Callable[..., Any] = program.entry.__call__
    if _compat.exporting(ctx):
        telling.fallback(
            f"{program!r}: an exported program holds the original, as fast.original does: a plan belongs to "
            "the process that made it. Schedule the function where it runs",
        )
        run = program.plain
    elif _of_elements(program):
        # It may be what an operator does to single elements (lax.reduce, a scatter), which nothing tells
        # here: XLA ends the process where that calls something.
        if not program._is_part:
            telling.fallback(
                f"{program!r} computes with scalars alone, which is less than to hand them over, so the "
                "original runs",
            )
        run = program.plain
    else:
        _refuse_more_devices(ctx, program)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


_SHORT_NS = 10_000.0


def _of_elements(program: ScheduledProgram) -> bool:
    """Whether a program computes with scalars alone, and shortly: a loop inside may be worth lanes."""
    whole = program.whole
    alone = all(
        aval.shape == () and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
        for aval in whole.avals
    )
    return alone and sum(op.cost_ns for op in whole.graph.ops) < _SHORT_NS


def _refuse_more_devices(ctx: Any, program: ScheduledProgram) -> None:
    """JAX looks for the devices of a program in its equations, and does not see those inside of this one."""
    count, eqn = sharding.widest(program.whole.jaxpr.eqns)
    if count > 1 and _compat.device_count(ctx) == 1:
        raise UnsupportedError(sharding.too_wide(eqn, count, f"{program!r}"))


def batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, program: ScheduledProgram) -> Any:
    """The rule of ``jax.vmap``."""
    named = program.communicates(axis.name)
    if not named and all(dim is None for dim in dims):
        return program.bind(*args), [None] * len(program.out_avals)
    known = {"axis_name": axis.name, "axis_size": axis.size} if named else {}
    made, out_dims = program.batched(tuple(dims), args, known)
    return made(*args), out_dims


mlir.register_lowering(program_p, _lower)
batching.fancy_primitive_batchers[program_p] = batch
