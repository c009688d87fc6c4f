"""A captured function split over its batch: proof, expansion, and the functions of its regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dynaflow_xla.batch.expansion import expand
from dynaflow_xla.batch.expansion.specs import (
    PARTS,
    WHOLE,
    AsProved,
    InSpec,
    MergeSpec,
    OutSpec,
    Parts,
    RegionOrigin,
)
from dynaflow_xla.batch.expansion.split import Function, SplitGraph
from dynaflow_xla.batch.joins import AUTOMATIC, Joining, Wanted
from dynaflow_xla.batch.proof import Mean, OutAxis, Proof, Sum
from dynaflow_xla.batch.states import Rows, Same, State, is_plain_same, plainly_same
from dynaflow_xla.errors import PlanError, SeparabilityError
from dynaflow_xla.frontends.jax.batch import separability, split_functions
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.regions.functions import (
    Second,
    no_kernel_for_parts,
    region_function,
    replaced_function,
)
from dynaflow_xla.ir.graph import Region, placed
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.phases import ONE_PHASE
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.planning.recording import Decision, Recording


@dataclass(frozen=True)
class Resolved:
    """A function at the sizes of a split.

    Attributes:
        at: Captured graphs by size; those of the nano-batches, others as needed.
        in_specs: For each graph input how to cut it.
        out_specs: For each flat output how to put it together.
        states: By value id of the whole graph, what is known of it, or () if nothing was proved.
        proof: The proof, or None if the user vouches for it.
        const_parts: By number of a graph input that stays in parts: its value in each nano-batch.
        joining: What runs once, on all rows; None if nothing does.
    """

    at: Mapping[int, Captured]
    in_specs: tuple[InSpec, ...]
    out_specs: tuple[OutSpec, ...]
    states: tuple[State, ...] = ()
    proof: Proof | None = None
    const_parts: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    joining: Joining | None = None


class Splittable(Protocol):
    """A function that may be split."""

    batch: int
    sizes: tuple[int, ...]
    """Rows of each nano-batch if they are given already, else () and the strategy decides."""

    def resolve(
        self,
        sizes: Sequence[int],
        *,
        assume_separable: bool,
        also: Sequence[int] = (),
        joins: Wanted = AUTOMATIC,
    ) -> Resolved:
        """Captures it at the sizes, and at ``also``, where several nano-batches run as one.

        Raises:
            SeparabilityError: that would change its meaning.
        """


@dataclass
class BatchedFunction:
    """A user's function with its batch axes.

    Attributes:
        whole: Captured at the full size.
        consts: Its closed-over values.
        batch: Rows.
        in_axes: For each flat argument (closed-over values are none).
        out_axes: For each flat output.
        capture_at: Captures it at another size: graph and closed-over values.
    """

    whole: Captured
    consts: Sequence[Any]
    batch: int
    in_axes: tuple[int | None, ...]
    out_axes: tuple[OutAxis, ...]
    capture_at: Callable[[int], tuple[Captured, Sequence[Any]]]
    sizes: tuple[int, ...] = ()

    def resolve(
        self,
        sizes: Sequence[int],
        *,
        assume_separable: bool,
        also: Sequence[int] = (),
        joins: Wanted = AUTOMATIC,
    ) -> Resolved:
        """Captures the function at every size, and proves its outputs unless that is waived."""
        made = {size: self.capture_at(size) for size in dict.fromkeys((*sizes, *also))}
        parts = {size: captured for size, (captured, _) in made.items()}
        consts = [self.consts, *(values for _, values in made.values())]
        if any(len(values) != len(self.consts) for values in consts):
            raise SeparabilityError(
                f"{self.whole.graph.name!r} closes over {len(self.consts)} arrays for {self.batch} rows and "
                f"{' or '.join(str(n) for n in sorted({*map(len, consts)} - {len(self.consts)}))} for "
                "nano-batches: which arrays of its surroundings it uses depends on the size. Make them "
                "arguments, or use a strategy without nano-batches"
            )
        proof = joining = None
        if not assume_separable:
            proof, joining = self._proved(made, joins)
            proof.raise_if_refused(allow_unproven=True)
        specs: list[InSpec] = []
        const_parts: dict[int, tuple[Any, ...]] = {}
        for number, value in enumerate(self.consts):
            state = proof.states[self.whole.graph.inputs[number]] if proof is not None else None
            if isinstance(state, Rows) and state.power == 0:
                specs.append(state.axis)
            elif (isinstance(state, Same) and is_plain_same(state)) or all(
                values[number] is value for values in consts
            ):
                specs.append(None)
            else:
                const_parts[number] = tuple(
                    _untraced(made[size][1][number], self.whole.graph.name) for size in sizes
                )
                specs.append(PARTS)
        return Resolved(
            at={self.batch: self.whole, **parts},
            in_specs=(*specs, *self.in_axes),
            out_specs=self.out_axes,
            states=_states(proof, joining),
            proof=proof,
            const_parts=const_parts,
            joining=joining,
        )

    def _proved(
        self, made: Mapping[int, tuple[Captured, Sequence[Any]]], joins: Wanted
    ) -> tuple[Proof, Joining | None]:
        """The proof; what mixes rows runs once if the strategy allows that."""
        proof = self._proof(made)
        # Where only the wrong merge was asked for, the message says which one is right.
        mixed = any(o.status == "mixed" and not o.suggestion for o in proof.outputs)
        if not joins.allowed or not (mixed or joins.chosen):
            return proof, None
        joined, joining = separability.prove_joined(
            self.whole,
            {size: captured for size, (captured, _) in made.items()},
            batch=self.batch,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            consts=[self.consts, *(values for _, values in made.values())],
            forced=joins.forced(self.whole.graph),
        )
        open_ = any(
            o.status == "unproven" for o in joined.outputs
        )  # effects are told by themselves
        if open_ and proof.status != "separable":
            blame = next(o.finding for o in joined.outputs if o.status == "unproven")
            return proof.not_joined(blame), None
        return joined, joining

    def _proof(self, made: Mapping[int, tuple[Captured, Sequence[Any]]]) -> Proof:
        """The proof; it does not refuse because of nano-batches of one row alone.

        JAX leaves out operators on axes with one element, so what looks like mixing rows there may be
        that: it counts as unproven if larger nano-batches are not refused.
        """

        def prove(parts: Mapping[int, tuple[Captured, Sequence[Any]]]) -> Proof:
            return separability.prove(
                self.whole,
                {size: captured for size, (captured, _) in parts.items()},
                batch=self.batch,
                in_axes=self.in_axes,
                out_axes=self.out_axes,
                consts=[self.consts, *(values for _, values in parts.values())],
            )

        proof = prove(made)
        if proof.status == "unproven" and len(made) > 1:
            # Where the program is another one at some size, nothing behind that is known; what mixes rows
            # at the other sizes is not made good by values that happen to be equal on the first call.
            each = (prove({n: m}) for n, m in made.items() if n > 1)
            return next((one for one in each if one.status == "mixed"), proof)
        if proof.status != "mixed" or 1 not in made or self.batch < 3:
            return proof
        larger = {n: m for n, m in made.items() if n > 1} or {2: self.capture_at(2)}
        return proof if prove(larger).status == "mixed" else proof.as_unproven()


def _states(proof: Proof | None, joining: Joining | None) -> tuple[State, ...]:
    if joining is not None:
        return tuple(joining.states)
    return () if proof is None else proof.states


def _untraced(value: Any, name: str) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise SeparabilityError(
            f"{name!r} closes over a traced value that is another when the batch size is another; pass "
            "it as an argument"
        )
    return value


@dataclass(frozen=True)
class SplitCapture(SplitGraph):
    """A function split over its batch.

    Attributes:
        captured: The expanded graph in the form that lowering takes.
        resolved: What it was made from.
    """

    captured: Captured
    resolved: Resolved
    function_of: Splittable = field(repr=False)
    assume_separable: bool = False
    once: PartitionedGraph | None = None
    """The cut of the whole graph, if some of its regions run once."""
    joins: Wanted = AUTOMATIC

    def inputs(self, flat: Sequence[Any]) -> list[Any]:
        """Graph inputs from those of the whole function: what stays in parts is replaced by them."""
        made: list[Any] = []
        for number, value in enumerate(flat):
            made += self.resolved.const_parts.get(number, (value,))
        return made

    def part(self, nano_batch: int) -> Captured:
        """The captured function of one nano-batch."""
        return self.resolved.at[self.sizes[nano_batch]]

    def grouped(self, recording: Recording) -> tuple[SplitCapture, Recording]:
        """The same with the recording's groups as one region each.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        groups = recording.groups()
        if not groups:
            return self, recording
        resolved = self.resolved
        sizes = {self.joint_size(self.nanos_of(m)) for m in groups} - resolved.at.keys()
        if sizes:
            more = self.function_of.resolve(
                self.sizes,
                assume_separable=self.assume_separable,
                also=sorted(sizes),
                joins=self.joins,
            )
            at = {**resolved.at, **{size: more.at[size] for size in sizes}}
            resolved = replace(resolved, at=at)
        expanded, new = self.grouped_graph(groups, lambda size: resolved.at[size].graph)
        captured = replace(self.captured, graph=expanded.pg.graph)
        made = replace(self, resolved=resolved, expanded=expanded, captured=captured)
        return made, recording.renumbered(new)

    def joint_regions(self) -> frozenset[int]:
        """Regions that are no single nano-batch's: merges, and groups that run as one batch."""
        return frozenset(
            number
            for number, origin in enumerate(self.expanded.origins)
            if not isinstance(origin, RegionOrigin) or origin.nanos[0] < 0 or len(origin.nanos) > 1
        )

    def _local(self, origin: RegionOrigin) -> tuple[Captured, Region]:
        """The captured function that a region's operators come from, and its region there.

        Raises:
            PlanError: it has other operators at one of the sizes that run as one.
        """
        nanos = origin.nanos
        if nanos == (WHOLE,):
            assert self.once is not None
            return self.resolved.at[sum(self.sizes)], self.once.regions[origin.region]
        if len(nanos) == 1:
            return self.part(nanos[0]), self.cuts[nanos[0]].regions[origin.region]
        captured = self.resolved.at[self.joint_size(nanos)]
        return captured, self.joint_cut(nanos, captured.graph).regions[origin.region]

    def source(self, region: int) -> tuple[Captured, tuple[int, ...]]:
        """The captured function that a region's operators come from, and these; a merge has none."""
        origin = self.expanded.origins[region]
        if not isinstance(origin, RegionOrigin):
            return self.captured, ()
        captured, local = self._local(origin)
        return captured, local.ops

    def function(self, region: int, decision: Decision, second: Second | None = None) -> Function:
        """A region as a traceable function from its inputs to its outputs.

        ``second``, of one nano-batch's region: see ``regions.functions``.
        """
        origin, made = self.expanded.origins[region], self.pg.regions[region]
        if isinstance(origin, MergeSpec):
            reads = self.expanded.merge_reads[region]
            return split_functions.merged(origin, made.inputs, reads)
        assert isinstance(origin, RegionOrigin)
        captured, local = self._local(origin)
        if second is not None:
            kept = [local.outputs.index(self.expanded.sources[v][1]) for v in made.outputs]
            return split_functions.with_second(captured, made, local, origin.reads[0], kept, second)
        if decision.replace is None:
            inner = region_function(captured, local)
        elif isinstance(decision.replace, CudaKernel):
            raise no_kernel_for_parts(decision.replace, made)
        else:
            inner = replaced_function(decision.replace, captured, local, str(decision.source))
        put = self.single if len(origin.nanos) == 1 else self.several
        return put(inner, made, local, split_functions.ARRAYS)


def _check_merges(whole: Captured, parts: Sequence[Captured], specs: Sequence[OutSpec]) -> None:
    """That results have shapes and types that can be put together, whatever the user vouches for."""
    for number, (out, ok, spec) in enumerate(
        zip(whole.outputs, whole.output_is_value, specs, strict=True)
    ):
        if not ok or isinstance(spec, Parts | AsProved):
            continue
        types = {str(made.avals[made.outputs[number]].dtype) for made in parts}
        if types != {str(whole.avals[out].dtype)}:
            raise PlanError(
                f"{whole.graph.name!r}: result {number} is {whole.avals[out].dtype} for all rows and "
                f"{' or '.join(sorted(types))} for nano-batches{_made_at(whole, out)}. Give it the same type "
                "whatever the size, or use a strategy without nano-batches"
            )
        want = tuple(whole.avals[out].shape)
        shapes = [tuple(part.avals[part.outputs[number]].shape) for part in parts]
        if isinstance(spec, int):
            rows = sum(shape[spec] for shape in shapes)
            merged = {(*shape[:spec], rows, *shape[spec + 1 :]) for shape in shapes}
        else:
            merged = set(shapes)
        if merged != {want}:
            how = f"along axis {spec}" if isinstance(spec, int) else f"by out_axes={spec!r}"
            raise PlanError(
                f"{whole.graph.name!r}: result {number} of shape {list(want)} cannot be put together "
                f"{how} from nano-batches of shapes {', '.join(str(list(s)) for s in shapes)}"
                f"{_made_at(whole, out)}. Say with out_axes where its rows are, write its shape in terms of "
                "the arguments' shapes, or use a strategy without nano-batches"
            )
        if not isinstance(spec, Sum | Mean):
            continue
        dtype = whole.avals[out].dtype
        if not jnp.issubdtype(dtype, jnp.inexact if isinstance(spec, Mean) else jnp.number):
            kind = "floating point or complex" if isinstance(spec, Mean) else "numeric"
            raise PlanError(
                f"{whole.graph.name!r}: out_axes={spec!r} needs a {kind} result; result {number} is "
                f"{dtype}"
            )


def _made_at(whole: Captured, value: int) -> str:
    """Where a value is made, or ""."""
    ops = (op for op in whole.graph.ops if value in op.outputs)
    return "".join(f" ({op.kind}{placed(op.source)})" for op in ops)


def split(
    function: Splittable,
    sizes: tuple[int, ...],
    rules: Any,
    *,
    assume_separable: bool,
    fused: frozenset[str] = frozenset(),
    joins: Wanted = AUTOMATIC,
) -> SplitCapture:
    """Captures, proves, cuts and expands a function.

    Raises:
        SeparabilityError: the split would change what the function computes.
        PlanError, UnsupportedError: see ``batch.expansion.expand``.
    """
    resolved = function.resolve(sizes, assume_separable=assume_separable, joins=joins)
    whole = resolved.at[function.batch]
    joining = resolved.joining
    phases = ONE_PHASE if joining is None else joining.phases(whole.graph)
    cut = partition(resolved.at[max(sizes)].graph, rules, fused=fused, phases=phases)
    cut_at: dict[int, PartitionedGraph] = {}
    for size in dict.fromkeys(sizes):
        graph = resolved.at[size].graph
        moved = expand.transfer(cut, graph)
        if moved is None and joining is not None:
            raise _other_operators(whole, size)
        cut_at[size] = moved or partition(graph, rules, fused=fused)
    cuts = tuple(cut_at[size] for size in sizes)
    once = None if joining is None else expand.transfer(cut, whole.graph)
    if once is None and joining is not None:
        raise _other_operators(whole, function.batch)
    specs = tuple(
        spec for spec, ok in zip(resolved.out_specs, whole.output_is_value, strict=True) if ok
    )
    for size in sizes:
        if resolved.at[size].output_is_value != whole.output_is_value:
            raise SeparabilityError(
                f"{whole.graph.name!r} returns constants at one batch size and computed values at "
                "another"
            )
    parts = [resolved.at[size] for size in sizes]
    if joining is None:
        _check_merges(whole, parts, resolved.out_specs)
    proved = joining is not None or (
        resolved.proof is not None and resolved.proof.status == "separable"
    )
    expanded = expand.expand(
        whole.graph, cuts, sizes, resolved.in_specs, specs, joining=joining, once=once,
        same=plainly_same(resolved.states) if proved else frozenset(),
    )  # fmt: skip
    avals = [(whole if n < 0 else parts[n]).avals[local] for n, local in expanded.sources]
    outputs: list[Any] = []
    is_value: list[bool] = []
    produced = iter(expanded.pg.graph.outputs)
    for number, (ok, spec) in enumerate(
        zip(whole.output_is_value, resolved.out_specs, strict=True)
    ):
        of = parts if isinstance(spec, Parts) else [whole]
        outputs += [next(produced) if ok else part.outputs[number] for part in of]
        is_value += [ok] * len(of)
    captured = Captured(expanded.pg.graph, [], outputs, is_value, avals, whole.jaxpr)
    return SplitCapture(
        expanded, sizes, cuts, resolved.states, captured, resolved, function, assume_separable,
        once, joins,
    )  # fmt: skip


def _other_operators(whole: Captured, size: int) -> SeparabilityError:
    return SeparabilityError(
        f"{whole.graph.name!r} has other operators for {size} rows than for the other sizes, so nothing of "
        "it can run once for all nano-batches. Choose nano-batches of several rows each"
    )


class NotCompared(Exception):
    """A split is neither proved nor compared yet; never leaves the package."""

    def __init__(self, made: Any):
        super().__init__("not compared")
        self.entry = made


def unproven_error(made: Any, why: str) -> SeparabilityError:
    """The error for a split that is not proved, with the proof's findings and ways out."""
    try:
        made.split.resolved.proof.raise_if_refused()
    except SeparabilityError as error:
        return SeparabilityError(f"{error}\n{why}")
    return SeparabilityError(why)
