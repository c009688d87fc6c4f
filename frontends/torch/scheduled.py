"""What ``dynaflow_xla.schedule`` returns for PyTorch: a module or function that runs scheduled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.selected import core_of
from dynaflow_xla.protocols import PassesOn
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            EngineError: a region failed while it ran, or the process was forked.
        """
        return self._dfx_core.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds like a function, so that methods can be scheduled."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        return ScheduledFunction, (self.original, self.options)

    def __repr__(self) -> str:
        return f"<scheduled {self.options.name} with {self.options.how!r}>"


class _ModuleView:
    """Turns a class into that of a scheduled module, which shares the original's ``__dict__``.

    Sharing the dictionary makes parameters, buffers, submodules, hooks, ``training`` and every
    attribute the same object seen from both, whichever of the two changes them.
    """

    __slots__ = ("_dfx_core", "original")

    _dfx_core: Any
    original: torch.nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            EngineError: a region failed while it ran, or the process was forked.
        """
        return self._dfx_core.call(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return schedule_module(copy.deepcopy(self.original, memo), self._dfx_core.options)

    def __copy__(self) -> Any:
        return schedule_module(copy.copy(self.original), self._dfx_core.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return schedule_module, (self.original, self._dfx_core.options)

    def __repr__(self) -> str:
        return (
            f"<scheduled {self._dfx_core.options.name} with {self._dfx_core.options.how!r}>\n"
            + repr(self.original)
        )


@functools.lru_cache(maxsize=256)
def _class_for(cls: type) -> type:
    try:
        return type(f"Scheduled{cls.__name__}", (_ModuleView, cls), {"__module__": __name__})
    except TypeError as error:
        raise UnsupportedError(
            f"{cls.__name__} cannot be wrapped ({error}); schedule a function that calls the module"
        ) from error


def schedule_module(original: torch.nn.Module, options: Settings) -> Any:
    """A module like the original whose calls run scheduled."""
    if isinstance(original, _ModuleView):
        original = original.original
    view: Any = object.__new__(_class_for(type(original)))  # type: ignore[arg-type]
    object.__setattr__(view, "__dict__", original.__dict__)
    object.__setattr__(view, "original", original)
    object.__setattr__(view, "_dfx_core", core_of(original, options))
    return view


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
