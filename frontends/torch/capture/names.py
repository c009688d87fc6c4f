"""What operators, inputs and outputs of a graph are in the user's code: lines, modules, arguments."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla import errors
from dynaflow_xla.frontends.torch._compat import aot
from dynaflow_xla.ir.graph import Source

if TYPE_CHECKING:
    from dynaflow_xla.frontends.torch.capture.captured import Captured

ROOT_FILE = "<dynaflow_xla schedule"
"""How the files of functions begin that call a scheduled callable; their numbers say nothing."""

ROOT_NAME = "_dfx_root"
"""Name under which the scheduled module is seen by Dynamo; not part of a scope."""

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
OURS = tuple(
    os.path.dirname(os.path.dirname(file)) + os.sep
    for file in (errors.__file__, os.path.dirname(__file__))
)
"""Folders of the core and of the frontends: in an editable install neither lies inside of the other."""
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
FUNCTION_NAME = "_dfx_function_{}"
"""Name of a module that is one of several functions; not part of a scope either."""

PLACES = "_dfx_places"
"""Attribute of a module of several functions: what the user calls its arguments."""

_FUNCTION = re.compile(r"^_dfx_function_\d+(@\d+)?$")
_ROOT = re.compile(r"^[LG]\['(\w+)'\]")


def leaves_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Leaves of a pytree with where they are in it; containers need not say what their keys are."""
    with contextlib.suppress(ValueError):
        return pytree.tree_flatten_with_path(tree)[0]
    members = pytree.tree_leaves(tree, is_leaf=lambda x: x is not tree)
    named = type(tree) is dict
    keys = map(
        pytree.MappingKey if named else pytree.SequenceKey, tree if named else range(len(members))
    )
    found = zip(keys, map(leaves_with_paths, members), strict=True)
    return [((key, *path), leaf) for key, leaves in found for path, leaf in leaves]


def source_of(node: Any) -> Source | None:
    """The innermost line of a node's stack trace outside PyTorch, or else the innermost in it."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in found if not frame[0].startswith((ROOT_FILE, *OURS))]
    for file, line, function in reversed(frames):
        if not file.startswith(_TORCH_DIR):
            return Source(file, int(line), function)
    return Source(frames[-1][0], int(frames[-1][1]), frames[-1][2]) if frames else None


def is_internal(file: str) -> bool:
    """Whether a file is PyTorch's, or ours."""
    return file.startswith(("<dynaflow_xla", *OURS, _TORCH_DIR))


def without_counts(parts: list[str]) -> list[str]:
    """Components of a path without the numbers of calls."""
    return [part.partition("@")[0] for part in parts]


def path_parts(path: str) -> list[str]:
    """Components of a module path as Dynamo or export write it; the scheduled module is the root."""
    match = _ROOT.match(path)
    parts: list[str] = []
    if match:
        path = path[match.end() :]
        if match.group(1) not in ("self", ROOT_NAME):
            parts.append(match.group(1))
    path = re.sub(r"\['?(\w+)'?\]", r".\1", path.replace("._modules", ""))
    parts += [part for part in path.split(".") if part]
    # Modules of several functions that make one plan: each is a root.
    return parts[1:] if parts and _FUNCTION.match(parts[0]) else parts


_ARGUMENT = re.compile(r"^L\['(args|kwargs)'\]\[(.+?)\](.*)$")


def user_name(original: Any, source: str) -> str:
    """What the user calls an input that Dynamo writes as ``source``; "" if that is not known.

    An argument has the name that the function gives it, a parameter its path in the module.
    """
    match = _ARGUMENT.match(source)
    if match is None:
        parts = [p for p in path_parts(source) if p not in ("_parameters", "_buffers")]
        return ".".join(parts) if _ROOT.match(source) else ""
    where, key, rest = match.groups()
    if where == "kwargs":
        return key.strip("'") + rest
    called = original.forward if isinstance(original, torch.nn.Module) else original
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    number = int(key)
    if number < len(places := getattr(original, PLACES, ())):
        return str(places[number]) + rest
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (plain[number] if number < len(plain) else f"argument {number}") + rest


def outputs_in_words(captured: Captured, roles: Sequence[str]) -> list[str]:
    """What the outputs of a graph, and what it writes, are to the user, who counts the results alone.

    Args:
        captured: The graph.
        roles: Of each output and each write, as in the proof of a split.
    """
    written = aot.updated_inputs(captured.module)
    labels = aot.input_labels(captured.module)
    inputs = dict(zip(captured.graph.inputs, captured.graph.input_names, strict=True))
    for number, (value, _) in enumerate(captured.epilogue, len(captured.outputs)):
        written[number] = labels.get(inputs.get(value, ""), "")
    made, results = [], 0
    for number, role in enumerate(roles):
        if role in ("result", "passed"):
            made.append(f"output {results}")
            results += 1
        elif role == "saved":
            made.append("what the backward needs")
        elif role == "gradient":
            made.append("")
        else:
            name = written.get(number, "")
            made.append(f"what is written to {name!r}" if name else "what is written")
    return made
