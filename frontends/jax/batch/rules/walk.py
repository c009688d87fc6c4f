"""Walks the program of the whole batch and those of the nano-batches side by side.

They must be the same program up to the batch size. At each operator the rule of its primitive gives the
states of the results; the shapes of all traces are then held against these states, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla.batch.joins import Joiner
from dynaflow_xla.batch.row_orders import groups, orders
from dynaflow_xla.batch.rule_table import RuleTable
from dynaflow_xla.batch.states import (
    SAME,
    Below,
    BrokenRule,
    Listed,
    Mixed,
    NoRule,
    Obstacle,
    Partial,
    Permutation,
    Position,
    Refuse,
    Rows,
    Same,
    Sizes,
    State,
    SummedBy,
    Unknown,
    first_failure,
    is_plain_same,
)
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch.rules import equality
from dynaflow_xla.frontends.jax.capture import capture, marks
from dynaflow_xla.ir.graph import Operator, Source, placed

Rule = Callable[["Site"], "State | list[State]"]
RULES: RuleTable[Rule] = RuleTable()
rule = RULES.of

# Rules that see failed operands: they may not need them, or apply a rule of their own to each.
_SEES_FAILURES = {"select_n", "scan", "while", "cond"}
# Rules that keep track of known values, or look inside.
_RULE_FIRST = {
    "broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "stop_gradient",
    "select_n", "scan", "while", "cond", "custom_vmap_call", "custom_linear_solve", "composite",
    capture.HI_CALL,
    *capture.INLINE,
}  # fmt: skip
# Calls: what is inside is walked, whatever the states.
_INLINE = {*capture.INLINE, "custom_vmap_call", "composite", capture.HI_CALL}
# What mixes rows in the body of one of these is not joined: it would run once a round.
_LOOPS = {"scan", "while"}
# Results that equal operands do not determine.
_NOT_FUNCTIONS = {"rng_uniform", "empty", "empty2", "infeed"}


OrderRule = Callable[["Site"], "State | list[State] | None"]
IN_ORDER: RuleTable[OrderRule] = RuleTable()
"""Rules that know rows in an order of data's; asked first, about all states; None: nothing to say."""
in_order = IN_ORDER.of

# Families of rules that treat the elements of an order as rows. Others look across devices, or inside.
_BY_ROWS = {"elementwise", "indexing", "reductions", "shapes"}


@dataclass(frozen=True)
class Body:
    """A list of equations with inputs and outputs; ``ops`` adds the graph's own notes on them."""

    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]
    ops: Sequence[Operator] = ()

    @staticmethod
    def of(jaxpr: Any) -> Body:
        """A jaxpr, or a closed one; its constants become leading inputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        return Body((*jaxpr.constvars, *jaxpr.invars), jaxpr.eqns, jaxpr.outvars)


@dataclass
class Site:
    """One operator in all traces.

    Attributes:
        name: The primitive.
        eqns: Its equation in the trace of the whole batch, then in those of the nano-batches.
        ins: States of its operands.
        walker: For rules with inner programs.
        source: The user's line.
        scope: The name scope.
        each: How many rows there are for each row of the batch; above 1 where rows are items of an order.
    """

    name: str
    eqns: Sequence[Any]
    ins: list[State]
    walker: Walker
    source: Source | None
    scope: tuple[str, ...]
    each: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the batch in each trace."""
        return tuple(n * self.each for n in self.walker.sizes)

    def with_ins(self, ins: Sequence[State], each: int = 1) -> Site:
        """The same operator with operands of other states."""
        return replace(self, ins=list(ins), each=each)

    def framed(self, order: Permutation) -> list[State]:
        """States of the results where the operands are in an order, whose items are the rows then."""
        found = RULES.get(self.name)
        if found is None:
            raise NoRule("no rule says what this operator does to the rows of a batch")
        if found.__module__.rpartition(".")[2] not in _BY_ROWS:
            raise Refuse("needs rows in the order of the batch", order.origin, ordered=True)
        inside = self.with_ins([orders.into(s, order) for s in self.ins], order.each)
        made = found(inside)
        states = made if isinstance(made, list) else self.each_result(made)
        return [orders.out_of(state, order) for state in states]

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters in the trace of the whole batch."""
        return self.eqns[0].params

    @property
    def origin(self) -> SummedBy:
        """This operator, for messages."""
        return SummedBy(self.name, self.source, self.scope)

    def shape(self, operand: int, trace: int = 0) -> tuple[int, ...]:
        """Shape of an operand in a trace."""
        return tuple(self.eqns[trace].invars[operand].aval.shape)

    def out_shape(self, result: int = 0, trace: int = 0) -> tuple[int, ...]:
        """Shape of a result in a trace."""
        return tuple(self.eqns[trace].outvars[result].aval.shape)

    def traces(self) -> range:
        """Numbers of the traces; 0 is that of the whole batch."""
        return range(len(self.eqns))

    def same_params(self, *except_: str) -> None:
        """Requires equal parameters in all traces, apart from those named."""
        equality.require_same_params([e.params for e in self.eqns], except_)

    def each_result(self, state: State) -> list[State]:
        """The same state for every result."""
        return [state] * len(self.eqns[0].outvars)


class LooksAtRules(Protocol):
    """Who looks at the derivative rules that a walk meets."""

    def look(self, site: Site, outs: Sequence[State]) -> None:
        """A call with a rule of its own, and the states of its results."""

    def missed(self, eqn: Any) -> None:
        """An operator with such calls inside that were not met."""


@dataclass
class Walker:
    """Applies the rules.

    Attributes:
        sizes: Rows of the batch in each trace: the whole batch first.
        effects: Operators with effects that were met, as findings.
        joiner: Decides what of the outermost program runs once; None: nothing may.
        own_rules: Looks at calls with derivative rules of their own, and is told of those that are passed by.
    """

    sizes: tuple[int, ...]
    effects: dict[Obstacle, None] = field(default_factory=dict)
    joiner: Joiner | None = None
    own_rules: LooksAtRules | None = None
    _caller: Source | None = None

    def run(self, bodies: Sequence[Body], ins: Sequence[State]) -> list[State]:
        """States of the outputs, given those of the inputs."""
        return self.run_all(bodies, ins)[0]

    def run_all(
        self, bodies: Sequence[Body], ins: Sequence[State]
    ) -> tuple[list[State], dict[Any, State]]:
        """States of the outputs, and of every variable of the first trace."""
        whole = bodies[0]
        env: dict[Any, State] = dict(zip(whole.invars, ins, strict=True))
        # For each other trace: its variable -> the variable of the first trace.
        names = [dict(zip(b.invars, whole.invars, strict=True)) for b in bodies[1:]]
        broken: Unknown | None = None
        for number, eqn in enumerate(whole.eqns):
            source, scope = self._place(whole, number)
            peers: list[Any] = [
                b.eqns[number] if number < len(b.eqns) else None for b in bodies[1:]
            ]
            if broken is None and not all(
                _corresponds(eqn, peer, known) for peer, known in zip(peers, names, strict=True)
            ):
                reason = (
                    "the program has other operators from here on when the batch size is another, "
                    "so the traces cannot be compared"
                )
                broken = Unknown(Obstacle("unproven", eqn.primitive.name, reason, source, scope))
            if broken is not None:
                self._missed(eqn)
                env.update(dict.fromkeys(eqn.outvars, broken))
                continue
            eqns = [eqn, *peers]
            site = Site(eqn.primitive.name, eqns, [], self, source, scope)
            if self.joiner is not None and whole.ops:
                states = self._joined(site, whole.ops[number], env, self.joiner)
            else:
                states, _ = self._states(site, env)
            env.update(zip(eqn.outvars, states, strict=True))
            for peer, known in zip(peers, names, strict=True):
                known.update(zip(peer.outvars, eqn.outvars, strict=True))
        if len({len(b.outvars) for b in bodies}) > 1:
            reason = "the number of results is another when the batch size is another"
            other = Unknown(Obstacle("unproven", "return", reason, self._caller))
            return [other] * len(whole.outvars), env
        outs: list[State] = []
        for position, atoms in enumerate(zip(*(b.outvars for b in bodies), strict=True)):
            if broken is None and not _same_atoms(atoms, names):
                reason = (
                    f"result {position} comes from another operator when the batch size is another"
                )
                broken = Unknown(Obstacle("unproven", "return", reason, self._caller))
            try:
                outs.append(broken or self._read(atoms, env))
            except Refuse as error:
                outs.append(Mixed(Obstacle("mixed", "return", str(error), self._caller)))
        return outs, env

    def _states(self, site: Site, env: Mapping[Any, State]) -> tuple[list[State], bool]:
        """An operator's states, and whether it itself is to blame if it fails, nothing inside of it."""
        site.ins.clear()
        for atoms in zip(*(e.invars for e in site.eqns), strict=True):
            try:
                site.ins.append(self._read(atoms, env))
            except Refuse as error:
                site.ins.append(failed(site, error))
        try:
            return self._looked_at(site), site.name not in _LOOPS
        except (Refuse, NoRule) as error:
            self._missed(site.eqns[0])
            return site.each_result(failed(site, error)), True
        except BrokenRule:
            raise  # of an inner program's operator
        except Exception as error:
            raise BrokenRule(site.name, site.source, error) from error

    def _looked_at(self, site: Site) -> list[State]:
        """An operator's states; whoever looks at derivative rules sees it."""
        look = self.own_rules
        if look is None or not capture.has_own_rules_in(site.eqns[0]):
            return self._apply(site)
        own = capture.has_own_rule(site.name)
        # What a rule stands for is not differentiated itself.
        self.own_rules = None if own else look
        try:
            states = self._apply(site)
        finally:
            self.own_rules = look
        if first_failure([*site.ins, *states]) is not None:
            look.missed(site.eqns[0])
        elif own:
            look.look(site, states)
        return states

    def _missed(self, eqn: Any) -> None:
        if self.own_rules is not None and capture.has_own_rules_in(eqn):
            self.own_rules.missed(eqn)

    def _joined(
        self, site: Site, op: Operator, env: dict[Any, State], joiner: Joiner
    ) -> list[State]:
        """An operator's states, where it, or the totals it reads, may be joined."""
        read = dict.fromkeys(a for a in site.eqns[0].invars if not isinstance(a, jcore.Literal))
        values = dict(zip(read, op.inputs, strict=True))

        def attempt() -> tuple[list[State], bool]:
            env.update((variable, joiner.states[value]) for variable, value in values.items())
            return self._states(site, env)

        states = joiner.step(op, attempt)
        env.update((variable, joiner.states[value]) for variable, value in values.items())
        return states

    def _place(self, body: Body, number: int) -> tuple[Source | None, tuple[str, ...]]:
        if body.ops:
            return body.ops[number].source, body.ops[number].scope
        eqn = body.eqns[number]
        parts = marks.split_scope(str(eqn.source_info.name_stack))
        return _compat.user_source(eqn) or self._caller, tuple(map(marks.plain_name, parts))

    def _read(self, atoms: Sequence[Any], env: Mapping[Any, State]) -> State:
        if isinstance(atoms[0], jcore.Literal):
            return equality.constant_state([a.val for a in atoms], self.sizes)
        return env[atoms[0]]

    def _apply(self, site: Site) -> list[State]:
        eqn = site.eqns[0]
        effects = [e for e in eqn.effects if type(e).__name__ != "NamedAxisEffect"]
        if effects:
            names = ", ".join(sorted(map(str, effects)))
            reason = f"has effects ({names}), which would happen once for each nano-batch"
            self.effects[Obstacle("unproven", site.name, reason, site.source, site.scope)] = None
        failure = first_failure(site.ins)
        if failure is not None and site.name not in _SEES_FAILURES:
            return site.each_result(failure)
        if all(map(is_plain_same, site.ins)) and site.name not in _RULE_FIRST:
            # A function of equal values with equal parameters is equal, whatever it computes.
            try:
                site.same_params()
                if site.name not in _NOT_FUNCTIONS:
                    known = _known(site)
                    return [self._checked(site, n, known) for n in range(len(eqn.outvars))]
            except (Refuse, NoRule):
                pass  # the rule knows which parameters follow the batch size
        caller, self._caller = self._caller, site.source or self._caller
        try:
            states = _ruled(site)
        finally:
            self._caller = caller
        states = states if isinstance(states, list) else site.each_result(states)
        if len(states) != len(eqn.outvars):
            raise NoRule("has another number of results than its rule knows")
        return [self._checked(site, n, state) for n, state in enumerate(states)]

    def _checked(self, site: Site, result: int, state: State) -> State:
        """Holds a result's shapes against its state, whatever the rule said."""
        shapes = [site.out_shape(result, t) for t in site.traces()]
        dtypes = {str(getattr(e.outvars[result].aval, "dtype", None)) for e in site.eqns}
        if len(dtypes) > 1:
            raise NoRule("has another element type at another batch size")
        if isinstance(state, Mixed | Unknown) or fits(state, shapes, self.sizes):
            return _named(state, site.eqns[0].outvars[result].aval)
        if isinstance(state, Same | Partial):
            origin = state.origin if isinstance(state, Partial) else None
            raise Refuse("makes a value whose shape depends on the batch size", origin)
        raise Refuse("makes a value in which the rows of the batch are not along one axis")


INTEGER: dict[str, Callable[..., Any]] = {}
"""Functions of integers, element by element, in NumPy."""


LISTS: RuleTable[Callable[[Site], State | None]] = RuleTable()
"""Operators whose results may be known one by one where operands are the same in every trace."""
lists = LISTS.of


def _known(site: Site) -> State:
    """A function of equal values: equal, and a known value if it is a function of known integers."""
    if site.name in LISTS and (made := LISTS[site.name](site)) is not None:
        return made
    fills = [s.fill if isinstance(s, Same) else None for s in site.ins]
    if site.name in INTEGER and fills and all(type(f) in (int, bool) for f in fills):
        try:
            with np.errstate(all="raise"):
                fill = np.asarray(INTEGER[site.name](*fills)).item()
        except ArithmeticError:
            return SAME
        if has_integers(site.eqns[0].outvars[0].aval.dtype, fill, fill):
            return Same(0, fill)
    return SAME


def has_integers(dtype: Any, low: int, high: int) -> bool:
    """Whether all integers between these are in a type, which is one of integers or the boolean one."""
    if jax.dtypes.issubdtype(dtype, np.bool_):
        return 0 <= low and high <= 1
    if not jax.dtypes.issubdtype(dtype, np.integer):
        return False
    limits = jax.numpy.iinfo(dtype)
    return int(limits.min) <= low and high <= int(limits.max)


def _ruled(site: Site) -> State | list[State]:
    """States of the results, by the rules that know orders, else by the ordinary one."""
    knows = IN_ORDER.get(site.name)
    if knows is not None:
        made = knows(site)
        if made is not None:
            return made
    if orders.is_ordered(site.ins) and site.name not in _INLINE:
        if site.name in _SEES_FAILURES:
            return RULES[site.name](site.with_ins(plain(site.ins, site)))
        order = orders.order_of(site.ins)
        if order is not None:
            return site.framed(order)
        site = site.with_ins([orders.plain(s) for s in site.ins])
    function = RULES.get(site.name)
    if function is None:
        raise NoRule("no rule says what this operator does to the rows of a batch")
    return function(site)


def plain(states: Sequence[State], site: Site) -> list[State]:
    """What ordinary rules may know of values, failed ones where that is nothing."""
    made: list[State] = []
    for state in states:
        try:
            made.append(orders.plain(state))
        except Refuse as error:
            made.append(failed(site, error))
    return made


def _named(state: State, aval: Any) -> State:
    """Integers get a key, so that what is counted of them can be told to be of them."""
    dtype = getattr(aval, "dtype", None)
    if not isinstance(state, Rows) or dtype is None or not jax.dtypes.issubdtype(dtype, np.integer):
        return state
    limits = jax.numpy.iinfo(dtype)
    low = 0 if int(limits.min) == 0 else None
    return groups.keyed(state, low)


def fits(state: State, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> bool:
    """Whether the shapes in all traces are as a state says."""
    if isinstance(state, Same | Partial | Sizes | Below | Listed):
        return all(shape == shapes[0] for shape in shapes)
    state = orders.at(state) or state
    if not isinstance(state, Rows | Position):
        return True
    repeat = state.outer * state.inner if isinstance(state, Rows) else 1
    for shape, size in zip(shapes, sizes, strict=True):
        if state.axis >= len(shape) or shape[state.axis] == 0:
            return False
        rest = (shape[: state.axis], shape[state.axis + 1 :])
        if rest != (shapes[0][: state.axis], shapes[0][state.axis + 1 :]):
            return False
        if shape[state.axis] != size * repeat:
            return False
    return True


def _same_atoms(atoms: Sequence[Any], names: Sequence[Mapping[Any, Any]]) -> bool:
    first, *others = atoms
    if isinstance(first, jcore.Literal):
        return all(
            isinstance(a, jcore.Literal) and a.aval.dtype == first.aval.dtype for a in others
        )
    return all(
        not isinstance(a, jcore.Literal) and known.get(a) is first
        for a, known in zip(others, names, strict=True)
    )


def _corresponds(eqn: Any, peer: Any, names: Mapping[Any, Any]) -> bool:
    """Same primitive on the same operands."""
    return (
        peer is not None
        and peer.primitive is eqn.primitive
        and len(peer.invars) == len(eqn.invars)
        and len(peer.outvars) == len(eqn.outvars)
        and all(_same_atoms(pair, [names]) for pair in zip(eqn.invars, peer.invars, strict=True))
    )


def failed(site: Site, error: Refuse | NoRule) -> State:
    """The state of what an operator makes when no rule gives it one."""
    if isinstance(error, NoRule):
        return Unknown(Obstacle("unproven", site.name, str(error), site.source, site.scope))
    if error.origin is not None:
        origin = error.origin
        reason = f"{error.what}; {site.name}{placed(site.source)} {error}"
        return Mixed(
            Obstacle("mixed", origin.op, reason, origin.source, origin.scope, total=error.total)
        )
    return Mixed(Obstacle("mixed", site.name, str(error), site.source, site.scope))
