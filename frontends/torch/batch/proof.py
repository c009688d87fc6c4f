"""The proof that a captured graph can run nano-batch by nano-batch, and how its parts fit together.

In a training step there are two graphs. What the forward keeps for the backward is proved like a result,
although it need not be put together (``handed``), and the backward starts from what is known of it. The
gradient of a result that is no total reaches each nano-batch's backward weighted by its share of the
batch, so that gradients of parameters are sums over nano-batches whatever the result was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from dynaflow_xla.batch.expansion.specs import AS_PROVED, PARTS, InSpec, OutSpec
from dynaflow_xla.batch.joins import Joiner, Joining, Wanted
from dynaflow_xla.batch.proof import Mean, OutputProof, Proof, Sum, mergers, prove_output
from dynaflow_xla.batch.row_orders.orders import at, plain
from dynaflow_xla.batch.states import (
    ORDERED,
    Counted,
    ItemNumbers,
    Keyed,
    Late,
    Mixed,
    Obstacle,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    Unknown,
    Whole,
    is_plain_same,
    is_zero,
)
from dynaflow_xla.errors import PlanError, RuleError, checks
from dynaflow_xla.frontends.torch.batch.rules import (
    activations,
    bags,
    contractions,
    indexing,
    layers,
    loops,
    made,
    opaque,
    orders,
    pointwise,
    reductions,
    shapes,
)
from dynaflow_xla.frontends.torch.batch.walking.probes import (
    PROBES,
    number_state,
    rows_by_shape,
    varying,
)
from dynaflow_xla.frontends.torch.batch.walking.registry import RULES
from dynaflow_xla.frontends.torch.batch.walking.walk import Walker
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.names import outputs_in_words
from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, NoSize, Symbol

# Importing them registers their rules.
_FAMILIES = (
    pointwise, shapes, made, reductions, contractions, indexing, activations, bags, layers, orders, opaque,
    loops,
)  # fmt: skip


def covered() -> frozenset[str]:
    """Kinds of operators that have a rule; those that go element by element need none."""
    return frozenset(RULES)


@dataclass(frozen=True)
class Fit:
    """How a graph is cut and put together.

    Attributes:
        proof: What is proved.
        states: By value id.
        in_specs: For each input of the graph that is a tensor: axis, None, or ``PARTS`` for a
            gradient that is handed out in shares.
        out_specs: By value id of the outputs that are tensors.
        joining: What runs once for all nano-batches; None if nothing does.
    """

    proof: Proof
    states: tuple[State, ...]
    in_specs: Mapping[int, InSpec]
    out_specs: Mapping[int, OutSpec]
    joining: Joining | None = None


@dataclass(frozen=True)
class Question:
    """What is asked about a graph.

    Attributes:
        captured: The graph with its open sizes.
        batch_symbols: Sizes that are the number of rows.
        others: Values of the other open sizes.
        kind: "inference", "forward" or "backward".
        roles: For each entry of ``captured.outputs``: "result", "passed" (to code of the user's behind a
            graph break), "saved", "updated" (what an argument is to hold) or "gradient".
        given: Backward only: states of inputs by name.
        totals: Backward only: names of gradients of results that are sums over the batch.
        out_axes: As the user gave it.
        cuts: Backward only: how what the forward hands over was put together, by name. It is cut so
            even where nothing is proved of it.
        open_numbers: Numbers that are another one at each call, the same for all nano-batches.
    """

    captured: Captured
    batch_symbols: frozenset[Symbol]
    others: Mapping[Symbol, int]
    kind: str
    roles: Sequence[str]
    given: Mapping[str, State]
    totals: frozenset[str]
    out_axes: Any
    cuts: Mapping[str, OutSpec] = field(default_factory=dict)
    open_numbers: frozenset[int] = frozenset()


def answer(
    question: Question,
    batch: int,
    sizes: Sequence[int],
    *,
    assume: bool,
    joins: Wanted | None = None,
) -> Fit:
    """Proves what can be proved for these sizes.

    Rules look at two sizes that nothing else has. What follows the batch size otherwise there than at the
    sizes of this batch and its parts (``min(rows, 3)``, ``rows % 2``) is told to them beforehand.

    Args:
        question: The graph.
        batch: Rows of the whole batch.
        sizes: Of the nano-batches.
        assume: The user vouches for what is not proved; results go by their shapes then.
        joins: What the strategy wants to run once; operators that mix rows do so, too. None: nothing may.

    Raises:
        PlanError: a result's shape does not say how to put it together.
    """
    captured = question.captured
    probes = [
        Evaluator({**question.others, **dict.fromkeys(question.batch_symbols, n)}) for n in PROBES
    ]
    shape_of: dict[int, Any] = {}
    numbers: dict[int, tuple[Any, Any]] = {}
    opened = dict.fromkeys(question.open_numbers, ((), ()))
    for value in captured.graph.values:
        example = captured.examples[value.id]
        if isinstance(example, torch.Tensor):
            shape_of[value.id] = tuple(p.shape(example.shape, "a tensor") for p in probes)
        elif not isinstance(example, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            continue
        elif (pair := (probes[0](example), probes[1](example)))[0] is not None:
            numbers[value.id] = pair
    ins = _inputs(question, shape_of, numbers, joins)
    traced = tuple(dict.fromkeys((batch, *sizes)))
    for number, state in ins.items():
        if _of_other_sizes(state, traced):
            reason = "was made by a forward that was split in another way"
            ins[number] = Mixed(Obstacle("mixed", "argument", reason))
    irregular = _irregular(question, {batch, *sizes}, {**shape_of, **numbers})
    joiner: Joiner | None = None
    force = {} if joins is None else _forced(joins, question)
    early: frozenset[int] = frozenset()
    while True:
        if joins is not None:

            def shapes_at(value: int) -> Sequence[tuple[int, ...]]:
                regular = value in shape_of and value not in irregular
                return shape_of[value] if regular else ((), (0,))

            joiner = Joiner(captured.graph, shapes_at, PROBES, force, early, numbers)
            joiner.start(ins)
        walker = Walker(
            captured, {**shape_of, **opened}, numbers, lenient=assume, irregular=irregular, joiner=joiner,
            sizes=traced, evaluators=probes,
        )  # fmt: skip
        states = tuple(s.rows if isinstance(s, Keyed) else s for s in walker.run(ins))
        verdicts, specs = _outputs(question, states, shape_of, assume=assume, joiner=joiner)
        if joiner is None:
            break
        more, blamed = _to_join(question, verdicts, joiner)
        more, blamed = more - early, {op: w for op, w in blamed.items() if op not in force}
        if not more and not blamed:
            break
        early |= more
        force = {**force, **blamed}
    in_specs: dict[int, InSpec] = {}
    for given, name in zip(captured.graph.inputs, captured.graph.input_names, strict=True):
        if given in numbers:
            continue
        state = ins[given]
        if isinstance(state, Rows | Position | Counted):
            in_specs[given] = state.axis
        elif isinstance(state, ORDERED):
            in_specs[given] = _axis(state)
        elif isinstance(state, Same) and state.power == 1 and name.startswith("tangents"):
            in_specs[given] = PARTS
        else:
            cut = question.cuts.get(name) if isinstance(state, Mixed | Unknown) else None
            in_specs[given] = cut if isinstance(cut, int) else None
    proof = Proof(
        name=captured.graph.name,
        batch=batch,
        sizes=tuple(dict.fromkeys(sizes)),
        states=states,
        outputs=tuple(verdicts),
        findings=tuple(dict.fromkeys(v.finding for v in verdicts if v.finding is not None)),
    )
    joining = None if joiner is None else replace(joiner.joining(), states=states)
    return Fit(proof, states, in_specs, specs, joining)


def _forced(joins: Wanted, question: Question) -> dict[int, str]:
    try:
        return joins.forced(question.captured.graph)
    except RuleError:
        if question.kind != "backward":
            raise
        return {}  # the strategy's rules speak of the forward


def _to_join(
    question: Question, verdicts: Sequence[OutputProof], joiner: Joiner
) -> tuple[frozenset[int], dict[int, str]]:
    """Totals that are to be complete, and operators to run once, for the sake of outputs."""
    graph = question.captured.graph
    values = [*question.captured.outputs, *(v for _, v in question.captured.epilogue)]
    early = set(joiner.again)
    blamed = {}
    for verdict in verdicts:
        if verdict.status == "separable" or isinstance(verdict.state, Mixed | Unknown):
            continue
        value = values[verdict.index]
        if isinstance(verdict.state, Partial):
            early.add(value)
        elif not verdict.suggestion and graph.values[value].producer >= 0:
            blamed[graph.values[value].producer] = str(verdict.finding)
    return frozenset(early), blamed


def _axis(state: State) -> int:
    """Along which axis each nano-batch has what is its own."""
    rows = at(state)
    return 0 if rows is None else rows.axis


def _of_other_sizes(state: State, sizes: Sequence[int]) -> bool:
    """Whether numbers of items are known of other batch sizes than these."""
    if not isinstance(state, ItemNumbers):
        return False
    each = state.outer * state.inner
    return [t.size for t in state.tables] != [n * each for n in sizes]


def _irregular(
    question: Question, sizes: set[int], probed: Mapping[int, tuple[Any, Any]]
) -> frozenset[int]:
    """Values whose shape, or which themselves as numbers, follow the batch size otherwise than the probes."""
    found = set()
    examples = question.captured.examples
    for size in sizes:
        at = Evaluator({**question.others, **dict.fromkeys(question.batch_symbols, size)})
        for value, (first, second) in probed.items():
            example = examples[value]
            try:
                if isinstance(example, torch.Tensor):
                    shape = at.shape(example.shape, "a tensor")
                    pairs = zip(first, second, shape, strict=True)
                    regular = all(_on_line((a, b), size, n) for a, b, n in pairs)
                else:
                    regular = _on_line((first, second), size, at(example))
            except NoSize:
                regular = False
            if not regular:
                found.add(value)
    return frozenset(found)


def _on_line(pair: tuple[Any, Any], size: int, number: Any) -> bool:
    """Whether a number follows the batch size as it does at both probes: ``a + b * size``, or a power."""
    p, q = PROBES
    first, second = map(Fraction, pair)
    laws = [first + (second - first) * Fraction(size - p, q - p)]
    laws += [
        first * Fraction(size, p) ** power
        for power in (2, -1, -2)
        if math.isclose(first * Fraction(q, p) ** power, second)
    ]
    if isinstance(number, float):
        return any(math.isclose(number, law, abs_tol=1e-12) for law in laws)
    return number in laws


def _inputs(
    question: Question,
    shape_of: Mapping[int, Any],
    numbers: Mapping[int, Any],
    joins: Wanted | None,
) -> dict[int, State]:
    graph = question.captured.graph
    made: dict[int, State] = {}
    for value, name in zip(graph.inputs, graph.input_names, strict=True):
        if value in question.open_numbers:
            made[value] = Same()
            continue
        if value in numbers:
            made[value] = number_state(numbers[value])
            continue
        if name in question.given:
            made[value] = question.given[name]
            continue
        shapes_ = shape_of.get(value)
        if shapes_ is None:
            blame = Obstacle("unproven", "argument", f"{name} is neither a tensor nor a number")
            made[value] = Unknown(blame)
            continue
        rows = rows_by_shape(shapes_)
        if not varying(shapes_):
            weighted = name.startswith("tangents") and name not in question.totals
            made[value] = Same(1) if weighted else Same()
        elif joins is not None and rows is None:
            made[value] = Whole()
        elif rows is None or (rows.inner > 1 and question.kind != "backward"):
            reason = f"{name} has the batch in several dimensions, or a multiple of its rows"
            made[value] = Mixed(Obstacle("mixed", "argument", reason))
        else:
            made[value] = rows
    return made


def _declared(out_axes: Any) -> list[Any]:
    """The leaves of what the user gave as ``out_axes``."""
    if isinstance(out_axes, Mapping):
        return [leaf for part in out_axes.values() for leaf in _declared(part)]
    if isinstance(out_axes, (tuple, list)):
        return [leaf for part in out_axes for leaf in _declared(part)]
    number = checks.integer(out_axes)
    return [out_axes if number is None else number]


def _outputs(
    question: Question,
    states: Sequence[State],
    shape_of: Mapping[int, Any],
    *,
    assume: bool,
    joiner: Joiner | None = None,
) -> tuple[list[OutputProof], dict[int, OutSpec]]:
    captured = question.captured
    roles = list(zip(captured.outputs, question.roles, strict=True))
    roles += [(value, "written") for _, value in captured.epilogue]
    verdicts: list[OutputProof] = []
    specs: dict[int, OutSpec] = {}
    specs.update((v, None) for v, _ in roles if v in question.open_numbers)
    for number, (value, role) in enumerate(roles):
        if not isinstance(value, int) or value not in shape_of:
            continue
        state = states[value]
        whole = joiner is not None and joiner.is_whole(value)
        if whole and not isinstance(state, Mixed | Unknown):
            # What is whole is the original's value, however it was to be put together.
            verdicts.append(OutputProof(number, state, None, "separable"))
            specs.setdefault(value, AS_PROVED)
            continue
        verdict, spec = _one(question, number, value, role, state, shape_of[value])
        if assume and verdict.status != "separable":
            spec = _by_shape(question, number, role, shape_of[value])
        verdicts.append(verdict)
        specs.setdefault(value, spec)
    names = outputs_in_words(captured, [role for _, role in roles])
    return [replace(v, name=names[v.index]) for v in verdicts], specs


def _one(
    question: Question, number: int, value: int, role: str, state: State, shapes_: Any
) -> tuple[OutputProof, OutSpec]:
    """What is proved of an output in its role, and how it is put together."""
    graph = question.captured.graph
    producer = graph.values[value].producer
    op = graph.ops[producer] if producer >= 0 else None
    made_by = Obstacle(
        "mixed", op.kind if op else "argument", "", op.source if op else None,
        op.scope if op else (),
    )  # fmt: skip
    if role == "saved" and isinstance(state, ORDERED):
        # Each nano-batch gets back what is its own; nothing is put together.
        axis = _axis(state)
        return OutputProof(number, state, axis, "separable"), axis
    try:
        state = plain(state)
    except Refuse as error:
        blame = error.origin or made_by
        reason = "sorts the batch, and the result is in that order" if error.origin else str(error)
        state = Mixed(Obstacle("mixed", blame.op, reason, blame.source, blame.scope))
    wanted = _wanted(question, number, role, state)
    if isinstance(state, Unknown):
        return _unproven(question, number, role, state, shapes_)
    kept = role in ("passed", "saved", "written", "updated")  # whole, and no matter of out_axes
    if kept and isinstance(state, Partial) and state.power in (0, -1):
        total = Mean() if state.power else Sum()
        return OutputProof(number, state, total, "separable"), total
    if role == "saved":
        # Numbers that a nano-batch counts for itself go back to that nano-batch, and nowhere else.
        if isinstance(state, Counted) or (isinstance(state, Position) and state.dim is None):
            return OutputProof(number, state, state.axis, "separable"), state.axis
    if isinstance(state, Late) and role in ("passed", "saved", "gradient", "updated"):
        return OutputProof(number, state, None, "separable"), None
    rank = len(shapes_[0])
    if isinstance(state, Rows) and (role == "saved" or state.power == 0) and wanted == state.axis:
        # Several runs of the batch one after the other are put together run by run.
        return OutputProof(number, state, state.axis, "separable"), state.axis
    inexact = graph.values[value].dtype.startswith(("float", "bfloat", "complex"))
    verdict = prove_output(number, state, wanted, rank=rank, inexact=inexact, made_by=made_by)
    if verdict.status == "mixed" and role == "saved" and not isinstance(state, Mixed):
        finding = Obstacle(
            "mixed", made_by.op,
            f"its result is {state}, and the backward needs it of the whole batch",
            made_by.source, made_by.scope,
        )  # fmt: skip
        verdict = OutputProof(number, state, wanted, "mixed", finding)
    return verdict, wanted


def _unproven(
    question: Question, number: int, role: str, state: Unknown, shapes_: Any
) -> tuple[OutputProof, OutSpec]:
    """An output that can be compared with the whole batch's, if its shape says how to put it together."""
    try:
        spec = _by_shape(question, number, role, shapes_)
    except PlanError:
        shape = ["?" if d in varying(shapes_) else n for d, n in enumerate(shapes_[0])]
        made = f"a result of shape [{', '.join(map(str, shape))}]"
        where = (
            f"{state.finding.reason}, and {made} does not say where the rows of the batch are in it"
        )
        finding = replace(state.finding, verdict="mixed", reason=where)
        ways = (
            ""
            if varying(shapes_) or role == "passed"
            else "out_axes=dfx.Sum(), dfx.Mean() or None, if it is that; it is then compared"
        )
        return OutputProof(number, state, None, "mixed", finding, ways), None
    return OutputProof(number, state, None, "unproven", state.finding), spec


def _said(question: Question, number: int) -> Any:
    """What the user's ``out_axes`` say of one result; where they are not one for each, what comes first."""
    declared = _declared(question.out_axes)
    if len(declared) == question.roles.count("result"):
        return declared[question.roles[:number].count("result")]
    return declared[0] if declared else 0


def _wanted(question: Question, number: int, role: str, state: State) -> Any:
    """How an output of this state is to be put together, as far as the user leaves it open."""
    declared = _declared(question.out_axes)
    if isinstance(state, Rows):
        fixed = [a for a in declared if isinstance(a, int) and a != 0]
        if role == "result" and fixed and state.axis not in fixed and 0 not in declared:
            return fixed[0]
        return state.axis
    if role in ("gradient", "passed"):
        possible = mergers(state)
        if Sum() in possible and not is_zero(state):
            return Sum()
        return possible[0] if possible else None
    if isinstance(state, Partial) and role == "result":
        totals = [a for a in declared if isinstance(a, Sum | Mean)]
        said = totals[0] if totals else _said(question, number)
        return next((a for a in totals if a in mergers(state)), said)
    if isinstance(state, Late) and role == "result":
        return next((a for a in declared if a in mergers(state)), _said(question, number))
    if isinstance(state, Same) and is_plain_same(state):
        return None
    return 0 if role == "result" else None


def _by_shape(question: Question, number: int, role: str, shapes_: Any) -> OutSpec:
    """How an output of which nothing is proved is put together, from its shape."""
    rows = rows_by_shape(shapes_)
    if rows is not None:
        return rows.axis
    if not varying(shapes_):
        if role == "gradient":
            return Sum()
        totals = [a for a in _declared(question.out_axes) if a is None or isinstance(a, Sum | Mean)]
        if role == "result" and totals:
            return totals[0]  # type: ignore[no-any-return]
        if role in ("saved", "written", "updated"):
            return None
    raise PlanError(
        f"{question.captured.graph.name!r}: result {number} of shape {list(shapes_[0])} (for a batch of "
        f"{PROBES[0]}) does not say along which axis its nano-batches lie; give out_axes=dfx.Sum(), "
        "dfx.Mean() or None for a result without a batch"
    )
