"""Proves that a captured function can run nano-batch by nano-batch.

The function is captured at the batch size and at each nano-batch size, because a batch size can be baked
into shapes, literals and constants; ``rules`` walks all traces side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla.batch.expansion.specs import AS_PROVED, AsProved
from dynaflow_xla.batch.joins import Joiner, Joining
from dynaflow_xla.batch.proof import OutAxis, OutputProof, Proof, prove_output
from dynaflow_xla.batch.row_orders import orders
from dynaflow_xla.batch.states import (
    Mixed,
    Obstacle,
    Partial,
    Refuse,
    Rows,
    Same,
    State,
    Unknown,
    as_rows,
)
from dynaflow_xla.errors import SeparabilityError
from dynaflow_xla.frontends.jax.batch.rules import equality
from dynaflow_xla.frontends.jax.batch.rules.walk import RULES, Body, Walker, fits
from dynaflow_xla.frontends.jax.capture.capture import Captured


def covered() -> frozenset[str]:
    """Names of the primitives that have a rule."""
    return frozenset(RULES)


def prove(
    whole: Captured,
    parts: Mapping[int, Captured],
    *,
    batch: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[OutAxis],
    consts: Sequence[Sequence[Any]] = (),
) -> Proof:
    """Proves which outputs follow from those of the nano-batches, and how.

    Args:
        whole: The function, captured at the batch size.
        parts: Nano-batch size -> the same function captured at it. The sizes of the split are among these.
        batch: Rows of the whole batch.
        in_axes: For each input of the captured graphs that is no constant: its batch axis, or None.
        out_axes: For each flat output: axis, ``Sum()``, ``Mean()`` or None.
        consts: For ``whole``, then for each of ``parts`` in order: the values of the leading inputs
            that are closed-over constants.

    Returns:
        The proof; it is never wrong about "separable", and says for all else which operator is to blame.

    Raises:
        SeparabilityError: the request itself makes no sense (no batched input, an axis out of range, a
            nano-batch that is no part of the batch).
    """
    captured = [whole, *parts.values()]
    sizes = (batch, *parts)
    ins = _checked_inputs(captured, sizes, in_axes, out_axes, consts)
    return _proof(captured, sizes, ins, out_axes, None)


def prove_joined(
    whole: Captured,
    parts: Mapping[int, Captured],
    *,
    batch: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[OutAxis],
    consts: Sequence[Sequence[Any]] = (),
    forced: Mapping[int, str] | None = None,
) -> tuple[Proof, Joining]:
    """As ``prove``, where operators that mix rows run once, on the rows put together again.

    ``forced`` operators run once whatever is proved of them; each with the reason.
    """
    captured = [whole, *parts.values()]
    sizes = (batch, *parts)
    ins = _checked_inputs(captured, sizes, in_axes, out_axes, consts)
    return _with_joins(captured, sizes, ins, out_axes, forced or {})


def prove_pass(
    captured: Sequence[Captured],
    sizes: Sequence[int],
    ins: Sequence[State],
    forced: Mapping[int, str] | None = None,
) -> tuple[Proof, Joining]:
    """Proves a derivative's pass, whose results are to be the whole batch's own values.

    Args:
        captured: The pass at the batch size, then at those of the nano-batches.
        sizes: These sizes.
        ins: What is known of its inputs.
        forced: As for ``prove_joined``.
    """
    out_axes = [AS_PROVED] * len(captured[0].outputs)
    return _with_joins(captured, tuple(sizes), ins, out_axes, forced or {})


def _with_joins(
    captured: Sequence[Captured],
    sizes: tuple[int, ...],
    ins: Sequence[State],
    out_axes: Sequence[OutAxis | AsProved],
    forced: Mapping[int, str],
) -> tuple[Proof, Joining]:
    graph = captured[0].graph
    force = dict(forced)
    early: frozenset[int] = frozenset()

    def shapes(value: int) -> list[tuple[int, ...]]:
        return [tuple(c.avals[value].shape) for c in captured]

    while True:
        joiner = Joiner(graph, shapes, sizes, force, early)
        joiner.start(dict(zip(graph.inputs, ins, strict=True)))
        proof = _proof(captured, sizes, ins, out_axes, joiner)
        more = joiner.again - early
        blamed = {}
        for output in proof.outputs:
            value = captured[0].outputs[output.index]
            if output.status == "separable" or not captured[0].output_is_value[output.index]:
                continue
            if isinstance(output.state, Partial) and not isinstance(output.wanted, int):
                more |= {value}
            elif not isinstance(output.state, Mixed | Unknown) and not output.suggestion:
                blamed[graph.values[value].producer] = (
                    f"{output.finding}" if output.finding is not None else "a result"
                )
        blamed = {op: why for op, why in blamed.items() if op >= 0 and op not in force}
        if not more - early and not blamed:
            return proof, joiner.joining()
        early |= more
        force.update(blamed)


def _checked_inputs(
    captured: Sequence[Captured],
    sizes: Sequence[int],
    in_axes: Sequence[int | None],
    out_axes: Sequence[OutAxis],
    consts: Sequence[Sequence[Any]],
) -> list[State]:
    """States of the inputs, if the request makes sense; see ``prove``."""
    whole, parts, batch = captured[0], sizes[1:], sizes[0]
    name = whole.graph.name
    for size in parts:
        if not 0 < size <= batch:
            raise SeparabilityError(
                f"{name!r}: a nano-batch has from 1 to {batch} rows, the whole batch; got {size}"
            )
    if not parts:
        raise SeparabilityError(f"{name!r}: the function must be captured at each nano-batch size")
    consts = consts or [()] * len(captured)
    ins = _constants(whole, consts, sizes)
    ins += _inputs(captured, in_axes, sizes, len(ins))
    count = len(whole.outputs)
    if len(out_axes) != count:
        raise SeparabilityError(
            f"{name!r}: out_axes must have one entry for each of {count} outputs; got {len(out_axes)}"
        )
    if any(
        len(c.graph.inputs) != len(whole.graph.inputs) or len(c.outputs) != count for c in captured
    ):
        raise SeparabilityError(
            f"{name!r} has other inputs, constants or outputs when the batch size is another"
        )
    return ins


def _proof(
    captured: Sequence[Captured],
    sizes: tuple[int, ...],
    ins: Sequence[State],
    out_axes: Sequence[OutAxis | AsProved],
    joiner: Joiner | None,
) -> Proof:
    whole = captured[0]
    walker = Walker(sizes, joiner=joiner)
    outs, env = walker.run_all([_body(c) for c in captured], ins)
    states = tuple(as_rows(env[v]) for v in whole.variables)
    verdicts = [
        _verdict(captured, sizes, n, state, wanted, joiner)
        for n, (state, wanted) in enumerate(zip(outs, out_axes, strict=True))
    ]
    return Proof(
        name=whole.graph.name,
        batch=sizes[0],
        sizes=sizes[1:],
        states=states,
        outputs=tuple(verdicts),
        findings=tuple(dict.fromkeys(v.finding for v in verdicts if v.finding is not None)),
        effects=tuple(walker.effects),
    )


def _body(captured: Captured) -> Body:
    graph = captured.graph
    outvars = [
        captured.variables[out] if is_value else jcore.Literal(out, jax.typeof(out))
        for out, is_value in zip(captured.outputs, captured.output_is_value, strict=True)
    ]
    invars = [captured.variables[v] for v in graph.inputs]
    return Body(invars, [op.payload for op in graph.ops], outvars, graph.ops)


def _constants(
    whole: Captured, consts: Sequence[Sequence[Any]], sizes: Sequence[int]
) -> list[State]:
    if len(consts) != len(sizes) or len({len(c) for c in consts}) != 1:
        raise SeparabilityError(
            f"{whole.graph.name!r} closes over other constants when the batch size is another: "
            f"{', '.join(str(len(c)) for c in consts)}"
        )
    states: list[State] = []
    for number, values in enumerate(zip(*consts, strict=True)):
        try:
            states.append(equality.constant_state(values, sizes))
        except Refuse as error:
            states.append(Mixed(Obstacle("mixed", f"closed-over constant {number}", str(error))))
    return states


def _inputs(
    captured: Sequence[Captured], in_axes: Sequence[int | None], sizes: Sequence[int], skip: int
) -> list[State]:
    whole = captured[0].graph
    numbers = whole.inputs[skip:]
    if len(in_axes) != len(numbers):
        raise SeparabilityError(
            f"{whole.name!r}: in_axes must have one entry for each of {len(numbers)} inputs; "
            f"got {len(in_axes)}"
        )
    if all(axis is None for axis in in_axes):
        raise SeparabilityError(
            f"{whole.name!r}: in_axes names no batched input, so there is no batch"
        )
    states: list[State] = []
    for number, axis in enumerate(in_axes):
        shapes_ = [c.graph.values[c.graph.inputs[skip + number]].shape for c in captured]
        rank = len(shapes_[0])
        if axis is not None and not -rank <= axis < rank:
            raise SeparabilityError(
                f"{whole.name!r}: in_axes of input {number} must be an axis of its shape {shapes_[0]}; "
                f"got {axis}"
            )
        state: State = Same() if axis is None else Rows(axis % rank)
        if not fits(state, shapes_, sizes):
            raise SeparabilityError(
                f"{whole.name!r}: input {number} with batch axis {axis} must have "
                f"{', '.join(map(str, sizes))} rows in its traces and equal other dimensions; "
                f"got shapes {', '.join(map(str, shapes_))}"
            )
        states.append(state)
    return states


def _verdict(
    captured: Sequence[Captured],
    sizes: Sequence[int],
    number: int,
    state: State,
    wanted: OutAxis | AsProved,
    joiner: Joiner | None,
) -> OutputProof:
    whole = captured[0]
    out = whole.outputs[number]
    if joiner is not None and not isinstance(state, Mixed | Unknown):
        # What is whole is the original's value, however it was to be put together.
        if whole.output_is_value[number] and joiner.is_whole(out):
            return OutputProof(number, state, None, "separable")
        if isinstance(wanted, AsProved):
            if not whole.output_is_value[number] or joiner.can_be_whole(out):
                return OutputProof(number, state, None, "separable")
            finding = Obstacle("mixed", "return", "its rows are no part of the whole batch's")
            return OutputProof(number, state, None, "mixed", finding)
    if isinstance(wanted, AsProved):
        wanted = None
    if not whole.output_is_value[number]:
        shape, dtype, made_by = (
            np.shape(out),
            np.asarray(out).dtype,
            Obstacle("mixed", "return", ""),
        )
    else:
        shape, dtype = whole.avals[out].shape, whole.avals[out].dtype
        producer = whole.graph.values[out].producer
        if producer < 0:
            made_by = Obstacle("mixed", "argument", "")
        else:
            op = whole.graph.ops[producer]
            made_by = Obstacle("mixed", op.kind, "", op.source, op.scope)
    all_shapes = [
        tuple(c.avals[c.outputs[number]].shape)
        if c.output_is_value[number]
        else np.shape(c.outputs[number])
        for c in captured
    ]
    try:
        state = orders.plain(state)
    except Refuse as error:
        blame = error.origin or made_by
        reason = "sorts the batch, and the result is in that order" if error.origin else str(error)
        state = Mixed(Obstacle("mixed", blame.op, reason, blame.source, blame.scope))
    if not isinstance(state, Mixed | Unknown) and not fits(state, all_shapes, sizes):
        reason = "has other shapes than its state says"
        state = Unknown(Obstacle("unproven", made_by.op, reason, made_by.source))
    inexact = jax.dtypes.issubdtype(dtype, np.inexact)
    return prove_output(number, state, wanted, rank=len(shape), inexact=inexact, made_by=made_by)
