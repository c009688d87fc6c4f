"""Whether a captured graph can run at the sizes of a nano-batch: its operators, one by one, without data.

A capture has the batch as an open size, but an operator may still hold something of the whole batch: a
tensor that is not cut, an index, a size that a rule was not told. Found here it is an error of the plan
that names the operator, and no error of a kernel in the middle of a call.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from dynaflow_xla.batch.states import Obstacle
from dynaflow_xla.frontends.torch._compat import failures
from dynaflow_xla.frontends.torch._compat.modes import FakeTensorMode
from dynaflow_xla.frontends.torch.capture.captured import Payload, Ref
from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, Sized, StridedLayout
from dynaflow_xla.ir.graph import Operator


def first_failure(sized: Sized, whole: Sized, once: Container[int] = ()) -> Obstacle | None:
    """The first operator that cannot run at a nano-batch's sizes, or makes another shape there.

    Args:
        sized: The graph at a nano-batch's sizes.
        whole: The graph at the whole batch's. What fails there too says nothing: operators that cannot
            run without data, kernels for fake tensors that know less than the real ones.
        once: Values of operators that run on the whole batch.
    """
    check = _ShapeCheck(sized)
    for op in sized.captured.graph.ops:
        if any(v in once for v in op.outputs) or not _touched(op, sized, whole):
            continue
        reason = check.failure(op)
        if reason and not _ShapeCheck(whole).failure(whole.captured.graph.ops[op.index]):
            return Obstacle("mixed", op.kind, reason, op.source, op.scope, final=True)
    return None


def _touched(op: Operator, sized: Sized, whole: Sized) -> bool:
    """Whether an operator sees other sizes than in the whole batch."""
    here, there = sized.captured.graph.values, whole.captured.graph.values
    if any(here[v].shape != there[v].shape for v in (*op.inputs, *op.outputs)):
        return True
    payload: Payload = op.payload
    other: Payload = whole.captured.graph.ops[op.index].payload
    return bool(payload.args != other.args or payload.kwargs != other.kwargs)


_UNSAID: tuple[type[BaseException], ...] = (*failures.says_nothing(), NotImplementedError)


class _ShapeCheck:
    """Operators of a graph on tensors without data."""

    def __init__(self, sized: Sized) -> None:
        self.captured = sized.captured
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.made: dict[int, Any] = {}

    def failure(self, op: Operator) -> str:
        """Why an operator cannot run, or what it makes that it should not; empty if it can."""
        payload: Payload = op.payload
        if self.captured.graph.values[op.outputs[-1] if op.outputs else 0].dtype == "token":
            return ""  # drawn for the whole batch
        try:
            args, kwargs = payload.mapped(self._value)
            with self.mode, torch.no_grad():
                out = payload.target(*args, **kwargs)
        except _UNSAID:
            return ""
        except Exception as error:
            rows = ", ".join(self._shapes(op))
            return f"cannot run on a nano-batch ({rows}): {str(error).splitlines()[0].rstrip('.')}"
        results = out if isinstance(out, (list, tuple)) else [out]
        for value, result in zip(payload.outputs, results, strict=False):
            if value is None or not isinstance(result, torch.Tensor):
                continue
            wanted = self.captured.graph.values[value].shape
            if tuple(result.shape) != tuple(wanted):
                return (
                    f"makes {list(result.shape)} of a nano-batch where the rest of the graph counts on "
                    f"{list(wanted)}"
                )
        return ""

    def _shapes(self, op: Operator) -> list[str]:
        values = self.captured.graph.values
        return [str(list(values[v].shape)) for v in op.inputs if v in self.made]

    def _value(self, ref: Ref) -> Any:
        if ref.value not in self.made:
            example = self.captured.examples[ref.value]
            if isinstance(example, torch.Tensor):
                with self.mode:
                    example = StridedLayout.of(example, Evaluator({})).empty()
            self.made[ref.value] = example
        return self.made[ref.value]
