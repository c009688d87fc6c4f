"""What ``schedule`` returns, for type checkers and editors: nothing here runs.

A function keeps its parameters and its result, a module stays of its class. Everything else that a scheduled
callable has comes from its framework (``lower``, ``trace``, ...), so any other attribute is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, overload

from dynaflow_xla.kernels import Lanes

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class TorchModule(Protocol):
    """What tells a ``torch.nn.Module`` from a function, without PyTorch."""

    training: bool

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's."""


M = TypeVar("M", bound=TorchModule)


class ScheduledMethod(Protocol[Q, P, R_co]):
    """A scheduled function that was got from an object: a method without its first parameter.

    That of a static method, or of a function whose parameters nobody knows (``jax.jit``'s), has all of them:
    type checkers bind these, too.
    """

    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class ScheduledCallable(Protocol[P, R_co]):
    """A scheduled function: called as the original, and with the attributes of its framework's functions."""

    @property
    def original(self) -> Callable[P, R_co]:
        """What was scheduled; of a plain function of JAX, what ``jax.jit`` makes of it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """The original's result."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> ScheduledCallable[P, R_co]: ...
    @overload
    def __get__(
        self: ScheduledCallable[Concatenate[Any, Q], R],
        instance: object,
        owner: type | None = None,
        /,
    ) -> ScheduledMethod[Q, P, R]: ...

    def __getattr__(self, name: str, /) -> Any:
        """What the framework's functions have."""


class Scheduling(Protocol):
    """``schedule`` with options and without a function, as a decorator."""

    @overload
    def __call__(self, function: M, /) -> M: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> ScheduledCallable[P, R]: ...


class Options(TypedDict, total=False):
    """The options of ``schedule`` by keyword."""

    in_axes: Any
    out_axes: Any
    batch_size: int | None
    backend: str
    lanes: int | Lanes | None
    rules: Sequence[Any] | None
    context: Mapping[str, Any] | None
    select: Any
    target: str | None
    compiler: str
    compiler_options: Mapping[str, Any] | None
    check: bool
