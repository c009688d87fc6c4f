"""What a function that Dynamo captures changes, its arguments left out. Rests on private names of PyTorch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import dynamo_graphs
from dynaflow_xla.frontends.torch._compat.aot import writes_inputs
from dynaflow_xla.frontends.torch.capture.names import ROOT_FILE, ROOT_NAME
from dynaflow_xla.tuning.put_back import Saved

_LOCAL = re.compile(r"L\['\w+'\](\[[^\].]*\])*")
_ARGUMENTS = ("L['args']", "L['kwargs']")
_BUFFER = re.compile(rf"L\['{ROOT_NAME}'\](\._modules\['[^']*'\])*\._buffers\['[^']*'\]")


class _Scope:
    """Globals of a frame; equal if they are the same dictionary."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scope) and other.names is self.names

    def __hash__(self) -> int:
        return id(self.names)


@dataclass(frozen=True)
class MutatedPlace:
    """Something that a captured function changes, and where it is found when it has to be put back.

    Attributes:
        expression: Dynamo's name of the object, to be evaluated.
        scope: Globals of the frame in which the name begins.
        of_root: Whether that frame is the one that calls the scheduled function.
        what: "attribute", "contents" (of a container), "global" or "data" (of a tensor).
        key: Of an attribute or global its name.
    """

    expression: str
    scope: _Scope
    of_root: bool
    what: str
    key: str = ""

    @property
    def name(self) -> str:
        """For messages; "itself" is the scheduled function or module."""
        if self.what == "global":
            return self.key
        words = re.findall(r"\w+", self.expression.replace(ROOT_NAME, "itself"))
        return words[-1] if words else "a tensor"

    def find(self, original: Any) -> Any:
        """The object as the next call will find it.

        Raises:
            LookupError: it is not to be found from here.
        """
        if self.what == "global":
            return self.scope.names
        here = {"G": self.scope.names, "L": {ROOT_NAME: original} if self.of_root else {}}
        try:
            return eval(self.expression, {**dynamo_graphs.guard_names(), **here})
        except Exception as error:  # whatever a name of Dynamo's may raise here
            raise LookupError(self.name) from error


@dataclass
class Changes:
    """What calls of a function change that is no argument, as far as captures have told.

    Attributes:
        places: What can be looked up, and put back.
        others: Descriptions of what cannot.
        watchers: Who is told of more, see ``watched``.
    """

    places: frozenset[MutatedPlace] = frozenset()
    others: frozenset[str] = frozenset()
    watchers: list[Callable[[frozenset[MutatedPlace]], None]] = field(default_factory=list)

    def found(
        self, places: frozenset[MutatedPlace] = frozenset(), others: frozenset[str] = frozenset()
    ) -> None:
        """A capture tells what it has found."""
        new = places - self.places
        if new or not others <= self.others:
            self.places |= places
            self.others |= others
            for watcher in tuple(self.watchers):
                watcher(new)

    @contextmanager
    def watched(self, watcher: Callable[[frozenset[MutatedPlace]], None]) -> Iterator[None]:
        """Tells of what this thread's captures find, before the call that a capture is for changes it.

        Args:
            watcher: Called with the places that were not known.
        """
        me = threading.get_ident()

        def of_this_thread(new: frozenset[MutatedPlace]) -> None:
            if threading.get_ident() == me:
                watcher(new)

        self.watchers.append(of_this_thread)
        try:
            yield
        finally:
            self.watchers.remove(of_this_thread)

    def lasting(self, original: Any) -> list[str]:
        """Names of what cannot be put back after a call."""
        lost = set(self.others)
        for place in self.places:
            try:
                save([place], original, Saved())
            except LookupError:
                lost.add(place.name)
        return sorted(lost)


def save(places: Iterable[MutatedPlace], original: Any, saved: Saved) -> list[torch.Tensor]:
    """Saves what is in some places but the data of tensors, and gives these tensors.

    Raises:
        LookupError: something is not found, or cannot be put back.
    """
    tensors = []
    for place in places:
        found = place.find(original)
        if place.what == "data":
            tensors.append(found)
            kept = isinstance(found, torch.Tensor)
        elif place.what == "contents":
            kept = saved.contents(found)
        elif place.what == "global":
            saved.entry(found, place.key)
            kept = True
        else:
            kept = _save_attribute(saved, found, place.key)
        if not kept:
            raise LookupError(place.name)
    return tensors


def _save_attribute(saved: Saved, owner: Any, name: str) -> bool:
    if isinstance(owner, torch.nn.Module):
        for part in (owner._parameters, owner._buffers, owner._modules):
            saved.entry(part, name)  # type: ignore[arg-type]
    return saved.attribute(owner, name)


def _frame() -> tuple[_Scope, bool]:
    """Globals of the frame that is captured now, and whether it calls the scheduled function."""
    translator = dynamo_graphs.translator()
    if translator is None:
        return _Scope({}), False
    root = getattr(translator.output, "root_tx", None) or translator
    return _Scope(root.f_globals), root.f_code.co_filename.startswith(ROOT_FILE)


def changed_objects() -> frozenset[MutatedPlace]:
    """Python objects that the function being captured changes, its arguments left out.

    Attributes of modules, lists, globals and so on; not parameters and buffers written in place. There is
    no public way to ask.
    """
    translator = dynamo_graphs.translator()
    if translator is None:
        return frozenset()
    effects, frame = translator.output.side_effects, _frame()
    found = set()
    for variable in effects.id_to_variable.values():
        kept = type(variable.mutation_type).__name__.endswith("Existing")
        if kept and variable.source is not None and effects.is_modified(variable):
            name = dynamo_graphs.source_name(variable.source)
            if name.startswith(_ARGUMENTS):
                continue
            attributes = effects.store_attr_mutations.get(variable, {})
            is_global = type(variable).__name__ == "NewGlobalVariable"
            what = "global" if is_global else "attribute"
            found |= {MutatedPlace(name, *frame, what, key) for key in attributes}
            inside = getattr(variable, "_base_vt", None)  # of classes derived from containers
            if not attributes or (inside is not None and effects.is_modified(inside)):
                found.add(MutatedPlace(name, *frame, "contents"))
    return frozenset(found)


def broke_before(known: bool) -> bool:
    """Whether a graph is not the first thing that the function does: a break in front of it is not told.

    Args:
        known: Whether this graph ends in a break, for which the wrapper alone cannot be captured.
    """
    translator = dynamo_graphs.translator()
    if translator is None:
        return False
    code = translator.f_code
    if known:
        return bool(code.co_name.startswith("torch_dynamo_resume_in"))
    return not code.co_filename.startswith(ROOT_FILE)


def sources_of(gm: Any) -> tuple[MutatedPlace, ...]:
    """Where Dynamo found each input of a graph."""
    frame = _frame()
    return tuple(MutatedPlace(name, *frame, "data") for name in dynamo_graphs.sources_of_inputs(gm))


def arguments(sources: Sequence[MutatedPlace]) -> tuple[int, ...]:
    """Which inputs of a graph are, or are inside of, arguments of the call, or variables behind a break."""
    given = [x.expression.startswith(_ARGUMENTS) or _LOCAL.fullmatch(x.expression) for x in sources]
    return tuple(n for n, x in enumerate(given) if x)


def written_outside(sources: Sequence[MutatedPlace]) -> frozenset[MutatedPlace]:
    """Called while a forward is compiled: tensors that it writes and that ``keeping`` does not know.

    That is neither arguments, which are copied, nor buffers of the scheduled module, which are kept in any
    case. Its parameters are large and hardly ever written: those that are count here.

    Args:
        sources: Of ``sources_of``.
    """
    writes = dynamo_graphs.inputs_written()
    if writes is None:
        return frozenset()
    written = sources
    if len(writes) == len(sources):
        written = [x for x, is_written in zip(sources, writes, strict=True) if is_written]
    elif not writes_inputs():  # inputs that share memory became one: any of them may be written
        return frozenset()
    return frozenset(
        x
        for x in written
        if not x.expression.startswith(_ARGUMENTS) and _BUFFER.fullmatch(x.expression) is None
    )
