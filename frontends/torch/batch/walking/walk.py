"""Walks a captured graph whose batch size is open, and says of each value what the batch is to it.

At each operator its rule gives the states of the results; the shapes at both batch sizes of ``probes``
are then held against these states, whatever the rule.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow_xla.batch.joins import Joiner, defined
from dynaflow_xla.batch.row_orders import groups, orders
from dynaflow_xla.batch.states import (
    POSITION,
    SAME,
    BrokenRule,
    Counted,
    Late,
    Mixed,
    NoRule,
    Obstacle,
    Partial,
    Permutation,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    SummedBy,
    Unknown,
    Whole,
    batch_axis,
    first_failure,
    is_plain_same,
    moved,
    unfilled,
)
from dynaflow_xla.frontends.torch.batch.walking.probes import (
    PROBES,
    Shape,
    fits,
    number_state,
    rows_by_shape,
    varying,
)
from dynaflow_xla.frontends.torch.batch.walking.registry import (
    BY_ROWS,
    COUNTS,
    IN_ORDER,
    LOOPS,
    RULE_FIRST,
    RULES,
    SIZES,
    Rule,
)
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.capture.sizes import Evaluator
from dynaflow_xla.ir.graph import Operator

# Results that equal operands do not determine.
_NOT_FUNCTIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@dataclass
class Site:
    """One operator.

    Attributes:
        op: The operator.
        args: Its arguments by the names of its schema, defaults filled in.
        outs: Shapes of its results; () for numbers.
        walker: Knows the values.
        seen: Ids of the numbers that the rule has looked at.
        order: The order that operands are in; its items are the rows then.
    """

    op: Operator
    args: Mapping[str, Any]
    outs: Sequence[Shape]
    walker: Walker
    seen: set[int] = field(default_factory=set)
    order: Permutation | None = None

    @property
    def probes(self) -> tuple[int, int]:
        """Rows of the batch, or items of the order, at both probes."""
        each = 1 if self.order is None else self.order.each
        return PROBES[0] * each, PROBES[1] * each

    def framed(self, order: Permutation) -> list[State]:
        """States of the results where the operands are in an order, whose items are the rows then."""
        found = self.walker.rule(self.op)
        if found.__module__.rpartition(".")[2] not in BY_ROWS:
            raise Refuse("needs rows in the order of the batch", order.origin, ordered=True)
        made = found(replace(self, order=order))
        states = made if isinstance(made, list) else self.each(made)
        return [orders.out_of(state, order) for state in states]

    @property
    def origin(self) -> SummedBy:
        """This operator, for messages."""
        return SummedBy(self.op.kind, self.op.source, self.op.scope)

    @property
    def target(self) -> Any:
        """The function it calls."""
        return self.op.payload.target

    def state(self, arg: Any) -> State:
        """State of an argument: a tensor, a number, or None."""
        if isinstance(arg, Ref):
            self.seen.add(arg.value)
            state = self.walker.states[arg.value]
            if arg.value in self.walker.numbers and isinstance(state, Mixed):
                raise Refuse("computes with a number that depends on the batch size")
            return orders.plain(state) if self.order is None else orders.into(state, self.order)
        if isinstance(arg, (int, float, complex)):
            return Same(0, arg)
        return SAME

    def raw(self, arg: Any) -> State:
        """The state of an argument, whatever it says of orders."""
        if isinstance(arg, Ref) and arg.value not in self.walker.numbers:
            return self.walker.states[arg.value]
        return self.state(arg)

    def states(self, *names: str) -> list[State]:
        """States of arguments by name."""
        return [self.state(self.args[name]) for name in names]

    def shape(self, arg: Any) -> Shape:
        """Shape of an argument, () for a number."""
        if not isinstance(arg, Ref) or arg.value in self.walker.numbers:
            return ()
        return self.walker.shapes[arg.value][0]

    def tensors(self) -> list[Ref]:
        """The tensors among the arguments, in lists too."""
        found = []
        for arg in self.args.values():
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Ref) and item.value not in self.walker.numbers:
                    found.append(item)
        return found

    def pair(self, arg: Any) -> tuple[Any, Any]:
        """A number at both probes.

        Raises:
            NoRule: it is not known.
        """
        if not isinstance(arg, Ref):
            return arg, arg
        if arg.value not in self.walker.numbers:
            raise NoRule
        self.seen.add(arg.value)
        if arg.value in self.walker.irregular:
            raise Refuse("computes with a number that depends on the batch size")
        return self.walker.numbers[arg.value]

    def fixed(self, arg: Any) -> Any:
        """A number that does not depend on the batch size, lists of them, or None.

        Raises:
            Refuse: it depends on it.
        """
        if isinstance(arg, (list, tuple)):
            return [self.fixed(item) for item in arg]
        first, second = self.pair(arg)
        if first != second:
            raise Refuse("has a parameter that depends on the batch size")
        return first

    def check_numbers(self) -> None:
        """Refuses numbers that depend on the batch size and that the rule has not looked at."""
        for name, arg in self.args.items():
            if name in SIZES.get(self.op.kind, ()):
                continue
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Ref) and item.value not in self.seen:
                    if item.value in self.walker.numbers:
                        self.fixed(item)

    def each(self, state: State) -> list[State]:
        """The same state for every result."""
        return [state] * len(self.outs)

    def aligned(self, arg: Any, out: int = 0) -> State:
        """State of an operand that is broadcast to a result, its axis counted in the result's shape."""
        state = self.state(arg)
        return shifted(state, len(self.outs[out]) - len(self.shape(arg)))


def shifted(state: State, by: int) -> State:
    """The same with ``by`` dimensions more in front."""
    axis = batch_axis(state)
    return state if axis is None or not by else moved(state, axis + by)


@dataclass
class Walker:
    """Applies the rules.

    Attributes:
        captured: The graph.
        shapes: For each tensor its shape at both probes.
        numbers: For each number that follows from sizes, its value at both probes.
        states: What is known of each value so far.
        lenient: A rule that fails with an error of its own leaves its results unproven.
        irregular: Values that follow the batch size otherwise at the sizes in question than at the
            probes: numbers themselves, tensors in their shapes.
        sizes: Rows of the batch and of its nano-batches; without them nothing is said of orders.
        joiner: Decides what runs once for all nano-batches; None: nothing may.
        evaluators: Sizes at both probes, for graphs inside of this one.
    """

    captured: Captured
    shapes: dict[int, tuple[Shape, Shape]]
    numbers: dict[int, tuple[Any, Any]]
    states: dict[int, State] = field(default_factory=dict)
    lenient: bool = False
    irregular: frozenset[int] = frozenset()
    sizes: tuple[int, ...] = ()
    joiner: Joiner | None = None
    evaluators: Sequence[Evaluator] = ()

    def run(self, ins: Mapping[int, State]) -> tuple[State, ...]:
        """States of all values, given those of the graph's inputs."""
        graph = self.captured.graph
        self.states.update(ins)
        for number, pair in self.numbers.items():
            self.states[number] = number_state(pair, irregular=number in self.irregular)
        for op in graph.ops:
            wanted = [v for v in op.outputs if v not in self.numbers]
            if not wanted:
                continue
            made = self._joined(op, wanted) if self.joiner is not None else self._apply(op, wanted)
            self.states.update(zip(wanted, made, strict=True))
        if self.joiner is not None:
            self.states.update(self.joiner.states)
        return tuple(self.states.get(v.id, SAME) for v in graph.values)

    def _joined(self, op: Operator, wanted: Sequence[int]) -> list[State]:
        """The states of an operator's results, where it, or the totals it reads, may be joined."""
        joiner = self.joiner
        assert joiner is not None
        read = [v for v in op.inputs if v not in self.numbers]

        def attempt() -> tuple[list[State], bool]:
            self.states.update((v, joiner.states[v]) for v in read)
            return self._apply(op, wanted), op.kind not in LOOPS

        drawn = self.captured.graph.values[wanted[-1]].dtype == "token"
        if drawn:
            made = attempt()[0] if drawn_like(op) is None else self._drawn_whole(op, wanted)
            joiner.states.update(zip(wanted, made, strict=True))
            return made
        return joiner.step(replace(op, outputs=tuple(wanted)), attempt)

    def _drawn_whole(self, op: Operator, wanted: Sequence[int]) -> list[State]:
        """Random numbers are drawn for the whole batch before nano-batches run; these get their rows."""
        joiner = self.joiner
        assert joiner is not None
        self.states.update((v, joiner.states[v]) for v in op.inputs if v not in self.numbers)
        whole = any(isinstance(self.states[v], Whole) for v in op.inputs)
        made = self._apply(op, wanted) if not whole else [Whole()] * len(wanted)
        return [
            defined(self.shapes[v], PROBES)
            if isinstance(state, Whole)
            or (isinstance(state, Mixed) and "pairs of rows" in state.finding.reason)
            else state
            for v, state in zip(wanted[:-1], made, strict=False)
        ] + [SAME]

    def _apply(self, op: Operator, wanted: Sequence[int]) -> list[State]:
        payload: Payload = op.payload
        outs = [self.shapes[v][0] if v in self.shapes else () for v in wanted]
        site = Site(op, arguments(payload), outs, self)
        if self.captured.graph.values[wanted[-1]].dtype == "token":
            try:
                return self._random(site, wanted)
            except Refuse as error:
                return [failed(site, error)] * len(wanted)
        read = [self.states[v] for v in payload.reads()]
        failure = first_failure(self.states[v] for v in payload.reads() if v not in self.numbers)
        if failure is not None:
            return [failure] * len(wanted)
        fixed_shapes = all(a == b for a, b in (self.shapes[v] for v in wanted if v in self.shapes))
        fixed_shapes &= self.irregular.isdisjoint(wanted)
        known = op.kind in RULE_FIRST
        if all(map(is_plain_same, read)) and fixed_shapes and not known:
            if op.kind not in _NOT_FUNCTIONS:
                return [SAME] * len(wanted)
        try:
            _counted_for(site, read)
            made = self._made(site, read)
            site.check_numbers()
        except (Refuse, NoRule) as error:
            late = self._late(op, read, wanted) if fixed_shapes else None
            if late is not None and self.joiner is None:
                return [late] * len(wanted)
            if late is not None and isinstance(error, NoRule):  # whatever it does, it may do later
                error = Refuse("needs a total over the batch, before it is complete", late.origin)
            return [failed(site, error)] * len(wanted)
        except Exception as error:
            broken = BrokenRule(op.kind, op.source, error)
            if not self.lenient:
                raise broken from error
            finding = Obstacle("unproven", op.kind, str(broken), op.source, op.scope)
            return [Unknown(finding)] * len(wanted)
        given = made if isinstance(made, list) else [made] * len(wanted)
        outputs = [v for v in payload.outputs if v not in self.numbers]
        if len(given) != len(wanted):
            # A rule speaks of all results; those that nobody has a name for are left out.
            given = [s for s, v in zip(given, outputs, strict=True) if v is not None]
        odd = failed(site, Refuse("makes a value whose shape depends on the batch size"))
        given = [odd if v in self.irregular else s for s, v in zip(given, wanted, strict=True)]
        return [self._checked(site, state, v) for state, v in zip(given, wanted, strict=True)]

    def _late(self, op: Operator, read: Sequence[State], wanted: Sequence[int]) -> Late | None:
        """What can wait until the totals over the batch are complete, and is computed from them then."""
        if op.once or op.outer or any(v not in self.shapes for v in wanted):
            return None
        numbers = {v for v in op.payload.reads() if v in self.numbers}
        origin = None
        for value, state in zip(op.payload.reads(), read, strict=True):
            if isinstance(state, Late) or (isinstance(state, Partial) and state.power in (0, -1)):
                origin = origin or state.origin
            elif value not in numbers and not is_plain_same(state):
                return None
        return None if origin is None else Late(origin)

    def _random(self, site: Site, wanted: Sequence[int]) -> list[State]:
        """Random numbers that depend on no data are drawn for the whole batch, and then cut."""
        op = site.op
        like = drawn_like(op)
        if like is None and fills(op, self.states) is not None:
            like = []  # of data that is known beforehand
        if like is None:
            blame = Obstacle(
                "mixed", op.kind,
                "draws random numbers that depend on data: nano-batches would draw others than the whole "
                "batch",
                op.source, op.scope,
            )  # fmt: skip
            return [Mixed(blame)] * len(wanted)
        given = site.state(like[0]) if like else SAME
        failure = first_failure([given])
        made: list[State] = []
        for value in wanted[:-1]:
            rows = rows_by_shape(self.shapes[value])
            if op.kind == "native_dropout" and value == op.payload.outputs[0]:
                # What stays is scaled, the rest is 0: a row number is none any more.
                blame = Obstacle("mixed", op.kind, POSITION, op.source, op.scope)
                kept = Mixed(blame) if isinstance(given, Position) else unfilled(given)
                made.append(failure or kept)
            elif rows is None and varying(self.shapes[value]):
                blame = Obstacle("mixed", op.kind, "draws numbers for pairs of rows", op.source)
                made.append(Mixed(blame))
            elif rows is not None and isinstance(given, Rows) and given.axis == rows.axis:
                made.append(Rows(given.axis, given.outer, given.inner))
            else:
                made.append(rows or SAME)
        return [*made, SAME]

    def _made(self, site: Site, read: Sequence[State]) -> State | list[State]:
        """States of the results, by the rules that know orders, else by the ordinary one."""
        knows = IN_ORDER.get(site.op.kind) if self.sizes else None
        if knows is not None:
            made = knows(site)
            if made is not None:
                return made
        found = self.rule(site.op)
        order = orders.order_of(read)
        if order is not None and not found.__module__.endswith(".made"):
            _beside(replace(site, order=order))
            return site.framed(order)
        _beside(site)
        return found(site)

    def rule(self, op: Operator) -> Rule:
        """The ordinary rule of an operator.

        Raises:
            NoRule: it has none.
        """
        found = RULES.get(op.kind)
        if found is None:
            tags = getattr(op.payload.target, "tags", ())
            found = RULES["pointwise"] if torch.Tag.pointwise in tags else None
        if found is None:
            raise NoRule
        return found

    def _checked(self, site: Site, state: State, value: int) -> State:
        if isinstance(state, Mixed | Unknown) or value not in self.shapes:
            return state
        if fits(state, self.shapes[value], PROBES):
            integer = self.captured.graph.values[value].dtype.startswith("int")
            return groups.keyed(state) if integer and self.sizes else state
        reason = f"has another shape than one that is {state}"
        return Unknown(Obstacle("unproven", site.op.kind, reason, site.op.source, site.op.scope))


def _counted_for(site: Site, read: Sequence[State]) -> None:
    """Refuses operands that no rule looks at, but those of operators that they are made for."""
    for state in read:
        if isinstance(state, Late):
            raise Refuse("needs a total over the batch, before it is complete", state.origin)
        if isinstance(state, Counted) and site.op.kind not in COUNTS:
            raise Refuse("counts the rows of the batch")


# Operators that take rows of several operands side by side, and broadcast none.
_BESIDE = {
    "select_scatter": ("self", "src"), "slice_scatter": ("self", "src"),
    "diagonal_scatter": ("self", "src"), "index_add": ("self", "source"),
    "index_copy": ("self", "source"), "index_reduce": ("self", "source"),
    "scatter": ("index", "src"), "scatter_add": ("index", "src"), "scatter_reduce": ("index", "src"),
}  # fmt: skip


def _beside(site: Site) -> None:
    """Refuses a tensor that is the same for all nano-batches beside one that is cut.

    Kernels without data let it pass where it is longer, and a nano-batch would get the first rows of it.
    """
    given = [site.args.get(name) for name in _BESIDE.get(site.op.kind, ())]
    tensors = [a for a in given if isinstance(a, Ref) and site.shape(a)]
    rows = [isinstance(site.state(a), Rows) for a in tensors]
    if any(rows) and not all(rows):
        raise Refuse("takes rows of the batch beside a tensor that is not cut with them")


# Random operators of whose tensor only the shape matters.
_SHAPE_ONLY = {
    "rand_like", "randn_like", "randint_like", "normal_functional", "uniform", "exponential",
    "log_normal", "geometric", "cauchy", "native_dropout",
}  # fmt: skip
_FROM_NOTHING = {"rand", "randn", "randint", "randperm"}


def drawn_like(op: Operator) -> list[Ref] | None:
    """Of an operator that draws random numbers the tensor of whose shape, if any; None: of its data."""
    payload: Payload = op.payload
    args = arguments(payload)
    if op.kind in _FROM_NOTHING:
        return []
    if (
        op.kind == "normal"
        and not isinstance(args["mean"], Ref)
        and not isinstance(args["std"], Ref)
    ):
        return []
    if op.kind in _SHAPE_ONLY or (op.kind == "bernoulli" and "p" in args):
        like = args.get("self", args.get("input"))
        return [like] if isinstance(like, Ref) else None
    return None


def fills(op: Operator, states: Mapping[int, State] | Sequence[State]) -> dict[int, Any] | None:
    """What the tensors are filled with that an operator draws by; None if one holds other values."""
    found: dict[int, Any] = {}
    for value in op.payload.reads():
        state = states[value]
        if not isinstance(state, Same | Rows) or state.power or state.fill is None:
            return None
        found[value] = state.fill
    return found or None


def failed(site: Site, error: Exception) -> State:
    """The state of a result about which nothing can be said."""
    op = site.op
    if isinstance(error, Refuse):
        origin = error.origin or site.origin
        reason = str(error) if error.origin is None else f"{op.kind}{op.at} {error}"
        total = error.total
        if error.origin is not None and not total:
            reason = f"{error.what}; {reason}"
        return Mixed(Obstacle("mixed", origin.op, reason, origin.source, origin.scope, total))
    reason = str(error) or "no rule says what this operator does to the batch"
    return Unknown(Obstacle("unproven", op.kind, reason, op.source, op.scope))


def arguments(payload: Payload) -> dict[str, Any]:
    """Arguments by the names in the operator's schema; {} if it has none."""
    schema = getattr(payload.target, "_schema", None)
    if schema is None:
        return {str(n): a for n, a in enumerate(payload.args)} | dict(payload.kwargs)
    made: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(payload.args):
            made[argument.name] = payload.args[position]
        elif argument.name in payload.kwargs:
            made[argument.name] = payload.kwargs[argument.name]
        else:
            made[argument.name] = argument.default_value
    return made


def axis_in(state: State, dims: Any, rank: int) -> bool:
    """Whether the batch is along one of these dimensions (None or none given: all)."""
    if not isinstance(state, Rows | Position):
        return False
    return not dims or state.axis in {operator.index(d) % max(rank, 1) for d in dims}
