"""A captured aten graph: the graph IR with what runs each operator, and where its results lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value among the arguments of an operator."""

    value: int


@dataclass(frozen=True)
class Payload:
    """How to run an operator: a call over value ids.

    Attributes:
        target: The function.
        args: Its arguments; a :class:`Ref` among them stands for a value.
        kwargs: Its keyword arguments.
        outputs: Value id of each result; None where nobody has a name for it. One entry if the
            operator returns a single value.
        multiple: The operator returns a sequence.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    multiple: bool

    def reads(self) -> tuple[int, ...]:
        """Ids of the values among the arguments, each once."""
        found: dict[int, None] = {}

        def note(arg: Any) -> Any:
            if isinstance(arg, Ref):
                found[arg.value] = None
            return arg

        torch.fx.node.map_aggregate((self.args, self.kwargs), note)
        return tuple(found)

    def mapped(self, replace: Callable[[Ref], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments with every ``Ref`` replaced."""

        def read(arg: Any) -> Any:
            return replace(arg) if isinstance(arg, Ref) else arg

        made: Any = torch.fx.node.map_aggregate((self.args, self.kwargs), read)
        return tuple(made[0]), dict(made[1])


@dataclass(frozen=True)
class JoinedLayout:
    """How a result lies in memory that the nano-batches write, each its part.

    Attributes:
        empty: Makes the tensor.
        runs: How many runs of the whole batch lie there one after the other; a part has its rows of each.
        shared: Dimensions of a part along which the memory is the same.
    """

    empty: Callable[[], Any]
    runs: int
    shared: tuple[int, ...] = ()


def rows_of(x: Any, axis: int, start: int, count: int, runs: int) -> Any:
    """A view of a nano-batch's rows; of several runs of the batch with a dimension for the runs."""
    if runs == 1:
        return x.narrow(axis, start, count)
    return x.unflatten(axis, (runs, x.shape[axis] // runs)).narrow(
        axis + 1, start // runs, count // runs
    )


@dataclass
class Captured:
    """A graph with what is needed to run it.

    Attributes:
        graph: The neutral graph; ``Operator.payload`` is a :class:`Payload`.
        ids: fx node -> value id.
        examples: Value id -> example (fake) value, for compilation and checks.
        outputs: For each result a value id, or ("const", object).
        epilogue: (input value, value) pairs: the input takes the value's data at the end.
        module: The fx module captured from.
        labels: Name of an input -> what the user calls it.
        symbolic: Some size was not fixed when the graph was captured.
        device: Where its tensors are (numbers in tensors of one element may be on the CPU).
        joined: Of a graph of nano-batches the results that are put together in place, by value id.
        copied: Of such a graph the views of inputs that have to be copied: how many runs of the batch
            they take rows from, and what makes the tensor.
    """

    graph: Graph
    ids: dict[Any, int]
    examples: Mapping[int, Any]
    outputs: list[Any]
    epilogue: list[tuple[int, int]]
    module: Any
    symbolic: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    device: torch.device = torch.device("cpu")
    joined: dict[int, JoinedLayout] = field(default_factory=dict)
    copied: dict[int, tuple[int, Callable[[], Any]]] = field(default_factory=dict)


def overlapping(example: torch.Tensor) -> tuple[int, ...]:
    """Dimensions along which a tensor repeats the same memory (an expanded one)."""
    sizes = zip(example.shape, example.stride(), strict=True)
    return tuple(d for d, (size, stride) in enumerate(sizes) if stride == 0 and size > 1)


def place(slot: Any, part: Any, shared: Sequence[int] = ()) -> Any:
    """Writes a part of a result to its place; returns what is there now.

    Along ``shared`` dimensions the memory is the same, and written once.

    A few operators make another type than they say at capture (the mean that layer norm keeps under
    autocast); such a part stays apart until the end of the call.
    """
    if slot.dtype is not part.dtype:
        return part
    target = slot
    for dim in shared:
        target, part = target.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    target.copy_(part)
    return slot
