"""From a jaxpr to the graph IR.

Call-like equations (nested jit, custom derivatives, remat) are inlined and remembered as call
path; control flow stays one operator. The captured program is only ever evaluated: derivatives
come from the original function, so inlining custom rules loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core as jcore

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import costs, marks, parameters, sharding
from dynaflow_xla.frontends.jax.capture.equal import Equal
from dynaflow_xla.ir.graph import Graph, Operator, OuterKind, OuterReason, Source, Value
from dynaflow_xla.ir.work import Work

# Calls, and the parameter that holds the function called.
INLINE = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
    "checkpoint": "jaxpr", "custom_lin": "call_jaxpr",
}  # fmt: skip

# Calls that carry their own way to be differentiated, or to be recomputed when that happens.
OWN_DERIVATIVES = frozenset("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split())
HI_CALL = "call_hi_primitive"
"""Since JAX 0.11, ``custom_root`` and others: an operator with a derivative of its own; captures keep it."""
_RECOMPUTED = frozenset("remat remat2 checkpoint".split())
_RULES = OWN_DERIVATIVES | _RECOMPUTED | {"custom_lin"}

REVERSE_ONLY = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})

# Types narrower than a byte: XLA packs them in some buffers and not in others.
_PACKED = frozenset("int2 uint2 int4 uint4 int1 uint1 float4_e2m1fn".split())


@dataclass(frozen=True)
class Loop:
    """A loop whose body has a plan of its own.

    Attributes:
        equation: The loop's equation with that body.
        entry: The plan of the body; its inputs are the body's. Of a type that who planned it knows.
    """

    equation: Any
    entry: Any


@dataclass(frozen=True)
class Captured:
    """A graph with what is needed to run it.

    Attributes:
        graph: The neutral graph; ``Operator.payload`` is an equation over ``variables``.
        variables: Value id -> jaxpr variable.
        outputs: For each flat result: a value id, or a literal's value.
        avals: Value id -> abstract value.
        jaxpr: The jaxpr captured from (for its settings).
        keeps_rules: Calls with derivative rules of their own are one operator.
        loops: Operator index -> the loop with a scheduled body that runs in its place.
        consts: Values of the first inputs, if the trace met them and callers do not give them.
        merged: How many equations are no operator, since an equal one is.
    """

    graph: Graph
    variables: list[Any]
    outputs: list[int | Any]
    output_is_value: list[bool]
    avals: list[Any]
    jaxpr: Any
    keeps_rules: bool = False
    loops: dict[int, Loop] = field(default_factory=dict, compare=False)
    consts: tuple[Any, ...] = field(default=(), compare=False)
    merged: int = 0

    def equation(self, index: int) -> Any:
        """The equation that runs for an operator."""
        loop = self.loops.get(index)
        return self.graph.ops[index].payload if loop is None else loop.equation


def ordering_effects(effects: Iterable[Any]) -> list[Any]:
    """Effects but those that say that a mesh axis is named, which order nothing."""
    return [e for e in effects if type(e).__name__ != "NamedAxisEffect"]


def outer_reason(eqn: Any) -> OuterReason | None:
    """Why an equation must stay in the outer program; None if it need not."""
    name = eqn.primitive.name
    if effects := ordering_effects(eqn.effects):
        return OuterReason(f"has effects ({', '.join(sorted(map(str, effects)))})")
    for atom in (*eqn.invars, *eqn.outvars):
        if str(getattr(atom.aval, "dtype", "")) in _PACKED:
            return OuterReason(
                f"uses {atom.aval.dtype}, whose layout in memory differs between programs",
                OuterKind.LAYOUT,
            )
    if name in costs.CALLBACKS:
        return OuterReason("calls back into Python")
    if name in costs.COLLECTIVES:
        return OuterReason("communicates between devices", OuterKind.NETWORK)
    if name == "device_put" and sharding.changes_nothing(eqn) and not sharding.names_devices(eqn):
        return None
    if name in costs.OUTER_CALLS:
        scheduled = dict.fromkeys(costs.SCHEDULED, "is scheduled already")
        texts = {**scheduled, "device_put": "places data"}
        return OuterReason(texts.get(name, "runs on several devices"))
    if name not in INLINE and sharding.names_devices(eqn):
        return OuterReason(sharding.REASON)
    if _is_interpreted(eqn):
        return None
    for inner in jcore.jaxprs_in_params(eqn.params):
        for inner_eqn in inner.eqns:
            if reason := outer_reason(inner_eqn):
                return replace(reason, text=f"contains {inner_eqn.primitive.name}, which {reason}")
    return None


def _is_interpreted(eqn: Any) -> bool:
    """Whether it is a Pallas kernel that is ordinary operators, with no effects but on memory of its own."""

    def local(inner: Any) -> bool:
        return all(
            all(map(_compat.is_of_a_reference, e.effects))
            and e.primitive.name not in costs.CALLBACKS | costs.COLLECTIVES | costs.OUTER_CALLS
            for e in _all_equations(inner)
        )

    return (
        eqn.primitive.name == "pallas_call"
        and eqn.params.get("interpret") is True
        and all(map(local, jcore.jaxprs_in_params(eqn.params)))
    )


def acts(eqn: Any) -> bool:
    """Whether an equation does something that nobody may repeat: effects, callbacks, communication."""
    name = eqn.primitive.name
    if ordering_effects(eqn.effects) or name in costs.CALLBACKS | costs.COLLECTIVES:
        return True
    if name in costs.OUTER_CALLS - {"device_put"}:
        return True
    return not _is_interpreted(eqn) and any(
        acts(e) for inner in jcore.jaxprs_in_params(eqn.params) for e in inner.eqns
    )


def changes_something(eqn: Any) -> bool:
    """Whether an equation acts on something besides its results; a pure callback says that it does not."""
    name = eqn.primitive.name
    if ordering_effects(eqn.effects) or name in costs.CALLBACKS - costs.PURE_CALLBACKS:
        return True
    inner = jcore.jaxprs_in_params(eqn.params)
    return any(changes_something(e) for each in inner for e in each.eqns)


def _dtype_name(aval: Any) -> str:
    return str(aval.dtype)


def holds_custom_rules(jaxpr: Any, *, in_loops: bool = False) -> bool:
    """Whether a capture of a jaxpr would look through derivative rules of its functions.

    Args:
        jaxpr: The jaxpr.
        in_loops: The bodies of loops count, too.
    """

    def holds(eqn: Any) -> bool:
        name = eqn.primitive.name
        if name in _RULES:
            return True
        if name in INLINE:
            return holds_custom_rules(_inner(eqn), in_loops=in_loops)
        return (
            in_loops
            and name == "scan"
            and holds_custom_rules(eqn.params["jaxpr"].jaxpr, in_loops=True)
        )

    return any(map(holds, jaxpr.eqns))


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jcore.jaxprs_in_params(eqn.params):
            yield from _all_equations(inner)


def has_reverse_rules(jaxpr: Any) -> bool:
    """Whether a jaxpr holds a ``custom_vjp``, at any depth: it has no derivative in forward mode."""
    return any(eqn.primitive.name in REVERSE_ONLY for eqn in _all_equations(jaxpr))


def has_own_rule(name: str) -> bool:
    """Whether a primitive of this name is a call with a derivative rule of its own."""
    return name in OWN_DERIVATIVES or name == HI_CALL


def outermost_own_rules(eqns: Iterable[Any]) -> Iterator[Any]:
    """Calls with derivative rules of their own, at any depth, but not inside of one another."""
    for eqn in eqns:
        if has_own_rule(eqn.primitive.name):
            yield eqn
        else:
            for inner in jcore.jaxprs_in_params(eqn.params):
                yield from outermost_own_rules(inner.eqns)


def has_own_rules_in(eqn: Any) -> bool:
    """Whether an equation is such a call, or holds one."""
    return next(outermost_own_rules([eqn]), None) is not None


def has_own_rules(jaxpr: Any) -> bool:
    """Whether a jaxpr holds such a call, at any depth."""
    return next(outermost_own_rules(jaxpr.eqns), None) is not None


def rule_name(eqn: Any) -> str:
    """Name of the function that a rule, or something that holds one, is of."""
    called = eqn.params.get(INLINE.get(eqn.primitive.name, ""))
    info = getattr(getattr(called, "jaxpr", called), "debug_info", None)
    return repr(str(getattr(info, "func_name", "") or eqn.params.get("name") or eqn.primitive.name))


def marks_inside(captured: Captured) -> list[str]:
    """Sentences about marks that cut nothing, since an operator of the graph holds them whole.

    A loop or a branch is one operator of a plan, unless what it does each turn has a plan of its own.
    """
    notes: list[str] = []
    for op in captured.graph.ops:
        params = getattr(op.payload, "params", None)
        if params is None or op.index in captured.loops:
            continue
        inner = (e for body in jcore.jaxprs_in_params(params) for e in _all_equations(body))
        stacks = (str(e.source_info.name_stack) for e in inner)
        parts = (part for stack in stacks if "dfx:" in stack for part in marks.split_scope(stack))
        names = dict.fromkeys(marks.plain_name(part) for part in parts if marks.is_mark(part))
        notes.extend(
            f"mark {name!r} inside of {op.kind}{op.at} cuts nothing: the whole {op.kind} is one operator "
            "of this plan. Mark what is around it, or schedule the body's function by itself"
            + (" (backend='xla' plans the bodies of scans)" if op.kind == "scan" else "")
            for name in names
        )
    return notes


def uses_axis(jaxpr: Any, name: Any) -> bool:
    """Whether a jaxpr communicates over, or asks for the position on, a named axis."""
    for eqn in _all_equations(jaxpr):
        for key in ("axes", "axis_name"):
            used = eqn.params.get(key, ())
            if name in (used if isinstance(used, (tuple, list)) else (used,)):
                return True
    return False


def _inner(eqn: Any) -> Any:
    inner = eqn.params.get(INLINE[eqn.primitive.name])
    return getattr(inner, "jaxpr", inner)


@dataclass(frozen=True)
class _Behind:
    """The parts of a jaxpr that ``inline`` reads, of one whose inputs pass a barrier first."""

    constvars: Any
    invars: Any
    eqns: Any
    outvars: Any


def _behind_barrier(inner: Any, call: Any) -> Any:
    """The function that ``jax.checkpoint`` calls again, so that XLA does not merge it with the first time.

    JAX's own lowering puts the same barrier there (``prevent_cse``): else what is recomputed to save memory
    would be kept after all.
    """
    told = call.params.get("prevent_cse", False)
    held = (told,) * len(inner.invars) if isinstance(told, bool) else tuple(told)
    passing = [var for var, hold in zip(inner.invars, held, strict=True) if hold]
    if not passing:
        return inner
    fresh = {var: _compat.new_var(var.aval) for var in passing}
    barrier = call.replace(
        primitive=jax.lax.optimization_barrier_p, params={}, effects=frozenset(),
        invars=list(fresh.values()), outvars=passing,
    )  # fmt: skip
    return _Behind(
        inner.constvars,
        [fresh.get(var, var) for var in inner.invars],
        [barrier, *inner.eqns],
        inner.outvars,
    )


class _Builder:
    def __init__(self, keep_rules: bool, merge: bool) -> None:
        self.keep_rules = keep_rules
        self.merge = merge
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.variables: list[Any] = []
        self.ops: list[Operator] = []
        self.calls: Counter[str] = Counter()
        self.mark_numbers: dict[Any, int] = {}
        self.generated: set[int] = set()
        self.equal = Equal()

    def value(self, aval: Any, producer: int) -> int:
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            raise UnsupportedError(
                f"a schedule takes arrays; got a value of type {aval} (jax.lax.create_token and "
                "jax.experimental.hijax make such ones). Leave it out of the scheduled function, or call "
                "fast.original"
            )
        number = len(self.values)
        self.values.append(
            Value(
                number,
                tuple(aval.shape),
                _dtype_name(aval),
                costs.aval_bytes(aval),
                producer,
                bool(getattr(aval, "weak_type", False)),
            )
        )
        self.avals.append(aval)
        self.variables.append(_compat.new_var(aval))
        return number

    def inline(
        self,
        jaxpr: Any,
        env: dict[Any, Any],
        scope: list[str],
        scope_calls: tuple[int, ...],
        call_path: tuple[str, ...],
        caller: Source | None = None,
        entered: dict[str, tuple[str, ...]] | None = None,
        function: str = "",
    ) -> None:
        """Adds the equations of ``jaxpr``; ``env`` maps its variables to value ids or literals.

        ``caller`` is the line of the call, for equations that only library code has a line for;
        ``function`` that one of several functions which they belong to.
        """

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jcore.Literal) else env[atom]

        for eqn in map(sharding.without_default, jaxpr.eqns):
            name = eqn.primitive.name
            local, named = marks.without_function(
                marks.split_scope(str(eqn.source_info.name_stack))
            )
            own = function or named
            inner_scope = scope + local
            inner_calls = scope_calls + (len(call_path),) * len(local)
            marked = dict(entered or {})
            for component in local:
                if marks.is_mark(component):
                    marked.setdefault(component, call_path)
            called = None if self.keep_rules and name in _RULES else INLINE.get(name)
            if called is not None and called in eqn.params:
                inner = eqn.params[called]
                consts = list(getattr(inner, "consts", ()))
                inner = getattr(inner, "jaxpr", inner)
                if name in _RECOMPUTED and eqn.params.get("differentiated"):
                    inner = _behind_barrier(inner, eqn)
                inner_env: dict[Any, Any] = {}
                for var, const in zip(inner.constvars, consts, strict=True):
                    inner_env[var] = jcore.Literal(const, var.aval)
                for var, atom in zip(inner.invars, eqn.invars, strict=True):
                    inner_env[var] = read(atom)
                path = call_path
                if name in ("jit", "pjit"):
                    label = str(eqn.params.get("name", name))
                    path = (*call_path, f"{label}#{self.calls[label]}")
                    self.calls[label] += 1
                line = _compat.user_source(eqn) or caller
                self.inline(inner, inner_env, inner_scope, inner_calls, path, line, marked, own)
                for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                    env[var] = atom if isinstance(atom, jcore.Literal) else inner_env[atom]
                continue
            atoms = [read(atom) for atom in eqn.invars]
            if sharding.changes_nothing(eqn):
                env.update(zip(eqn.outvars, atoms, strict=True))
                continue
            reason = outer_reason(eqn)
            read_values = [a for a in atoms if isinstance(a, int)]
            generator = name in costs.GENERATORS and self.generated.issuperset(read_values)
            flops, moved, cost, spread = Work() if generator else costs.estimate(eqn)
            mark = marks.find_mark(inner_scope, self.mark_numbers, marked)
            looked = self.merge and not reason
            key = self.equal.key(eqn, atoms, (mark, own)) if looked else None
            if (first := self.equal.found(key, eqn, atoms, cost)) is not None:
                env.update(zip(eqn.outvars, first, strict=True))
                continue
            index = len(self.ops)
            outputs = tuple(self.value(var.aval, index) for var in eqn.outvars)
            self.equal.made(key, outputs, atoms, cost)
            for var, number in zip(eqn.outvars, outputs, strict=True):
                env[var] = number
            payload = eqn.replace(
                invars=[self.variables[a] if isinstance(a, int) else a for a in atoms],
                outvars=[self.variables[n] for n in outputs],
            )
            if generator:
                self.generated.update(outputs)
            self.ops.append(
                Operator(
                    index=index,
                    kind=name,
                    inputs=tuple(dict.fromkeys(read_values)),
                    outputs=outputs,
                    scope=tuple(marks.plain_name(part) for part in inner_scope),
                    call_path=call_path,
                    scope_calls=inner_calls,
                    flops=flops,
                    bytes_moved=moved,
                    cost_ns=cost,
                    spread=spread,
                    outer=bool(reason),
                    outer_reason=reason,
                    generator=generator,
                    mark=mark,
                    function=own,
                    source=_compat.user_source(eqn) or caller,
                    params=parameters.text(payload),
                    payload=payload,
                )
            )


def capture(
    closed: Any, n_consts: int, name: str, *, keep_rules: bool = False, merge: bool = False
) -> Captured:
    """Builds the graph of a closed jaxpr whose constants were made inputs already.

    Args:
        closed: A ``ClosedJaxpr``; its constants become the first inputs.
        n_consts: How many leading inputs are closed-over values (for names only).
        name: Name of the function.
        keep_rules: Keep calls with derivative rules of their own as one operator, so that the
            captured program can be differentiated.
        merge: Equal equations are one operator, see ``equal``.
    """
    jaxpr = closed.jaxpr
    builder = _Builder(keep_rules, merge)
    env: dict[Any, Any] = {}
    inputs = []
    for var in (*jaxpr.constvars, *jaxpr.invars):
        number = builder.value(var.aval, -1)
        env[var] = number
        inputs.append(number)
    builder.inline(jaxpr, env, [], (), ())
    outputs: list[Any] = []
    is_value = []
    for atom in jaxpr.outvars:
        resolved = atom if isinstance(atom, jcore.Literal) else env[atom]
        is_value.append(isinstance(resolved, int))
        outputs.append(resolved if isinstance(resolved, int) else resolved.val)
    graph_outputs = tuple(n for n, ok in zip(outputs, is_value, strict=True) if ok)
    steps = [costs.applied(op.payload, op.inputs, op.outputs) for op in builder.ops]
    spreads = costs.as_parts(steps, [op.spread for op in builder.ops], graph_outputs)
    ops = tuple(
        op if op.spread == spread else replace(op, spread=spread)
        for op, spread in zip(builder.ops, spreads, strict=True)
    )
    names = [f"const_{i}" for i in range(n_consts + len(jaxpr.constvars))]
    names += [f"arg_{i}" for i in range(len(inputs) - len(names))]
    graph = Graph(
        name=name,
        values=tuple(builder.values),
        ops=ops,
        inputs=tuple(inputs),
        outputs=graph_outputs,
        input_names=tuple(names),
    )
    return Captured(
        graph, builder.variables, outputs, is_value, builder.avals, jaxpr, keep_rules,
        merged=builder.equal.merged,
    )  # fmt: skip
