"""The private PyTorch names that the frontend uses, each with the reason, in one place."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError

MIN_TORCH, MAX_TORCH = (2, 11), (2, 16)


def check_version(
    minimum: tuple[int, int] = MIN_TORCH, maximum: tuple[int, int] = MAX_TORCH
) -> None:
    """Raises UnsupportedError if the installed PyTorch is outside the tested range."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not minimum <= version < maximum:
        raise UnsupportedError(
            f"dynaflow_xla works with torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]} and < "
            f"{MAX_TORCH[0]}.{MAX_TORCH[1]}; found {torch.__version__}. "
            "Install one with: pip install 'dynaflow-xla[torch]' (torch 2.9.0 works together with "
            "torch-xla: pip install 'dynaflow-xla[torch-xla]')"
        )


def aot_backend(
    forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any]
) -> Callable[..., Any]:
    """A Dynamo backend that hands functional aten graphs to the three compilers.

    The public way to it is a ``torch.compile`` backend, but AOTAutograd itself has only this name.
    The default partitioner keeps every forward value that the backward reads: nothing is computed
    again, so gradients have the original's bits.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=default_partition,
        decompositions={},
    )


def inductor(
    gm: Any, examples: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Compiles a functional graph module; apart from any capture that is going on."""
    from torch._inductor import compile as inductor_compile

    with torch._guards.tracing(None), torch.no_grad():
        return inductor_compile(gm, list(examples), options=dict(options))  # type: ignore[no-any-return]


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a compiled function as one that takes a list it may empty, so that inputs die early."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def break_reason(gm: Any) -> tuple[str, Any] | None:
    """(reason, innermost frame) if a graph ended because Dynamo could not go on, else None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(getattr(reason, "user_stack", ()))
    return str(reason.reason), stack[-1] if stack else None


def never_compile(code: types.CodeType) -> None:
    """Keeps Dynamo from compiling a frame of this code by itself; inlining it stays possible."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


@contextlib.contextmanager
def dynamo_settings(fused_layers: bool = True) -> Iterator[None]:
    """Context: recurrent modules are captured (Dynamo breaks graphs at them by default).

    Args:
        fused_layers: Keep the operators that are a whole transformer layer; they have no
            decomposition.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    if before and not fused_layers:
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch._dynamo.config.patch(allow_rnn=True):
            yield
    finally:
        if before and not fused_layers:
            torch.backends.mha.set_fastpath_enabled(True)


def inner_error(error: BaseException) -> BaseException:
    """What a backend raised, without Dynamo's wrapping."""
    return getattr(error, "inner_exception", None) or error


def backend_failed() -> type[BaseException]:
    """The class in which Dynamo wraps a backend's exception."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def modes_active() -> bool:
    """Whether a dispatch or function mode of this thread would miss what other threads do."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The bare setter: the public one is a context object, made anew for each step."""
