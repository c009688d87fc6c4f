"""Complex results of a split graph that are views of a real tensor, as in rotary embeddings.

AOTAutograd makes such a result anew, from the tensor that it is a view of. If it does not find out which
views led there, it takes that tensor for complex before it gives it a shape (``gen_alias_from_base``), which
only does where its last dimension is 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import aot

_Run = Callable[[list[Any]], list[Any]]


def numbers(gm: Any) -> dict[int, bool]:
    """Which outputs of AOTAutograd's graph are such, and whether a lazy conjugate; while that is compiled."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return {}
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    (output,) = gm.graph.find_nodes(op="output")
    values: list[Any] = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    users: dict[int, int] = {}
    bases: list[Any] = []
    for place, described in enumerate(aot.output_descriptions(gm)):
        if type(described).__name__ == "PlainAOTOutput":
            users[described.idx] = place
        elif type(described).__name__ == "IntermediateBaseAOTOutput":
            bases.append(values[place])
    found = {}
    for number, info in enumerate(context.fw_metadata.output_info):
        if number not in users or info.base_idx is None:
            continue
        place = users[number]
        if not _is_complex(values[place]):
            continue
        base: Any
        if info.output_type.name == "alias_of_input":
            base = inputs[info.base_idx]
        elif info.output_type.name == "alias_of_intermediate_base_is_user_output":
            base = values[users[info.base_idx]]
        else:
            base = bases[info.base_idx] if info.base_idx < len(bases) else None
        if isinstance(base, torch.Tensor) and not base.is_complex():
            found[place] = values[place].is_conj()
    return found


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


class Based:
    """A graph whose complex results are known to be views of real tensors of another shape.

    Args:
        run: The graph.
        places: As ``numbers`` gives them.
    """

    def __init__(self, run: _Run, places: dict[int, bool]) -> None:
        self._run, self._places = run, places

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Runs it."""
        results = list(self._run(inputs))
        for place, conjugate in self._places.items():
            results[place] = _on_real(results[place], conjugate)
        return results


def _on_real(value: torch.Tensor, conjugate: bool) -> torch.Tensor:
    """A tensor that lies like this one, as a view of a real tensor that is none itself.

    Only where it lies counts: its values are read from the tensor that it is a view of in the original.
    """
    with torch.no_grad():
        parts = torch.view_as_real(value.conj() if value.is_conj() else value)
        real = torch.empty(0, dtype=parts.dtype, device=parts.device)
        real.set_(parts.untyped_storage(), parts.storage_offset(), parts.shape, parts.stride())  # type: ignore[call-overload]
        made = torch.view_as_complex(real)
        return made.conj() if conjugate else made
