"""Integers of other libraries are integers everywhere; truth values and other numbers are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla import settings
from dynaflow_xla.errors import checks
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.strategies.base import Context, record

THREE = [np.int64(3), np.int8(3), np.uint32(3), np.array(3), 3]
NO_INTEGERS = [True, np.True_, np.array(True), 3.0, np.float32(3), "3", None, np.array([3]), 3j]


@pytest.mark.parametrize("value", THREE, ids=repr)
def test_integers(value: Any) -> None:
    made = checks.integer(value)
    assert made == 3 and type(made) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer(value: Any) -> None:
    assert checks.integer(value) is None
    for use in (
        dfx.Split.even, dfx.NanoBatch, lambda n: dfx.Split.of_sizes([n]), dfx.Lanes, settings.resolve_lanes,
        lambda n: dfx.Split.balanced([1.0] * 4, n), lambda n: dfx.Branches(lanes=n),
        lambda n: dfx.Lanes(2, sms=(0, n)), lambda n: dfx.schedule(len, batch_size=n, in_axes=0),
    ):  # fmt: skip
        if value is None and use(1) is not None and _takes_none(use):
            continue
        if isinstance(value, np.ndarray) and value.shape == (1,) and use is dfx.NanoBatch:
            continue  # sizes: one of three rows
        with pytest.raises(dfx.PlanError):
            use(value)


def _takes_none(use: Callable[[Any], Any]) -> bool:
    try:
        use(None)
    except dfx.PlanError:
        return False
    return True


@pytest.mark.parametrize("three", THREE, ids=repr)
def test_integers_of_other_libraries_are_taken(three: Any) -> None:
    assert dfx.Split.even(three) == dfx.Split.even(3) == dfx.Split(three)
    assert dfx.Split.of_sizes([three, 5]).sizes == (3, 5)
    assert dfx.Split.balanced(np.ones(6), three).sizes == (2, 2, 2)
    assert dfx.NanoBatch(three) == dfx.NanoBatch(3) and repr(dfx.NanoBatch(three)) == "NanoBatch(3)"
    assert (
        dfx.Branches(three) == dfx.Branches(3) and repr(dfx.Branches(three)) == "Branches(lanes=3)"
    )
    lanes = dfx.Lanes(three, priorities=(0, three), sms=(0, three))
    assert lanes == dfx.Lanes(3, (0, 3), (0, 3)) and type(lanes.sms[1]) is int
    kernel = dfx.CudaKernel(
        "x", "k", grid=(three,), block=(three, 1), parameters=[("out", three - 3)]
    )
    assert kernel.size == ((3, 1, 1), (3, 1, 1))
    assert kernel.bound(0, 1, "r") == [("out", 0)]


def test_sizes_of_an_array() -> None:
    sizes = np.array([3, 5])
    assert dfx.Split.of_sizes(sizes) == dfx.Split.of_sizes([3, 5]) == dfx.Split(2, sizes)  # type: ignore[arg-type]
    assert dfx.NanoBatch(sizes) == dfx.NanoBatch([3, 5])  # type: ignore[arg-type]
    assert repr(dfx.NanoBatch(sizes)) == "NanoBatch([3, 5])"  # type: ignore[arg-type]
    assert dfx.Split.of_sizes(n for n in (3, 5)) == dfx.Split.of_sizes([3, 5])
    with pytest.raises(dfx.PlanError, match="sizes must be positive integers"):
        dfx.Split.of_sizes(np.array([3.0, 5.0]))


def test_numbers_of_other_libraries() -> None:
    auto = dfx.Auto(budget_s=np.float32(2), margin=np.float64(0.5), min_cost_ns=np.int64(3))
    assert (auto.budget_s, auto.margin, auto.min_cost_ns) == (2.0, 0.5, 3.0)
    for value in (True, "1", float("nan"), -1.0, None):
        with pytest.raises(dfx.PlanError, match="must be a number >= 0"):
            dfx.Auto(margin=value)  # type: ignore[arg-type]


def test_execute_takes_what_can_be_iterated(make: Callable[..., Graph]) -> None:
    pg = partition(make("a = sort x; b = add a", "b"), [dfx.Op("sort"), dfx.Op("add")])

    class Generated(dfx.Strategy):
        def __init__(self, wrap: Callable[[Any], Any], lane: Any) -> None:
            self.wrap, self.lane = wrap, lane

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                s.execute(self.wrap(ready), lane=self.lane)

    def recorded(wrap: Callable[[Any], Any], lane: Any = 1) -> list[Any]:
        made = record(Generated(wrap, lane), pg, Context(None, (), "cpu", 2))
        return [(d.region, d.lane, type(d.lane)) for d in made.decisions]

    want = [(0, 1, int), (1, 1, int)]
    for wrap in (iter, list, tuple, set, lambda r: (h for h in r), lambda r: r[0], dict.fromkeys):
        assert recorded(wrap) == want
    for one in (np.int64(1), np.array(1), np.uint8(1)):
        assert recorded(iter, one) == want
    for bad in (True, 1.0, "1", 2, -1, None):
        with pytest.raises(dfx.PlanError, match="lane must be an integer from 0 to 1"):
            recorded(iter, bad)
    for nothing in (lambda r: iter(()), lambda r: "ab", lambda r: 3, lambda r: None):
        with pytest.raises(dfx.PlanError, match=r"nano-batches; got none|handle from s.ready\(\)"):
            recorded(nothing)


def test_lanes_of_a_gpu_may_be_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert settings.resolve_lanes(dfx.Lanes(3, sms=(0, 32, 16))) == 3
    assert settings.resolve_lanes(dfx.Lanes(5), "torch") == 5
    assert settings.resolve_lanes(np.int64(2)) == 2
    with pytest.raises(dfx.PlanError, match=r"exceed the cores .* 2; got 3.*lanes=dfx.Lanes\(3\)"):
        settings.resolve_lanes(3)
    with pytest.raises(dfx.PlanError, match="from 1 to 64"):
        settings.resolve_lanes(dfx.Lanes(65), "xla")


@pytest.mark.parametrize("gpu", [True, False])
def test_plain_lanes_beyond_the_cores_may_be_streams(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Where a GPU is, what they are is known at a call: until then they are as many as were asked for."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("dynaflow_xla.machine.may_have_gpu", lambda: gpu)
    lanes = settings._perhaps_streams(np.int64(3), "torch")
    assert lanes == (dfx.Lanes(3) if gpu else 3)
    for same, backend in ((2, "torch"), (None, "torch"), ("3", "torch"), (9, "xla")):
        assert settings._perhaps_streams(same, backend) is same
    torch = pytest.importorskip("torch")
    if gpu:
        fast = dfx.schedule(torch.sin, "sequential", backend="torch", lanes=3)
        assert fast._dfx_core.options.lanes == 3
        with pytest.raises(dfx.PlanError, match="exceed the cores .* 2; got 3"):
            fast(torch.ones(3))
        with pytest.raises(dfx.PlanError, match="at most 256"):
            dfx.schedule(torch.sin, "sequential", backend="torch", lanes=257)
    else:
        with pytest.raises(dfx.PlanError, match="exceed the cores .* 2; got 3"):
            dfx.schedule(torch.sin, "sequential", backend="torch", lanes=3)


def test_lanes_that_turn_out_to_be_threads() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("about lanes of a CPU")
    x = jax.numpy.arange(8.0)

    def scheduled(lanes: dfx.Lanes) -> Any:
        return dfx.schedule(jax.jit(lambda x: x * 2), "sequential", backend="ffi", lanes=lanes)

    with pytest.raises(dfx.UnsupportedError, match="which lanes of a CPU have not"):
        scheduled(dfx.Lanes(3, sms=(0, 32, 16)))(x)
    with pytest.raises(dfx.PlanError, match=r"lanes must not exceed.*dfx\.Lanes\(256, width=1\)"):
        scheduled(dfx.Lanes(256))(x)
    with pytest.raises(dfx.PlanError, match="at most 4096 cores together.* 2 of width 1000000"):
        dfx.Lanes(2, width=1_000_000)
    assert (scheduled(dfx.Lanes(1))(x) == x * 2).all()
