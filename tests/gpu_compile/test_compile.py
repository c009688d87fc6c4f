"""What XLA makes of plans, read back from programs compiled for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax.readback import targets  # noqa: E402

S = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


def branch(x: Any, w: Any) -> Any:
    h = jnp.tanh(x @ w) * 2 + 1
    h = h - h.mean(axis=-1, keepdims=True)
    return jnp.tanh(h @ w)


def two_branches(x: Any, y: Any, v: Any, w: Any) -> Any:
    with dfx.mark("left"):
        a = branch(x, v)
    with dfx.mark("right"):
        b = branch(y, w)
    with dfx.mark("join"):
        return a + b


class OneLane(dfx.Strategy):
    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], lane=0)


@pytest.mark.parametrize("target", targets.names())
def test_branches_stay_parallel(target: str) -> None:
    report = dfx.compile(dfx.schedule(two_branches, dfx.Branches(), target=target), S, S, S, S)
    assert set(report.order.held) == {("left", "join"), ("right", "join")}
    assert set(report.order.parallel) == {("left", "right")}
    assert not report.order.broken and not report.order.extra and not report.order.partly
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured
    assert report.copies_added == 0
    assert report.scheduled.kernels == report.original.kernels


def test_one_lane_is_a_chain() -> None:
    """The order of a lane is in the CUDA graph although no data asks for it."""
    report = dfx.compile(dfx.schedule(two_branches, OneLane(), target="nvidia-h200"), S, S, S, S)
    assert ("left", "right") in report.order.held
    assert not report.order.broken and not report.order.parallel
    assert report.scheduled.gates == 1
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured


def test_an_argument_is_not_copied_for_its_gate() -> None:
    """A scalar passes the gate; the kernel that reads the argument reads the scalar too."""

    def f(x: Any, y: Any) -> Any:
        with dfx.mark("left"):
            a = jnp.cumsum(jax.nn.softmax(x) @ x, axis=0)
        with dfx.mark("right"):
            b = jax.nn.softmax(y) @ y
        return a, b

    report = dfx.compile(dfx.schedule(f, OneLane(), target="nvidia-h200"), S, S)
    assert ("left", "right") in report.order.held and not report.order.broken
    assert report.copied_bytes_added < 64
    assert report.scheduled.kernels == report.original.kernels
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured


def expert(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.gelu(x @ up) @ down


TOKENS = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)
UP = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
DOWN = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)


@pytest.mark.parametrize("choices", [2, 16, 32, 64])
def test_nothing_is_copied_for_a_product_of_arguments(choices: int) -> None:
    """Its result takes a maximum with what passed the gate, at the end of the product's own kernel.

    The gate waits for what is stored anyway: the router has no kernel that the original has not.
    """

    def f(x: Any, w: Any, up: Any, down: Any) -> Any:
        with dfx.mark("router"):
            gates = jax.nn.softmax(x @ w)
        outs = []
        for n in range(2):
            with dfx.mark(f"expert_{n}"):
                outs.append(expert(x, up[n], down[n]) * gates[:, n, None])
        with dfx.mark("combine"):
            return x + sum(outs)

    router = jax.ShapeDtypeStruct((512, choices), jnp.bfloat16)
    for strategy in (dfx.Branches(), OneLane()):
        fast = dfx.schedule(f, strategy, target="nvidia-h200")
        report = dfx.compile(fast, TOKENS, router, [UP] * 2, [DOWN] * 2)
        assert ("router", "expert_0") in report.order.held, report
        assert not report.order.broken and not report.order.merged, report
        assert not report.order.extra and not report.order.partly, report
        assert report.copied_bytes_added < 64, report
        assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured
        kernels = {mark.name: (mark.scheduled, mark.original) for mark in report.marks}
        assert kernels["router"][0] <= kernels["router"][1], report
    assert ("expert_0", "expert_1") in report.order.held, report


def test_what_two_regions_compute_alike_does_not_order_them() -> None:
    """XLA normalises once for both; it must not also join the products of that."""

    def f(x: Any, w: Any, up: Any, down: Any) -> Any:
        with dfx.mark("left"):
            a = jax.nn.softmax(jax.nn.standardize(x, axis=-1) @ w)
        with dfx.mark("right"):
            b = expert(jax.nn.standardize(x, axis=-1), up, down)
        return a, b

    report = dfx.compile(dfx.schedule(f, dfx.Branches(), target="nvidia-h200"), TOKENS, S, UP, DOWN)
    assert [set(pair) for pair in report.order.common] == [{"left", "right"}], report
    assert not report.order.conflicts and not report.order.merged, report
    joined = {"xla_gpu_dot_merger_threshold_mb": "1024"}
    fast = dfx.schedule(f, dfx.Branches(), target="nvidia-h200", compiler_options=joined)
    assert dfx.compile(fast, TOKENS, S, UP, DOWN).order.merged


def test_nano_batches_have_the_kernels_of_the_original() -> None:
    """Each nano-batch of a mark has as many as the unscheduled function; the last ones may be one."""

    def f(x: Any, up: Any, down: Any) -> Any:
        with dfx.mark("mlp"):
            return x + expert(jax.nn.standardize(x, axis=-1), up, down)

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=(0, None, None), target="nvidia-h200")
    report = dfx.compile(fast, TOKENS, UP, DOWN)
    (mark,) = report.marks
    assert mark.nano_batches == 2 and mark.scheduled == 2 * mark.original > 0, report
    assert not report.copies_added and not report.order.broken, report


def test_a_function_without_arguments() -> None:
    def f() -> Any:
        x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
        with dfx.mark("left"):
            a = jnp.sin(x) @ x
        with dfx.mark("right"):
            b = jnp.cos(x) @ x
        return a, b

    report = dfx.compile(dfx.schedule(f, dfx.Branches(), target="nvidia-h200"))
    assert report.original.kernels and report.scheduled.kernels, report
    assert not report.order.broken, report


def test_without_gates_the_chain_is_lost() -> None:
    """The readback tells: in CONCURRENT mode a plan without its gates is not kept."""
    fast = dfx.schedule(two_branches, OneLane(), target="nvidia-h200")
    fast.planned((S, S, S, S), {}).gates.clear()
    assert ("left", "right") in dfx.compile(fast, S, S, S, S).order.broken


def test_serialising_mode_is_seen() -> None:
    options = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
    fast = dfx.schedule(
        two_branches, dfx.Branches(), target="nvidia-h200", compiler_options=options
    )
    report = dfx.compile(fast, S, S, S, S)
    assert report.order.extra or report.order.partly
    assert any("serial" in note for note in report.notes)


def test_refused_target_text(tmp_path: Path) -> None:
    text = tmp_path / "broken.txtpb"
    text.write_text("gpu_device_info { no_such_field: 1 }")
    with pytest.raises(dfx.EngineError, match="broken.txtpb"):
        dfx.compile(dfx.schedule(two_branches, target=text), S, S, S, S)


def test_refused_option() -> None:
    fast = dfx.schedule(
        two_branches, target="nvidia-h200", compiler_options={"xla_no_such_option": "1"}
    )
    with pytest.raises(dfx.EngineError, match="xla_no_such_option"):
        dfx.compile(fast, S, S, S, S)


def test_a_function_that_was_called_before() -> None:
    """JAX keeps what it traced; the report is on the scheduled program all the same."""
    fast = dfx.schedule(two_branches, dfx.Branches(), target="nvidia-h200")
    outer = jax.jit(lambda *args: fast(*args) * 2)
    x = jnp.ones(S.shape, S.dtype)
    fast(x, x, x, x)
    outer(x, x, x, x)
    report = dfx.compile(outer, S, S, S, S)
    assert set(report.order.parallel) == {("left", "right")}


def test_report_forms() -> None:
    fast = dfx.schedule(two_branches, dfx.Branches(), target="nvidia-h200")
    report = dfx.compile(fast, S, S, S, S)
    assert '"parallel"' in report.to_json()
    assert "1 parallel" in dfx.explain(fast, S, S, S, S, deep=True)
