"""What runs is the plan: a plan changed behind the proof changes what PyTorch's lanes do."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edited_plans import ByName, edited, launch, moved, swapped, with_edge, with_other  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import PlanError  # noqa: E402
from dynaflow_xla.frontends.torch.native import native  # noqa: E402
from dynaflow_xla.frontends.torch.native.stretches import interpreted  # noqa: E402
from dynaflow_xla.planning.instructions import Merge, Slice, Wait  # noqa: E402
from dynaflow_xla.planning.plan import Plan  # noqa: E402
from dynaflow_xla.planning.validate import validate  # noqa: E402

X, Y = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[True, False], ids=["interpreted", "python"], autouse=True)
def both_forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "_EXISTS", request.param)


def marked(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sin(x) @ y
    with dfx.mark("right"):
        b = torch.cos(y) @ x
    with dfx.mark("late"):
        c = torch.tanh(a) @ a
    with dfx.mark("both"):
        d = a @ y - torch.tanh(b)
    return c, d


def planned(f: Any, strategy: Any, **options: Any) -> Any:
    """What runs for these arguments."""
    with torch.no_grad():
        fast: Any = dfx.schedule(f, strategy, lanes=2, **options).made_for((X, Y), {})
        fast(X, Y)
        entry = fast._dfx_core.planned((X, Y), {})
    entry.fast = fast
    return entry


def with_plan(entry: Any, plan: Plan) -> Any:
    return native.build(entry.captured, entry.pg, plan, entry.implementations)


def ran(entry: Any, runnable: Any) -> list[Any]:
    """Results of a call in which this runs."""
    entry.native = runnable
    with torch.no_grad():
        result = entry.fast(X, Y)
    return list(result) if isinstance(result, tuple) else [result]


class Told:
    """An engine program that notes what it is told."""

    def __init__(self, made: Any, log: list[tuple[Any, ...]]) -> None:
        self._made, self._log = made, log

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._made, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._log.append((name, *(a for a in args if isinstance(a, int))))
            return method(*args, **kwargs)

        return call


def told(entry: Any, plan: Plan) -> list[tuple[Any, ...]]:
    """What the engine is told of a plan: launches by lane, records and waits."""
    log: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        program = native._engine.Program

        class Engine:
            def __getattr__(self, name: str) -> Any:
                return getattr(native_engine, name)

            @staticmethod
            def Program(*args: Any) -> Told:  # noqa: N802
                return Told(program(*args), log)

        native_engine = native._engine
        patch.setattr(native, "_engine", Engine())
        with_plan(entry, plan)
    return log


def test_equal_plans_are_built_alike() -> None:
    entry = planned(marked, ByName("right"))
    again = Plan.from_json(entry.plan.to_json())
    assert told(entry, entry.plan) == told(entry, again)
    for a, b in zip(ran(entry, entry.native), ran(entry, with_plan(entry, again)), strict=True):
        assert torch.equal(a, b)


def test_a_dropped_wait() -> None:
    entry = planned(marked, ByName("right", "both"))
    waits = [i for i in entry.plan.instructions if isinstance(i, Wait)]
    assert waits
    plan = edited(entry.plan, lambda i: [] if i == waits[0] else i)
    with pytest.raises(PlanError):
        validate(plan, entry.pg)
    before, after = told(entry, entry.plan), told(entry, plan)
    count = [sum(call[0] == "add_wait" for call in log) for log in (before, after)]
    assert count[0] == count[1] + 1


def test_a_launch_on_another_lane() -> None:
    def f(x: Any, y: Any) -> Any:
        with dfx.mark("left"):
            a = torch.sin(x) @ y
        with dfx.mark("right"):
            b = torch.cos(y) @ x
        return a, b

    entry = planned(f, ByName("right"))
    plan = moved(entry.plan, "right", 0)
    validate(plan, entry.pg)  # nothing crosses lanes: as good a plan
    lanes = [
        {call[1] for call in told(entry, p) if call[0] == "add_python_launch"}
        for p in (entry.plan, plan)
    ]
    assert lanes == [{0, 1}, set()]  # one lane needs no engine
    for a, b in zip(ran(entry, entry.native), ran(entry, with_plan(entry, plan)), strict=True):
        assert torch.equal(a, b)


def test_a_launch_where_its_values_do_not_reach() -> None:
    entry = planned(marked, ByName("right", "both"))
    plan = moved(entry.plan, "late", 1)
    with pytest.raises(PlanError, match="'late' on lane 1 reads buffer .* which nothing"):
        with_plan(entry, plan)


def test_swapped_buffers() -> None:
    def f(x: Any, y: Any) -> Any:
        with dfx.mark("a"):
            a = torch.sin(x)
        with dfx.mark("b"):
            b = torch.cos(y)
        with dfx.mark("c"):
            c = torch.tanh(a - 2 * b)
        return c

    entry = planned(f, ByName())
    mine = launch(entry.plan, "c")
    assert len(mine.ins) == 2
    plan = with_other(entry.plan, mine, ins=mine.ins[::-1])
    with pytest.raises(PlanError, match="must read values"):
        validate(plan, entry.pg)
    torch.testing.assert_close(ran(entry, entry.native)[0], f(X, Y))
    want = torch.tanh(torch.cos(Y) - 2 * torch.sin(X))
    torch.testing.assert_close(ran(entry, with_plan(entry, plan))[0], want)


def test_swapped_results() -> None:
    entry = planned(lambda x, y: (torch.sin(x) @ y, torch.cos(y) @ x), dfx.Branches())
    plan = swapped(entry.plan, "result")
    with pytest.raises(PlanError, match="is result 1"):
        validate(plan, entry.pg)
    want, got = ran(entry, entry.native), ran(entry, with_plan(entry, plan))
    assert torch.equal(got[0], want[1]) and torch.equal(got[1], want[0])


def _rows(x: Any, y: Any) -> Any:
    return torch.tanh(x @ y) @ y


def test_a_slice_of_other_rows() -> None:
    entry = planned(_rows, dfx.NanoBatch(2), in_axes=(0, None))
    first, second = (i for i in entry.plan.instructions if isinstance(i, Slice))
    plan = with_other(entry.plan, second, start=first.start, stop=first.stop)
    with pytest.raises(PlanError):
        validate(plan, entry.pg)
    (want,), (got,) = ran(entry, entry.native), ran(entry, with_plan(entry, plan))
    torch.testing.assert_close(want, _rows(X, Y))
    torch.testing.assert_close(got, torch.cat([want[:3], want[:3]]))


def test_parts_of_a_result_the_other_way_round() -> None:
    entry = planned(_rows, dfx.NanoBatch(2), in_axes=(0, None))
    (merge,) = (i for i in entry.plan.instructions if isinstance(i, Merge))
    plan = with_other(entry.plan, merge, srcs=merge.srcs[::-1])
    with pytest.raises(PlanError):
        validate(plan, entry.pg)
    (want,), (got,) = ran(entry, entry.native), ran(entry, with_plan(entry, plan))
    torch.testing.assert_close(got, torch.cat([want[3:], want[:3]]))


def test_an_argument_for_another() -> None:
    """The argument buffers of two inputs swapped: each is read as the other."""
    entry = planned(lambda x, y: torch.sin(x) - 2 * torch.cos(y), ByName())
    plan = swapped(entry.plan, "arg")
    with pytest.raises(PlanError):
        validate(plan, entry.pg)
    want = torch.sin(Y) - 2 * torch.cos(X)
    torch.testing.assert_close(ran(entry, with_plan(entry, plan))[0], want)


def test_an_edge_that_only_the_plan_asks_for() -> None:
    entry = planned(marked, ByName("right", "both"))
    event = entry.plan.events
    plan = with_edge(entry.plan, "right", "late")
    validate(plan, entry.pg)
    log = told(entry, plan)
    assert ("add_record", 1, event) in log and ("add_wait", 0, event) in log
    for a, b in zip(ran(entry, entry.native), ran(entry, with_plan(entry, plan)), strict=True):
        assert torch.equal(a, b)
