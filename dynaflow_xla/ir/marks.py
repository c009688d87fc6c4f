"""``mark``: says in a model where to cut it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from dynaflow_xla.errors import RuleError, bad_rule
from dynaflow_xla.ir.graph import Resource
from dynaflow_xla.ir.rules import check_labels

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class MarkInfo:
    """What a mark says."""

    name: str
    resource: Resource | None
    tags: frozenset[str]


_backends: list[Callable[[MarkInfo], contextlib.AbstractContextManager[Any]]] = []

# Set by the PyTorch frontend: whether Dynamo is reading this code, and what it shall read instead
# of the backends, whose code it cannot trace.
_traced_mark: (
    tuple[Callable[[], bool], Callable[[MarkInfo], contextlib.AbstractContextManager[Any]]] | None
) = None


def set_traced_mark(
    is_tracing: Callable[[], bool],
    enter: Callable[[MarkInfo], contextlib.AbstractContextManager[Any]],
) -> None:
    """How a mark is noted while a compiler reads the source of ``mark`` itself."""
    global _traced_mark
    _traced_mark = (is_tracing, enter)


def register_mark_backend(
    enter: Callable[[MarkInfo], contextlib.AbstractContextManager[Any]],
) -> None:
    """A frontend's way to note a mark while a model is traced; all registered ones are entered."""
    if enter not in _backends:
        _backends.append(enter)


class mark(contextlib.ContextDecorator):  # noqa: N801 - used as a statement, like jax.named_scope
    """Makes what is traced inside one region: ``with dfx.mark("attention", tags={"attn"}): ...``.

    Also a decorator. Marks change no value; without a schedule they are names in a profile.

    Args:
        name: Name of the region; a second use makes a second region.
        resource: Dominant resource, if known.
        tags: Tags for strategies.
    """

    def __init__(
        self, name: str, *, resource: Resource | None = None, tags: Iterable[str] = ()
    ) -> None:
        # No regular expression: Dynamo traces this, and some versions break the graph in `re`.
        if (
            not isinstance(name, str)
            or not name
            or not all(c.isalnum() or c in "_.- " for c in name)
        ):
            text = f"a mark's name must be letters, digits, '_', '.', '-' or spaces; got {name!r}"
            raise bad_rule(name, str, text)
        self._info = MarkInfo(name, resource, check_labels("mark", name, resource, tags))
        self._stacks: list[contextlib.AbstractContextManager[Any]] = []

    def __call__(self, func: _F) -> _F:
        """Marks what a function does.

        Raises:
            RuleError: its body runs after the call, as that of a generator does; or it is no function, but a
                class or a module, whose parameters would be lost.
        """
        if not callable(func) or isinstance(func, type) or _is_module(func):
            shown = func.__name__ if isinstance(func, type) else type(func).__name__
            what = "the class " * isinstance(func, type) + shown
            text = (
                f"a mark decorates functions; got {what}: decorate the method that computes, write "
                f"`with dfx.mark({self._info.name!r}):` around the call, or cut by dfx.Module"
            )
            raise RuleError(text)
        if any(
            look(func)
            for look in (
                inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
            )
        ):  # fmt: skip
            text = (
                f"the body of {getattr(func, '__name__', func)!r} runs after the call, when the mark is "
                f"closed: write `with dfx.mark({self._info.name!r}):` in it"
            )
            raise RuleError(text)
        return super().__call__(func)

    def __enter__(self) -> mark:
        if _traced_mark is not None and _traced_mark[0]():
            traced = _traced_mark[1](self._info)
            traced.__enter__()
            self._stacks.append(traced)
            return self
        if "jax" in sys.modules:
            _load_jax()
        stack = contextlib.ExitStack()
        for enter in _backends:
            stack.enter_context(enter(self._info))
        self._stacks.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stacks.pop().__exit__(*error)

    def _recreate_cm(self) -> mark:
        return mark(self._info.name, resource=self._info.resource, tags=self._info.tags)


def _is_module(value: Any) -> bool:
    """Whether it is a module of PyTorch's, or of Flax or Equinox, which are dataclasses."""
    return is_dataclass(value) or any(
        (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module")
        for kind in type(value).__mro__
    )


@functools.cache
def _load_jax() -> None:
    module = importlib.import_module("dynaflow_xla.frontends.jax.capture.marks")
    register_mark_backend(module.enter_mark)
