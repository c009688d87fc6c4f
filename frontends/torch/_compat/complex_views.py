"""Results of a split graph that are complex, or lazily negated, views of a real tensor: rotary embeddings.

AOTAutograd makes such a result anew, from the tensor that it is a view of. If it does not find out which
views led there, it goes by where the result lies: it takes that tensor for complex before it gives it a shape
(``gen_alias_from_base``), which only does where its last dimension is 2, and forgets a negation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dynaflow_xla.frontends.torch._compat import aot

_Run = Callable[[list[Any]], list[Any]]


class OnReal(NamedTuple):
    """Such a result.

    Attributes:
        place: Its number among the graph's results.
        is_input: Whether it is a view of an input; else of a result.
        base: The number of that.
        conjugate: Whether it is a lazy conjugate.
        negative: Whether it is lazily negated.
    """

    place: int
    is_input: bool
    base: int
    conjugate: bool
    negative: bool


def on_real(gm: Any) -> list[OnReal]:
    """Which results of AOTAutograd's forward are such; called while that is compiled."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return []
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    inputs = [placeholders.index(node) for node in aot.input_nodes(gm)]
    (output,) = gm.graph.find_nodes(op="output")
    users: dict[int, int] = {}
    bases: list[int] = []
    for place, described in enumerate(aot.output_descriptions(gm)):
        if type(described).__name__ == "PlainAOTOutput":
            users[described.idx] = place
        elif type(described).__name__ == "IntermediateBaseAOTOutput":
            bases.append(place)
    found = []
    for number, info in enumerate(context.fw_metadata.output_info):
        if number not in users or info.base_idx is None:
            continue
        kind = info.output_type.name
        is_input = kind == "alias_of_input"
        of_user = kind == "alias_of_intermediate_base_is_user_output"
        places: dict[int, int] = (
            users if of_user else dict(enumerate(inputs if is_input else bases))
        )
        if info.base_idx not in places:  # inference returns no base of what is computed
            continue
        base = places[info.base_idx]
        given = placeholders[base] if is_input else output.args[0][base]
        value, real = _value(output.args[0][users[number]]), _value(given)
        if value is None or real is None or real.is_complex():
            continue
        if value.is_complex() or value.is_neg():
            place = users[number]
            found.append(OnReal(place, is_input, base, value.is_conj(), value.is_neg()))
    return found


def _value(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


class Based:
    """A graph of whose results it is known by which views they come from real tensors.

    Args:
        run: The graph.
        found: These results.
    """

    def __init__(self, run: _Run, found: Sequence[OnReal]) -> None:
        self._run, self._found = run, found

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs it."""
        given = {one.base: inputs[one.base] for one in self._found if one.is_input}
        results = list(self._run(inputs))
        for one in self._found:
            base = given[one.base] if one.is_input else results[one.base]
            results[one.place] = _view_of(base, results[one.place], one)
        return results


def _view_of(base: torch.Tensor, made: torch.Tensor, one: OnReal) -> torch.Tensor:
    """What of ``base`` lies where a result lies, by views."""
    with torch.no_grad():
        plain = made.conj() if made.is_conj() else made
        parts = torch.view_as_real(plain) if made.is_complex() else plain
        view = base.detach().as_strided(parts.shape, parts.stride(), parts.storage_offset())
        if made.is_complex():
            view = torch.view_as_complex(view)
        if one.conjugate:
            view = view.conj()
        return torch._neg_view(view) if one.negative else view
