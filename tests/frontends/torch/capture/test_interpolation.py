"""Interpolations stay the one operator that the original has, in training, too."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
F = torch.nn.functional


def kinds(fast: Any, *args: Any) -> list[str]:
    return [op.kind for op in fast._dfx_core.planned(args, {}).captured.graph.ops]


def scheduled(fn: Any) -> Any:
    return dfx.schedule(fn, strategy="sequential", backend="torch", lanes=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "how",
    [
        {"scale_factor": 2}, {"scale_factor": 2.0}, {"size": (14, 10)}, {"size": 9}, {"scale_factor": 2.1},
        {"scale_factor": (2, 1)}, {"scale_factor": 0.6}, {"scale_factor": 3, "mode": "nearest-exact"},
    ],
)  # fmt: skip
def test_one_operator_with_the_originals_bits(dtype: str, how: dict[str, Any]) -> None:
    def fn(x: Any) -> Any:
        return F.interpolate(torch.tanh(x), **how) + 1

    x = torch.randn(2, 3, 7, 5).to(getattr(torch, dtype))
    fast = scheduled(fn)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), fn(x))
        first, enlarged, last = kinds(fast, x)
    assert (first, last) == ("tanh", "add") and "upsample_nearest" in enlarged


@pytest.mark.parametrize("spatial", [1, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_other_dimensions(spatial: int, mode: str) -> None:
    module = torch.nn.Upsample(scale_factor=1.7, mode=mode)
    x = torch.randn(2, 3, *[4, 5, 6][:spatial])
    fast = dfx.schedule(module, strategy="branches", lanes=2)
    with torch.no_grad():
        assert torch.equal(fast(x), module(x))


SMOOTH = [
    (1, {"mode": "linear"}), (2, {"mode": "bilinear"}), (2, {"mode": "bilinear", "align_corners": True}),
    (2, {"mode": "bicubic"}), (3, {"mode": "trilinear"}), (2, {"mode": "bilinear", "antialias": True}),
    (2, {"mode": "bicubic", "antialias": True}), (2, {"mode": "nearest"}), (3, {"mode": "nearest-exact"}),
    (2, {"mode": "bilinear", "recompute_scale_factor": True}),
]  # fmt: skip


@pytest.mark.parametrize(("spatial", "how"), SMOOTH)
@pytest.mark.parametrize("scale", [2, 1.7, 0.6])
def test_values_and_gradients_have_the_originals_bits(
    spatial: int, how: dict[str, Any], scale: float
) -> None:
    def fn(x: Any) -> Any:
        return F.interpolate(torch.tanh(x), scale_factor=scale, **how)

    fast = scheduled(fn)
    for rows, size in ((2, 7), (3, 7), (3, 9)):  # sizes that change are open
        x = torch.randn(rows, 3, *[size, 5, 6][:spatial], requires_grad=True)
        with torch.no_grad():
            assert torch.equal(fast(x), fn(x))
        mine, its = fast(x), fn(x)
        torch.testing.assert_close(mine, its)
        weights = torch.randn_like(its)
        pulled = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (mine, its)]
        torch.testing.assert_close(*pulled, rtol=1e-4, atol=1e-5)
        if rows == 2:
            assert torch.equal(mine, its)
            entry = fast._dfx_core.planned((x,), {})
            forward = [op.kind for op in entry.captured.graph.ops]
            backward = [op.kind for op in entry.backward.captured.graph.ops]
            assert [k for k in forward if k != "detach"][1:] in [[forward[-1]]], forward
            assert "upsample" in forward[-1] and any("upsample" in kind for kind in backward)
            assert len(backward) < 5


def test_a_tracer_beside_ours_gets_what_it_always_gets() -> None:
    """``torch.compile`` decomposes, also after a graph of ours."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def fn(x: Any) -> Any:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    def traced() -> list[str]:
        with torch._dispatch.python.enable_python_dispatcher():
            graph = make_fx(fn)(torch.randn(1, 2, 4, 4)).graph
        return [str(node.target) for node in graph.nodes]

    before = traced()
    with torch.no_grad():
        scheduled(fn)(torch.randn(1, 2, 4, 4))
    assert traced() == before and len(before) > 10


def test_nano_batches_and_sizes_that_change() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.Conv2d(4, 2, 3),
    ).eval()
    nano = dfx.schedule(model, dfx.NanoBatch(2), lanes=2, in_axes=0)
    fast = dfx.schedule(model, "branches", lanes=2)
    with torch.no_grad():
        for rows, size in ((4, 8), (6, 8), (8, 12), (4, 10), (5, 7)):
            x = torch.randn(rows, 3, size, size)
            torch.testing.assert_close(nano(x), model(x))
            torch.testing.assert_close(fast(x), model(x))


def test_other_orders_of_memory() -> None:
    def fn(x: Any) -> Any:
        return F.interpolate(x, scale_factor=2, mode="nearest")

    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    fast = scheduled(fn)
    with torch.no_grad():
        got = fast(x)
    assert torch.equal(got, fn(x)) and got.stride() == fn(x).stride()


def test_gradients_and_sizes_that_change() -> None:
    def fn(x: Any) -> Any:
        return F.interpolate(x, scale_factor=2, mode="nearest").square().sum()

    fast = scheduled(fn)
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 3, 8, 8, requires_grad=True)
        mine, its = torch.autograd.grad(fast(x), x), torch.autograd.grad(fn(x), x)
        torch.testing.assert_close(mine, its)
