"""When two results of PyTorch count as equal, and what equal ones say of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dynaflow_xla import verification
from dynaflow_xla.batch import evidence
from dynaflow_xla.errors import VerificationError

_WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""NumPy has no such types."""


def compare(name: str, want: torch.Tensor, got: torch.Tensor) -> verification.Row:
    """One row of a report; VerificationError if the values differ too much."""
    dtype = str(want.dtype).removeprefix("torch.")
    kind = f"{dtype}{list(want.shape)}"
    if (want.dtype, want.shape, want.device) != (got.dtype, got.shape, got.device):
        raise VerificationError(
            f"{name} must be {kind} on {want.device}; the scheduled call returned "
            f"{got.dtype}{list(got.shape)} on {got.device}"
        )
    if dtype not in verification.TOLERANCES:
        if not torch.equal(want, got):
            raise VerificationError(f"{name} ({kind}) must be equal")
        return name, kind, 0.0, 0.0, True
    return verification.compare(name, kind, dtype, _values(want), _values(got))


def _values(x: torch.Tensor) -> Any:
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.detach().to("cpu", _WIDER.get(x.dtype, x.dtype))
    return x.resolve_conj().resolve_neg().numpy()


def silent(batched: Mapping[str, tuple[Any, int]], sizes: Sequence[int]) -> list[str]:
    """Which inputs of a split that is not proved say nothing of it, or [] if comparing on these decides.

    Floating-point inputs decide, each of them, as these are what data are made of; where there are none, one
    of the others is enough (of flags and labels equal ones are common).

    Args:
        batched: By name an input that is read, and its batch axis.
        sizes: Rows of the nano-batches.
    """
    floats: dict[str, bool] = {}
    others: dict[str, bool] = {}
    for name, (x, axis) in batched.items():
        if not isinstance(x, torch.Tensor):
            continue
        decides = x.is_floating_point() or x.is_complex()
        (floats if decides else others)[name] = evidence.tells(_values(x), axis, sizes)
    if floats:
        return [name for name, told in floats.items() if not told]
    return [] if any(others.values()) else list(others)


def undecided(name: str, inputs: Sequence[str]) -> str:
    """Why a call runs the original's operators although a split was asked for, and what to do."""
    return (
        f"{name!r}: it is not proved that rows are independent, and comparing this call with the whole batch "
        f"would say nothing: all rows of {', '.join(inputs)} are equal, or those of a nano-batch are zero. "
        "The original's operators run until a call has rows that differ. If you know that rows are "
        "independent, tell the strategy: dfx.NanoBatch(2, assume_separable=True)"
    )
