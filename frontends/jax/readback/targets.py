"""GPUs that programs can be compiled for without having one: XLA's target texts."""

from __future__ import annotations

from pathlib import Path

import jax

from dynaflow_xla.errors import PlanError

_FOLDER = Path(__file__).parent / "target_texts"


def names() -> list[str]:
    """Names of the targets that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.txtpb"))


def resolve(target: object) -> str:
    """The path of a target's text.

    Args:
        target: One of ``names()``, or the path of a text of XLA's ``GpuTargetConfigProto``.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(target, str) and target in names():
        return str(_FOLDER / f"{target}.txtpb")
    if isinstance(target, str | Path) and Path(target).is_file():
        return str(target)
    raise PlanError(
        f"target must be one of {', '.join(names())} or the path of an XLA target text; got {target!r}"
    )


def has_gpu() -> bool:
    """Whether JAX runs on a CUDA GPU here."""
    return jax.default_backend() in ("gpu", "cuda")


def of_this_machine() -> str:
    """The target of this machine's GPU.

    Raises:
        PlanError: there is no GPU, or none of the known ones.
    """
    kind = jax.devices()[0].device_kind if has_gpu() else ""
    for name in names():
        if name.split("-")[1].upper() in kind.upper().split():
            return resolve(name)
    seen = f"its GPU {kind!r} is not known" if kind else "this machine has no GPU"
    raise PlanError(
        f"compiling for a GPU needs a target, for {seen}: schedule(..., backend='xla', "
        f"target='nvidia-h200'); known targets: {', '.join(names())}"
    )
