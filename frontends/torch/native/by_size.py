"""A captured graph with open sizes: one capture, plans by class of sizes.

Eager regions run at any size; only the plan depends on sizes, by the costs that the strategy sees. So
there is a plan for each power of two of each size. Compiled regions are for fixed sizes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture import costs
from dynaflow_xla.frontends.torch.capture.capture import OPEN_SIZES
from dynaflow_xla.frontends.torch.capture.captured import Captured, Ref
from dynaflow_xla.frontends.torch.capture.for_sizes import ForSizes, boxed
from dynaflow_xla.frontends.torch.capture.sizes import (
    Binding,
    Evaluator,
    Symbol,
    at_sizes,
    bindings_of,
)
from dynaflow_xla.frontends.torch.native.entry import NativeEntry, whole_entry
from dynaflow_xla.settings import Settings

MAX_CLASSES = 32
"""So many plans are kept: those used last."""


@dataclass
class BySize:
    """A graph whose sizes may change.

    Attributes:
        captured: The graph.
        options: What the user asked for.
        kind: "inference", "forward" or "backward".
        batch: Rows of the batch, where it is too small to be split, or not in this graph.
        warn: Tells the user of something.
        backward: Of a forward: the graph of its backward.
    """

    captured: Captured
    options: Settings
    kind: str
    batch: int | None
    warn: Callable[[str], None]
    bindings: tuple[Binding, ...]
    backward: Any = None
    _plans: OrderedDict[tuple[int, ...], NativeEntry] = field(default_factory=OrderedDict)
    _fixed: ForSizes[NativeEntry] = field(default_factory=ForSizes)
    _warned: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def resolve(self, inputs: Sequence[Any]) -> NativeEntry:
        """The plan for the sizes of these inputs."""
        return self.at({b.symbol: b.read(inputs) for b in self.bindings})

    def at(self, values: dict[Symbol, int]) -> NativeEntry:
        """The plan for these sizes."""
        if self.options.compiler != "eager":
            key = tuple(values.values())
            found = self._fixed.get(key, lambda: self._compiled(values))
            if found is not None:
                return found
            self._tell_once()
        key = tuple(value.bit_length() for value in values.values())
        with self._lock:
            made = self._plans.get(key)
            if made is None:
                made = self._plans[key] = self._planned(values)
                if len(self._plans) > MAX_CLASSES:
                    self._plans.popitem(last=False)
            elif len(self._plans) > MAX_CLASSES // 2:  # else none has to go soon
                self._plans.move_to_end(key)
            return made

    def release(self) -> None:
        """Gives the memory of graphs back; later calls make them anew."""
        for made in (*self._plans.values(), *self._fixed.kept()):
            made.release()

    def _planned(self, values: dict[Symbol, int]) -> NativeEntry:
        options = replace(self.options, compiler="eager", compiler_options=None)
        made = whole_entry(estimated_at(self.captured, values), options, self.kind, self.batch)
        made.later = lambda: self._backward_at(values)
        return made

    def _compiled(self, values: dict[Symbol, int]) -> NativeEntry:
        """With regions compiled for these sizes."""
        sized = at_sizes(self.captured, values, 1.0, frozenset())
        kept = [n for n, v in enumerate(self.captured.graph.inputs) if v not in sized.numbers]
        sized.captured.notes.append(self._fixed.describe("regions are compiled"))
        made = whole_entry(sized.captured, self.options, self.kind, self.batch)

        def prepare(inputs: Sequence[Any]) -> list[Any]:
            given = boxed(inputs)
            return [given[n] for n in kept]

        made.prepare = prepare
        made.later = lambda: self._backward_at(values)
        return made

    def _backward_at(self, values: dict[Symbol, int]) -> Any:
        other = self.backward
        if not isinstance(other, BySize):
            return other
        if any(b.symbol not in values for b in other.bindings):
            return None
        return other.at({b.symbol: values[b.symbol] for b in other.bindings})

    def _tell_once(self) -> None:
        if not self._warned:
            self._warned = True
            self.warn(
                f"{self.captured.graph.name!r} has come in many sizes, and compiler="
                f"{self.options.compiler!r} compiles for fixed ones: "
                f"{self._fixed.describe('regions are compiled')}"
            )


def of_graph(
    captured: Captured, options: Settings, kind: str, batch: int | None, warn: Callable[[str], None]
) -> BySize | None:
    """A graph with open sizes that its inputs tell; None if there are none of those."""
    bindings = bindings_of(captured)
    if not captured.symbolic or not bindings:
        return None
    made = BySize(captured, options, kind, batch, warn, bindings)
    examples = [captured.examples[value] for value in captured.graph.inputs]
    made.at(
        {b.symbol: _hint_of(b, examples) for b in bindings}
    )  # what cannot be planned fails here
    return made


def _hint_of(binding: Binding, examples: Sequence[Any]) -> int:
    example = examples[binding.position]
    size = example if binding.dim < 0 else example.shape[binding.dim]
    return costs.hint(size) // binding.scale


def estimated_at(captured: Captured, values: dict[Symbol, int]) -> Captured:
    """The graph with the shapes and costs that it has at these sizes; it still runs at any."""
    evaluate = Evaluator(values)

    def number(size: Any) -> Any:
        found = evaluate(size)
        return costs.hint(size) if found is None else found

    examples: dict[int, Any] = {}
    moved: set[int] = set()
    for value, example in captured.examples.items():
        examples[value] = example
        if isinstance(example, torch.SymInt):
            examples[value] = number(example)
            moved.add(value)
        elif isinstance(example, torch.Tensor) and any(
            isinstance(n, torch.SymInt) for n in example.shape
        ):
            shape = [number(n) for n in example.shape]
            examples[value] = torch.empty(shape, dtype=example.dtype, device="meta")
            moved.add(value)

    def read(arg: Any) -> Any:
        return examples[arg.value] if isinstance(arg, Ref) else arg

    graph = captured.graph
    ops = []
    for op in graph.ops:
        if moved.intersection((*op.inputs, *op.outputs)):
            payload = op.payload
            args, kwargs = payload.mapped(read)
            outs = [None if v is None else examples[v] for v in payload.outputs]
            out = outs if payload.multiple else (outs[0] if outs else None)
            work = costs.estimate(payload.target, args, kwargs, out, captured.device)
            op = replace(
                op,
                flops=work.flops,
                bytes_moved=work.bytes_moved,
                cost_ns=work.ns,
                spread=work.spread,
            )
        ops.append(op)
    made_values = [
        replace(v, shape=costs.shape_of(x), bytes=costs.tensor_bytes(x))
        if v.id in moved and isinstance(x := examples[v.id], torch.Tensor)
        else v
        for v in graph.values
    ]
    made = replace(graph, values=tuple(made_values), ops=tuple(ops))
    notes = [note for note in captured.notes if note != OPEN_SIZES]
    told = ", ".join(f"{symbol}={value}" for symbol, value in values.items())
    notes.append(
        f"sizes may change: captured once, with a plan for each power of two; this one was made for {told}"
    )
    return replace(captured, graph=made, notes=notes)
