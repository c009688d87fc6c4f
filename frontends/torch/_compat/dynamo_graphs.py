"""Dynamo's graphs: where their inputs come from, why they end, and which sizes are open."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla import errors


def guard_names() -> dict[str, Any]:
    """What Dynamo's names of objects may refer to beside ``L`` and ``G``."""
    from torch._dynamo import guards

    made = getattr(guards, "_get_closure_vars", None)
    return dict(made()) if made is not None else dict(getattr(guards, "CLOSURE_VARS", {}))


def given_tensor(node: Any) -> Any:
    """The caller's tensor that an input of a Dynamo graph stands for, or None."""
    argument = node.meta.get("grapharg")
    try:
        return None if argument is None else argument.example
    except AssertionError:  # it is gone already
        return None


def sources_of_inputs(gm: Any) -> list[str]:
    """Where the inputs of a Dynamo graph come from, as Dynamo writes it."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        found.append(source_name(getattr(node.meta.get("grapharg"), "source", None)))
    return found


def source_name(source: Any) -> str:
    """Where a variable comes from, as Dynamo writes it; "" of none.

    A cell of a frame that goes on behind a graph break has no name there. It gets one that says which
    variable it is of, and that nothing is found by.
    """
    try:
        name: Any = getattr(source, "name", "")
        return str(name() if callable(name) else name)  # a method in older versions
    except NotImplementedError:
        return f"<{getattr(source, 'local_name', '')}>"


def translator() -> Any:
    """Dynamo's translator of the frame that is captured now; None where Dynamo captures nothing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # of the thread's state: there is none
        return None


def may_catch(is_internal: Callable[[str], bool]) -> bool:
    """Whether code of the user's that is captured now handles exceptions, or ends a context at one.

    Args:
        is_internal: Whether a file is not the user's.
    """
    context = torch._guards.TracingContext.try_get()
    codes = getattr(context, "traced_code", None) or ()
    return any(code.co_exceptiontable and not is_internal(code.co_filename) for code in codes)


def inputs_written() -> list[bool] | None:
    """For each input of the forward that is compiled now, whether it writes there; None: nobody knows."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return None
    return [bool(info.mutates_data) for info in context.fw_metadata.input_info]


def mark_open(tensor: torch.Tensor, dim: int) -> None:
    """Makes a dimension an open size of the next capture, unless what is captured fixes it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
"""Attributes of a tensor in which ``mark_open`` notes it; the first is a set."""


_THIS_PACKAGE = tuple(
    os.path.join(folder, "")
    for folder in (Path(__file__).parents[2], Path(errors.__file__).parents[1])
)
"""Folders of the frontends and of the rest; of an editable installation they lie apart."""


def _is_of_this_package(frame: Any) -> bool:
    """Whether a frame is of a function of this package, or of an ``__init__`` that ``dataclass`` made."""
    made = frame.filename == "<string>" and frame.name == "__init__"
    return made or frame.filename.startswith(_THIS_PACKAGE)


def break_reason(gm: Any) -> tuple[str, Any] | None:
    """(reason, the user's innermost frame) if a graph ended because Dynamo could not go on, else None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(getattr(reason, "user_stack", ()))
    user = len(stack) - 1
    while user >= 0 and _is_of_this_package(stack[user]):
        user -= 1
    if 0 <= user < len(stack) - 1:
        return "dynaflow_xla is called there, which no graph holds: call it outside", stack[user]
    return str(reason.reason), stack[-1] if stack else None


_RESUMED = re.compile(r'File "([^"]*)", line \d+, in torch_dynamo_resume_in_\w*?_at_(\d+)')


def resumed_at(gm: Any) -> str:
    """FILE:LINE of the break behind which a graph goes on; "" for one that a call begins with."""
    for node in gm.graph.nodes:
        if found := _RESUMED.search(node.meta.get("stack_trace") or ""):
            return f"{found[1]}:{found[2]}"
    return ""


def break_counts() -> Counter[str]:
    """How often this process ended a graph for which reason; without a graph there is no other trace."""
    return Counter(torch._dynamo.utils.counters["graph_break"])


def reason_of_break(before: Mapping[str, int]) -> str:
    """The reason that was added last; "" if there is none."""
    added = [r for r, n in break_counts().items() if n > before.get(r, 0)]
    if not added:
        return ""
    lines = [line.strip() for line in added[-1].splitlines()]
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    explained = told.get("Explanation", "").strip().rstrip(".")
    context = told.get("Developer debug context", "").strip()
    return explained or (f"{lines[0]}: {context}" if context else lines[0])


@contextlib.contextmanager
def sizes_apart(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Sizes that are equal by accident stay two sizes in a capture, in which these may have open ones."""
    from torch._dynamo import config
    from torch.fx.experimental import _config

    # Dynamo fixes the sizes of all parameters, also of those that are arguments.
    given = any(isinstance(x, torch.nn.Parameter) for x in tensors)
    static = config.force_parameter_static_shapes and not given
    with (
        _config.patch(use_duck_shape=False),
        config.patch(force_parameter_static_shapes=static),
    ):
        yield


def where_fixed(size: Any) -> str:
    """Where in the program an open size became a number, as far as PyTorch remembers."""
    node: Any = getattr(size, "node", None)
    for guard in getattr(getattr(node, "shape_env", None), "guards", ()):
        if node._expr in guard.expr.free_symbols:
            return f" (at {_with_whole_path(str(guard.sloc).rpartition('#')[2].strip())})"
    return ""


def _with_whole_path(place: str) -> str:
    """A place in a program as PyTorch shortens it: without what its file's path shares with PyTorch's own.

    Of a path that shares only the root it cuts a letter, too.
    """
    name, colon, rest = place.partition(":")
    for folder in Path(torch.__file__).parents:
        if (folder / name).is_file():
            return f"{folder / name}{colon}{rest}"
    found = [] if glob.has_magic(name) else glob.glob(f"/?{name}")
    return f"{found[0]}{colon}{rest}" if len(found) == 1 else place
