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

from dynaflow_xla.batch import orders
from dynaflow_xla.batch.proof import OutputProof, OutSpec, Proof, prove_output
from dynaflow_xla.batch.states import Finding, Keyed, Mixed, Refuse, Rows, Same, State, Unknown
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
    out_axes: Sequence[OutSpec],
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
    name = whole.graph.name
    captured = [whole, *parts.values()]
    sizes = (batch, *parts)
    for size in parts:
        if not 0 < size <= batch:
            raise SeparabilityError(
                f"{name!r}: a nano-batch has from 1 to {batch} rows, the whole batch; got {size}"
            )
    if not parts:
        raise SeparabilityError(f"{name!r}: the function must be captured at each nano-batch size")
    walker = Walker(sizes)
    bodies = [_body(c) for c in captured]
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
    outs, env = walker.run_all(bodies, ins)
    states = tuple(s.rows if isinstance(s := env[v], Keyed) else s for v in whole.variables)
    verdicts = [
        _verdict(captured, sizes, n, state, wanted)
        for n, (state, wanted) in enumerate(zip(outs, out_axes, strict=True))
    ]
    return Proof(
        name=name,
        batch=batch,
        sizes=tuple(parts),
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
            states.append(Mixed(Finding("mixed", f"closed-over constant {number}", str(error))))
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
    captured: Sequence[Captured], sizes: Sequence[int], number: int, state: State, wanted: OutSpec
) -> OutputProof:
    whole = captured[0]
    out = whole.outputs[number]
    if not whole.output_is_value[number]:
        shape, dtype, made_by = np.shape(out), np.asarray(out).dtype, Finding("mixed", "return", "")
    else:
        shape, dtype = whole.avals[out].shape, whole.avals[out].dtype
        producer = whole.graph.values[out].producer
        if producer < 0:
            made_by = Finding("mixed", "argument", "")
        else:
            op = whole.graph.ops[producer]
            made_by = Finding("mixed", op.kind, "", op.source, op.scope)
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
        state = Mixed(Finding("mixed", blame.op, reason, blame.source, blame.scope))
    if not isinstance(state, Mixed | Unknown) and not fits(state, all_shapes, sizes):
        reason = "has other shapes than its state says"
        state = Unknown(Finding("unproven", made_by.op, reason, made_by.source))
    inexact = jax.dtypes.issubdtype(dtype, np.inexact)
    return prove_output(number, state, wanted, rank=len(shape), inexact=inexact, made_by=made_by)
