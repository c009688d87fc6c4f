"""Results that are views of others or of arguments, on XLA: they lie as the original's, at all sizes."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("jax", reason="JAX is not installed")
nn = torch.nn

slow = pytest.mark.slow


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.table = nn.Parameter(torch.randn(20, 6))

    def hidden(self, x: Any) -> Any:
        return self.linear(x).relu()


class Expanded(Base):
    def forward(self, x: Any) -> Any:
        h, table = self.hidden(x), self.table * 2
        deep = h[:, :, None] * torch.ones(4)
        return table[:1].expand_as(h), table, h[:, :1].expand_as(h), h, deep[:, :1].expand_as(deep)


class Normal(Base):
    def forward(self, x: Any) -> Any:
        made = torch.distributions.Normal(self.linear(x), self.table[0].exp())
        return made.loc, made.scale, made.scale


class Strided(Base):
    def forward(self, x: Any) -> Any:
        h = self.hidden(x)
        return (
            h,
            h[:, ::2],
            h[:, 1:].mT,
            h.unfold(1, 3, 2),
            h[:, 2],
        )


class OfBatch(Base):
    def forward(self, x: Any) -> Any:
        h = self.hidden(x)
        half = h.shape[0] // 2
        return (
            h[half:],
            h[::2],
            h.unfold(0, 2, 1),
            h[1:].unfold(0, 3, 1),
            h[0],
            h.reshape(half * 12),
        )


class Complex(Base):
    def forward(self, x: Any) -> Any:
        h = torch.view_as_complex(self.hidden(x).view(-1, 3, 2))
        return h.real, h, h.imag[1:], torch.view_as_real(h)[1:, 1:]


class OfArgument(Base):
    def forward(self, x: Any) -> Any:
        rows = x.shape[0]
        return (
            x[:1].expand_as(x), x[rows // 2 :], x.t(), x.reshape(rows * 8), x.unfold(0, 2, 1), self.hidden(x)
        )  # fmt: skip


class Written(Base):
    def forward(self, x: Any) -> Any:
        x.add_(1)
        return x[x.shape[0] // 2 :], x[:, :1].expand_as(x), self.hidden(x)


def check(make: Any, strategy: Any, begin: int = 1, **options: Any) -> None:
    model = make()
    fast = dfx.schedule(model, strategy, **options)
    for rows in (6, 6, 4, 10, 12):
        values = torch.randn(rows + begin, 8)
        for training in (True, False):
            made = []
            for call in (model, fast):
                x = values.clone()[begin:]  # it does not begin where its memory does
                with torch.set_grad_enabled(training):
                    outs = call(x)
                grads = []
                if training:
                    sum(out.abs().square().sum() for out in outs if out.requires_grad).backward()
                    grads = [p.grad for p in model.parameters()]
                    model.zero_grad()
                made.append((outs, grads, x))
            torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
            assert [out.stride() for out in made[1][0]] == [out.stride() for out in made[0][0]]


@pytest.mark.parametrize("backend", ["ffi", pytest.param("xla", marks=slow)])
@pytest.mark.parametrize("make", [Expanded, Normal, Strided, OfBatch, Complex, OfArgument])
def test_views(make: Any, backend: str) -> None:
    check(make, dfx.Branches(wide=False), backend=backend)


def test_views_of_a_written_argument() -> None:
    check(Written, dfx.Branches(wide=False), begin=0, backend="ffi")


@pytest.mark.parametrize("backend", ["ffi", pytest.param("xla", marks=slow)])
@pytest.mark.parametrize("make", [Expanded, Strided])
def test_views_in_nano_batches(make: Any, backend: str) -> None:
    check(make, dfx.NanoBatch(2), backend=backend, in_axes=0)
