"""GPUs that a call computes on, waiting for them, and memory that they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def of(original: Any, args: Any, kwargs: Any) -> set[torch.device]:
    """Those of the arguments, and of a module's parameters and buffers."""
    if not torch.cuda.is_initialized():
        return set()
    tensors = pytree.tree_leaves((args, kwargs))
    if isinstance(original, torch.nn.Module):
        tensors += [*original.parameters(), *original.buffers()]
    return {x.device for x in tensors if isinstance(x, torch.Tensor) and x.is_cuda}


def waiting(original: Any, args: Any, kwargs: Any) -> Callable[[], None] | None:
    """What waits for all that calls enqueued there; None if this process uses no GPU."""
    if not torch.cuda.is_initialized():
        return None
    used = of(original, args, kwargs) or {torch.device("cuda", torch.cuda.current_device())}

    def wait() -> None:
        for device in used:
            torch.cuda.synchronize(device)

    return wait


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is a device's lack of memory, or comes of one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
