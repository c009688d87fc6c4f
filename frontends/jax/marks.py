"""``dfx.mark`` for JAX: a named scope whose name carries the mark through jit, grad and vmap."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax

from dynaflow_xla.ir import OpMark

_PREFIX = "dfx:"
_counter = itertools.count()
_lock = threading.Lock()
_infos: dict[str, Any] = {}

# jvp(x), transpose(jvp(x)), vmap(x), rematted_computation(x) ... wrap a scope's name.
_WRAPPED = re.compile(r"^[\w\-]+\((.*)\)$")


@contextlib.contextmanager
def enter_mark(info: Any) -> Iterator[None]:
    """Mark backend for ``dynaflow_xla.rules.mark``; ``info`` has name, resource and tags."""
    with jax.named_scope(new_key(info)):
        yield


def new_key(info: Any) -> str:
    """A scope component that stands for one use of a mark (name, resource, tags)."""
    key = f"{_PREFIX}{info.name}#{next(_counter)}"
    with _lock:
        _infos[key] = info
    return key


def unwrap(component: str) -> str:
    """Strips transformation wrappers: ``transpose(jvp(enc))`` -> ``enc``."""
    while match := _WRAPPED.match(component):
        component = match.group(1)
    return component


def split_scope(stack: str) -> list[str]:
    """Components of a name stack; a slash inside parentheses does not split."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(stack):
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append(stack[start:i])
            start = i + 1
    parts.append(stack[start:])
    return [name for part in parts for name in unwrap(part).split("/") if name]


def is_mark(component: str) -> bool:
    """Whether a scope component is a mark."""
    return component.startswith(_PREFIX) and component in _infos


def names_mark(component: str) -> bool:
    """Whether a scope component is the name of a mark, maybe of another process."""
    return component.startswith(_PREFIX)


def find_mark(
    scope: list[str], numbers: dict[Any, int], entered: dict[str, tuple[str, ...]]
) -> OpMark | None:
    """The innermost mark of a scope.

    ``numbers`` gives each use of a mark a small stable number; ``entered`` tells the call path at
    which a mark was entered: a nested call inside a mark belongs to the same use of it.
    """
    for component in reversed(scope):
        if is_mark(component):
            info = _infos[component]
            instance = numbers.setdefault((component, entered.get(component, ())), len(numbers))
            return OpMark(info.name, instance, info.resource, frozenset(info.tags))
    return None


def plain_name(component: str) -> str:
    """A scope component as the user wrote it."""
    if component.startswith(_PREFIX):
        return component[len(_PREFIX) :].rsplit("#", 1)[0]
    return component
