"""What ``dynaflow_xla.schedule`` returns for PyTorch: a module or function that runs scheduled."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import DynaflowError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.batch.buckets import Bucketed
from dynaflow_xla.frontends.torch.capture import lazy, marks
from dynaflow_xla.frontends.torch.capture.mutation import effects
from dynaflow_xla.frontends.torch.selected import SelectCore, core_of
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.protocols import PassesOn, stands_at
from dynaflow_xla.settings import Settings


class ScheduledFunction(PassesOn):
    """A torch function that runs under a schedule; it is called like the original.

    Attributes:
        original: The function as given to ``schedule``.
    """

    def __init__(self, fn: Callable[..., Any], options: Settings) -> None:
        self.original = fn
        self.options = options
        self._dfx_core = core_of(fn, options)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            EngineError: a region failed while it ran, or the process was forked.
        """
        return self._dfx_core.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds like a function, so that methods can be scheduled."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        # A decorated function stands where pickle would look for the original.
        if stands_at(self):
            return self.__qualname__
        return _begun_function, (self.original, self.options)

    def __getattr__(self, name: str) -> Any:
        if name == "_dfx_core":  # of a copy
            with _beginning:
                if name not in self.__dict__:
                    self._dfx_core = core_of(self.original, self.options)
            return self._dfx_core
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"<scheduled {self.options.name} with {self.options.how!r}>"


class _ModuleView:
    """Turns a class into that of a scheduled module, which shares the original's ``__dict__``.

    Sharing the dictionary makes parameters, buffers, submodules, hooks, ``training`` and every
    attribute the same object seen from both, whichever of the two changes them.

    The class has the name of the user's, as libraries write that down (``save_pretrained``).
    """

    __slots__ = ("_dfx_core", "_dfx_options", "original")

    _dfx_core: Any
    _dfx_options: Settings
    _dfx_user_class: Any
    original: torch.nn.Module

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the user's class: what is made anew by ``type(fast)(...)`` is not scheduled.

        Raises:
            UnsupportedError: a class was derived from that of a scheduled module.
        """
        made = cls._dfx_user_class
        if "_dfx_user_class" not in cls.__dict__:
            raise UnsupportedError(
                f"{cls.__qualname__} is derived from the class of a scheduled module, which makes no "
                f"objects: derive it from {made.__qualname__} itself, and schedule its objects"
            )
        # No object of ``cls``, so Python calls no further __init__.
        return made(*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Keeps the user's from running: to a registry this would be another class of the same name."""

    def __del__(self) -> None:
        """Keeps the user's from running: what it would close belongs to the original, which may live on."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            EngineError: a region failed while it ran, or the process was forked.
        """
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)  # inlined into somebody's graph
        return self._dfx_core.call(args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The original's, which some functions derive a class from and give to the module.

        ``torch.nn.utils.parametrizations`` do, and those that take a parametrization off: so they find, and
        change, what the original is.
        """
        return type(self.original)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        self.original.__class__ = cls
        self._follow()

    def _share(self) -> bool:
        """Has the attributes that the original has been given since, all at once; whether there are any."""
        if torch.compiler.is_compiling() or self.__dict__ is self.original.__dict__:
            return False  # (a compiler that follows this has no dictionaries to compare)
        object.__setattr__(self, "__dict__", self.original.__dict__)
        return True

    def _follow(self) -> bool:
        """Becomes a view of the class that the original has by now; whether it has another one."""
        cls = type(self.original)
        if cls is type(self)._dfx_user_class:
            return False
        # Not by assignment, which would be the original's.
        made = _class_for(cls)  # type: ignore[arg-type]
        object.__dict__["__class__"].__set__(self, made)
        return True

    def __getattr__(self, name: str) -> Any:
        """What only the original's class has, which may be another one by now; the core of a copy."""
        if name == "_dfx_core":
            with _beginning:
                if not _has_core(self):
                    self._share()
                    object.__setattr__(self, name, core_of(self.original, self._dfx_options))
            return self._dfx_core
        if name not in _ModuleView.__slots__ and (self._share() or self._follow()):
            return getattr(self, name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """As the original's class does it."""
        self._share()
        self._follow()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """The same."""
        self._share()
        self._follow()
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Known before the original is copied, which may hold it: a hook that is a method of this.
        memo[id(self)] = made = _empty(self.original)
        return _begin(made, copy.deepcopy(self.original, memo), self._dfx_options)

    def __copy__(self) -> Any:
        return schedule_module(copy.copy(self.original), self._dfx_options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _begun_module, (self.original, self._dfx_options)

    def __repr__(self) -> str:
        return (
            f"<scheduled {self._dfx_core.options.name} with {self._dfx_core.options.how!r}>\n"
            + repr(self.original)
        )


_beginning = threading.RLock()
"""Held while a copy's core is made, at its first use."""


def _has_core(view: _ModuleView) -> bool:
    try:
        object.__getattribute__(view, "_dfx_core")
    except AttributeError:
        return False
    return True


@functools.lru_cache(maxsize=256)
def _class_for(cls: type) -> type:
    # The module is this one's: by it, what is scheduled is told from what is not.
    names = {"__module__": __name__, "__qualname__": cls.__qualname__, "_dfx_user_class": cls}
    try:
        return type(cls.__name__, (_ModuleView, cls), names)
    except TypeError as error:
        raise UnsupportedError(
            f"{cls.__name__} cannot be wrapped ({error}); schedule a function that calls the module"
        ) from error


def schedule_module(original: torch.nn.Module, options: Settings) -> Any:
    """A module like the original whose calls run scheduled."""
    if isinstance(original, _ModuleView):
        original = original.original
    if "original" in torch.nn.Module.__dir__(original):
        raise UnsupportedError(
            f"{type(original).__name__} has something of its own named 'original', the name by which a "
            "scheduled module gives the module that it was made from: methods would find that instead. "
            "Rename it, or schedule a function that calls the module"
        )
    view = _begun_module(original, options)
    object.__setattr__(view, "_dfx_core", core_of(original, options))
    return view


def _begun_module(original: torch.nn.Module, options: Settings) -> Any:
    """A copy, of which the core is made when it is asked for: the original may have nothing in it yet."""
    return _begin(_empty(original), original, options)


def _empty(original: torch.nn.Module) -> Any:
    return object.__new__(_class_for(type(original)))  # type: ignore[arg-type]


def _begin(view: Any, original: torch.nn.Module, options: Settings) -> Any:
    object.__setattr__(view, "__dict__", original.__dict__)
    object.__setattr__(view, "original", original)
    object.__setattr__(view, "_dfx_options", options)
    return view


def _begun_function(original: Callable[..., Any], options: Settings) -> ScheduledFunction:
    """The same of a function, which may be a method of what has nothing in it yet."""
    made = ScheduledFunction.__new__(ScheduledFunction)
    made.original, made.options = original, options
    functools.update_wrapper(made, original, updated=())
    return made


def schedule(fn: Any, options: Settings) -> Any:
    """The scheduled form of a module, exported program or function."""
    if isinstance(fn, torch.export.ExportedProgram):
        from dynaflow_xla.frontends.torch.export import ScheduledExport

        if options.selection is not None:
            raise UnsupportedError(
                "select takes a module or a function; an exported program is one plan: schedule the module"
            )
        return ScheduledExport(fn, options)
    fn = captures.without_compile(fn)
    if isinstance(fn, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise UnsupportedError(
            "a TorchScript module has no Python code to capture; schedule the module it was made from"
        )
    if isinstance(fn, torch.nn.Module):
        return schedule_module(fn, options)
    if isinstance(fn, ScheduledFunction):
        fn = fn.original
    return ScheduledFunction(fn, options)


def alone(fast: Any, given: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """What a scheduled callable's original returns, without a trace of that call.

    It is for a comparison with a call that comes next, so that both start from the same state.

    Args:
        fast: The scheduled callable.
        given: Arguments and keyword arguments of the call that comes next. It is captured before: a capture
            tells what calls change beside modules and random states.
        args: What the original is called with, on copies.
        kwargs: The same by keyword.

    Returns:
        Leaves of the result; None for a module without parameters yet, whose first call makes them.
    """
    original = fast.original
    if lazy.uninitialized(original):
        return None
    core: Any = fast._dfx_core
    if isinstance(core, SelectCore):
        core = core.members[core.chosen(*given)]
    if core is not None and core.captured_ahead:
        try:
            core.check_arguments(args, kwargs)
        except UnsupportedError as error:
            raise UnsupportedError(
                "the first padded call of each bucket is compared with the original at the batch's own size, "
                f"which this exported program does not take: {error}. Export it with an open size "
                "(dynamic_shapes), or give check=False if no row depends on another"
            ) from None
    # What select leaves to the original has no capture that could tell.
    changes = effects.Changes() if core is None else core.changes
    with keeping.preserved(original, changes, args, kwargs) as put_back:
        if core is not None:
            with contextlib.suppress(DynaflowError):  # the call that comes next tells it
                core.all_planned(*given)
            put_back()
            if lasting := changes.lasting(original):
                core.warn(
                    f"{core.options.name!r} is compared with the original at the first padded call of each "
                    f"bucket, and a call changes what cannot be put back ({', '.join(lasting)}): that "
                    "happens more than once then. Give check=False where it matters"
                )
        _draw(pytree.tree_leaves((args, kwargs)))
        copied, named = keeping.copies((args, kwargs))
        with keeping.called_modules_kept(), marks.ignore():
            return pytree.tree_leaves(original(*copied, **named))


def _draw(leaves: Sequence[Any]) -> None:
    """Draws a number from each generator: results that are random should not be equal by chance."""
    for device in {torch.device("cpu")} | {x.device for x in leaves if isinstance(x, torch.Tensor)}:
        if device.type in ("cpu", "cuda"):
            torch.rand((), device=device)
    for x in leaves:
        if isinstance(x, torch.Generator):
            torch.rand((), generator=x, device=x.device)


Bucketed.alone = staticmethod(alone)
