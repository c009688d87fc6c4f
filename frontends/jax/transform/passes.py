"""What derivatives are made of: passes from ``jax.jvp`` and ``jax.linearize``, each scheduled on its own.

Forward mode is one pass, which makes results and their tangents. Reverse mode takes a forward pass that
keeps only what the wanted derivatives need, and a backward pass for the cotangents that are not zero. What
the forward pass keeps serves a tangent pass, too: for who linearizes first and asks later. A split
function is ``merge_k f_k(cut_k x, w)`` with linear cuts and
merges, so its derivative follows by the chain rule: tangents are cut and merged as the values they belong
to, cotangents are cut as the results were merged, residuals stay with their nano-batch, and gradients are
put together as the arguments were cut. Where something runs once, on all
rows, each pass is proved for itself, and values between the passes are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla.batch.expansion.specs import AS_PROVED, PARTS, InSpec, OutSpec
from dynaflow_xla.batch.joins import AUTOMATIC, Wanted, defined
from dynaflow_xla.batch.proof import Mean, Sum
from dynaflow_xla.batch.states import Rows, Same, State
from dynaflow_xla.errors import DynaflowError, RuleError, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch import separability
from dynaflow_xla.frontends.jax.batch.own_rules import OwnRules
from dynaflow_xla.frontends.jax.batch.split import Resolved, SplitCapture
from dynaflow_xla.frontends.jax.capture import capture, equal
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.frontends.jax.capture.tracing import capture_function
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.signature.entry import build_entry
from dynaflow_xla.frontends.jax.transform.unnested import unnested
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.branches import Branches

_OF_INPUTS = frozenset({"forward", "results", "jvp"})
"""Passes that take the function's inputs, its constants among them."""

Flat: TypeAlias = Callable[..., list[Any]]
Specs: TypeAlias = tuple[tuple[InSpec, ...], tuple[OutSpec, ...]]


def inexact(aval: Any) -> bool:
    """Whether a value has a derivative."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def flat_function(captured: capture.Captured) -> Flat:
    """A captured function without schedule; its constants are its first arguments."""
    jaxpr = unnested(captured.jaxpr)
    n_consts = len(jaxpr.constvars)

    def plain(*flat: Any) -> list[Any]:
        closed = jcore.ClosedJaxpr(jaxpr, flat[:n_consts])
        return list(jcore.jaxpr_as_fun(closed)(*flat[n_consts:]))

    return plain


def of_wanted(
    plain: Flat, wanted: Sequence[int], moving: Sequence[int], flat: Sequence[Any]
) -> Callable[..., Any]:
    """A function of its inputs ``wanted`` to its outputs ``moving``, with all results beside."""

    def of_wanted(*inputs: Any) -> tuple[list[Any], list[Any]]:
        full = list(flat)
        for i, x in zip(wanted, inputs, strict=True):
            full[i] = x
        outs = plain(*full)
        return [outs[i] for i in moving], outs

    return of_wanted


def forward_mode(plain: Flat, wanted: Sequence[int], moving: Sequence[int], count: int) -> Flat:
    """``count`` inputs and the tangents of ``wanted`` to the results and the tangents of ``moving``."""

    def jvp(*flat: Any) -> list[Any]:
        primals = tuple(flat[i] for i in wanted)
        of_them = of_wanted(plain, wanted, moving, flat[:count])
        _, tangents, outs = jax.jvp(of_them, primals, tuple(flat[count:]), has_aux=True)
        return [*outs, *tangents]

    return jvp


@dataclass(frozen=True)
class Primal:
    """A flat function without schedule, as its derivatives are made of it.

    Attributes:
        plain: The function at its full size.
        in_avals, out_avals: Of its flat inputs and outputs.
        split: Its split, if its derivatives are to be split, too.
        options: What the user asked for.
        rules: Derivative rules of its own, that its split derivatives have to be proved for.
    """

    plain: Flat
    in_avals: list[Any]
    out_avals: list[Any]
    split: SplitCapture | None
    options: Settings
    rules: OwnRules | None = None

    def at(self, size: int) -> tuple[Flat, list[Any]]:
        """The function at a size, and its abstract inputs."""
        if self.split is None:
            return self.plain, self.in_avals
        captured = self.split.resolved.at[size]
        return flat_function(captured), [captured.avals[v] for v in captured.graph.inputs]


Pass: TypeAlias = tuple[Planned, capture.Captured]
"""A planned pass, and the pass at its full size."""


def alone(fn: Flat, specs: Sequence[Any], options: Settings, what: str) -> Pass:
    """A function made of a scheduled one, planned by itself: not split, and cut as by default.

    Args:
        fn: The function.
        specs: What it is traced with.
        options: Of the scheduled function. Its rules may not fit, and its batch axes are others.
        what: Name of the transformation.
    """
    options = replace(
        options, name=f"{options.name}.{what}", rules=None, default_cut=True, in_axes=None,
        strategy=Branches() if options.in_axes is not None else options.strategy,
    )  # fmt: skip
    captured = capture_function(fn, specs, 0, options.name, merge=equal.merges(options))
    return build_entry(captured, options, derived=True), captured


class Passes:
    """Passes for derivatives with respect to some of the inputs, planned.

    Args:
        primal: The function.
        wanted: Positions of these inputs.
        moving: Positions of the outputs that have a derivative with respect to them.
    """

    def __init__(self, primal: Primal, wanted: tuple[int, ...], moving: tuple[int, ...]):
        self.wanted, self.moving = wanted, moving
        self.out_avals = primal.out_avals
        self._options = primal.options
        self._primal = primal
        self._split = primal.split
        self._batch = 0 if self._split is None else sum(self._split.sizes)
        self._trees: dict[int, Any] = {}
        self._reverse_only = False
        self._forwards: dict[int, capture.Captured] = {}
        self._told: list[str] = []
        # Rules are looked at before any pass is traced: a trace that fails takes from JAX's batched rules
        # what passes made before find in them.
        why = primal.rules.mixing(1) if self._split is not None and primal.rules is not None else ""
        if self._split is not None and not self._same_residuals(self._split.sizes):
            self._split = None  # the passes are those of the whole batch
        # Where something runs once, a pass is proved for itself: also where only a derivative asks for it.
        self._proved_alone = self._split is not None and self._split.resolved.joining is not None
        if self._split is not None and why:
            self._told.append(why)
            self._proved_alone = True
            if not self._split.joins.allowed:
                self._split = None

    def jvp(self) -> Pass:
        """The inputs and the tangents of ``wanted`` to the results and the tangents of ``moving``."""
        return self._scheduled("jvp", self._jvp_at, self._jvp_specs)

    def tangent(self) -> Pass:
        """Residuals and the tangents of ``wanted`` to the tangents of ``moving``."""
        return self._scheduled("tangent", self._tangent_at, self._tangent_specs)

    def forward(self) -> Pass:
        """The inputs to the results and residuals."""
        return self._scheduled("forward", self._forward_at, self._forward_specs)

    def results(self) -> Pass:
        """The inputs to the results: of rules that make results, theirs."""
        return self._scheduled("results", self._results_at, self._results_specs)

    def backward(self, given: tuple[int, ...]) -> Pass:
        """Residuals and the given cotangents to the gradients of ``wanted``."""
        return self._scheduled(
            "backward",
            lambda size: self._backward_at(size, given),
            lambda split: self._backward_specs(split, given),
        )

    # -- one pass -----------------------------------------------------------------------------

    def _scheduled(
        self,
        what: str,
        at: Callable[[int], capture.Captured],
        specs: Callable[[SplitCapture], Specs],
    ) -> Pass:
        whole = at(self._batch)
        options = replace(self._options, name=f"{self._options.name}.{what}")
        notes = list(self._told)
        batched = None
        split = self._split
        if split is not None and _same_consts([at(size) for size in {self._batch, *split.sizes}]):
            first = len(whole.consts)  # the trace met them, all nano-batches get the same
            ins, outs = specs(split)
            given = split.resolved.const_parts if what in _OF_INPUTS else {}
            parts = {first + number: values for number, values in given.items()}
            pair = ((*[None] * first, *ins), outs)
            batched = _Derived(self._batch, at, pair, parts, split.sizes)
            if self._proved_alone:
                try:
                    batched.resolved = self._joined(what, whole, at, split)
                except SeparabilityError as error:
                    batched = None
                    notes.append(str(error).splitlines()[0])
        if batched is None and options.in_axes is not None:
            options = replace(options, in_axes=None, strategy=Branches())
            notes.append("this pass is not split; Branches() schedules it")
        try:
            made = build_entry(whole, options, batched, derived=True)
        except RuleError:
            # The user's rules speak of the forward graph; the default cut fits any.
            options = replace(options, rules=None, default_cut=True)
            made = build_entry(whole, options, batched, derived=True)
            notes.append("the rules do not fit this pass; it has the default cut")
        made.notes += notes
        return made, whole

    def _captured(self, what: str, fn: Flat, avals: Sequence[Any]) -> capture.Captured:
        return capture_function(fn, list(map(spec, avals)), 0, f"{self._options.name}.{what}")

    def _jvp_at(self, size: int) -> capture.Captured:
        plain, avals = self._primal.at(size)
        jvp = forward_mode(plain, self.wanted, self.moving, len(avals))
        return self._captured("jvp", jvp, [*avals, *(avals[i] for i in self.wanted)])

    def _joined(
        self,
        what: str,
        whole: capture.Captured,
        at: Callable[[int], capture.Captured],
        split: SplitCapture,
    ) -> Resolved:
        """A pass of a function in which something runs once: what of it does is proved anew.

        Its results are the whole batch's own values, and a nano-batch of the next pass gets its rows
        of residuals, tangents and cotangents, whatever it made of them forwards.

        Raises:
            SeparabilityError: that would change its meaning.
        """
        parts = {size: at(size) for size in dict.fromkeys(split.sizes)}
        captured, sizes = [whole, *parts.values()], (self._batch, *parts)
        first = len(whole.consts)
        states: list[State] = [Same()] * first
        specs: list[InSpec] = [None] * first
        const_parts: dict[int, tuple[Any, ...]] = {}
        if what in _OF_INPUTS:
            before = split.resolved
            graph = before.at[self._batch].graph
            states += [before.states[v] for v in graph.inputs]
            specs += before.in_specs
            const_parts = {first + n: values for n, values in before.const_parts.items()}
        for position in range(len(states), len(whole.graph.inputs)):
            shapes = [tuple(c.avals[c.graph.inputs[position]].shape) for c in captured]
            state = defined(shapes, sizes)
            states.append(state)
            specs.append(state.axis if isinstance(state, Rows) else None)
        try:
            forced = split.joins.forced(whole.graph)
        except RuleError:
            forced = {}  # the strategy's rules speak of the function
        proof, joining = separability.prove_pass(captured, sizes, states, forced)
        proof.raise_if_refused()
        return Resolved(
            at={self._batch: whole, **parts},
            in_specs=tuple(specs),
            out_specs=tuple([AS_PROVED] * len(whole.outputs)),
            states=tuple(joining.states),
            const_parts=const_parts,
            joining=joining,
        )

    def _results_at(self, size: int) -> capture.Captured:
        count = len(self.out_avals)
        forward = flat_function(self._forward_at(size))
        _, avals = self._primal.at(size)
        consts = self._forward_at(size).consts
        return self._captured("results", lambda *flat: forward(*consts, *flat)[:count], avals)

    def _results_specs(self, split: SplitCapture) -> Specs:
        return split.resolved.in_specs, split.resolved.out_specs

    def _forward_at(self, size: int) -> capture.Captured:
        if size not in self._forwards:
            plain, avals = self._primal.at(size)

            def forward(*flat: Any) -> list[Any]:
                of_them = of_wanted(plain, self.wanted, self.moving, flat)
                primals = [flat[i] for i in self.wanted]
                try:
                    _, linear, outs = jax.linearize(of_them, *primals, has_aux=True)
                except DynaflowError:
                    raise  # a built-in error, too, but not the one meant here
                except NotImplementedError:  # an operator that says its transpose alone
                    _, linear, outs = jax.vjp(of_them, *primals, has_aux=True)
                    self._reverse_only = True
                leaves, self._trees[size] = jax.tree_util.tree_flatten(linear)
                return [*outs, *leaves]

            self._forwards[size] = self._captured("forward", forward, avals)
        return self._forwards[size]

    def _linear(self, size: int, leaves: Sequence[Any]) -> Callable[..., Any]:
        """Tangents of ``wanted`` to tangents of ``moving``; the transpose of that if ``_reverse_only``."""
        return jax.tree_util.tree_unflatten(self._trees[size], leaves)  # type: ignore[no-any-return]

    def _tangent_at(self, size: int) -> capture.Captured:
        residuals = out_avals(self._forward_at(size))[len(self.out_avals) :]
        _, avals = self._primal.at(size)
        if self._reverse_only:
            raise UnsupportedError(
                f"an operator of the scheduled function {self._options.name!r} has a rule for reverse mode "
                "alone, so what jax.linearize gives cannot be evaluated; transpose it (jax.vjp, jax.grad)"
            )

        def tangent(*flat: Any) -> list[Any]:
            linear = self._linear(size, flat[: len(residuals)])
            return list(linear(*flat[len(residuals) :]))

        return self._captured("tangent", tangent, [*residuals, *(avals[i] for i in self.wanted)])

    def _backward_at(self, size: int, given: tuple[int, ...]) -> capture.Captured:
        avals = out_avals(self._forward_at(size))
        count = len(self.out_avals)
        weights = self._weights(size)
        _, in_avals = self._primal.at(size)
        primals = [spec(in_avals[i]) for i in self.wanted]

        def backward(*flat: Any) -> list[Any]:
            leaves, cotangents = flat[: -len(given)], flat[-len(given) :]
            cotangents = tuple(
                ct if weights[i] is None else ct * jnp.asarray(weights[i], ct.dtype)
                for i, ct in zip(given, cotangents, strict=True)
            )
            linear = self._linear(size, leaves)
            if self._reverse_only:
                found = dict(zip(given, cotangents, strict=True))
                missing = (i for i in self.moving if i not in found)
                found.update((i, jnp.zeros(avals[i].shape, avals[i].dtype)) for i in missing)
                return list(linear([found[i] for i in self.moving]))

            def of_given(*tangents: Any) -> list[Any]:
                moved = dict(zip(self.moving, linear(*tangents), strict=True))
                return [moved[i] for i in given]

            return list(jax.linear_transpose(of_given, *primals)(list(cotangents)))

        return self._captured("backward", backward, (*avals[count:], *(avals[i] for i in given)))

    # -- under a split ------------------------------------------------------------------------

    def _weights(self, size: int) -> list[float | None]:
        """For each result, what a nano-batch's share of its cotangent is multiplied with."""
        split = self._split
        if split is None or self._proved_alone or size == self._batch:
            return [None] * len(self.out_avals)
        # A result that is equal in all nano-batches is their mean, too.
        return [
            size / self._batch if spec is None or isinstance(spec, Mean) else None
            for spec in split.resolved.out_specs
        ]

    def _same_residuals(self, sizes: Sequence[int]) -> bool:
        """Whether the forward pass keeps the same number of values, and the same inputs, at all sizes.

        JAX leaves out operators on axes with one element, so a nano-batch of one row may differ. And what
        has a derivative at the whole batch's size need not have one at a nano-batch's: of square matrices
        all singular vectors are known, say.
        """
        kept = set()
        self._forward_at(self._batch)  # what has no derivative here has none in the original
        for size in {self._batch, *sizes}:
            try:
                forward = self._forward_at(size)
            except NotImplementedError:
                return False
            inputs = forward.graph.inputs
            residuals = list(zip(forward.outputs, forward.output_is_value, strict=True))
            kept.add(
                tuple(
                    (ok, inputs.index(out) if ok and out in inputs else None)
                    for out, ok in residuals[len(self.out_avals) :]
                )
            )
        return len(kept) == 1

    def _residual_specs(self, split: SplitCapture) -> list[InSpec]:
        """Residuals stay in parts; those that are arguments as they are, are cut like these."""
        forward = self._forward_at(self._batch)
        inputs = forward.graph.inputs
        given: list[InSpec] = [None] * len(forward.consts) + [*split.resolved.in_specs]
        return [
            given[inputs.index(out)] if ok and out in inputs else PARTS
            for out, ok in list(zip(forward.outputs, forward.output_is_value, strict=True))[
                len(self.out_avals) :
            ]
        ]

    def _forward_specs(self, split: SplitCapture) -> Specs:
        resolved = split.resolved
        return resolved.in_specs, (*resolved.out_specs, *self._residual_specs(split))

    def _jvp_specs(self, split: SplitCapture) -> Specs:
        resolved = split.resolved
        ins = (*resolved.in_specs, *(resolved.in_specs[i] for i in self.wanted))
        return ins, (*resolved.out_specs, *(resolved.out_specs[i] for i in self.moving))

    def _tangent_specs(self, split: SplitCapture) -> Specs:
        resolved = split.resolved
        ins = (*self._residual_specs(split), *(resolved.in_specs[i] for i in self.wanted))
        return ins, tuple(resolved.out_specs[i] for i in self.moving)

    def _backward_specs(self, split: SplitCapture, given: tuple[int, ...]) -> Specs:
        resolved = split.resolved
        ins = self._residual_specs(split)
        for i in given:
            spec = resolved.out_specs[i]
            ins.append(spec if isinstance(spec, int) else None)
        outs: list[OutSpec] = []
        for i in self.wanted:
            axis = resolved.in_specs[i]
            outs.append(Sum() if axis is None else axis)
        return tuple(ins), tuple(outs)


def _same_consts(passes: Sequence[capture.Captured]) -> bool:
    first, *others = [captured.consts for captured in passes]
    return all(
        len(first) == len(other) and all(map(np.array_equal, first, other)) for other in others
    )


@dataclass
class _Derived:
    """A pass of a split function, split in the same way."""

    batch: int
    at: Callable[[int], capture.Captured]
    specs: Specs
    const_parts: dict[int, tuple[Any, ...]]
    sizes: tuple[int, ...]
    resolved: Resolved | None = None
    """What was proved of the pass itself, if something of it runs once."""

    def resolve(
        self,
        sizes: Sequence[int],
        *,
        assume_separable: bool,
        also: Sequence[int] = (),
        joins: Wanted = AUTOMATIC,
    ) -> Resolved:
        """As ``split.Splittable`` does; what was proved of the function holds for its derivative."""
        assert not also, "derivatives of nano-batches run one by one"
        if self.resolved is not None:
            return self.resolved
        at = {size: self.at(size) for size in dict.fromkeys((self.batch, *sizes))}
        return Resolved(at, *self.specs, const_parts=self.const_parts)


def out_avals(captured: capture.Captured) -> list[Any]:
    """Abstract values of the flat outputs."""
    return [
        _compat.in_device_memory(captured.avals[out]) if is_value else jax.typeof(out)
        for out, is_value in zip(captured.outputs, captured.output_is_value, strict=True)
    ]
