"""Python code of the user's that runs between and behind graphs, in none of them."""

from __future__ import annotations

import dis
import gc
import os
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.capture.names import is_internal

_LIBRARY = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_LAYERS = os.path.join(os.path.dirname(torch.nn.__file__), "modules", "")
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")
_SIZES = tuple(os.path.join(path, of, "") for path in _INSTALLED for of in ("sympy", "mpmath"))
"""PyTorch computes sizes that may change with them, also between graphs. Nothing of the user's changes."""

_BEGINS_WITH = (
    "BUILD_", "COPY", "JUMP_", "LIST_", "LOAD_", "POP_", "RETURN_", "SWAP", "UNARY_", "UNPACK_", "FORMAT_",
)  # fmt: skip
_OTHERS = frozenset({
    "BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "CACHE", "CHECK_EXC_MATCH", "COMPARE_OP", "CONTAINS_OP",
    "CONVERT_VALUE", "COPY_FREE_VARS", "DELETE_FAST", "DICT_MERGE", "DICT_UPDATE", "EXTENDED_ARG",
    "INTRINSIC_LIST_TO_TUPLE", "INTRINSIC_UNARY_POSITIVE", "IS_OP", "MAKE_CELL", "NOP", "NOT_TAKEN",
    "PUSH_EXC_INFO", "PUSH_NULL", "RAISE_VARARGS", "RERAISE", "RESUME", "SET_UPDATE", "STORE_FAST",
    "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "TO_BOOL",
})  # fmt: skip
_STORES = frozenset({
    "STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF",
})  # fmt: skip
"""In code of Dynamo's own, which writes into lists of its own, too, and into others by their methods."""

_WEAK = frozenset((weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename))
"""Files of Python's that are called when memory is freed."""

_IMPORTS = "<frozen importlib"

_LOOKUPS = frozenset(
    "__getattribute__ __getattr__ __getitem__ __contains__ __len__ __eq__ __hash__".split()
)
"""What Dynamo's guards call of objects that the function reads, before a frame of it begins."""

_STATES = (random.Random.getstate.__code__, random.Random.setstate.__code__)
"""What Dynamo calls around its work, whatever frame is the innermost."""
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
"""A generator's code goes on behind ``RETURN_GENERATOR``."""


class _Here(threading.local):
    watch: Callable[[types.FrameType, str, Any], None] | None = None


_here = _Here()


@contextmanager
def told(tell: Callable[[str], None], runner: types.CodeType) -> Iterator[None]:
    """Tells of code of the user's that this thread runs, in no graph, before it does anything.

    Dynamo says of a break where it is, but not whether it captures what follows: it runs a frame without
    operators on tensors as it is, and remembers that for good. Only a frame that begins tells.

    Args:
        tell: Gets where the code is; what it raises ends the call.
        runner: The code that runs a graph: what that calls is the graph's.
    """
    if sys.getprofile() is not None:  # somebody else watches, who cannot be interrupted
        tell("a place that is not looked for under a profiler")
        yield
        return
    inside: types.FrameType | None = None
    # Freeing memory calls others' functions anywhere, and nothing that they raise comes through.
    # By identity: code that Dynamo makes may hold constants that have no hash.
    collected = {id(getattr(called, "__code__", None)) for called in gc.callbacks}

    def watch(frame: types.FrameType, event: str, given: Any) -> None:
        nonlocal inside
        if event == "return" and frame is inside:
            inside = None
        if inside is not None:
            return
        code = frame.f_code
        freeing = code.co_name == "__del__" or code.co_filename in _WEAK or id(code) in collected
        # What a module does when it is imported happens once in any case; Dynamo's work is told apart.
        beside = code.co_filename.startswith(_IMPORTS) or code.co_filename == captures.CONVERTING
        beside = beside or (code.co_name in _LOOKUPS and _is_dynamos(frame.f_back))
        if event == "call" and (code is runner or freeing or beside):
            inside = frame
        elif event == "call" and _may_have_effects(code, frame.f_back):
            tell(f"{code.co_filename}:{frame.f_lineno}")
        elif event == "c_call" and _only_goes_on(code) and not _is_of_torch(given):
            tell(f"{code.co_filename}:{frame.f_lineno}")

    _here.watch = watch
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        _here.watch = None


@contextmanager
def not_told() -> Iterator[None]:
    """While Dynamo captures, whose own calls are many, and run nothing of the user's."""
    watch = _here.watch
    if watch is None or sys.getprofile() is not watch:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


def _is_dynamos(caller: types.FrameType | None) -> bool:
    return caller is not None and caller.f_code.co_filename.startswith(_DYNAMO)


def _may_have_effects(code: types.CodeType, caller: types.FrameType | None) -> bool:
    """Whether a frame of this code may change something that no capture tells."""
    called_there = caller is not None and _is_of_library(code) and _only_goes_on(caller.f_code)
    if any(code is state for state in _STATES) or not (called_there or _is_users(code)):
        return False
    if any(name.startswith(captures.GRAPH) for name in code.co_names):
        return False
    names = _names_of(code)
    if _only_goes_on(code):
        return not names.isdisjoint(_STORES)
    return not all(name in _OTHERS or name.startswith(_BEGINS_WITH) for name in names)


_names: Recent[int, tuple[types.CodeType, frozenset[str]]] = Recent(512)
"""By the number of a code object, which is kept beside so that no other one gets it."""


def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names of its instructions; a loop may call it often."""
    found = _names.get(id(code))
    if found is None:
        names = frozenset(instruction.opname for instruction in _reached(code))
        found = _names[id(code)] = code, names
    return found[1]


def _is_users(code: types.CodeType) -> bool:
    """Whether it is neither PyTorch's, nor Python's, nor ours; or a layer of PyTorch's: it may have state."""
    if code.co_name.startswith("torch_dynamo_resume_in"):
        return True
    file = code.co_filename
    if code.co_name == "forward" and file.startswith(_LAYERS):
        return True
    return not (file.startswith(("<", *_SIZES)) or is_internal(file) or _is_of_library(code))


def _is_of_library(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith(_INSTALLED)


def _only_goes_on(code: types.CodeType) -> bool:
    """Whether Dynamo made it, without a graph: what it could not follow, and then another function."""
    names = code.co_names
    return any(n.startswith(captures.BEHIND) for n in names) and not any(
        n.startswith(captures.GRAPH) for n in names
    )


def _is_of_torch(called: Any) -> bool:
    """Whether a builtin function is PyTorch's, or a method of a tensor: ``item``, say."""
    module = getattr(called, "__module__", None) or ""
    return isinstance(getattr(called, "__self__", None), torch.Tensor) or module.startswith("torch")


def _reached(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Its instructions that may run, those of handlers of exceptions included.

    Operators like ``+=``, which may change a list, get a name of their own, and so do the operations for
    which Python 3.12 and later have one instruction. What goes on behind a break holds all of its
    function, and begins with a jump there.
    """
    bytecode = dis.Bytecode(code)
    found = list(bytecode)
    handlers: list[Any] = list(bytecode.exception_entries)  # type: ignore[attr-defined]
    at = {instruction.offset: i for i, instruction in enumerate(found)}
    seen: set[int] = set()
    todo = [0]
    while todo:
        i = todo.pop()
        if i in seen or i >= len(found):
            continue
        seen.add(i)
        one = found[i]
        if one.opname == "BINARY_OP" and "=" in one.argrepr:
            one = one._replace(opname="INPLACE_OP")
        elif one.opname == "CALL_INTRINSIC_1":
            one = one._replace(opname=one.argrepr)
        yield one
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            todo.append(at[one.argval])
        todo.extend(at[h.target] for h in handlers if h.start <= one.offset < h.end)
        if not one.opname.startswith(_ENDS):
            todo.append(i + 1)
