"""``dfx.mark`` for PyTorch.

Dynamo cannot follow a context manager of ours, but it keeps calls of functions that are allowed in
its graph. So a mark leaves one call at its begin and one at its end; before AOTAutograd sees the
graph they are turned into ``node.meta["custom"]``, which the derived graphs (backward included)
inherit. A mark that Dynamo did not see, because its frame runs uncompiled, is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.capture.names import OURS
from dynaflow_xla.ir.graph import OpMark
from dynaflow_xla.ir.marks import MarkInfo, mark, register_mark_backend, set_traced_mark

KEY = "dynaflow_xla.mark"

_counter = itertools.count()


class _ScheduledCalls(threading.local):
    scheduled = 0


_state = _ScheduledCalls()


@torch.compiler.assume_constant_result
def _next_instance() -> int:
    """Evaluated by Dynamo while it traces: each mark that is entered gets a number of its own."""
    return next(_counter)


@torch.compiler.allow_in_graph
def _begin(name: str, resource: str | None, tags: tuple[str, ...], instance: int) -> None:
    return None


@torch.compiler.allow_in_graph
def _end(instance: int) -> None:
    return None


_Note = tuple[str, str | None, tuple[str, ...], int]
"""Name, resource and tags of a mark, and its number."""


class _TracedMark(contextlib.AbstractContextManager[Any]):
    """Simple enough for Dynamo to trace."""

    def __init__(self, info: MarkInfo) -> None:
        self.info = info
        self.instance = _next_instance()

    def __enter__(self) -> None:
        _begin(self.info.name, self.info.resource, tuple(sorted(self.info.tags)), self.instance)

    def __exit__(self, *error: object) -> None:
        _end(self.instance)


def _caller() -> str:
    """File and line of the marked block."""
    frame: Any = sys._getframe()
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_internal(file: str) -> bool:
    return file.startswith(OURS) or file.endswith("contextlib.py") or file.startswith("<")


@contextlib.contextmanager
def enter_mark(info: MarkInfo) -> Iterator[None]:
    """Mark backend for ``dynaflow_xla.ir.marks.mark`` where Dynamo does not read the mark's code.

    Raises:
        UnsupportedError: inside a scheduled call; the mark would be lost.
    """
    if torch.compiler.is_exporting():
        if not hasattr(torch.fx.traceback, "annotate"):
            raise UnsupportedError(
                f"the mark {info.name!r} would be lost: torch {torch.__version__} keeps no "
                "annotations of an exported program. Cut with rules (dfx.Module, dfx.Scope)."
            )
        note = (info.name, info.resource, tuple(sorted(info.tags)), next(_counter))
        with torch.fx.traceback.annotate({KEY: note}):
            yield
        return
    if _state.scheduled:
        raise UnsupportedError(
            f"the mark {info.name!r} at {_caller()} is lost: the code around it runs outside of every "
            "captured graph. A graph break inside the marked block, or in a function that cannot be "
            "compiled, does that; move what breaks the graph out of the mark "
            "(TORCH_LOGS=graph_breaks shows it). So does a mark that is made outside of the function and "
            f"entered in it: write `with dfx.mark({info.name!r}):` in its place."
        )
    yield


class MarkWatch:
    """Context of a scheduled call: marks that are met uncompiled are lost."""

    __slots__ = ()

    def __enter__(self) -> Any:
        _state.scheduled += 1

    def __exit__(self, *error: object) -> None:
        _state.scheduled -= 1


def watched() -> bool:
    """Whether this thread is inside a scheduled call."""
    return _state.scheduled > 0


class ignore:  # noqa: N801
    """While the original runs inside a scheduled call: its marks have no effect."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _state.scheduled
        _state.scheduled = 0

    def __exit__(self, *error: object) -> None:
        _state.scheduled = self._before


def settle(gm: Any) -> None:
    """Turns the begin and end calls of a Dynamo graph into annotations of the nodes between.

    Raises:
        UnsupportedError: a mark begins in this graph and ends in another.
    """
    _settle(gm, None)


def _settle(gm: Any, around: _Note | None) -> None:
    opened: list[_Note] = [] if around is None else [around]
    outer = len(opened)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is _begin:
            opened.append(tuple(node.args))
            gm.graph.erase_node(node)
        elif node.op == "call_function" and node.target is _end:
            if len(opened) == outer or opened[-1][3] != node.args[0]:
                raise UnsupportedError("a mark ends in another graph than it begins in")
            opened.pop()
            gm.graph.erase_node(node)
        elif node.op not in ("placeholder", "output"):
            if opened:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), KEY: opened[-1]}
            for body in _bodies(gm, node):  # of a checkpoint, say, whose operators are its own
                _settle(body, opened[-1] if opened else None)
    if len(opened) > outer:
        raise UnsupportedError(
            f"the mark {opened[-1][0]!r} ends in another graph than it begins in: the graph breaks "
            "inside the marked block. Move what breaks it out of the mark."
        )


def _bodies(gm: Any, node: Any) -> Iterator[Any]:
    """The graphs that an operator of higher order runs."""
    for read in node.all_input_nodes if node.op == "call_function" else ():
        body = getattr(gm, str(read.target), None) if read.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            yield body


def mark_of(meta: Any) -> OpMark | None:
    """The innermost mark around a node."""
    note = (meta.get("custom") or {}).get(KEY)
    if note is None:
        return None
    name, resource, tags, instance = note
    return OpMark(name, instance, resource, frozenset(tags))


register_mark_backend(enter_mark)
set_traced_mark(torch.compiler.is_dynamo_compiling, _TracedMark)
captures.never_compile(mark.__enter__.__code__)
captures.never_compile(mark.__exit__.__code__)
