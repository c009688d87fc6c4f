"""Regions that have all cores: on the caller's thread with all of its threads, between phases of lanes."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
from round_robin import EachItsWidth, Mixed

import dynaflow_xla as dfx
from dynaflow_xla.errors import PlanError
from dynaflow_xla.planning.instructions import Launch

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from dynaflow_xla.frontends.torch.native import threads  # noqa: E402

pytestmark = pytest.mark.wide


def work(x: Any, y: Any) -> Any:
    a = torch.sort(x @ y, -1).values
    b = torch.cumsum(torch.tanh(y), 0)
    return a @ b + x, (a.sum(), b.argmax(1))


class Layers(nn.Module):
    """Two branches between dense layers, one with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(16)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.up(x))
        return self.down(self.norm(h) + self.drop(torch.softmax(h, -1))) + x


def _launches(fast: Any, *args: Any) -> list[Launch]:
    return [i for i in dfx.plan(fast, *args).instructions if isinstance(i, Launch)]


@pytest.mark.parametrize("every", [2, 3])
def test_values_are_the_originals(every: int) -> None:
    fast = dfx.schedule(work, Mixed(every), lanes=2)
    lanes = [i.lane for i in _launches(fast, torch.randn(6, 6), torch.randn(6, 6))]
    assert -1 in lanes and max(lanes) == 1, "the test needs both kinds of launches"
    for _ in range(3):
        args = torch.randn(6, 6), torch.randn(6, 6)
        torch.testing.assert_close(fast(*args), work(*args))


@pytest.mark.parametrize("strategy", [Mixed(2), Mixed(3), dfx.Branches(), dfx.Sequential()])
def test_training_steps(strategy: Any) -> None:
    model, x = Layers().train(), torch.randn(5, 8)
    fast = dfx.schedule(copy.deepcopy(model), strategy, lanes=2)
    found = []
    for m in (model, fast):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        out = m(given)
        out.square().sum().backward()
        found.append([out.detach(), given.grad, *(p.grad for p in m.parameters())])
    torch.testing.assert_close(*found)


def test_nano_batches_with_rows_together() -> None:
    class Meet(dfx.Strategy):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.even(2)

        def rules(self, graph: Any) -> Any:
            return [dfx.Op("*")]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                several = [o for o in ready if o.name.split("@")[0] == ready[0].name.split("@")[0]]
                if len(several) == 2 and "sort" in ready[0].name:
                    s.execute(several, width="all")
                else:
                    s.execute(ready[0], lane=ready[0].nano % s.lanes)

    def fn(x: Any, w: Any) -> Any:
        return torch.sort(torch.tanh(x @ w), 1).values @ w

    x, w = torch.randn(8, 6), torch.randn(6, 6)
    fast = dfx.schedule(fn, Meet(), lanes=2, in_axes=(0, None))
    torch.testing.assert_close(fast(x, w), fn(x, w))
    wide = [i for i in _launches(fast, x, w) if i.lane < 0]
    assert len(wide) == 1 and "sort" in wide[0].name


class Counting(dfx.Strategy):
    """Three regions in a row that tell how many threads they have: wide, on lane 1, wide."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")]

    def schedule(self, s: Any) -> None:
        def counted(function: Any) -> Any:
            def run(x: Any) -> Any:
                self.told.append(threads.limit(1)[0])
                threads.restore((self.told[-1], -1))
                return function(x)

            return run

        for function, width in ((torch.sin, "all"), (torch.cos, None), (torch.tan, "all")):
            s.execute(s.ready()[0], lane=1, width=width, replace=counted(function))


@pytest.mark.parametrize("set_to", [3, 1])
def test_who_has_how_many_threads(set_to: int) -> None:
    """Wide regions have the caller's, lanes those of their cores, and the caller's stay what they were."""
    if threads.limit(1)[0] == 0:
        pytest.skip("this build of PyTorch has no OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(set_to)
    try:
        told: list[int] = []
        fast, x = (
            dfx.schedule(lambda x: x.sin().cos().tan(), Counting(told), lanes=2),
            torch.randn(4),
        )
        torch.testing.assert_close(fast(x), x.sin().cos().tan())
        lane = _launches(fast, x)[1].width
        assert told == [set_to, lane, set_to]
        assert torch.get_num_threads() == set_to
    finally:
        torch.set_num_threads(before)


class RowsApart(dfx.Strategy):
    """Each operator by turns on lanes of one, two and three cores, where it tells its number of threads."""

    def __init__(self, told: list[tuple[int, int]]) -> None:
        self.told = told

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")]

    def schedule(self, s: Any) -> None:
        def counted(function: Any, width: int) -> Any:
            def run(x: Any) -> Any:
                has = threads.limit(1)[0]
                threads.restore((has, -1))
                self.told.append((width, has))
                return function(x)

            return run

        count = 0
        while ready := s.ready():
            for op in ready:
                width = 1 + count % 3
                told = counted(getattr(torch, op.region.name.split("_")[0]), width)
                s.execute(op, lane=width - 1, width=width, replace=told)
                count += 1


def test_lanes_of_different_widths_have_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if threads.limit(1)[0] == 0:
        pytest.skip("this build of PyTorch has no OpenMP")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        told: list[tuple[int, int]] = []

        def rows(a: Any, b: Any, c: Any, d: Any) -> Any:
            return tuple(x.sin().cos().tanh() for x in (a, b, c, d))

        fast = dfx.schedule(rows, RowsApart(told), lanes=3)
        args = [torch.randn(50, 50) for _ in range(4)]
        for _ in range(20):
            torch.testing.assert_close(fast(*args), rows(*args))
        assert {width for width, _ in told} == {1, 2, 3}
        assert [pair for pair in told if pair[0] != pair[1]] == []
        assert dfx.plan(fast, *args).widths == {0: 1, 1: 2, 2: 3}
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_wide_neighbours_are_one_stretch_and_one_program() -> None:
    model, x = Layers().eval(), torch.randn(4, 8)
    for compiler, programs in (("eager", 0), ("inductor", 1)):
        fast = dfx.schedule(
            model, dfx.Sequential(), rules=[dfx.Op("*")], lanes=2, compiler=compiler
        )
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
            assert "the plan is the original program" in dfx.explain(fast, x)
            (made,) = fast._dfx_core.all_planned((x,), {})
        (stretch,) = made.native.stretches()
        assert len(stretch.regions) > 4 and len(stretch.programs) == programs
        assert stretch.operators - stretch.compiled == (0 if programs else stretch.operators)


def test_programs_know_how_many_threads_they_have() -> None:
    """Inductor writes the number into its kernels: that of the lane, or of the process."""
    from dynaflow_xla.frontends.torch.native.compiling.compilers import Compiler

    class Half(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            s.execute(s.ready()[0], width="all")
            for lane in (0, 1):
                s.execute(s.ready()[0], lane=lane)
            s.execute(s.ready()[0], width="all")

    asked: list[int] = []
    settings = Compiler.settings

    def noted(self: Any, threads: int) -> Any:
        asked.append(threads)
        return settings(self, threads)

    def fn(x: Any) -> Any:
        with dfx.mark("a"):
            a = x.sin() * 2
        with dfx.mark("b"):
            b = a.cos() + 1
        with dfx.mark("c"):
            c = a.tan() - 1
        with dfx.mark("d"):
            return (b * c).tanh() + a

    x = torch.randn(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "settings", noted)
        fast = dfx.schedule(fn, Half(), lanes=2, compiler="inductor")
        torch.testing.assert_close(fast(x), fn(x))
    assert sorted(asked) == [0, _launches(fast, x)[1].width]


def test_an_error_in_a_wide_region_names_it_and_the_next_call_works() -> None:
    def fn(x: Any, i: Any) -> Any:
        return x.sin()[i] + 1

    fast, x = dfx.schedule(fn, dfx.Sequential(), rules=[dfx.Op("*")], lanes=2), torch.randn(3)
    good, bad = torch.tensor([0, 2]), torch.tensor([7])
    torch.testing.assert_close(fast(x, good), fn(x, good))
    with pytest.raises(Exception, match="region 'index"):
        fast(x, bad)
    torch.testing.assert_close(fast(x, good), fn(x, good))


def test_widths_that_are_none() -> None:
    class Asks(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            s.execute(s.ready()[0], width=4096)

    with pytest.raises(PlanError, match="width must be 'all', or a number of cores from 1 to"):
        dfx.schedule(torch.sin, Asks(), lanes=2)(torch.randn(3))


def test_other_numbers_of_threads_make_another_plan() -> None:
    before = torch.get_num_threads()
    fast, x = dfx.schedule(work, dfx.Sequential(), lanes=2), (torch.randn(4, 4), torch.randn(4, 4))
    for count in (before, before + 3):
        try:
            torch.set_num_threads(count)
            torch.testing.assert_close(fast(*x), work(*x))
            told = "1 core:" if count == 1 else f"{count} cores:"
            assert f"every region has all {told}" in dfx.explain(fast, *x)
        finally:
            torch.set_num_threads(before)


def test_debug_and_profile_know_wide_regions() -> None:
    args = torch.randn(6, 6), torch.randn(6, 6)
    fast = dfx.schedule(work, Mixed(3), lanes=2)
    assert dfx.debug(fast, *args, rounds=4).finding is None
    spans = [s for s in dfx.profile(fast, *args).spans if s.kind == "launch"]
    wide = {i.name for i in _launches(fast, *args) if i.lane < 0}
    assert wide and {s.name for s in spans if s.lane < 0} == wide
    assert dfx.why(fast, *args, rounds=2).measured


def test_branches_gives_all_cores_to_what_they_make_faster() -> None:
    """A large product and loops over rows are wide, a sort of one row and small operators are not."""

    def fn(x: Any, y: Any) -> Any:
        with dfx.mark("one"):
            a = torch.sort(x.reshape(-1)).values
        with dfx.mark("other"):
            b = torch.sort(y.reshape(-1)).values
        with dfx.mark("product"):
            return torch.softmax(a.reshape(512, 512) @ b.reshape(512, 512), -1)

    args = torch.randn(512, 512), torch.randn(512, 512)
    fast = dfx.schedule(fn, dfx.Branches(), lanes=2)
    lanes = {i.name: i.lane for i in _launches(fast, *args)}
    assert sorted((lanes["one"], lanes["other"])) == [0, 1] and lanes["product"] == -1
    torch.testing.assert_close(fast(*args), fn(*args))


@pytest.mark.parametrize(
    ("fn", "args", "shared"),
    [
        (torch.matmul, ((512, 512), (512, 512)), "products"),
        (nn.functional.conv2d, ((8, 16, 32, 32), (16, 16, 3, 3)), "convolutions"),
        (nn.functional.scaled_dot_product_attention, ((2, 4, 128, 32),) * 3, "products"),
        (torch.tanh, ((512, 512),), "rows"),
        (lambda x: torch.sort(x).values, ((64, 4096),), "rows"),
        (lambda x: x.cumsum(-1), ((512, 512),), "rows"),
        (lambda x: torch.sort(x).values, ((1 << 16,),), ""),
        (lambda x: x.cumsum(0), ((1 << 16,),), ""),
        (lambda x: torch.topk(x, 5).values, ((1 << 18,),), ""),
        (lambda x: torch.topk(x, 5).values, ((64, 4096),), "rows"),
        (torch.median, ((64, 4096),), ""),
        (torch.linalg.eigvalsh, ((64, 64),), ""),
        (torch.tanh, ((8, 8),), ""),
    ],
)
def test_what_threads_share(fn: Any, args: Any, shared: str) -> None:
    fast = dfx.schedule(lambda *a: fn(*a), dfx.Sequential(), lanes=2)
    graph = dfx.graph(fast, *(torch.randn(shape) for shape in args))
    found = {k for r in graph.regions for k, v in r.spread._asdict().items() if v}
    assert found == ({shared} if shared else set())


def test_fewer_threads_than_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are right whatever the affinity was: lanes share out PyTorch's number, and have one at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    before = torch.get_num_threads()

    def towers(x: Any, *weights: Any) -> Any:
        return tuple(torch.tanh(torch.tanh(x @ w) @ w) for w in weights)

    args = [torch.randn(128, 128) / 11 for _ in range(5)]
    try:
        for count in (1, 2, 4, 6):
            torch.set_num_threads(count)
            for strategy in (
                dfx.Branches(), dfx.Branches(wide=False), dfx.Sequential(wide=False), dfx.Search(),
                dfx.NanoBatch(2),
            ):  # fmt: skip
                axes = {"in_axes": (0, *[None] * 4)} if isinstance(strategy, dfx.NanoBatch) else {}
                fast = dfx.schedule(towers, strategy, lanes=8, rules=[dfx.Op("mm")], **axes)
                for got, want in zip(fast(*args), towers(*args), strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
                plan = dfx.plan(fast, *args)
                assert plan.cores == count and plan.lane_cores <= max(count, len(plan.widths))
    finally:
        torch.set_num_threads(before)


def test_training_on_lanes_of_different_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    before = torch.get_num_threads()
    torch.set_num_threads(6)

    def fn(x: Any, a: Any, b: Any) -> Any:
        return (torch.tanh(x @ a).softmax(-1) * torch.sigmoid(x @ b)).sum()

    try:
        fast = dfx.schedule(fn, EachItsWidth(4, 1), lanes=2)
        for seed in range(3):
            torch.manual_seed(seed)
            args = [torch.randn(24, 24, requires_grad=True) for _ in range(3)]
            want = torch.autograd.grad(fn(*args), args)
            got = torch.autograd.grad(fast(*args), args)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert dfx.plan(fast, *args).widths == {0: 4, 1: 1}
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
