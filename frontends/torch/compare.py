"""When two results count as equal."""

from __future__ import annotations

import torch

from dynaflow_xla.errors import VerificationError

TOLERANCES = {
    torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12,
    torch.complex64: 2e-5, torch.complex128: 1e-12,
}  # fmt: skip
"""dtype -> allowed difference relative to the largest element. Eager regions on lanes differ from the
original only where an operator's rounding depends on its number of threads."""


def compare(
    name: str, want: torch.Tensor, got: torch.Tensor
) -> tuple[str, str, float, float, bool]:
    """One row of a report; VerificationError if the values differ too much."""
    kind = f"{str(want.dtype).removeprefix('torch.')}{list(want.shape)}"
    if (want.dtype, want.shape, want.device) != (got.dtype, got.shape, got.device):
        raise VerificationError(
            f"{name} must be {kind} on {want.device}; the scheduled call returned "
            f"{got.dtype}{list(got.shape)} on {got.device}"
        )
    if want.dtype not in TOLERANCES:
        if not torch.equal(want, got):
            raise VerificationError(f"{name} ({kind}) must be equal")
        return name, kind, 0.0, 0.0, True
    if want.layout is not torch.strided and want.layout is got.layout:
        want, got = want.to_dense(), got.to_dense()
    equal = torch.equal(want.nan_to_num(), got.nan_to_num())
    if not torch.equal(want.isnan(), got.isnan()) or not torch.equal(want.isinf(), got.isinf()):
        raise VerificationError(f"{name} ({kind}) differs in its NaN or infinite elements")
    wide = torch.complex128 if want.is_complex() else torch.float64
    finite = want.isfinite()
    w, g = want[finite].to(wide), got[finite].to(wide)
    scale = float(w.abs().max()) if w.numel() else 0.0
    largest = float((w - g).abs().max()) if w.numel() else 0.0
    bound = TOLERANCES[want.dtype] * max(scale, 1e-30)
    if largest > bound:
        raise VerificationError(
            f"{name} ({kind}): largest difference {largest:.3g} is above the allowed {bound:.3g}"
        )
    return name, kind, largest, bound, equal
