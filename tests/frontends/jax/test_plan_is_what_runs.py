"""What runs is the plan: a plan changed behind the proof changes what every backend makes of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from edited_plans import ByName, edited, launch, moved, swapped, with_edge, with_other  # noqa: E402
from jaxlib import xla_client  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import PlanError  # noqa: E402
from dynaflow_xla.ffi import device_lanes  # noqa: E402
from dynaflow_xla.frontends.jax.lanes import device_stage  # noqa: E402
from dynaflow_xla.frontends.jax.xla import build  # noqa: E402
from dynaflow_xla.planning.instructions import Merge, Slice, Wait  # noqa: E402
from dynaflow_xla.planning.plan import Plan  # noqa: E402
from dynaflow_xla.planning.validate import validate  # noqa: E402

_clients: list[Any] = []


def _device_lanes() -> Any:
    """Device lanes whose clients are of this CPU."""
    made = device_lanes.DeviceLanes(
        "cpu", lambda: xla_client.make_cpu_client(asynchronous=False), 0, 64
    )
    made.clients = _clients
    return device_stage.use_lanes(made)


def _on_lanes(made: Any, plan: Plan) -> Any:
    return replace(made, plan=plan, _stages=None, _lock=threading.Lock())


def _lane_programs(made: Any, *args: Any) -> str:
    """The programs of all lanes, and what the engine is told of buffers and order."""
    stages = [stage for stage, _ in made.stages if stage is not None]
    return "\n".join(str(part) for s in stages for part in (*sorted(s.lane_texts.items()), *s.told))


def _one_program(made: Any, plan: Plan) -> Any:
    return build.build(
        options=made.options, captured=made.captured, pg=made.pg, plan=plan,
        functions=dict(made.functions), seconds={}, split=made.split,
    )  # fmt: skip


def _program_text(made: Any, *args: Any) -> str:
    return str(jax.make_jaxpr(lambda *xs: made(*xs))(*args))


@dataclass(frozen=True)
class Backend:
    """How a backend is asked for, given a plan that nobody proved, and looked at.

    Attributes:
        name: For the test's name.
        options: For ``schedule``.
        lanes: Makes the context in which its lanes are.
        with_plan: The same planned function with another plan.
        lowered: What it makes of the plan, as text.
    """

    name: str
    options: dict[str, Any]
    lanes: Callable[[], Any]
    with_plan: Callable[[Any, Plan], Any]
    lowered: Callable[..., str]


BACKENDS = (
    Backend("lanes", {"backend": "ffi"}, nullcontext, _on_lanes, _lane_programs),
    Backend("device", {"backend": "ffi"}, _device_lanes, _on_lanes, _lane_programs),
    Backend("xla", {"backend": "xla"}, nullcontext, _one_program, _program_text),
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with request.param.lanes():
        yield request.param


def marked(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.sin(x) @ y
    with dfx.mark("right"):
        b = jnp.cos(y) @ x
    with dfx.mark("late"):
        c = jnp.tanh(a) @ a
    with dfx.mark("both"):
        d = a @ y - jnp.tanh(b)
    return c, d


ARGS = tuple(np.random.default_rng(0).standard_normal((2, 24, 24)).astype(np.float32))


def planned(backend: Backend, f: Any, strategy: Any, *args: Any, **options: Any) -> Any:
    fast = dfx.schedule(f, strategy, lanes=2, **backend.options, **options)
    return fast.planned(args, {})


def ran(made: Any, *args: Any) -> list[Any]:
    return [np.asarray(x) for x in jax.jit(lambda *xs: made(*xs))(*args)]


def test_equal_plans_are_lowered_alike(backend: Backend) -> None:
    made = planned(backend, marked, ByName("right"), *ARGS)
    again = backend.with_plan(made, Plan.from_json(made.plan.to_json()))
    assert backend.lowered(made, *ARGS) == backend.lowered(again, *ARGS)


def test_a_dropped_wait(backend: Backend) -> None:
    """An edge that only the plan asks for: ``late`` after ``right``, of which it reads nothing."""
    made = planned(backend, marked, ByName("right", "both"), *ARGS)
    event = made.plan.events
    plan = with_edge(made.plan, "right", "late")
    validate(plan, made.pg)
    without = edited(plan, lambda i: [] if isinstance(i, Wait) and i.event == event else i)
    texts = [backend.lowered(backend.with_plan(made, p), *ARGS) for p in (plan, without)]
    assert texts[0] != texts[1]
    # The wait itself is gone: in a lane's gate, in the engine's list, as a gate in the program.
    if backend.name == "lanes":
        waits = [
            sum(map(int, re.findall(r"waits = dense<[^>]*> : tensor<(\d+)x", t))) for t in texts
        ]
    elif backend.name == "device":
        waits = [t.count("('wait'") for t in texts]
    else:
        waits = [t.count("dfx_xla_gate") for t in texts]
    assert waits[0] > waits[1]


def test_swapped_buffers(backend: Backend) -> None:
    def f(x: Any, y: Any) -> Any:
        with dfx.mark("a"):
            a = jnp.sin(x)
        with dfx.mark("b"):
            b = jnp.cos(y)
        with dfx.mark("c"):
            c = jnp.tanh(a - 2 * b)
        return c

    made = planned(backend, f, ByName(), *ARGS)

    mine = launch(made.plan, "c")
    assert len(mine.ins) == 2
    plan = with_other(made.plan, mine, ins=mine.ins[::-1])
    with pytest.raises(PlanError, match="must read values"):
        validate(plan, made.pg)
    other = backend.with_plan(made, plan)
    assert backend.lowered(other, *ARGS) != backend.lowered(made, *ARGS)
    x, y = ARGS
    np.testing.assert_allclose(ran(made, x, y)[0], np.tanh(np.sin(x) - 2 * np.cos(y)), atol=1e-5)
    np.testing.assert_allclose(ran(other, x, y)[0], np.tanh(np.cos(y) - 2 * np.sin(x)), atol=1e-5)


def test_swapped_results(backend: Backend) -> None:
    """Two launches write each other's result: the callable hands them out the other way round."""

    def f(x: Any, y: Any) -> Any:
        return jnp.sin(x) @ y, jnp.cos(y) @ x

    made = planned(backend, f, dfx.Branches(), *ARGS)
    plan = swapped(made.plan, "result")
    with pytest.raises(PlanError, match="is result 1"):
        validate(plan, made.pg)
    want, got = ran(made, *ARGS), ran(backend.with_plan(made, plan), *ARGS)
    np.testing.assert_array_equal(got[0], want[1])
    np.testing.assert_array_equal(got[1], want[0])


def test_a_launch_on_another_lane(backend: Backend) -> None:
    def f(x: Any, y: Any) -> Any:
        with dfx.mark("left"):
            a = jnp.sin(x) @ y
        with dfx.mark("right"):
            b = jnp.cos(y) @ x
        return a, b

    made = planned(backend, f, ByName("right"), *ARGS)
    plan = moved(made.plan, "right", 0)
    validate(plan, made.pg)  # nothing crosses lanes: as good a plan
    other = backend.with_plan(made, plan)
    texts = [backend.lowered(m, *ARGS) for m in (made, other)]
    assert texts[0] != texts[1]
    if backend.name == "lanes":
        assert [{lane for lane in (0, 1) if f"lane{lane}" in t} for t in texts] == [{0, 1}, {0}]
    for want, got in zip(ran(made, *ARGS), ran(other, *ARGS), strict=True):
        np.testing.assert_allclose(want, got, atol=1e-5)


def test_a_launch_where_its_values_do_not_reach(backend: Backend) -> None:
    """The same with a reader left behind: lanes have nothing to read it from, and say so."""
    made = planned(backend, marked, ByName("right", "both"), *ARGS)
    plan = moved(made.plan, "late", 1)
    with pytest.raises(PlanError, match="does not reach|a wait is missing"):
        validate(plan, made.pg)
    if backend.name == "lanes":
        with pytest.raises(PlanError, match="'late' on lane 1 reads buffer .* which nothing"):
            backend.lowered(backend.with_plan(made, plan), *ARGS)
    else:
        other = backend.lowered(backend.with_plan(made, plan), *ARGS)
        assert other != backend.lowered(made, *ARGS)


def _rows(x: Any, y: Any) -> Any:
    return jnp.tanh(x @ y) @ y


def test_a_slice_of_other_rows(backend: Backend) -> None:
    """Both nano-batches read the first one's rows: the second half of the result repeats the first."""
    made = planned(
        backend, _rows, dfx.NanoBatch(2), *ARGS, in_axes=(0, None), out_axes=0
    )  # fmt: skip
    slices = [i for i in made.plan.instructions if isinstance(i, Slice)]
    assert len(slices) == 2
    first, second = slices
    buffers = list(made.plan.buffers)
    buffers[second.out] = msgspec.structs.replace(
        buffers[second.out], offset=buffers[first.out].offset
    )
    plan = msgspec.structs.replace(made.plan, buffers=tuple(buffers))
    plan = with_other(plan, second, start=first.start, stop=first.stop)
    with pytest.raises(PlanError, match="is argument"):
        validate(plan, made.pg)
    other = backend.with_plan(made, plan)
    assert backend.lowered(other, *ARGS) != backend.lowered(made, *ARGS)
    (want,), (got,) = ran(made, *ARGS), ran(other, *ARGS)
    half = len(want) // 2
    np.testing.assert_allclose(got[:half], want[:half], atol=1e-5)
    np.testing.assert_allclose(got[half:], want[:half], atol=1e-5)


def test_parts_of_a_result_the_other_way_round(backend: Backend) -> None:
    made = planned(
        backend, _rows, dfx.NanoBatch(2), *ARGS, in_axes=(0, None), out_axes=0
    )  # fmt: skip
    (merge,) = (i for i in made.plan.instructions if isinstance(i, Merge))
    first, second = merge.srcs
    buffers = list(made.plan.buffers)
    offsets = buffers[first].offset, buffers[second].offset
    buffers[first] = msgspec.structs.replace(buffers[first], offset=offsets[1])
    buffers[second] = msgspec.structs.replace(buffers[second], offset=offsets[0])
    plan = msgspec.structs.replace(made.plan, buffers=tuple(buffers))
    plan = with_other(plan, merge, srcs=merge.srcs[::-1])
    with pytest.raises(PlanError, match="is result 0 at"):
        validate(plan, made.pg)
    (want,), (got,) = ran(made, *ARGS), ran(backend.with_plan(made, plan), *ARGS)
    half = len(want) // 2
    np.testing.assert_allclose(got, np.concatenate([want[half:], want[:half]]), atol=1e-5)


def test_scratch_at_another_offset() -> None:
    """The offsets that were proved are those that the engine is told."""
    backend = BACKENDS[0]
    made = planned(backend, marked, ByName("right", "both"), *ARGS)
    scratch = [b for b in made.plan.buffers if b.kind == "scratch"]
    assert scratch
    ((stage, _),) = made.stages
    told = [t for t in stage.told if t[0] == "scratch"]
    assert sorted(t[2:] for t in told) == sorted((b.offset, b.bytes) for b in scratch)
    shift = 1 << 12
    buffers = tuple(
        msgspec.structs.replace(b, offset=b.offset + shift) if b.kind == "scratch" else b
        for b in made.plan.buffers
    )
    plan = msgspec.structs.replace(
        made.plan, buffers=buffers, scratch_bytes=made.plan.scratch_bytes + shift
    )
    other = backend.with_plan(made, plan)
    ((stage, _),) = other.stages
    assert sorted(t[2] - shift for t in stage.told if t[0] == "scratch") == sorted(
        t[2] for t in told
    )
    for want, got in zip(ran(made, *ARGS), ran(other, *ARGS), strict=True):
        np.testing.assert_array_equal(want, got)
