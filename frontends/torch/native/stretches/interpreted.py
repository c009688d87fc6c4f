"""Operators that run one after another without Python between them.

Each call of an operator from Python gives the interpreter lock back and takes it again: two lanes of small
operators spend their time handing it to each other, and even one lane reads every argument anew. So
what can be is written as a graph of PyTorch's own interpreter, which a lane calls once. The operators and
their order are the same, hence the values bit for bit.

Not written: operators that write into their arguments, whose results are no tensors, that are Python
themselves (recurrent layers are written as PyTorch's operators), or whose values are large. A call that
fails runs again operator by operator in Python, on the same inputs, which raises what the original raises
and tells where. On CUDA a plan is captured as a graph, or launches from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import interpreter, operators
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.rewrite import recurrent, strides

_LEAST = 3
"""So many operators at least: a call costs as much as one or two operators from Python. Or one recurrent
layer, which is several."""

_EXISTS = interpreter.interpreter_exists()

_LARGE = 1 << 18
"""Bytes. What reads or makes more takes long enough that Python does not matter, and its memory is better
not taken between the small pieces of the interpreter's: those come from the same heap and cut up what
large values leave behind, so that the next one of the same size does not fit (seen: a process of
2.9 GB instead of 1.5, with as much in use)."""

_LARGE_LAYER = 1 << 22
"""The same of a recurrent layer, its weights included: its many short steps run without Python in any case,
but on two lanes each waits for the other's interpreter lock before and after, some 100 us a call."""

_HELD_BYTES = 1 << 20
_HELD_OPERATORS = 32
"""Inputs are held until a call ends, so calls that hold much of them are kept this short."""


class FxProgram:
    """Operators to be interpreted, collected one by one.

    Attributes:
        inputs: Values that it takes, in order.
        made: Values that its operators make, in order.
        drawn: Values among these without which a draw of random numbers would be left out.

    Args:
        captured: The graph that they are of.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._writer = interpreter.Writer()
        self._values: dict[int, Any] = {}
        self._bytes = 0
        self._operators = 0
        self._layers = False
        self.inputs: list[int] = []
        self.made: list[int] = []
        self.drawn: set[int] = set()

    def full(self) -> bool:
        """Whether what comes next is better left to another run."""
        return self._operators >= _HELD_OPERATORS and self._bytes >= _HELD_BYTES

    def pays(self) -> bool:
        """Whether this is faster than from Python."""
        return self._layers or self._operators >= _LEAST

    def add(self, payload: Payload) -> bool:
        """Writes an operator; False if it cannot be, and then nothing else can come after."""
        target = payload.target
        if not _EXISTS or self._captured.device.type != "cpu":
            return False
        layer = recurrent.is_by_aten(target, payload.args)
        if type(target) is not operators.Operator or not (
            layer or recurrent.direct(target) is target
        ):
            return False
        values, examples = self._captured.graph.values, self._captured.examples
        read = payload.reads()
        large = _LARGE_LAYER if layer else _LARGE
        if any(values[v].bytes > large for v in (*read, *payload.outputs) if v is not None):
            return False
        try:
            for value in read:
                if value not in self._values:
                    self._values[value] = self._writer.input(f"v{value}", examples[value])
                    self.inputs.append(value)
                    self._bytes += values[value].bytes
            results = self._results(payload)
        except interpreter.Unwritable:
            return False
        for output, result in zip(payload.outputs, results, strict=True):
            if output is not None:
                self._values[output] = result
                self.made.append(output)
        if torch.Tag.nondeterministic_seeded in target.tags:
            self.drawn.update(self.made[-1:])
        self._operators += 1
        self._layers |= layer
        return True

    def function(self, name: str, results: Sequence[int]) -> Callable[..., Any]:
        """What runs them: from ``inputs`` to one tensor for each of ``results``, and a list to be dropped."""
        return self._writer.function(name, [self._values[v] for v in results])

    def _results(self, payload: Payload) -> Sequence[Any]:
        """Writes what makes an operator's results."""
        target, count = strides.by_values(payload.target), len(payload.outputs)
        if not recurrent.is_by_aten(target, payload.args):
            values = self._captured.graph.values
            if strides.by_format(target) and values[payload.args[0].value].shape[0] == 1:
                raise interpreter.Unwritable  # what it gets depends on strides
            return self._writer.operator(target, payload.args, payload.kwargs, self._value, count)

        def call(operator: Any, *args: Any) -> Any:
            results = len(operator._schema.returns)
            made = self._writer.operator(operator, args, {}, self._value, results)
            return made if results > 1 else made[0]

        examples, _ = payload.mapped(lambda ref: self._captured.examples[ref.value])
        return recurrent.by_aten(call, payload.args, examples)

    def _value(self, arg: Any) -> Any:
        if interpreter.is_value(arg):
            return arg
        return self._values[arg.value] if isinstance(arg, Ref) else None
