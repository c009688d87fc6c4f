"""Means whose number of terms depends on data, as a sum and a count.

Cross entropy as a mean divides by the weights of those targets that are not ``ignore_index``. The sum and
the divisor are totals over the batch; their quotient is not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dynaflow_xla.frontends.torch.batch.walking.walk import arguments
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.ir.graph import Operator

_KINDS = ("nll_loss_forward", "nll_loss2d_forward")
_MEAN, _SUM = 1, 2


def as_quotients(captured: Captured) -> Captured:
    """The graph with each such mean as its sum, and the division that the operator does itself."""
    graph = captured.graph
    if not any(_is_mean(op) for op in graph.ops):
        return captured
    values, examples = list(graph.values), dict(captured.examples)
    ops: list[Operator] = []

    def add(op: Operator) -> None:
        ops.append(replace(op, index=len(ops)))
        for value in op.outputs:
            values[value] = replace(values[value], producer=len(ops) - 1)

    for op in graph.ops:
        if not _is_mean(op):
            add(op)
            continue
        payload: Payload = op.payload
        mean, count = payload.outputs
        assert mean is not None
        made = []
        for _ in range(1 if count is not None else 2):
            made.append(len(values))
            values.append(replace(values[mean], id=len(values)))
            examples[made[-1]] = captured.examples[mean]
        total = made[0]
        divisor = count if count is not None else made[1]
        given = {**arguments(payload), "reduction": _SUM}
        outputs = (total, divisor)
        summed = Payload(payload.target, tuple(given.values()), {}, outputs, True)
        add(replace(op, outputs=outputs, payload=summed))
        quotient = Payload(
            torch.ops.aten.div.Tensor, (Ref(total), Ref(divisor)), {}, (mean,), False
        )
        add(
            replace(
                op, kind="div", inputs=outputs, outputs=(mean,), flops=1, bytes_moved=12,
                cost_ns=0.0, payload=quotient,
            )
        )  # fmt: skip
    return replace(
        captured,
        graph=replace(graph, values=tuple(values), ops=tuple(ops)),
        examples=examples,
    )


def _is_mean(op: Operator) -> bool:
    return op.kind in _KINDS and arguments(op.payload)["reduction"] == _MEAN
