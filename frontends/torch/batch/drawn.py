"""Random numbers under a split: drawn for the whole batch before the nano-batches run.

So the caller's generator moves as for the whole batch, and every row gets the numbers it gets there.
Dropout becomes its mask, drawn before, and two products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.batch.expansion.specs import InSpec
from dynaflow_xla.batch.states import Rows, State
from dynaflow_xla.frontends.torch.batch.walking.walk import arguments, drawn_like, fills
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.capture.sizes import Sized
from dynaflow_xla.ir.graph import Operator, Value

_PREFIX = "drawn_"


def before(
    captured: Captured, states: tuple[State, ...]
) -> tuple[Captured, tuple[State, ...], list[Operator]]:
    """The graph with what it draws as inputs behind its others; the states; what draws, in order."""
    graph = captured.graph
    tokens = {v.id for v in graph.values if v.dtype == "token"}
    if not tokens:
        return captured, states, []
    values, known = list(graph.values), list(states)
    examples = dict(captured.examples)
    inputs, names = list(graph.inputs), list(graph.input_names)
    ops: list[Operator] = []
    draws: list[Operator] = []

    def value(like: int, state: State) -> int:
        number = len(values)
        values.append(replace(values[like], id=number, producer=-1))
        examples[number] = captured.examples[like]
        known.append(state)
        return number

    def add(op: Operator) -> None:
        ops.append(replace(op, index=len(ops)))

    for op in graph.ops:
        if not tokens.intersection(op.outputs):
            add(op)
            continue
        payload: Payload = op.payload
        if op.kind != "native_dropout":
            made = [v for v in payload.outputs if v is not None]
            known_values = fills(op, states) if drawn_like(op) is None else None
            if known_values is not None:
                op = replace(op, payload=_by_known(payload, known_values))
            draws.append(op)
        else:
            given = arguments(payload)
            out, mask = payload.outputs
            x, p = given["input"], float(given["p"])
            like = mask if mask is not None else out
            assert like is not None and isinstance(x, Ref)
            if mask is None:
                mask = value(like, _as_rows(known[like]))
                values[mask] = replace(
                    values[mask], dtype="bool", bytes=values[mask].bytes // 4 or 1
                )
                examples[mask] = captured.examples[like].to(torch.bool)
            made = [mask]
            draw = Payload(_mask, (x, 1.0 - p), {}, (mask,), False)
            draws.append(replace(op, payload=draw, inputs=(x.value,), outputs=(mask,)))
            if out is not None:
                product = value(out, known[out])
                scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
                for target, args, result in (
                    (torch.ops.aten.mul.Tensor, (x, Ref(mask)), product),
                    (torch.ops.aten.mul.Scalar, (Ref(product), scale), out),
                ):
                    refs = tuple(a.value for a in args if isinstance(a, Ref))
                    add(
                        replace(
                            op, kind="mul", inputs=refs, outputs=(result,), once=False,
                            payload=Payload(target, args, {}, (result,), False),
                        )
                    )  # fmt: skip
        for number in made:
            inputs.append(number)
            names.append(f"{_PREFIX}{len(draws)}")
    producers = {v: op.index for op in ops for v in op.outputs}
    done: list[Value] = [replace(v, producer=producers.get(v.id, -1)) for v in values]
    whole = replace(
        graph, values=tuple(done), ops=tuple(ops), inputs=tuple(inputs), input_names=tuple(names)
    )
    return replace(captured, graph=whole, examples=examples), tuple(known), draws


def _as_rows(state: State) -> State:
    return replace(state, power=0, fill=None) if isinstance(state, Rows) else state


def specs(
    given: Mapping[int, InSpec], captured: Captured, states: Sequence[State]
) -> dict[int, InSpec]:
    """How the inputs are cut, with those that are drawn."""
    made = dict(given)
    for value, name in zip(captured.graph.inputs, captured.graph.input_names, strict=True):
        if name.startswith(_PREFIX):
            state = states[value]
            made[value] = state.axis if isinstance(state, Rows) else None
    return made


def drawer(
    draws: Sequence[Operator], whole: Sized, captured: Captured
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Adds what is drawn to the inputs of a call."""
    from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, StridedLayout

    calls: list[tuple[Any, Any, Any, tuple[int, ...]]] = []
    for op in draws:
        payload: Payload = op.payload

        def put(ref: Ref) -> Any:
            if ref.value in whole.numbers:
                return whole.numbers[ref.value]
            return StridedLayout.of(whole.captured.examples[ref.value], Evaluator({}))

        args, kwargs = payload.mapped(put)
        keep = tuple(n for n, v in enumerate(payload.outputs) if v is not None)
        calls.append((payload.target, args, kwargs, keep if payload.multiple else ()))

    def real(arg: Any) -> Any:
        return arg.empty() if isinstance(arg, StridedLayout) else arg

    def run(given: Sequence[Any]) -> Sequence[Any]:
        made = [*given]
        if isinstance(given, list):
            given.clear()
        with torch.no_grad():
            for target, args, kwargs, keep in calls:
                out = target(*map(real, args), **kwargs)
                made += [out[n] for n in keep] if keep else [out]
        return made

    return run


def _by_known(payload: Payload, values: Mapping[int, Any]) -> Payload:
    """A call that is given tensors for their shapes, and draws by what these are filled with."""

    def filled(ref: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        room = x.untyped_storage().nbytes() // x.element_size()
        made = x.new_full((room,), values[ref.value])  # one element may stand for several
        return made.as_strided(x.shape, x.stride(), x.storage_offset())

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [filled(*pair) for pair in zip(payload.args, args, strict=True)]
        named = {name: filled(payload.kwargs[name], x) for name, x in kwargs.items()}
        return payload.target(*given, **named)

    return replace(payload, target=run)


def _mask(like: torch.Tensor, keep: float) -> torch.Tensor:
    """The mask that ``torch.native_dropout`` draws."""
    return torch.empty_like(like, dtype=torch.bool).bernoulli_(keep)
