"""Regions that have all cores: parts of the program around the lanes, between phases of lanes."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from round_robin import EachItsWidth, Mixed  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.errors import PlanError, PlanTypeError  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("quick_to_compile")]


def _x(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def work(x: Any) -> Any:
    a = jnp.sort(x, axis=-1) @ x.T
    b = jnp.cos(jnp.cumsum(-x, axis=0))
    return a @ x * 1e-1 + b, (a.sum(), jnp.argmax(b, axis=1))


def looped(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        return jnp.tanh(carry + jnp.sort(row)), carry.sum()

    last, sums = jax.lax.scan(step, jnp.zeros(x.shape[1]), jnp.sort(x))
    return jnp.cumsum(last) @ x, jnp.sort(sums)


def keyed(x: Any) -> Any:
    key, other = jax.random.split(jax.random.key(x.shape[0]))
    return jnp.sort(x) + jax.random.normal(key, x.shape), other


def _launches(fast: Any, *args: Any) -> list[Launch]:
    return [i for i in dfx.plan(fast, *args).instructions if isinstance(i, Launch)]


@pytest.mark.parametrize("fn", [work, looped, keyed])
@pytest.mark.parametrize("every", [2, 3])
def test_values_are_the_originals(fn: Any, every: int, assert_same: Any) -> None:
    x = _x(6, 6)
    fast = dfx.schedule(fn, Mixed(every), lanes=2)
    lanes = [i.lane for i in _launches(fast, x)]
    assert -1 in lanes and max(lanes) >= 0, "the test needs both kinds of launches"
    for seed in range(2):
        x = _x(6, 6, seed=seed)
        assert_same(fn(x), fast(x))
        assert_same(fn(x), jax.jit(lambda y: fast(y))(x))


def test_transformations(assert_same: Any) -> None:
    fast = dfx.schedule(lambda x: work(x)[0], Mixed(), lanes=2)
    plain = lambda x: work(x)[0]  # noqa: E731
    x, xs = _x(5, 5), _x(3, 5, 5)
    assert_same(jax.grad(lambda x: plain(x).sum())(x), jax.grad(lambda x: fast(x).sum())(x))
    assert_same(jax.jvp(plain, (x,), (x,)), jax.jvp(fast, (x,), (x,)))
    assert_same(jax.vmap(plain)(xs), jax.vmap(fast)(xs))
    assert_same(
        jax.lax.scan(lambda c, y: (plain(c + y), None), x, xs)[0],
        jax.lax.scan(lambda c, y: (fast(c + y), None), x, xs)[0],
    )


def test_nano_batches_with_rows_together(assert_same: Any) -> None:
    class Meet(dfx.Strategy):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.even(2)

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                op = ready[0]
                several = [o for o in ready if o.name == op.name]
                if len(several) == 2:
                    s.execute(several, width="all")
                else:
                    s.execute(op, lane=op.nano % s.lanes)

    def fn(w: Any, x: Any) -> Any:
        return jnp.sort(jnp.tanh(x @ w), axis=1) @ w

    w, x = _x(6, 6), _x(8, 6, seed=1)
    fast = dfx.schedule(fn, Meet(), lanes=2, in_axes=(None, 0))
    assert_same(fn(w, x), fast(w, x))
    assert_same(jax.grad(lambda w: fn(w, x).sum())(w), jax.grad(lambda w: fast(w, x).sum())(w))


def _operators(text: str) -> Counter[str]:
    return Counter(re.findall(r"= \S+ ([a-z\-]+)\(", text))


def test_sequential_is_the_original_program(assert_same: Any) -> None:
    """No custom call, and XLA makes the same operators of it."""

    def dense(x: Any) -> Any:
        for _ in range(3):
            x = jax.nn.gelu(x @ x.T) @ x
        return x

    x = _x(384, 384)  # tiny programs stay on the thread that calls
    fast = dfx.schedule(dense, "sequential", lanes=2)
    assert {i.lane for i in _launches(fast, x)} == {-1}
    compiled = fast.lower(x).compile().as_text()
    assert "dfx_run" not in compiled
    assert _operators(compiled) == _operators(jax.jit(dense).lower(x).compile().as_text())
    assert_same(dense(x), fast(x))
    assert "the plan is the original program" in dfx.explain(fast, x)


def test_neighbours_are_one_piece_and_lanes_one_custom_call() -> None:
    def fn(x: Any) -> Any:
        y = jnp.tanh(x @ x)
        a, b = jnp.sort(y), jnp.sort(-y)
        return jnp.tanh((a + b) @ x)

    class SortsOnLanes(Mixed):
        def schedule(self, s: Any) -> None:
            lane = 0
            while ready := s.ready():
                others = [op for op in ready if not op.name.startswith("sort")]
                if others:
                    s.execute(others[0], width="all")
                else:
                    lane = 1 - lane
                    s.execute(ready[0], lane=lane)

    x = _x(8, 8)
    fast = dfx.schedule(fn, SortsOnLanes(), lanes=2)
    assert fast.lower(x).as_text().count("custom_call @dfx_run") == 1
    plan = dfx.plan(fast, x)
    assert plan.events == 0 and plan.cores == machine.cores()
    np.testing.assert_allclose(fast(x), fn(x), rtol=1e-5, atol=1e-5)
    text = dfx.explain(fast, x)
    assert f"all ({machine.cores()})" in text and "sleep meanwhile" in text


def _dense_around_two_sorts(n: int = 512) -> Any:
    def fn(x: Any, w: Any) -> Any:
        y = x @ w @ w
        return jnp.sort(y) + jnp.sort(-y, axis=0)[::-1] @ w @ w

    return fn, (_x(n, n), _x(n, n, seed=1) / n**0.5)


def test_branches_gives_cores_to_products_and_lanes_to_sorts(
    assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)  # on any machine
    fn, args = _dense_around_two_sorts()
    fast = dfx.schedule(fn, "branches", lanes=1 + (machine.cores() > 1))
    where = {i.name: i.lane for i in _launches(fast, *args)}
    sorts = {lane for name, lane in where.items() if name.startswith("sort")}
    assert sorts == {0, 1}
    assert {lane for name, lane in where.items() if name.startswith("dot")} == {-1}
    everything = dfx.schedule(fn, dfx.Branches(wide=False), lanes=2)
    assert all(i.lane >= 0 for i in _launches(everything, *args))
    assert_same(fn(*args), fast(*args))
    faster = dfx.simulate(fast, *args).total_ns
    assert faster < dfx.simulate(everything, *args).total_ns
    assert faster < dfx.simulate(dfx.schedule(fn, "sequential", lanes=2), *args).total_ns


def test_what_lanes_would_not_gain_stays_the_original() -> None:
    fast = dfx.schedule(lambda x: jnp.sort(x) + jnp.cumsum(x), "branches", lanes=2)
    x = _x(64)
    assert {i.lane for i in _launches(fast, x)} == {-1}
    assert "dfx_run" not in fast.lower(x).as_text()


class AtWidth(dfx.Strategy):
    def __init__(self, width: Any) -> None:
        self.width = width

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], width=self.width)


def test_widths_that_there_are() -> None:
    if machine.cores() < 2:
        pytest.skip("one core is a lane and all of them")
    x = _x(8)
    for width, lane in ((1, 0), (machine.cores(), -1), (np.int64(machine.cores()), -1), (None, 0)):
        if width == 1 and not 1 < machine.cores() <= 8:
            continue
        fast = dfx.schedule(jnp.sort, AtWidth(width), lanes=min(8, machine.cores()))
        assert {i.lane for i in _launches(fast, x)} == {lane}


@pytest.mark.parametrize("width", [0, -1, 4096, "wide", 1.5, True])
def test_widths_that_there_are_not(width: Any) -> None:
    fast = dfx.schedule(jnp.sort, AtWidth(width), lanes=1)
    with pytest.raises(PlanError, match=r"region '.*': width must be 'all', or .*test_width.py"):
        fast(_x(8))


def test_costs_at_widths() -> None:
    seen: dict[str, Any] = {}

    class Looks(Mixed):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                seen[ready[0].name] = [ready[0].cost_at(n) for n in (1, 2, 16)]
                with pytest.raises(PlanError, match="cores must be an integer >= 1"):
                    ready[0].cost_at(0)
                s.execute(ready[0])

    x = _x(512, 512)
    dfx.plan(dfx.schedule(lambda x: jnp.sort(x) @ x, Looks(), lanes=1), x)
    sort = next(costs for name, costs in seen.items() if "sort" in name)
    assert sort[0] == sort[1] == sort[2]
    for name, (one, two, many) in seen.items():
        if "dot" in name:
            assert one / 2 <= two < one and two / 8 <= many < two


@pytest.mark.parametrize(
    ("fn", "gains"),
    [
        (lambda x: jnp.cumsum(x, axis=1), True),
        (lambda x: jax.lax.cumlogsumexp(x), True),
        (lambda x: jnp.argmax(x, axis=0), True),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 3), (1, 1), "SAME"), True),
        (lambda x: jnp.take(x, jnp.arange(x.size) % 512, axis=0), True),
        (lambda x: jnp.zeros_like(x).at[jnp.arange(512) // 2].add(x), False),
        (lambda x: jax.lax.top_k(x, 8), False),
    ],
    ids=["cumsum", "cumlogsumexp", "argmax", "reduce_window", "take", "scatter", "top_k"],
)
def test_which_loops_cores_share(fn: Any, gains: bool) -> None:
    seen = []

    class Looks(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                seen.append((ready[0].cost_at(1), ready[0].cost_at(2)))
                s.execute(ready[0])

    lanes = dfx.Lanes(1, one_pass=False)  # a lane's own kernels are for one core
    dfx.plan(dfx.schedule(fn, Looks(), lanes=lanes), _x(512, 512))
    one, two = (sum(costs) for costs in zip(*seen, strict=True))
    assert (two < 0.75 * one) is gains


@pytest.mark.parametrize("strategy", [dfx.Branches, dfx.Sequential])
def test_wide_is_a_truth_value(strategy: Any) -> None:
    with pytest.raises(PlanTypeError, match="must be True or False; got 2"):
        strategy(wide=2)
    assert eval(repr(strategy(wide=False)), vars(dfx)) == strategy(wide=np.bool_(False))


def test_one_program_has_no_widths() -> None:
    fast = dfx.schedule(work, Mixed(), lanes=2, backend="xla")
    assert all(i.lane >= 0 for i in _launches(fast, _x(4, 4)))
    assert "width='all' is a lane here" in dfx.explain(fast, _x(4, 4))


def test_cores_that_were_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    have = machine.cores()
    fast = dfx.schedule(work, Mixed(), lanes=1)
    x = _x(4, 4)
    fast(x)
    monkeypatch.setattr(machine, "cores", lambda: have + 3)
    text = dfx.explain(fast, x)
    assert f"planned for {have} cores; this process may use {have + 3} now" in text
    np.testing.assert_allclose(fast(x)[0], work(x)[0], rtol=1e-5, atol=1e-5)


def test_donated_updates_of_wide_regions_stay_in_place() -> None:
    def update(cache: Any, x: Any) -> Any:
        return cache.at[0].set(jnp.sort(x)), jnp.cumsum(x)

    fast = dfx.schedule(jax.jit(update, donate_argnums=0), "sequential", lanes=2)
    cache = jnp.zeros((64, 2048))
    where = cache.unsafe_buffer_pointer()
    made, _ = fast(cache, _x(2048))
    assert made.unsafe_buffer_pointer() == where
    assert "donated" not in dfx.explain(fast, jnp.zeros((64, 2048)), _x(2048))


def test_a_profile_knows_widths() -> None:
    fast = dfx.schedule(work, Mixed(), lanes=2)
    x = _x(32, 32)
    for timeline in (dfx.profile(fast, x), dfx.simulate(fast, x)):
        wide = [s for s in timeline.spans if s.kind == "launch" and s.lane < 0]
        assert wide and {s.cores for s in wide} == {machine.cores()}
        assert {s.cores for s in timeline.spans if s.kind == "launch" and s.lane >= 0} == {1}


def test_auto_measures_other_programs_than_the_original() -> None:
    fn, args = _dense_around_two_sorts(64)
    fast = dfx.schedule(fn, dfx.Auto(budget_s=20.0, min_cost_ns=0.0), lanes=2)
    for _ in range(2):
        fast(*args)
    text = dfx.explain(fast, *args)
    assert "Sequential(wide=False)" in text and "Branches(lanes=2, wide=False)" in text
    np.testing.assert_allclose(fast(*args), fn(*args), rtol=1e-4, atol=1e-4)


def test_wide_regions_keep_64_bit_types_that_the_function_asks_for(assert_same: Any) -> None:
    def f(x: Any) -> Any:
        with jax.enable_x64(True):
            return jnp.sum(x.astype(jnp.float64) * (1 + 1e-12)) - jnp.sum(x.astype(jnp.float64))

    x = _x(64)
    fast = dfx.schedule(jax.jit(f), Mixed(1), lanes=2)
    assert all(launch.width == 0 for launch in _launches(fast, x))
    for _ in range(2):
        assert_same(fast(x), jax.jit(f)(x))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_lanes_with_cores(width: int, assert_same: Any) -> None:
    """More cores than the machine has are shared: slower, and correct."""

    def fn(x: Any) -> Any:
        a = jnp.linalg.qr(jnp.stack([x, x + 1]))[1] @ jnp.sort(x)
        b = jnp.linalg.eigh(jnp.stack([x @ x.T, x.T @ x]))[0]
        return a * b[:, None], jnp.tanh(x @ a[0]) @ x

    x = _x(6, 6)
    fast = dfx.schedule(fn, Mixed(5), lanes=dfx.Lanes(2, width=width))
    assert {i.width for i in _launches(fast, x) if i.lane >= 0} == {width}
    for _ in range(3):
        assert_same(fn(x), fast(x))
    shared = "threads for" in dfx.explain(fast, x)
    assert shared == (2 * width > machine.cores())
    if width > 1:
        assert f"0 ({width})" in dfx.explain(fast, x)


@pytest.mark.parametrize("widths", [(3, 1), (1, 5, 2), (4, 0), (2, 7, 1, 0)])
def test_lanes_of_different_widths(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """Correct with more threads than there are cores, at top level, in loops and derivatives."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def fn(x: Any) -> Any:
        a = jnp.linalg.qr(jnp.stack([x, x + 1]))[1] @ jnp.sort(x)
        return a * jnp.tanh(x @ x.T), jnp.cumsum(x, 0) @ x, jax.nn.softmax(x @ a[0])

    x = _x(24, 24)
    lanes = sum(w > 0 for w in widths)
    fast = dfx.schedule(fn, EachItsWidth(*widths), lanes=lanes)
    plan = dfx.plan(fast, x)
    assert plan.widths == {lane: w for lane, w in enumerate(widths) if w}
    assert any(i.lane < 0 for i in plan.launches) == (0 in widths)
    text = dfx.explain(fast, x)
    assert all(f"{lane} ({w})" in text for lane, w in plan.widths.items() if w > 1)
    for seed in range(3):
        x = _x(24, 24, seed=seed)
        assert_same(fn(x), fast(x))
        assert_same(jax.jit(fn)(x), jax.jit(fast)(x))
    assert_same(
        jax.lax.map(fn, jnp.stack([x, -x])),
        jax.jit(lambda xs: jax.lax.map(fast, xs))(jnp.stack([x, -x])),
    )
    total = lambda f: lambda x: sum(jnp.sum(jnp.sin(y)) for y in f(x)[1:])  # noqa: E731
    assert_same(jax.grad(total(fn))(x), jax.grad(total(fast))(x))
    assert {
        s.cores for s in dfx.profile(fast, x).spans if s.kind == "launch" and s.lane >= 0
    } == set(plan.widths.values())


def test_lanes_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    x = _x(8)
    for lanes, width in ((1, 16), (2, 8)):
        fast = dfx.schedule(jnp.sort, AtWidth(None), lanes=lanes)
        assert {i.width for i in _launches(fast, x)} == {width}
        assert dfx.plan(fast, x).cores == 16


def test_branches_share_all_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two towers of products on 16 cores: eight each, though eight lanes would have two each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def towers(a: Any, b: Any, x: Any) -> Any:
        y = x
        for _ in range(4):
            x, y = jnp.tanh(x @ a), jnp.tanh(y @ b)
        return x, y

    args = _x(512, 512), _x(512, 512, seed=1), _x(512, 512, seed=2)
    fast = dfx.schedule(towers, dfx.Branches(), lanes=dfx.Lanes(8))
    assert dfx.plan(fast, *args).widths == {0: 8, 1: 8}
    asked = dfx.schedule(towers, dfx.Branches(), lanes=dfx.Lanes(8, width=2))
    assert set(dfx.plan(asked, *args).widths.values()) <= {2}, "the user says so"
    halves = dfx.schedule(towers, dfx.NanoBatch(2), lanes=8, in_axes=(None, None, 0))
    assert set(dfx.plan(halves, *args).widths.values()) == {8}
    for got in (fast, halves):
        for want, have in zip(towers(*args), got(*args), strict=True):
            np.testing.assert_allclose(want, have, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("width", [0, -1, 1.5, "all", True])
def test_lanes_with_no_such_width(width: Any) -> None:
    with pytest.raises(PlanError, match="width must be an integer >= 1, cores of a lane; got"):
        dfx.Lanes(2, width=width)


def test_one_program_has_no_lanes_with_cores() -> None:
    with pytest.raises(dfx.UnsupportedError, match="or cores to"):
        dfx.schedule(jnp.sort, lanes=dfx.Lanes(2, width=2), backend="xla")
    with pytest.raises(dfx.UnsupportedError, match="cores of a CPU, which lanes of a device"):
        dfx.Lanes(2, width=2).refuse_on_device()


def test_cores_that_are_taken_away_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def towers(a: Any, b: Any, x: Any) -> Any:
        return [jnp.tanh(jnp.tanh(x @ w) @ w) for w in (a, b, a + b)]

    args = _x(256, 256), _x(256, 256, seed=1), _x(256, 256, seed=2)
    for strategy in (dfx.Branches(), dfx.Branches(wide=False), dfx.Sequential(wide=False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        fast = dfx.schedule(towers, strategy, lanes=8)
        for have in (2, 1):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, have=have: set(range(have)))
            fast.clear_cache()
            plan = dfx.plan(fast, *args)
            assert plan.cores == have and plan.lane_cores <= max(have, len(plan.widths))


def test_widths_under_select_together_and_vmap(
    monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def fn(x: Any) -> Any:
        return jnp.cumsum(jnp.sort(x), 0) @ jnp.tanh(x @ x.T), jnp.sort(-x) * jax.nn.softmax(x)

    x, y = _x(24, 24), _x(24, 24, seed=1)
    uneven = EachItsWidth(3, 6)
    fast = dfx.schedule(fn, uneven, lanes=2)
    assert_same(jax.vmap(fn)(jnp.stack([x, y])), jax.vmap(fast)(jnp.stack([x, y])))
    chosen = dfx.schedule(fn, {"a": uneven, "b": dfx.Sequential()}, select=lambda *_: "a", lanes=2)
    assert_same(fn(x), chosen(x))
    assert dfx.plan(chosen, x).widths == {0: 3, 1: 6}
    both = dfx.together(fn, lambda z: jnp.sort(z) @ z, strategy=uneven, lanes=2)
    first, second = both((x,), (y,))
    assert_same(fn(x), first)
    assert_same(jnp.sort(y) @ y, second)
