"""``dfx.mark`` for JAX: a named scope whose name carries the mark through jit, grad and vmap."""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jax

from dynaflow_xla.ir.graph import OpMark

_PREFIX = "dfx:"
_FUNCTION = "dfx-function:"
"""Begins the scope of one of several functions that make one plan; its name follows."""

_counter = itertools.count()
_KEY = re.compile(rf"{_PREFIX}(.*)#\d+(?:\.([\w\-]+))?", re.DOTALL)
"""The name of a mark, which use of it this is, and what else it says; see ``new_key``."""

# jvp(x), transpose(jvp(x)), vmap(x), rematted_computation(x) ... wrap a scope's name.
_WRAPPED = re.compile(r"^[\w\-]+\((.*)\)$")


def function_scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside belongs to that one of several functions which make one plan."""
    return jax.named_scope(_FUNCTION + name)


def without_function(components: list[str]) -> tuple[list[str], str]:
    """A scope without the function it belongs to, and that function's name or ""."""
    named = [part for part in components if part.startswith(_FUNCTION)]
    if not named:
        return components, ""
    rest = [part for part in components if not part.startswith(_FUNCTION)]
    return rest, named[0].removeprefix(_FUNCTION)


@contextlib.contextmanager
def enter_mark(info: Any) -> Iterator[None]:
    """Mark backend for ``dynaflow_xla.ir.marks.mark``; ``info`` has name, resource and tags."""
    with jax.named_scope(new_key(info)):
        yield


def new_key(info: Any) -> str:
    """A scope component that stands for one use of a mark, and says all of it (name, resource, tags).

    There is no table behind it: nobody could tell when a program that holds the scope is gone.
    """
    key = f"{_PREFIX}{info.name}#{next(_counter)}"
    if info.resource is None and not info.tags:
        return key
    text = json.dumps([info.resource, sorted(info.tags)])
    return f"{key}.{base64.urlsafe_b64encode(text.encode()).decode().rstrip('=')}"


@functools.lru_cache(maxsize=1024)
def _read(component: str) -> tuple[str, Any, frozenset[str]] | None:
    """Name, resource and tags of the mark that a scope component is, or None."""
    found = _KEY.fullmatch(component)
    if found is None:
        return None
    if (text := found[2]) is None:
        return found[1], None, frozenset()
    try:
        resource, tags = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:  # somebody else's scope
        return None
    return found[1], resource, frozenset(tags)


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
    return component.startswith(_PREFIX) and _read(component) is not None


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
        if component.startswith(_PREFIX) and (read := _read(component)) is not None:
            name, resource, tags = read
            instance = numbers.setdefault((component, entered.get(component, ())), len(numbers))
            return OpMark(name, instance, resource, tags)
    return None


def plain_name(component: str) -> str:
    """A scope component as the user wrote it."""
    if component.startswith(_PREFIX):
        return component[len(_PREFIX) :].rsplit("#", 1)[0]
    return component
