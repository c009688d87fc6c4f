"""A scheduled flat function as one primitive: JAX's transformations are rules of it.

``dfx_program`` stands for the function. Its derivative is ``dfx_linear``, which keeps residuals
and has a transpose only: reverse mode works, and evaluating it (forward mode) is refused. JAX's
``custom_vjp`` would do less: it mixes up residuals when one traced function is differentiated for
different arguments, and its error for forward mode does not name a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla import telling
from dynaflow_xla.errors import DynaflowError, UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.split import Split
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.frontends.jax.capture.tracing import capture_function
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.signature.entry import build_entry
from dynaflow_xla.frontends.jax.transform.passes import (
    Flat,
    Passes,
    Primal,
    flat_function,
    inexact,
    out_avals,
)
from dynaflow_xla.recent import Recent
from dynaflow_xla.strategies.branches import Branches

_MAX_BATCHED = 64
"""Sizes and axes of ``jax.vmap`` for which a program is kept."""

program_p = Primitive("dfx_program")
program_p.multiple_results = True

linear_p = Primitive("dfx_linear")
linear_p.multiple_results = True


@_compat.weak_parameter
class Program:
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
        split: Split | None = None,
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
        self.plain: Flat = self._reference if expanded else flat_function(whole)
        self._pairs: dict[tuple[int, ...], Pair] = {}
        self._batched: Recent[Any, tuple[Program, list[int | None]]] = Recent(_MAX_BATCHED)

    def _reference(self, *flat: Any) -> list[Any]:
        return self.entry.reference(*self._plan_inputs(flat))

    def _plan_inputs(self, flat: Sequence[Any]) -> Sequence[Any]:
        return flat if self._takes is None else self._takes.inputs(flat)

    def __call__(self, *flat: Any) -> list[Any]:
        """Flat inputs (closed-over values first) to flat outputs."""
        return self.bind(*self.whole.consts, *flat)

    def bind(self, *flat: Any) -> list[Any]:
        """The same; constants that only the trace met are given, too."""
        return program_p.bind(*flat, program=self)  # type: ignore[no-any-return]

    def primal(self) -> Primal:
        """What its derivatives are made of."""
        return Primal(self.plain, self.in_avals, self.out_avals, self.split, self.entry.options)

    def pairs(self) -> list[Pair]:
        """Derivatives made so far."""
        return list(self._pairs.values())

    def pair(self, wanted: tuple[int, ...]) -> Pair:
        """Forward and backward pass for derivatives with respect to the inputs ``wanted``."""
        if wanted not in self._pairs:
            self._pairs[wanted] = Pair(self, wanted)
        return self._pairs[wanted]

    def batched(
        self, dims: tuple[int | None, ...], args: Sequence[Any], axis: Mapping[str, Any]
    ) -> tuple[Program, list[int | None]]:
        """The same for many: scheduled anew. User rules may not fit its graph: default cut.

        Args:
            dims: For each input the axis that ``jax.vmap`` maps, or None.
            args: The inputs, for their types.
            axis: Name and size of the mapped axis if the function communicates over it, else empty.
        """
        key = dims, tuple(jax.typeof(x) for x in args), *axis.items()
        found = self._batched.get(key)
        if found is None:
            if axis:
                out_dims = self._mapped_outputs(dims, args, axis)
            else:
                mapped = {i for i, d in enumerate(dims) if d is not None}
                out_dims = [0 if mapped & reads else None for reads in self._depends()]
            many = jax.vmap(self.plain, in_axes=dims, out_axes=out_dims, **axis)
            options = self.entry.options
            # The batch axes are others now.
            strategy = Branches() if options.in_axes is not None else options.strategy
            options = replace(
                options, name=f"{options.name}.vmap", rules=None, default_cut=True, in_axes=None,
                strategy=strategy,
            )  # fmt: skip
            specs = [spec(jax.typeof(x)) for x in args]
            captured = capture_function(many, specs, 0, options.name)
            made = build_entry(captured, options)
            found = self._batched[key] = Program(made, captured), out_dims
        return found

    def _depends(self) -> list[frozenset[int]]:
        """For each flat output the positions of the inputs that it depends on."""
        graph = self._outer.graph
        positions = [frozenset([i]) for i in range(len(self.in_avals))]
        # What is closed over stands in the plan's inputs as itself, not as an input's position.
        given = [
            x if isinstance(x, frozenset) else frozenset() for x in self._plan_inputs(positions)
        ]
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

    def _mapped_outputs(
        self, dims: tuple[int | None, ...], args: Sequence[Any], axis: Mapping[str, Any]
    ) -> list[int | None]:
        """What communicates over the axis is the same along it, whatever it depends on: JAX knows."""

        def dim(number: int) -> int | None:
            one = jax.vmap(lambda *xs: self.plain(*xs)[number], dims, None, **axis)
            try:
                jax.eval_shape(one, *args)
            except DynaflowError:
                raise  # a built-in error, too, but not one of those meant here
            except ValueError:  # it is mapped
                return 0
            return None

        return [dim(number) for number in range(len(self.out_avals))]

    def communicates(self, name: Any) -> bool:
        """Whether the function communicates over a named axis."""
        return capture.uses_axis(self.whole.jaxpr, name)

    def __repr__(self) -> str:
        return self.entry.options.name


@_compat.weak_parameter
class Pair:
    """Forward and backward pass for derivatives with respect to some of the inputs.

    Attributes:
        name: Name of the function.
        out_avals: Of the function itself.
        forward: The inputs to the results and residuals.
    """

    def __init__(self, primal: Program, wanted: tuple[int, ...]):
        self.name = primal.entry.options.name
        self.out_avals = primal.out_avals
        self._passes = Passes(primal.primal(), wanted)
        self._backwards: dict[tuple[int, ...], Program] = {}
        self.forward = _of_pass(*self._passes.forward())

    def backward(self, given: tuple[int, ...]) -> Program:
        """Residuals and the given cotangents to the gradients."""
        if given not in self._backwards:
            self._backwards[given] = _of_pass(*self._passes.backward(given))
        return self._backwards[given]

    def programs(self) -> list[Program]:
        """Those made so far."""
        return [self.forward, *self._backwards.values()]


def _of_pass(made: Planned, whole: capture.Captured) -> Program:
    return Program(made, whole, expanded=made.split is not None)


@program_p.def_impl
def _impl(*args: Any, program: Program) -> list[Any]:
    if _compat.names_culprits():
        return list(program.plain(*args))
    return jax.jit(lambda *xs: program_p.bind(*xs, program=program))(*args)  # type: ignore[no-any-return]


@program_p.def_effectful_abstract_eval
def _abstract(*_: Any, program: Program) -> tuple[Sequence[Any], set[Any]]:
    return program.out_avals, set(capture.ordering_effects(program.whole.jaxpr.effects))


def _lower(ctx: Any, *operands: Any, program: Program) -> Any:
    run: Callable[..., Any] = program.entry.__call__
    if _compat.exporting(ctx):
        telling.fallback(
            f"{program!r}: an exported program holds the original, as fast.original does: a plan belongs to "
            "the process that made it. Schedule the function where it runs",
            stacklevel=2,
        )
        run = program.plain
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, program: Program) -> Any:
    named = program.communicates(axis.name)
    if not named and all(dim is None for dim in dims):
        return program.bind(*args), [None] * len(program.out_avals)
    known = {"axis_name": axis.name, "axis_size": axis.size} if named else {}
    made, out_dims = program.batched(tuple(dims), args, known)
    return made(*args), out_dims


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, program: Program) -> Any:
    wanted = tuple(
        i
        for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        if type(t) is not ad.Zero and inexact(jax.typeof(x))
    )
    count = len(program.out_avals)
    if not wanted:
        outs = program.bind(*primals)
        return outs, [_zero_tangent(x) for x in outs]
    pair = program.pair(wanted)
    outs = pair.forward(*primals)
    residuals = outs[count:]
    found = iter(
        linear_p.bind(
            *residuals, *[tangents[i] for i in wanted], pair=pair, residuals=len(residuals)
        )
    )
    return outs[:count], [
        next(found) if inexact(aval) else _zero_tangent(x)
        for x, aval in zip(outs[:count], program.out_avals, strict=True)
    ]


mlir.register_lowering(program_p, _lower)
batching.fancy_primitive_batchers[program_p] = _batch
ad.primitive_jvps[program_p] = _jvp


@linear_p.def_abstract_eval
def _linear_abstract(*_: Any, pair: Pair, residuals: int) -> Sequence[Any]:
    return [aval.to_tangent_aval() for aval in pair.out_avals if inexact(aval)]


def _refuse(*_: Any, pair: Pair, **__: Any) -> Any:
    raise UnsupportedError(
        "forward-mode differentiation (jvp, jacfwd, hessian, evaluating jax.linearize) of the scheduled "
        f"function {pair.name!r} is not supported; differentiate fast.original, or use reverse mode "
        "(jax.grad, jax.jacrev)."
    )


def _transpose(cotangents: Sequence[Any], *args: Any, pair: Pair, residuals: int) -> list[Any]:
    numbers = [i for i, aval in enumerate(pair.out_avals) if inexact(aval)]
    given = tuple(i for i, ct in zip(numbers, cotangents, strict=True) if type(ct) is not ad.Zero)
    values = args[:residuals]
    if not given:
        return [None] * len(args)
    found = pair.backward(given)(*values, *[ct for ct in cotangents if type(ct) is not ad.Zero])
    return [None] * residuals + list(found)


linear_p.def_impl(_refuse)
mlir.register_lowering(linear_p, _refuse)
batching.primitive_batchers[linear_p] = _refuse
ad.primitive_jvps[linear_p] = _refuse
ad.primitive_transposes[linear_p] = _transpose
