"""When two results of PyTorch count as equal: by the rule of ``dynaflow_xla.verification``."""

from __future__ import annotations

from typing import Any

import torch

from dynaflow_xla import verification
from dynaflow_xla.errors import UnsupportedError, VerificationError

_WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""NumPy has no such types."""


def compare(name: str, want: torch.Tensor, got: torch.Tensor) -> verification.Row:
    """One row of a report; VerificationError if the values differ too much, UnsupportedError without any."""
    dtype = str(want.dtype).removeprefix("torch.")
    kind = f"{dtype}{list(want.shape)}"
    if (want.dtype, want.shape, want.device) != (got.dtype, got.shape, got.device):
        raise VerificationError(
            f"{name} must be {kind} on {want.device}; the scheduled call returned "
            f"{got.dtype}{list(got.shape)} on {got.device}"
        )
    if want.is_meta:
        raise UnsupportedError(
            f"{name} ({kind}) is on the meta device and has no values to compare: verify needs arguments "
            "on a device that has memory"
        )
    if dtype not in verification.TOLERANCES:
        if not torch.equal(want, got):
            raise VerificationError(f"{name} ({kind}) must be equal")
        return name, kind, 0.0, 0.0, True
    return verification.compare(name, kind, dtype, as_array(want), as_array(got))


def as_array(x: torch.Tensor) -> Any:
    """A tensor as NumPy's array, in a wider type where NumPy has none like it."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.detach().to("cpu", _WIDER.get(x.dtype, x.dtype))
    return x.resolve_conj().resolve_neg().numpy()
