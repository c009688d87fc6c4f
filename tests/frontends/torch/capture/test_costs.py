"""Costs of PyTorch's operators on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla import machine

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dynaflow_xla.frontends.torch.capture import costs  # noqa: E402
from dynaflow_xla.frontends.torch.capture.costs import elements  # noqa: E402
from dynaflow_xla.ir.work import NO_SPREAD  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("assumed_numbers")


def work(target: Any, *args: Any, **kwargs: Any) -> Any:
    return costs.estimate(target, args, kwargs, target(*args, **kwargs))


def test_decompositions_cost_what_is_asked_of_them() -> None:
    x = torch.randn(128, 128)
    both, values = (work(aten._linalg_svd.default, x, False, asked) for asked in (True, False))
    assert values.ns < 0.6 * both.ns
    both, values = (work(aten._linalg_eigh.default, x, "L", asked) for asked in (True, False))
    assert values.ns < 0.7 * both.ns


def test_solutions_by_a_matrix_cost_by_their_right_hand_sides() -> None:
    matrix = torch.randn(256, 256).tril() + 300 * torch.eye(256)
    few, many = matrix[:, :8].contiguous(), matrix.clone()
    for target, args in (
        (aten.linalg_solve_triangular.default, lambda b: (matrix, b)),
        (aten.triangular_solve.default, lambda b: (b, matrix)),
        (aten.cholesky_solve.default, lambda b: (b, matrix)),
    ):
        given = {"upper": False} if target is aten.linalg_solve_triangular.default else {}
        one, other = (work(target, *args(b), **given) for b in (few, many))
        assert other.flops == pytest.approx(32 * one.flops)
        assert 15 < other.ns / one.ns < 33


def test_powers_roots_and_other_exponents() -> None:
    x = torch.rand(1 << 16) + 0.5
    square, root, other = (work(aten.pow.Tensor_Scalar, x, e).ns for e in (2, 0.5, 1.7))
    assert square < root < other and other > 8 * square
    assert work(aten.pow.Tensor_Tensor, x, x).ns == pytest.approx(other, rel=0.1)


def test_copies_cost_by_what_changes_place() -> None:
    x = torch.randn(256, 512)
    whole = {"memory_format": torch.contiguous_format}
    same, turned = (work(aten.clone.default, t, **whole) for t in (x, x.t()))
    assert turned.ns > 3 * same.ns
    assert turned.spread == NO_SPREAD and same.spread != turned.spread  # one thread makes it
    image = torch.randn(4, 32, 32, 32)
    heads, last = (
        work(aten.clone.default, image.permute(order), **whole)
        for order in ((0, 2, 1, 3), (0, 2, 3, 1))
    )
    assert last.ns > 3 * heads.ns and last.spread.rows > 0


def test_a_search_costs_by_what_is_searched() -> None:
    x = torch.rand(1 << 14)
    short, long = (
        work(aten.bucketize.Tensor, x, torch.arange(n).float()).ns for n in (16, 1 << 12)
    )
    assert 2.5 < long / short < 3.5


def test_a_transform_costs_by_its_length() -> None:
    x = torch.randn(64, 64, dtype=torch.complex64)
    row, plane = (work(aten._fft_c2c.default, x, axes, 0, True).flops for axes in ([1], [0, 1]))
    assert plane == 2 * row
    even, prime = (
        work(aten._fft_r2c.default, torch.randn(n), [0], 0, True).ns for n in (16384, 16381)
    )
    assert prime > 3 * even


def test_short_rows_of_a_selection_cost_more() -> None:
    short, long = (
        work(aten.topk.default, torch.randn(*shape), 4) for shape in ((1 << 12, 16), (16, 1 << 12))
    )
    assert short.ns > 10 * long.ns


def test_what_has_no_strides_is_no_transposed_copy() -> None:
    sparse = torch.eye(64).to_sparse_coo()
    assert not elements.is_turned_by_one_thread(sparse, sparse)
    dense = torch.randn(64, 64)
    assert elements.nanoseconds("clone", (), [sparse], [sparse], 64, 64) == elements.nanoseconds(
        "clone", (), [dense], [dense], 64, 64
    )


def test_copies_of_parts_and_of_what_is_broadcast_are_no_turned_matrices() -> None:
    whole = {"memory_format": torch.contiguous_format}
    x = torch.randn(512, 512)
    for source in (x[:, ::2], x[:64].t(), torch.randn(512, 1).expand(512, 512)):
        made = source.clone(**whole)
        turned = elements.is_turned_by_one_thread(source, made)
        assert turned == (source.shape == (512, 64))
    wide = torch.randn(512, 1).expand(512, 512)
    assert (
        work(aten.clone.default, wide, **whole).ns
        < 0.5 * work(aten.clone.default, x.t(), **whole).ns
    )
    image = torch.randn(4, 32, 32, 32)
    last = work(aten.clone.default, image, memory_format=torch.channels_last)
    assert last.ns > 3 * work(aten.clone.default, image, memory_format=torch.preserve_format).ns


def test_selections_along_any_axis() -> None:
    x = torch.randn(1 << 12, 16)
    rows, columns = (work(aten.topk.default, x, 4, dim).ns for dim in (1, 0))
    assert rows > 10 * columns


def test_what_is_searched_decides_not_how_much_is_looked_for() -> None:
    long = torch.arange(1 << 20).float()
    few = work(aten.searchsorted.Tensor, long, torch.rand(1 << 10)).ns
    assert few > 1.5 * work(aten.searchsorted.Tensor, long[: 1 << 10], torch.rand(1 << 10)).ns


def test_solutions_of_several_matrices() -> None:
    matrices = torch.randn(8, 64, 64).tril() + 30 * torch.eye(64)
    one = work(aten.linalg_solve_triangular.default, matrices[0], torch.randn(64, 16), upper=False)
    for matrix, sides in ((matrices, torch.randn(64, 16)), (matrices[0], torch.randn(8, 64, 16))):
        several = work(aten.linalg_solve_triangular.default, matrix, sides, upper=False)
        assert several.flops == pytest.approx(8 * one.flops)
    none = work(aten.linalg_solve_triangular.default, matrices[0], torch.randn(64, 0), upper=False)
    assert none.flops == 0
    right = work(
        aten.linalg_solve_triangular.default,
        matrices[0],
        torch.randn(16, 64),
        upper=False,
        left=False,
    )
    assert right.flops == pytest.approx(one.flops)


def test_products_of_other_types() -> None:
    """256 rows: float32 0.5 ms, float64 1.0, complex64 3.1, int8 1.3, int32 2.8, int64 4.1."""

    def ns(dtype: Any) -> float:
        x = torch.ones(256, 256, dtype=dtype)
        return work(aten.mm.default, x, x).ns

    plain = ns(torch.float32)
    assert ns(torch.bfloat16) == pytest.approx(plain)
    for dtype, longer in (
        (torch.float64, 2),
        (torch.complex64, 4),
        (torch.int8, 2.6),
        (torch.int64, 8),
    ):
        assert ns(dtype) == pytest.approx(longer * plain, rel=0.1)


def test_convolutions_by_channel_take_more_than_they_compute() -> None:
    """4 images of 64 x 64 with 8 channels, 3 x 3: 0.9 ms each, by channel or with all."""
    x = torch.randn(4, 8, 64, 64)

    def made(groups: int) -> Any:
        w = torch.randn(8, 8 // groups, 3, 3)
        ones, none = [1, 1], [0, 0]
        return work(aten.convolution.default, x, w, None, ones, ones, ones, False, none, groups)

    assert made(8).flops == made(1).flops / 8
    assert 0.5 < made(8).ns / made(1).ns < 2


def test_pools_cost_by_their_windows() -> None:
    x = torch.randn(4, 8, 64, 64)
    small, wide, wider = (
        work(aten.max_pool2d_with_indices.default, x, size, step, pad).ns
        for size, step, pad in (([2, 2], [2, 2], 0), ([3], [1, 1], 1), ([5, 5], [1, 1], 2))
    )
    assert 3 < wide / small < 8 and 1.5 < wider / wide < 3
    mean = work(aten.avg_pool2d.default, x, [3, 3], [1, 1], 1).ns
    assert mean < wide


def test_functions_without_vectors() -> None:
    x, i = torch.rand(1 << 14), torch.arange(1, 1 + (1 << 14))
    plain = work(aten.exp.default, x).ns
    for target in (aten.special_zeta.default, aten.igamma.default):
        assert work(target, x, x).ns > 20 * plain
    assert work(aten.exp.default, torch.complex(x, x)).ns > 20 * plain
    divided = (aten.floor_divide.default, aten.remainder.Tensor)
    assert all(work(t, i, i).ns > 2 * work(aten.mul.Tensor, x, x).ns for t in divided)
    assert work(aten.div.Tensor, x, x).ns < 2 * work(aten.mul.Tensor, x, x).ns


def test_distances_by_their_power() -> None:
    x = torch.rand(64, 16)
    one, two, three = (work(aten._cdist_forward.default, x, x, p, None).ns for p in (1.0, 2.0, 3.0))
    assert two < one < three
    assert work(aten._euclidean_dist.default, x, x).ns > work(aten.add.Tensor, x, x).ns


def test_draws_cost_by_what_is_drawn_or_drawn_from() -> None:
    x = torch.rand(64, 128)
    few = work(aten.multinomial.default, x, 2).ns
    assert few > 20 * x.numel()
    assert work(aten._standard_gamma.default, x).ns > 3 * work(aten.rand_like.default, x).ns


def test_solutions_by_singular_values() -> None:
    x = torch.randn(64, 64)
    assert work(aten.linalg_pinv.atol_rtol_tensor, x).ns == work(aten._linalg_svd.default, x).ns


@pytest.mark.parametrize("table", [elements._OF_INPUT, elements._OF_RESULT, elements.RANDOM])
def test_every_name_is_an_operator_that_graphs_have(table: dict[str, float]) -> None:
    for name in table:
        packet = getattr(aten, name)
        overloads = [getattr(packet, o) for o in packet.overloads()]
        assert not all(o._schema.name and _is_composite(o) for o in overloads), name


def _is_composite(overload: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    )


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "state", "faster"),
    [
        ("LSTM", 1, 64, 64, 0.89), ("LSTM", 4, 64, 128, 1.21), ("LSTM", 8, 64, 128, 1.41),
        ("LSTM", 16, 64, 128, 1.58), ("LSTM", 8, 512, 128, 1.75), ("LSTM", 16, 512, 128, 1.87),
        ("GRU", 1, 64, 128, 0.94), ("GRU", 4, 128, 256, 1.02), ("GRU", 8, 64, 128, 1.15),
        ("GRU", 16, 64, 128, 1.28), ("GRU", 32, 512, 128, 1.66), ("RNN", 16, 64, 128, 1.19),
        ("RNN", 32, 128, 256, 1.61),
    ],
)  # fmt: skip
def test_recurrent_layers_on_two_cores(
    kind: str, rows: int, inputs: int, state: int, faster: float
) -> None:
    """How many times as fast PyTorch 2.13 was with two threads as with one (AMD Zen 4, cores near)."""
    layer = getattr(torch.nn, kind)(inputs, state)
    fast = dfx.schedule(layer, "sequential")
    x = torch.randn(32, rows, inputs)
    with torch.no_grad():
        (entry,) = fast._dfx_core.all_planned((x,), {})
    one, two = (sum(r.cost_at(n) for r in entry.pg.regions) for n in (1, 2))
    assert one / two == pytest.approx(faster, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "eager_ms"),
    [((64, 16, 512, 128), 11.9), ((32, 8, 256, 128), 5.4), ((128, 8, 256, 64), 14.0)],
)
def test_two_lstms_between_dense_layers_on_eight_cores(
    shape: tuple[int, int, int, int], eager_ms: float
) -> None:
    """Milliseconds of eager PyTorch 2.11 on eight cores of a Xeon: ``width-h100-machine.json``.

    Threads that meet after each step take most of it, and more the more they are.
    """
    machine.use(dataclasses.replace(machine.ASSUMED, step_ns=9_000.0))
    steps, rows, width, hidden = shape
    x = torch.randn(steps, rows, width)
    layers = [torch.nn.LSTM(width, hidden) for _ in range(2)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (
                torch.nn.Linear(width, width),
                torch.nn.Linear(2 * hidden, width),
            )
            self.one, self.other = layers

        def forward(self, x: Any) -> Any:
            y = torch.nn.functional.gelu(self.first(x))
            return self.last(torch.cat([self.one(y)[0], self.other(y)[0]], -1))

    with torch.no_grad():
        (entry,) = dfx.schedule(Model(), "sequential")._dfx_core.all_planned((x,), {})
    on_eight = sum(r.cost_at(8) for r in entry.pg.regions)
    assert on_eight / 1e6 == pytest.approx(eager_ms, rel=0.3)


def test_costs_on_a_gpu_are_a_kernels() -> None:
    """What fills few multiprocessors has their share of the rate; nothing takes less than a launch."""
    from dynaflow_xla.frontends.torch.capture.costs import gpu

    def product(rows: int, width: int, columns: int, dtype: Any = torch.bfloat16) -> float:
        out = torch.empty(rows, columns, dtype=dtype, device="meta")
        flops = 2.0 * rows * width * columns
        moved = 2 * (rows * width + width * columns + rows * columns)
        return gpu.nanoseconds(flops, moved, [out], True) - gpu.KERNEL_NS

    assert product(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 600_000.0, rel=0.01)
    assert product(64, 8192, 64) > 50 * product(8192, 8192, 8192) / 128**2  # one multiprocessor
    assert product(8192, 8192, 8192, torch.float32) > 10 * product(8192, 8192, 8192)
    small = torch.empty(4, device="meta")
    assert gpu.nanoseconds(4.0, 32, [small], False) == pytest.approx(gpu.KERNEL_NS, rel=0.01)
    image = torch.empty(8, 64, 28, 28, device="meta", dtype=torch.bfloat16)
    flat = torch.empty(8 * 28, 64 * 28, device="meta", dtype=torch.bfloat16)
    many, one = (gpu.nanoseconds(1e9, 0, [out], True) for out in (image, flat))
    assert 0.5 < many / one < 2.0


def test_operators_on_a_gpu_cost_what_they_do_there() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        there = torch.empty(256, 256, device="cuda:0")
        made = costs.estimate(aten.mm.default, (there, there), {}, there)
        view = costs.estimate(aten.t.default, (there,), {}, there)
    assert 2_000 < made.ns < 10_000 and made.flops == 2.0 * 256**3 and made.spread == NO_SPREAD
    assert view.ns == 0.0


def test_no_rows_on_a_gpu_cost_a_kernel() -> None:
    from dynaflow_xla.frontends.torch.capture.costs import gpu

    empty = torch.empty(0, 512, device="meta")
    assert gpu.nanoseconds(0.0, 1 << 20, [empty], True) < 2 * gpu.KERNEL_NS


def test_open_sizes_cost_what_their_device_takes() -> None:
    x = torch.empty(256, 256, device="meta")
    there = costs.estimate(aten.mm.default, (x, x), {}, x, torch.device("cuda", 0))
    here = costs.estimate(aten.mm.default, (x, x), {}, x)
    assert there.ns < here.ns / 10 and there.spread == NO_SPREAD
    assert costs.least_ns(torch.device("cuda", 0)) > 0 == costs.least_ns(torch.device("cpu"))
