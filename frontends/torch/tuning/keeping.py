"""Calling without leaving a trace: copies of arguments, and what a call changes put back."""

from __future__ import annotations

import copy
import enum
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch.capture.mutation import effects
from dynaflow_xla.tuning.put_back import Saved

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, slice, range, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat,
    torch.SymBool,
)  # fmt: skip
"""Types whose values never change."""

_SHARED = (
    torch.nn.Module, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType,
)  # fmt: skip
"""Types that are not copied: code, and what ``preserved`` and ``random_kept`` know."""


def is_object(leaf: Any) -> bool:
    """Whether an argument is an object that a call may change, say a cache of keys and values."""
    return not isinstance(leaf, (torch.Tensor, *PLAIN, *_SHARED))


def objects_copied(tree: Any) -> Any:
    """The same with every object copied deeply that a call may change; tensors are as they are.

    Raises:
        UnsupportedError: an object cannot be copied.
    """
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not is_object(leaf):
            return leaf
        try:
            return copy.deepcopy(leaf, memo)
        except Exception as error:
            raise UnsupportedError(
                f"an argument of type {type(leaf).__qualname__} cannot be copied ({error}), and this runs "
                "the function several times, which may change it. Pass tensors and containers that "
                "torch.utils._pytree knows, or give the type a __deepcopy__"
            ) from error

    return pytree.tree_map(copied, tree)


def copies(tree: Any) -> Any:
    """The same with every tensor cloned, and every object copied that a call may change.

    A tensor that is there twice is so in the copy: a call would be captured anew for two that differ.

    Raises:
        UnsupportedError: an object cannot be copied.
    """
    made: dict[int, Any] = {}

    def cloned(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf, leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return made[id(leaf)][1]

    return pytree.tree_map(cloned, objects_copied(tree))


@contextmanager
def random_kept(args: Any, kwargs: Any) -> Iterator[None]:
    """Puts random states back: of the default generators, of Python and of those among the arguments."""
    on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    leaves = (torch.default_generator, *on_gpu, *pytree.tree_leaves((args, kwargs)))
    found = {id(x): x for x in leaves if isinstance(x, torch.Generator)}
    states = [(x, x.get_state()) for x in found.values()]
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def called_modules_kept() -> Iterator[None]:
    """Puts back the state of every module that this thread calls meanwhile, wherever the module is held."""
    me = threading.get_ident()
    found: dict[int, tuple[torch.nn.Module, Saved, list[Any]]] = {}

    def before(module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() != me or id(module) in found:
            return
        for inside in module.modules():
            if id(inside) not in found:
                saved = Saved()
                saved.whole(inside)
                own = (*inside.parameters(recurse=False), *inside.buffers(recurse=False))
                found[id(inside)] = inside, saved, [(t, t.detach().clone()) for t in own]

    handle = operators.before_all_modules(before)
    try:
        yield
    finally:
        handle.remove()
        for _, saved, tensors in found.values():
            saved.put_back()
            _written_back(tensors)


def _written_back(tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in tensors:
            if not torch.equal(tensor, value):  # autograd counts writes, so none without need
                tensor.copy_(value)


def _modules(original: Any, args: Any, kwargs: Any) -> list[torch.nn.Module]:
    """The scheduled module and those among the arguments, with all inside of them."""
    leaves = (original, *pytree.tree_leaves((args, kwargs)))
    tops = [x for x in leaves if isinstance(x, torch.nn.Module)]
    return list({id(m): m for top in tops for m in top.modules()}.values())


@contextmanager
def arguments_kept(original: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """For a call up to its first graph: what Dynamo cannot follow in front of that runs.

    Tensors among the arguments get their values back, modules their attributes, generators their states; what
    else there is among the arguments is copied. Parameters and buffers are not: they may be large.

    Args:
        original: The scheduled function or module.
        args: Of the call.
        kwargs: Of the call.

    Yields:
        Arguments to call with: the same tensors, as a capture is for what memory they share.
    """
    whole = Saved()
    for module in _modules(original, args, kwargs):
        whole.whole(module)
    leaves = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if _is_plain(x)}
    versions = {i: x._version for i, x in leaves.items() if not x.is_inference()}
    saved = _with_values(leaves.values())
    try:
        given = objects_copied((args, kwargs))
    except UnsupportedError:  # whether it has to be copied is not known here
        given = args, kwargs
    try:
        with random_kept(args, kwargs):
            yield given
    finally:
        whole.put_back()
        # Those of inference count no writes.
        _written_back((t, v) for t, v in saved if t.is_inference() or t._version != versions[id(t)])


def _is_plain(leaf: Any) -> bool:
    """Whether it is a tensor of PyTorch's own whose elements lie in memory."""
    own = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return own and leaf.layout == torch.strided and not leaf.is_meta


@contextmanager
def preserved(
    original: Any, changes: effects.Changes, args: Any, kwargs: Any
) -> Iterator[Callable[[], None]]:
    """Puts back at the end what calls change: states of modules, of random generators, and other places.

    Modules are the original and those among the arguments, with parameters, buffers and attributes.
    A function of several graphs tells what a graph changes when that graph is captured, just before it runs.

    Args:
        original: The scheduled function or module.
        changes: What else its calls change; what is found meanwhile is put back, too.
        args: Of the call.
        kwargs: Of the call.

    Yields:
        What puts the other places back in between, tensors left out, so that a call starts as the first did.
    """
    places, whole = Saved(), Saved()
    tensors = _saved_places(changes.places, original, places)
    for module in _modules(original, args, kwargs):
        tensors += module.parameters(recurse=False)
        tensors += module.buffers(recurse=False)
        whole.whole(module)
    tensors = list({id(t): t for t in tensors}.values())
    saved = _with_values(tensors)

    def found(new: frozenset[effects.MutatedPlace]) -> None:
        saved.extend(_with_values(_saved_places(new, original, places)))

    try:
        with changes.watched(found), random_kept(args, kwargs):
            yield places.put_back
    finally:
        places.put_back()
        whole.put_back()
        # What was saved twice was saved first before anything changed it.
        _written_back(reversed(saved))


def _saved_places(
    places: Iterable[effects.MutatedPlace], original: Any, saved: Saved
) -> list[torch.Tensor]:
    """Saves what can be found; gives the tensors, whose values are still to be saved."""
    tensors: list[torch.Tensor] = []
    for place in places:
        with suppress(LookupError):
            tensors += effects.save([place], original, saved)
    return tensors


def _with_values(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with modes.apart(), torch.no_grad():  # of the modes of a capture, which may be going on
        return [(t, t.detach().clone()) for t in tensors]
