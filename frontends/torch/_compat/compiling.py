"""PyTorch's compilers of functional graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import modes, operators

_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
"""Settings of Inductor's that its own list of what code depends on leaves out: it asks each apart."""


def surroundings() -> dict[str, Any]:
    """Settings of the whole process on which compiled code depends."""
    from torch._inductor import config

    set_passes = {name: made for name in _PASSES if (made := getattr(config, name, None))}
    set_options = {**config.save_config_portable(), **set_passes}
    set_options.pop(
        "aot_inductor.metadata", None
    )  # AOTInductor writes about its last library there
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "inductor": set_options,
    }


def surroundings_key() -> str:
    """Equal for equal surroundings, in every process; passes of the user's are known by their ``uuid``."""
    made = surroundings()
    inductor_settings = {
        name: value.uuid() if name in _PASSES and hasattr(value, "uuid") else value
        for name, value in made.pop("inductor").items()
    }
    return repr((sorted(made.items()), sorted(inductor_settings.items())))


def surround(given: Mapping[str, Any]) -> None:
    """Sets what ``surroundings`` of another process are."""
    from torch._inductor import config

    torch.use_deterministic_algorithms(given["deterministic"], warn_only=given["warn_only"])
    config.load_config(given["inductor"])


def inductor(
    gm: Any, examples: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Compiles a functional graph module; apart from any capture that is going on."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as inductor_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor looks into its cache on disk only where there is a place for guards on shapes, and then takes
    # the sizes of real tensors as open: code for open sizes is slower, and is long in the making.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with modes.apart(), tracing(TracingContext(mode)), torch.no_grad():
        fixed = [mode.from_tensor(x, static_shapes=True) for x in examples]
        return inductor_compile(gm, fixed, options=dict(options))  # type: ignore[no-any-return]


def aot_compile(gm: Any, examples: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Path:
    """Compiles a functional graph module to a library; its path."""
    from torch._inductor import aot_compile as inductor_aot_compile

    with modes.apart(), torch.no_grad():
        settings = {**options, "aot_inductor.package": False}
        return Path(str(inductor_aot_compile(gm, tuple(examples), options=settings)))


def without_code(target: Any) -> bool:
    """Whether Inductor has neither code for an operator nor a C function to call it by.

    It then believes the strides that PyTorch's rules foresee, which some operators do not keep, and
    AOTInductor has nothing to call. What Inductor meets for the first time it adds to its table of lowerings
    as a fallback; the answer is the same before and after.
    """
    from torch._inductor import decomposition, lowering

    if not isinstance(target, operators.Operator):
        return False
    if target in decomposition.decompositions or operators.is_composite(target):
        return False
    if target in getattr(lowering, "user_lowerings", ()):
        return False
    if target in lowering.lowerings and target not in lowering.fallbacks:
        return False
    return not in_c(target)


def is_miscompiled(target: Any, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether Inductor is known to compute something else with an operator.

    ``h[mask] = value`` behind a write that accumulates (``h.index_add_(...)``) has wrong values (seen in
    2.13); ``masked_fill_`` and ``where`` have not.

    Args:
        target: The operator.
        dtypes: Of what it reads.
    """
    aten = torch.ops.aten
    return target in (aten.index_put.default, aten.index_put_.default) and torch.bool in dtypes


def in_c(target: Any) -> bool:
    """Whether AOTInductor's code can call an operator as it is."""
    from torchgen.aoti.fallback_ops import inductor_fallback_ops

    return str(target) in inductor_fallback_ops


tensor_handles: Callable[[Sequence[torch.Tensor]], list[Any]] = (
    torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
)
"""Tensors to handles of AOTInductor's C interface, which the receiver owns."""


tensors_of_handles: Callable[[list[Any]], list[torch.Tensor]] = (
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
)
"""Handles to tensors, which own them."""
