"""What PyTorch raises where a function cannot be captured."""

from __future__ import annotations

import re

import torch
import torch.utils._pytree


def says_nothing() -> tuple[type[BaseException], ...]:
    """What an operator raises on tensors without data where it needs the data, or has no kernel for them."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def told_by_fake(error: BaseException) -> str:
    """What one of these says, which may be the operator alone."""
    named = getattr(error, "func", None)
    return f"{named} needs the data of its tensors" if named is not None else str(error)


def inner_error(error: BaseException) -> BaseException:
    """What a backend raised, without Dynamo's wrapping."""
    return getattr(error, "inner_exception", None) or error


def backend_failed() -> type[BaseException]:
    """The class in which Dynamo wraps a backend's exception."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def of_dynamo() -> type[Exception]:
    """What Dynamo raises for itself: that it starts a capture again, skips a frame, or gives up."""
    return torch._dynamo.exc.TorchDynamoException


def capture_failed() -> tuple[type[BaseException], ...]:
    """Classes of Dynamo's errors where an operator fails on the shapes of a call, or Dynamo itself does."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

    return TorchRuntimeError, InternalTorchDynamoError


def unknown_tensors(error: BaseException, args: object, kwargs: object) -> list[str]:
    """Classes of tensors among the arguments that made a compiled graph fail, as no handler takes them."""
    told = f"{error} {error.__cause__}"  # an operator of ours, or what brings its arguments about
    if "__torch_dispatch__ handlers returned NotImplemented" not in told:
        return []
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    found = {type(x).__qualname__ for x in leaves if isinstance(x, torch.Tensor)}
    return sorted(found - {kind.__qualname__ for kind in plain})


def in_words(error: BaseException) -> str:
    """What a failed capture says, and at which line of the user's, as far as Dynamo remembers that."""
    said = (str(error) or type(error).__name__).splitlines()[0]
    if "fake tensor" in said:
        # The class of what an operator raised. What it said stands below, perhaps with a line of PyTorch's.
        found = re.search(r"got (\w+\(.*\))\s*$", str(error), re.MULTILINE)
        if found:
            raised = re.sub(r"/\S+\.(?:cpp|h):\d+: ", "", found[1])
            said = f"an operator on tensors without data: {raised}"
    frame = getattr(error, "innermost_user_frame_summary", None)
    if frame is None:
        stack = getattr(error, "real_stack", None) or [None]
        frame = stack[-1]
    return said if frame is None else f"{said}, at {frame.filename}:{frame.lineno}"


def of_compiling(error: BaseException) -> bool:
    """Whether ``torch.compile`` failed before what it compiles for ran."""
    return isinstance(error, of_dynamo()) or raised_by_capture(error)


def raised_by_capture(error: BaseException) -> bool:
    """Whether an operator raised this on tensors without data, while Dynamo followed the function.

    Dynamo lets errors of some classes through (``IndexError`` among them), with its own words added, which
    it remembers on the error. Its own classes are no operator's.
    """
    followed = hasattr(error, "innermost_user_frame_summary")
    return followed and not isinstance(error, of_dynamo())
