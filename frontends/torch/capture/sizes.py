"""Open sizes of a captured graph: what they are at a call, and the graph with them put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch._compat.modes import FakeTensorMode
from dynaflow_xla.frontends.torch.capture import costs
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.ir.graph import Graph, Operator

Symbol = Any
Bindings = Mapping[Symbol, int]


def expression(size: Any) -> Any:
    """The symbolic expression of a size; the number itself if it is one."""
    node = getattr(size, "node", None)
    return size if node is None else node.expr


def symbols_of(size: Any) -> set[Symbol]:
    """Symbols in a size."""
    return set(getattr(expression(size), "free_symbols", ()))


@dataclass(frozen=True)
class Binding:
    """Where a symbol's value is found at a call: an input (a number), or one of its dimensions.

    The size there is ``scale`` times the symbol.
    """

    symbol: Symbol
    position: int
    dim: int
    scale: int

    def read(self, inputs: Sequence[Any]) -> int:
        """The value at a call with these inputs."""
        given = inputs[self.position]
        size = given if self.dim < 0 else given.shape[self.dim]
        return int(size) // self.scale


def unread(captured: Captured) -> dict[Symbol, int]:
    """Symbols that are no size and that nothing computes with: numbers of the capture for them."""
    graph = captured.graph
    inputs, read = set(graph.inputs), {*graph.consumers(), *graph.outputs}
    alone = {v for v in inputs - read if isinstance(captured.examples[v], torch.SymInt)}
    if not alone:
        return {}
    needed: set[Symbol] = set()
    for value in (v.id for v in graph.values if v.id not in alone):
        example = captured.examples[value]
        sizes = [example]
        if isinstance(example, torch.Tensor):
            sizes = [*example.shape, *example.stride(), example.storage_offset()]
        needed.update(symbol for size in sizes for symbol in symbols_of(size))
    examples = [captured.examples[v] for v in alone]
    found = {symbol: costs.hint(x) for x in examples for symbol in symbols_of(x)}
    return {symbol: number for symbol, number in found.items() if symbol not in needed}


def bindings_of(captured: Captured) -> tuple[Binding, ...]:
    """How to read every symbol that the inputs' sizes hold, and that something depends on."""
    found: dict[Symbol, Binding] = {}
    left_out = unread(captured)
    for position, value in enumerate(captured.graph.inputs):
        example = captured.examples[value]
        sizes = list(example.shape) if isinstance(example, torch.Tensor) else [example]
        for dim, size in enumerate(sizes):
            symbols = symbols_of(size) if isinstance(size, torch.SymInt) else set()
            if len(symbols) != 1:
                continue
            (symbol,) = symbols
            if symbol in left_out:
                continue
            scale = expression(size) / symbol
            if not scale.is_Integer:
                continue
            place = dim if isinstance(example, torch.Tensor) else -1
            made = Binding(symbol, position, place, int(scale))
            if symbol not in found or (found[symbol].scale != 1 and made.scale == 1):
                found[symbol] = made
    return tuple(found.values())


class NoSize(UnsupportedError):
    """An expression has no value at some sizes, as it divides by zero there."""


class Evaluator:
    """Sizes as numbers, each expression once."""

    def __init__(self, values: Bindings) -> None:
        self.values = dict(values)
        self._known: dict[Any, Any] = {}

    def __call__(self, size: Any) -> Any:
        """The number; None if some symbol has no value (it comes from data).

        Raises:
            NoSize: there is none at these sizes.
        """
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        expr = expression(size)
        if expr not in self._known:
            try:
                made = expr.xreplace(self.values) if hasattr(expr, "xreplace") else expr
            except ZeroDivisionError:
                at = ", ".join(f"{symbol}={value}" for symbol, value in self.values.items())
                raise NoSize(f"a size in it, {expr}, divides by zero for {at}") from None
            if getattr(made, "free_symbols", None):
                self._known[expr] = None
            elif isinstance(size, torch.SymInt):
                self._known[expr] = int(made)
            elif isinstance(size, torch.SymFloat):
                self._known[expr] = float(made)
            else:
                self._known[expr] = bool(made)
        return self._known[expr]

    def shape(self, sizes: Sequence[Any], what: str) -> tuple[int, ...]:
        """Sizes of a tensor.

        Raises:
            UnsupportedError: one comes from data.
        """
        made = tuple(self(n) for n in sizes)
        if None in made:
            raise UnsupportedError(
                f"the shape of {what} depends on values in tensors; such a graph cannot be split"
            )
        return made


def _is_number(example: Any) -> bool:
    return isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


@dataclass
class Sized:
    """A captured graph with numbers for its open sizes.

    Attributes:
        captured: The graph, without its numbers among inputs and operators; values keep their ids.
        numbers: Value id -> number, for what is put in.
    """

    captured: Captured
    numbers: dict[int, Any]


def at_sizes(captured: Captured, values: Bindings, scale: float, rows: frozenset[int]) -> Sized:
    """Puts numbers in for open sizes.

    Args:
        captured: The graph.
        values: Symbol -> number.
        scale: How much more work operators have that touch one of ``rows``.
        rows: Values that hold rows of the batch.

    Raises:
        UnsupportedError: a shape depends on data.
    """
    evaluate = Evaluator({**unread(captured), **values})
    graph = captured.graph
    numbers: dict[int, Any] = {}
    made_values = []
    for value in graph.values:
        example = captured.examples[value.id]
        if isinstance(example, torch.Tensor):
            producer = graph.ops[value.producer] if value.producer >= 0 else None
            what = f"what {producer.kind}{producer.at} makes" if producer else "an argument"
            shape = evaluate.shape(example.shape, what)
            size = example.element_size()
            for n in shape:
                size *= n
            made_values.append(replace(value, shape=shape, bytes=size))
            continue
        if _is_number(example) and (number := evaluate(example)) is not None:
            numbers[value.id] = number
        made_values.append(value)
    ops: list[Operator] = []
    least_ns = costs.least_ns(captured.device)
    for op in graph.ops:
        payload: Payload = op.payload
        data = [v for v in op.inputs if v not in numbers]
        if (op.outputs and all(v in numbers for v in op.outputs)) or (not op.outputs and not data):
            continue  # a number, or a check of sizes, which the capture made sure of

        def put(ref: Ref) -> Any:
            return numbers.get(ref.value, ref)

        args, kwargs = payload.mapped(put)
        factor = scale if any(v in rows for v in (*op.inputs, *op.outputs)) else 1.0
        floor = min(op.cost_ns, least_ns)
        ops.append(
            replace(
                op, index=len(ops), inputs=tuple(data), flops=op.flops * factor,
                bytes_moved=int(op.bytes_moved * factor), cost_ns=floor + (op.cost_ns - floor) * factor,
                spread=op.spread.times(factor), payload=replace(payload, args=args, kwargs=kwargs),
            )
        )  # fmt: skip
    producers = {v: op.index for op in ops for v in op.outputs}
    kept = [n for n, v in enumerate(graph.inputs) if v not in numbers]
    made = Graph(
        name=graph.name,
        values=tuple(replace(v, producer=producers.get(v.id, -1)) for v in made_values),
        ops=tuple(ops),
        inputs=tuple(graph.inputs[n] for n in kept),
        outputs=tuple(v for v in graph.outputs if v not in numbers),
        input_names=tuple(graph.input_names[n] for n in kept),
        part=graph.part,
    )
    outputs = [
        ("const", numbers[out]) if isinstance(out, int) and out in numbers else out
        for out in captured.outputs
    ]
    result = replace(
        captured, graph=made, outputs=outputs, symbolic=False, notes=[],
        examples=_Examples(captured.examples, evaluate),
    )  # fmt: skip
    return Sized(result, numbers)


class _Examples(dict[int, Any]):
    """Example values at these sizes, without data, made when asked for."""

    def __init__(self, given: Mapping[int, Any], evaluate: Evaluator) -> None:
        super().__init__()
        self._given, self._evaluate = given, evaluate
        self._mode = FakeTensorMode()  # tensors of several cannot meet

    def __missing__(self, value: int) -> Any:
        example = self._given[value]
        if isinstance(example, torch.Tensor):
            with self._mode:
                made = StridedLayout.of(example, self._evaluate).empty()
                self[value] = operators.kept_alike(made, example)
        else:
            number = self._evaluate(example) if _is_number(example) else example
            self[value] = costs.hint(example) if number is None else number
        return self[value]


@dataclass(frozen=True)
class StridedLayout:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(example: torch.Tensor, evaluate: Evaluator) -> StridedLayout:
        """The layout of an example at the evaluator's sizes."""
        shape = evaluate.shape(example.shape, "a tensor")
        strides = evaluate.shape(example.stride(), "a tensor")
        offset = evaluate(example.storage_offset()) or 0
        return StridedLayout(shape, strides, offset, example.dtype, example.device)

    def of_type(self, dtype: torch.dtype) -> StridedLayout:
        """The same for another type of elements."""
        return self if dtype is self.dtype else replace(self, dtype=dtype)

    def empty(self) -> torch.Tensor:
        """A new tensor of this layout."""
        if not self.offset:
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=self.device
            )
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        room = torch.empty(self.offset + last + 1, dtype=self.dtype, device=self.device)
        return room.as_strided(self.shape, self.strides, self.offset)
