"""Results of a split function that are views of another type: complex ones of real tensors, above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def pairs(x: Any) -> Any:
    """Neighbours as complex numbers, as rotary embeddings take them."""
    return torch.view_as_complex(x.reshape(x.shape[0], -1, 2))


def of_intermediate(x: Any) -> Any:
    doubled = x * 2
    return doubled, pairs(doubled)


def two_of_intermediate(x: Any) -> Any:
    doubled = x * 2
    return pairs(doubled), doubled.view(-1, 3, 2)


REAL: dict[str, Callable[..., Any]] = {
    "pairs": pairs,
    "with a dimension": lambda x: pairs(x).unsqueeze(1),
    "of a slice": lambda x: pairs(x[:, 2:]),
    "a slice of it": lambda x: pairs(x)[:, 1:],
    "conjugate": lambda x: pairs(x).conj(),
    "imaginary": lambda x: pairs(x).imag,
    "negated": lambda x: pairs(x).conj().imag[:, 1:],
    "first columns": lambda x: pairs(x[:, :4]),
    "one": lambda x: pairs(x)[:, 1],
    "every other": lambda x: pairs(x[:, 2:])[:, ::2],
    "beside a check": lambda x: (torch.linalg.solve(2 * torch.eye(6), x.T).T, pairs(x)),
    "negated intermediate": lambda x: (x * 2, pairs(x * 2).conj().imag),
    "of an intermediate": of_intermediate,
    "two of an intermediate": two_of_intermediate,
    "copied": lambda x: pairs(x).clone(),
}
COMPLEX: dict[str, Callable[..., Any]] = {
    "conjugate": lambda x: x.conj(),
    "imaginary of it": lambda x: x.conj().imag,
    "real": lambda x: x.real[:, 1:],
    "as real": lambda x: torch.view_as_real(x)[:, :, 1],
    "as real, and back": lambda x: torch.view_as_complex(torch.view_as_real(x)[:, 1:]),
}
CASES = [
    pytest.param(f, dtype, id=f"{name} of {dtype}")
    for dtype, fs in ((torch.float32, REAL), (torch.complex64, COMPLEX))
    for name, f in fs.items()
]


def leaves(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def facts(made: Any, x: Any) -> list[Any]:
    found = []
    for one in leaves(made):
        shares = one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        # What is put together of parts is no lazy conjugate.
        lazy = (one.is_conj(), one.is_neg()) if shares else None
        found.append((one.stride(), one.storage_offset() if shares else 0, shares, lazy))
    return found


@pytest.mark.parametrize("sizes", [2, [5, 4, 3]], ids=["even", "uneven"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize(("f", "dtype"), CASES)
def test_views_of_another_type(f: Any, dtype: Any, grad: bool, sizes: Any) -> None:
    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=0)
    for _ in range(2):
        x = torch.randn(12, 6, dtype=dtype, requires_grad=grad)
        want, got = f(x), fast(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert facts(got, x) == facts(want, x)
        if grad:
            slopes = (
                torch.autograd.grad(sum((one.abs() ** 2).sum() for one in leaves(made)), x)[0]
                for made in (got, want)
            )
            torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(
    "f", [lambda x: pairs(x).unbind(1), lambda x: pairs(x).chunk(3, 1)], ids=["unbind", "chunk"]
)
def test_several_views_at_once(f: Any) -> None:
    """With gradients AOTAutograd takes these for results of their own."""
    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    for grad in (False, True):
        x = torch.randn(12, 6, requires_grad=grad)
        want, got = f(x), fast(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert grad or facts(got, x) == facts(want, x)


def test_writing_into_such_a_view_writes_the_argument() -> None:
    fast = dfx.schedule(pairs, dfx.NanoBatch(2), in_axes=0)
    x = torch.randn(12, 6)
    fast(x).mul_(2)
    again = fast(x)
    torch.testing.assert_close(again, pairs(x), rtol=0, atol=0)
