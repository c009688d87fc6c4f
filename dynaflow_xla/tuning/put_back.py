"""Python objects as they were before a call that changes them."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

_ABSENT: Any = object()

CONTAINERS = (dict, list, set, deque)
"""Types whose contents can be put back; classes derived from them, too."""


class Saved:
    """What some places held; ``put_back`` may be called after each of several calls.

    Values are kept by reference: what is inside of a saved object is saved on its own, or not at all.
    """

    def __init__(self) -> None:
        self._undo: dict[Any, Callable[[], None]] = {}
        self._owners: list[Any] = []  # so that ids stay theirs

    def put_back(self) -> None:
        """Puts everything back; what is as it was is not touched."""
        for undo in self._undo.values():
            undo()

    def _add(self, owner: Any, key: Any, undo: Callable[[], None]) -> None:
        if (id(owner), key) not in self._undo:
            self._owners.append(owner)
            self._undo[id(owner), key] = undo

    def attribute(self, owner: Any, name: str) -> bool:
        """Saves an attribute of an object, module or class; False if it is none that can be set."""
        if isinstance(owner, types.CellType):
            return name == "cell_contents" and self._cell(owner)
        if isinstance(owner, type):
            before = owner.__dict__.get(name, _ABSENT)
            self._add(owner, name, lambda: _set_of_class(owner, name, before))
            return True
        held = getattr(owner, "__dict__", None)
        slot = getattr(type(owner), name, None)
        if isinstance(slot, types.MemberDescriptorType):
            before = getattr(owner, name, _ABSENT)
            self._add(owner, name, lambda: _set_of_slot(owner, slot, before))
            return True
        if type(held) is not dict:
            return False
        self.entry(held, name)
        return True

    def entry(self, mapping: dict[Any, Any], key: Any) -> None:
        """Saves what a dictionary has under a key."""
        before = mapping.get(key, _ABSENT)

        def undo() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            elif mapping.get(key, _ABSENT) is not before:
                mapping[key] = before

        self._add(mapping, ("entry", key), undo)

    def contents(self, container: Any) -> bool:
        """Saves what a dictionary, list, set or deque holds; False if it is none of these."""
        for cls, read, write in _CONTENTS:
            if isinstance(container, cls):
                self._add(container, "contents", partial(write, container, read(container)))
                return True
        return False

    def whole(self, owner: Any) -> None:
        """Saves all attributes of an object, and what the containers among them hold."""
        held = getattr(owner, "__dict__", None)
        if type(held) is not dict:
            return
        before = dict(held)
        self._add(owner, "whole", lambda: _set_all(held, before))
        for value in before.values():
            if isinstance(value, CONTAINERS):
                self.contents(value)

    def _cell(self, cell: types.CellType) -> bool:
        try:
            before = cell.cell_contents
        except ValueError:  # empty
            before = _ABSENT

        def undo() -> None:
            if before is _ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = before

        self._add(cell, "cell", undo)
        return True


def _set_of_class(owner: type, name: str, before: Any) -> None:
    if before is _ABSENT:
        if name in owner.__dict__:
            type.__delattr__(owner, name)
    elif owner.__dict__.get(name, _ABSENT) is not before:
        type.__setattr__(owner, name, before)


def _set_of_slot(owner: Any, slot: types.MemberDescriptorType, before: Any) -> None:
    if before is not _ABSENT:
        slot.__set__(owner, before)
    else:
        try:
            slot.__delete__(owner)
        except AttributeError:  # not set
            return


def _set_all(held: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in held if name not in before]:
        del held[name]
    for name, value in before.items():
        if held.get(name, _ABSENT) is not value:
            held[name] = value


def _set_dict(container: Any, before: dict[Any, Any]) -> None:
    if list(dict.keys(container)) == list(before):
        for key, value in before.items():
            if dict.__getitem__(container, key) is not value:
                dict.__setitem__(container, key, value)
        return
    cls = OrderedDict if isinstance(container, OrderedDict) else dict
    cls.clear(container)
    for key, value in before.items():
        cls.__setitem__(container, key, value)


def _same(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(_is, now, before))


def _is(a: Any, b: Any) -> bool:
    return a is b


def _set_list(container: Any, before: list[Any]) -> None:
    if not _same(list(list.__iter__(container)), before):
        list.__setitem__(container, slice(None), before)


def _set_deque(container: Any, before: list[Any]) -> None:
    if not _same(container, before):
        deque.clear(container)
        deque.extend(container, before)


def _set_set(container: Any, before: set[Any]) -> None:
    if container != before:
        set.clear(container)
        set.update(container, before)


# Methods of the classes themselves: those of derived classes may have effects.
_CONTENTS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    (dict, lambda x: dict(dict.items(x)), _set_dict),
    (list, lambda x: list(list.__iter__(x)), _set_list),
    (set, lambda x: set(set.__iter__(x)), _set_set),
    (deque, lambda x: list(deque.__iter__(x)), _set_deque),
)
