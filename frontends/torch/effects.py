"""What a function that Dynamo captures changes, its arguments left out. Rests on private names of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import writes_inputs
from dynaflow_xla.frontends.torch.capture import ROOT_FILE, ROOT_NAME

_ARGUMENTS = ("L['args']", "L['kwargs']")
_STATE = re.compile(
    rf"L\['{ROOT_NAME}'\](\._modules\['[^']*'\])*\._(parameters|buffers)\['[^']*'\]"
)


def _capturing() -> Any:
    """Dynamo's translator of the frame that is captured now; None where Dynamo captures nothing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # of the thread's state: there is none
        return None


def changed_objects() -> frozenset[str]:
    """Names of Python objects that the function being captured changes, its arguments left out.

    Attributes of modules, lists, globals and so on; not parameters and buffers written in place. There is
    no public way to ask.
    """
    translator = _capturing()
    if translator is None:
        return frozenset()
    effects = translator.output.side_effects
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
    return re.findall(r"\w+", source.replace(ROOT_NAME, "itself"))[-1]  # type: ignore[no-any-return]


def broke_before(known: bool) -> bool:
    """Whether a graph is not the first thing that the function does: a break in front of it is not told.

    Args:
        known: Whether this graph ends in a break, for which the wrapper alone cannot be captured.
    """
    translator = _capturing()
    if translator is None:
        return False
    code = translator.f_code
    if known:
        return bool(code.co_name.startswith("torch_dynamo_resume_in"))
    return not code.co_filename.startswith(ROOT_FILE)


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
