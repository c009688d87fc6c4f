"""The framework-neutral graph: an SSA list of operators, and its cut into regions.

A frontend builds a :class:`Graph` from a framework's own program; ``partition`` cuts it into
:class:`Region` objects; nothing here knows JAX or PyTorch. The framework's own operator (a jaxpr
equation, an fx node) rides along as ``Operator.payload`` and is read by its frontend only.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dynaflow_xla.ir.work import NO_SPREAD, Spread

Resource = Literal["compute", "memory", "network", "host"]
ORDERED = "ordered"
"""Tag of regions that keep their program order among themselves."""

RESOURCES: tuple[Resource, ...] = ("compute", "memory", "network", "host")


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's program an operator came from."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def placed(source: Source | None) -> str:
    """Behind a name in a message: " at FILE:LINE", or "" where no line of the user's is known."""
    return f" at {source}" if source else ""


@dataclass(frozen=True, slots=True)
class Value:
    """One SSA value.

    Attributes:
        id: Number of the value, its index in ``Graph.values``.
        shape: Dimensions.
        dtype: Name of the element type as NumPy spells it ("float32", "bfloat16", "key<fry>").
        bytes: Size of the dense value.
        producer: Index of the operator that makes it, or -1 for a graph input.
        weak_type: Whether JAX's weak typing applies (kept so that results promote alike).
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    producer: int
    weak_type: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def type_str(self) -> str:
        """``float32[8,128]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class OpMark:
    """A ``dfx.mark`` around an operator: ``instance`` tells two uses of the same name apart."""

    name: str
    instance: int = 0
    resource: Resource | None = None
    tags: frozenset[str] = frozenset()


class OuterKind(enum.Enum):
    """What keeps an operator in the outer program."""

    ACTS = "acts"
    """It has effects, calls back, names devices, or writes in place: once, and where it is."""
    NETWORK = "network"
    """It communicates."""
    LAYOUT = "layout"
    """Programs lay out its values differently, so nothing is handed over between them."""


@dataclass(frozen=True, slots=True)
class OuterReason:
    """Why an operator stays in the outer program.

    Attributes:
        text: For messages: what the operator does, as the end of a sentence.
        kind: For decisions.
    """

    text: str
    kind: OuterKind = OuterKind.ACTS

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the graph.

    Attributes:
        index: Position in ``Graph.ops`` (program order, which is a topological order).
        kind: The framework's name for it: "dot_general", "sort", "scan", "aten.addmm".
        inputs: Value ids read.
        outputs: Value ids made.
        scope: Name scope, outermost first: ("encoder", "layer_0", "attention").
        call_path: Enclosing nested functions, outermost first, each with its call number:
            ("block#3", "relu#0"): two calls of one function are two instances.
        scope_calls: For each component of ``scope`` how many functions of ``call_path`` were entered
            before it: a call inside a scope belongs to the same use of it, a scope inside a call to
            that call. () where the scope itself tells its uses apart.
        classes: For each component of ``scope`` the class of that module, "" if it is none.
        flops: Estimated floating point (or comparison) operations.
        bytes_moved: Estimated bytes read and written.
        cost_ns: Estimated time on one core or lane, from the frontend's cost rules.
        outer: True if the operator must stay in the outer program (effects, callbacks,
            collectives, ordered tokens); it never enters a lane.
        outer_reason: Why; None if it is not outer.
        once: True if the operator changes something besides its results (random state, an
            assertion): it is never left out and never repeated.
        generator: It makes its values from nothing (iotas, masks of them, filled arrays) and costs
            nothing where it is fused into its reader: cuts repeat it in every region that reads it.
        mark: The innermost ``dfx.mark`` around it.
        function: Of several functions that make one plan (``dfx.together``) the name of its own.
        source: User's file and line.
        params: Short text of the operator's parameters, for the text form and the hash.
        payload: The framework's own operator.
        spread: What of ``cost_ns`` more cores than one share.
    """

    index: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: tuple[str, ...] = ()
    call_path: tuple[str, ...] = ()
    scope_calls: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    flops: float = 0.0
    bytes_moved: int = 0
    cost_ns: float = 0.0
    outer: bool = False
    outer_reason: OuterReason | None = None
    once: bool = False
    generator: bool = False
    mark: OpMark | None = None
    function: str = ""
    source: Source | None = None
    params: str = ""
    payload: Any = field(default=None, compare=False, repr=False)
    spread: Spread = NO_SPREAD

    @property
    def at(self) -> str:
        """Behind its name in a message, see :func:`placed`."""
        return placed(self.source)


@dataclass(frozen=True, slots=True)
class View:
    """Value ``value``: rows ``start:stop`` of graph input number ``input`` along ``axis``, in place.

    ``offset`` is where it begins, in bytes; the rows are contiguous and so aligned that a lane
    reads them where they are.
    """

    value: int
    input: int
    axis: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Join:
    """Graph output ``value`` is its ``parts`` one after the other in memory, along ``axis``.

    Whoever makes a part writes it to ``offsets`` (bytes) of the output; nothing is copied twice.
    """

    value: int
    parts: tuple[int, ...]
    offsets: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class Graph:
    """A whole function: values, operators in program order, inputs and outputs (value ids).

    A graph whose batch is split holds each nano-batch's operators, with ``views`` of its inputs and
    ``joins`` of its outputs. One that is a ``part`` of what was captured need not have what rules name.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_names: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    joins: tuple[Join, ...] = ()
    part: bool = False

    def consumers(self) -> dict[int, list[int]]:
        """Value id -> indices of the operators that read it."""
        uses: dict[int, list[int]] = {}
        for op in self.ops:
            for value in op.inputs:
                uses.setdefault(value, []).append(op.index)
        return uses


class Outside(NamedTuple):
    """What operators take longer in the framework's own program than on a lane, which has kernels for them.

    Attributes:
        ns: On one core.
        spread: What of the framework's own time more cores share.
    """

    ns: float = 0.0
    spread: Spread = NO_SPREAD


NOT_OUTSIDE = Outside()


@dataclass(frozen=True, slots=True)
class Region:
    """A schedulable subgraph.

    Attributes:
        id: Index in ``PartitionedGraph.regions``; ids are a topological order.
        name: Unique, readable name.
        ops: Operator indices, in program order.
        inputs: Value ids read from outside the region (graph inputs and other regions' outputs).
        outputs: Value ids that others, or the caller, read.
        tags: From rules and marks, plus built-in ones such as "outer".
        resource: The dominant resource.
        flops, bytes_moved, cost_ns: Sums over the operators.
        outer: The region holds one operator that must stay in the outer program.
        rule: Text of the rule that made it, "default" or "glue".
        source: Line of its costliest operator.
        nano: Nano-batch it belongs to.
        merge: It puts nano-batches together; schedules place it by themselves.
        function: Of several functions that make one plan (``dfx.together``) the name of its own.
        spread: What of ``cost_ns`` more cores than one share.
        outside: What it takes longer where no lane runs it.
    """

    id: int
    name: str
    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tags: frozenset[str] = frozenset()
    resource: Resource = "compute"
    flops: float = 0.0
    bytes_moved: int = 0
    cost_ns: float = 0.0
    outer: bool = False
    rule: str = "default"
    source: Source | None = None
    nano: int = 0
    merge: bool = False
    function: str = ""
    spread: Spread = NO_SPREAD
    outside: Outside = NOT_OUTSIDE

    def cost_at(self, cores: int, *, wide: bool = False) -> float:
        """Estimated nanoseconds on so many cores: a lane's, or (``wide``) all, in the framework's program."""
        on_lane = max(0.0, self.cost_ns - self.spread.saved_ns(cores))
        if not wide or self.outside == NOT_OUTSIDE:
            return on_lane
        return max(0.0, on_lane + self.outside.ns - self.outside.spread.saved_ns(cores))
