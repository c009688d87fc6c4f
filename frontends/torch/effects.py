"""What a function that Dynamo captures changes, its arguments left out. Rests on private names of PyTorch."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import writes_inputs

_ARGUMENTS = ("L['args']", "L['kwargs']")
_STATE = re.compile(
    r"L\['_dfx_root'\](\._modules\['[^']*'\])*\._(parameters|buffers)\['[^']*'\]"
)  # as capture.ROOT_NAME


def changed_objects() -> frozenset[str]:
    """Names of Python objects that the function being captured changes, its arguments left out.

    Attributes of modules, lists, globals and so on; not parameters and buffers written in place. There is
    no public way to ask.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        effects = InstructionTranslator.current_tx().output.side_effects
    except AttributeError:  # nothing is being captured by Dynamo
        return frozenset()
    found = set()
    for variable in effects.id_to_variable.values():
        kept = type(variable.mutation_type).__name__.endswith("Existing")
        if kept and variable.source is not None and effects.is_modified(variable):
            name = _source_name(variable.source)
            if not name.startswith(_ARGUMENTS):
                found.add(_last_name(name))
    return frozenset(found)


def _source_name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)  # a method before torch 2.13


def _last_name(source: str) -> str:
    return re.findall(r"\w+", source.replace("_dfx_root", "itself"))[-1]  # type: ignore[no-any-return]


def captured_frame() -> types.CodeType | None:
    """The code that Dynamo captures now; None elsewhere."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().f_code
    except AttributeError:
        return None


def sources_of(gm: Any) -> list[str]:
    """Where Dynamo found each input of a graph."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        known = node.meta.get("grapharg")
        found.append("" if known is None else _source_name(known.source))
    return found


def written_outside(sources: Sequence[str]) -> frozenset[str]:
    """Called while a forward is compiled: names of tensors that it writes and that nobody puts back.

    That is neither arguments, which can be copied, nor parameters and buffers of the scheduled module.

    Args:
        sources: Of ``sources_of``.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return frozenset()
    infos = context.fw_metadata.input_info
    if len(infos) != len(sources):  # inputs that share memory became one
        outside = [name for name in sources if not name.startswith(_ARGUMENTS)]
        return frozenset({"tensors"} if writes_inputs() and outside else ())
    written = [name for name, info in zip(sources, infos, strict=True) if info.mutates_data]
    return frozenset(
        _last_name(name)
        for name in written
        if not name.startswith(_ARGUMENTS) and _STATE.fullmatch(name) is None
    )
