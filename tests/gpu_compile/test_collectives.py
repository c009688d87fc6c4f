"""Collectives of nano-batches in programs for 8 GPUs: kept apart, and each beside the other's compute."""

from __future__ import annotations

import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
from parallel_layers import AXIS, DEVICES, Layer, layers  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import UnsupportedError  # noqa: E402
from dynaflow_xla.frontends.jax.xla.collectives import IN_GRAPH  # noqa: E402

# Nobody has 8 devices here: the mesh is abstract.
MESH = jax.sharding.AbstractMesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
LAYERS = layers(batch=8, length=512, width=1024)


def compiled(layer: Layer, strategy: Any, **options: Any) -> Any:
    fast = dfx.schedule(layer.fn, strategy, in_axes=layer.in_axes, target="nvidia-h200", **options)
    specs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(MESH, spec))
        for shape, spec in zip(layer.shapes, layer.specs, strict=True)
    ]
    return dfx.compile(layer.spread(fast, MESH), *specs)


def nano(name: str) -> str:
    return name.rsplit("@", 1)[-1]


@functools.cache
def default(name: str, strategy: str) -> Any:
    made = {"DualBatch()": dfx.DualBatch, "NanoBatch(2)": dfx.NanoBatch}[strategy]()
    return compiled(LAYERS[name], made)


STRATEGIES = ["DualBatch()", "NanoBatch(2)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LAYERS)
def test_collectives_run_beside_the_other_nano_batch(name: str, strategy: str) -> None:
    """Between a collective's start and done XLA runs kernels of the other nano-batch.

    The last ones may have nothing left beside them: how many kernels follow depends on the layer.
    """
    layer = LAYERS[name]
    report = default(name, strategy)
    assert len(report.collectives) == 2 * layer.collectives, report
    beside = [
        any(nano(region) != nano(one.region) for region in one.beside)
        for one in report.collectives
        if one.asynchronous
    ]
    dual = strategy == "DualBatch()"
    assert sum(beside) >= 2 * layer.collectives - (0 if dual else 1), report
    assert not report.order.broken and not report.order.merged, report


@pytest.mark.parametrize("strategy", [dfx.DualBatch(), dfx.published.TwoBatchOverlap()], ids=repr)
def test_all_to_alls_of_a_gradient_run_beside_the_other_nano_batch(strategy: Any) -> None:
    """Forward and backward of an expert-parallel layer: eight all-to-alls, compute of the other half beside
    each. For that the gradient is scheduled: in one that JAX makes of a scheduled layer the plan does not say
    what the backward pass begins first.
    """
    layer = LAYERS["experts"]
    weights = len(layer.shapes) - 1

    def gradient(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            return (layer.fn(*args).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, argnums=tuple(range(len(args))))(*args)

    fast = dfx.schedule(
        gradient,
        strategy,
        in_axes=layer.in_axes,
        out_axes=(0, *[dfx.Sum()] * weights),
        target="nvidia-h200",
    )
    specs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(MESH, spec))
        for shape, spec in zip(layer.shapes, layer.specs, strict=True)
    ]
    mapped = jax.shard_map(
        fast, mesh=MESH, in_specs=layer.specs, out_specs=tuple(layer.specs), check_vma=False
    )
    report = dfx.compile(jax.jit(mapped), *specs)
    assert len(report.collectives) == 2 * 2 * layer.collectives, report
    talks = {one.region for one in report.collectives}
    for one in report.collectives:
        computes = [region for region in one.beside if region not in talks and "@" in region]
        assert any(nano(region) != nano(one.region) for region in computes), (one, report)
    assert not report.order.merged, report


@pytest.mark.parametrize("name", LAYERS)
def test_no_activation_is_copied(name: str) -> None:
    report = default(name, "DualBatch()")
    assert report.copied_bytes_added < 64, report
    kernels = [
        sum(len(r.kernels) for r in report.regions if nano(r.name) == number) for number in "01"
    ]
    assert kernels[0] == kernels[1], report


@pytest.mark.parametrize("family", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_of_both_nano_batches_is_seen(family: str) -> None:
    """With XLA's own thresholds it combines them, and then nothing is beside the one: the reason for the
    options that a plan sets.
    """
    layer = LAYERS["transformer_block" if family == "all_reduce" else "sequence_parallel_mlp"]
    options = {f"xla_gpu_{family}_combine_threshold_bytes": str(1 << 30)}
    report = compiled(layer, dfx.NanoBatch(2), compiler_options=options)
    assert len(report.collectives) < 2 * layer.collectives, report


def test_products_of_both_nano_batches_are_seen() -> None:
    """The same for the products of two nano-batches with one weight."""
    layer = LAYERS["transformer_block"]
    apart = default("transformer_block", "NanoBatch(2)")
    options = {"xla_gpu_dot_merger_threshold_mb": "1024", "xla_disable_hlo_passes": ""}
    joined = compiled(layer, dfx.NanoBatch(2), compiler_options=options)
    assert not apart.order.merged, apart
    assert joined.order.merged or joined.scheduled.kernels < apart.scheduled.kernels, joined


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_in_the_graph(name: str) -> None:
    """As the user's option asks: one CUDA graph, in which gates put the collectives into one order."""
    layer = LAYERS[name]
    report = compiled(layer, dfx.DualBatch(), compiler_options=IN_GRAPH)
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured, report
    assert len(report.collectives) == 2 * layer.collectives, report
    order = report.order
    assert not order.broken and not order.merged and not order.extra, report
    talking = [one.region for one in report.collectives]
    kept = {*order.held, *order.fused}
    assert all(pair in kept for pair in zip(talking, talking[1:], strict=False)), report
    assert not any("DANGER" in note for note in report.notes), report.notes
    for one in report.collectives:
        assert any(nano(region) != nano(one.region) for region in one.beside), report
    assert report.copied_bytes_added < 64, report


def test_collectives_in_the_graph_without_gates_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA does not order the collectives of a CUDA graph: the reason for the gates."""
    from dynaflow_xla.frontends.jax.xla import build

    monkeypatch.setattr(build.collectives, "in_graph", lambda options: False)
    report = compiled(LAYERS["transformer_block"], dfx.DualBatch(), compiler_options=IN_GRAPH)
    assert len(report.order.broken) == 3, report
    assert any("DANGER: 3 pairs of collectives" in note for note in report.notes), report.notes


def test_a_step_with_its_collectives_in_the_graph() -> None:
    """Those of the backward pass are regions of the step's plan, and have gates too."""
    layer = LAYERS["transformer_block"]

    def step(*args: Any) -> Any:
        return jax.value_and_grad(
            lambda *a: layer.fn(*a).astype(jnp.float32).sum(), argnums=(1, 2)
        )(*args)

    specs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(MESH, spec))
        for shape, spec in zip(layer.shapes, layer.specs, strict=True)
    ]
    out = (jax.sharding.PartitionSpec(), layer.specs[1:3])

    def mapped(fn: Any) -> Any:
        return jax.jit(
            jax.shard_map(
                fn, mesh=MESH, in_specs=tuple(layer.specs), out_specs=out, check_vma=False
            )
        )

    options = {"target": "nvidia-h200", "compiler_options": IN_GRAPH}
    report = dfx.compile(mapped(dfx.schedule(step, dfx.Branches(), **options)), *specs)
    assert len(report.scheduled.command_buffers) == 1 and len(report.collectives) > 2, report
    assert not report.order.broken, report
    assert not any("DANGER" in note for note in report.notes), report.notes
    fast = dfx.schedule(layer.fn, dfx.Branches(), **options)
    gradient = jax.value_and_grad(lambda *a: fast(*a).astype(jnp.float32).sum(), argnums=(1, 2))
    with pytest.raises(UnsupportedError, match=r"is differentiated.*value_and_grad"):
        dfx.compile(mapped(gradient), *specs)


def test_collectives_that_cannot_be_put_into_one_order() -> None:
    def halved(x: Any) -> Any:
        summed = jax.lax.psum(x, AXIS)
        return jax.lax.while_loop(
            lambda y: y.sum() > 1, lambda y: jax.lax.pmean(y, AXIS) / 2, summed
        )

    fast = dfx.schedule(halved, "branches", target="nvidia-h200", compiler_options=IN_GRAPH)
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(fast, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.sharding.NamedSharding(MESH, spec))
    with pytest.raises(UnsupportedError, match=r"test_collectives\.py.*holds while of.*leave COLL"):
        dfx.compile(jax.jit(mapped), x)


@pytest.mark.parametrize("options", [{}, IN_GRAPH], ids=["outside", "in the graph"])
def test_layers_in_a_loop(options: dict[str, str]) -> None:
    """A scheduled layer as the body of a scan: nano-batches meet in each turn of it."""
    layer = LAYERS["transformer_block"]
    block = dfx.schedule(
        layer.fn,
        dfx.DualBatch(),
        in_axes=layer.in_axes,
        target="nvidia-h200",
        compiler_options=options,
    )

    def model(x: Any, *weights: Any) -> Any:
        return jax.lax.scan(lambda c, w: (block(c, *w), None), x, weights)[0]

    specs = (layer.specs[0], *(jax.sharding.PartitionSpec(None, *s) for s in layer.specs[1:]))
    shapes = (layer.shapes[0], *((4, *shape) for shape in layer.shapes[1:]))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(MESH, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(
        model, mesh=MESH, in_specs=specs, out_specs=layer.out_spec, check_vma=False
    )
    report = dfx.compile(jax.jit(mapped), *args)
    assert len(report.collectives) == 4 and report.copied_bytes_added < 64, report
    for one in report.collectives:
        assert any(nano(region) != nano(one.region) for region in one.beside), report
    assert not report.order.broken, report


def test_a_function_with_a_loop_is_split() -> None:
    """JAX 0.12 says in another way which inputs of a scan are carried."""

    def f(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, v: (jnp.tanh(c @ w + v), c.sum(1)), x, jnp.arange(3.0))

    fast = dfx.schedule(f, dfx.NanoBatch(2), backend="xla", in_axes=(0, None), out_axes=(0, 1))
    x, w = jnp.linspace(-1, 1, 32).reshape(4, 8), jnp.eye(8) / 2
    for got, want in zip(fast(x, w), f(x, w), strict=True):
        assert jnp.allclose(got, want, atol=1e-5)
