"""backend="xla": one XLA program. Its transformations, options, and what it refuses; on CPU."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.readback import targets
from dynaflow_xla.frontends.jax.tuning import auto
from dynaflow_xla.frontends.jax.xla import xla_options

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((8, 8)), jnp.float32) / 3
X = jnp.asarray(RNG.standard_normal((4, 8)), jnp.float32)


def model(w: Any, x: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.tanh(x @ w) * 2
    with dfx.mark("right"):
        b = jax.nn.softmax(x @ w.T)
    return jnp.sum((a + b) ** 2)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * jnp.cos(x),))


def with_rules(w: Any, x: Any) -> Any:
    a = clipped(x @ w)
    b = jax.checkpoint(lambda y: jnp.tanh(y @ w))(x)
    return jnp.sum(a * b) + jnp.sum(jax.nn.relu(x))


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f: jax.grad(f, argnums=(0, 1))(W, X),
    "value_and_grad": lambda f: jax.value_and_grad(f)(W, X),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0))(W, jnp.stack([X, X + 1, -X])),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0))(W, jnp.stack([X, 2 * X])),
    "inside_jit": lambda f: jax.jit(lambda w, x: f(w, x) * 2)(W, X),
    "grad_of_jit": lambda f: jax.jit(jax.grad(f))(W, X),
    "in_scan": lambda f: lax.scan(lambda c, x: (c + f(W, x), c), 0.0, jnp.stack([X, X + 1])),
    "remat": lambda f: jax.grad(jax.checkpoint(f))(W, X),
}
FORWARD: dict[str, Any] = {
    "jvp": lambda f: jax.jvp(f, (W, X), (W + 1, X)),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=1)(W, X),
    "hessian": lambda f: jax.hessian(f, argnums=1)(W, X),
    "jvp_of_grad": lambda f: jax.jvp(jax.grad(f), (W, X), (W, X)),
}


@pytest.mark.parametrize("how", [*TRANSFORMS, *FORWARD])
def test_transformations(how: str, schedule: Any, assert_same: Any) -> None:
    transform = {**TRANSFORMS, **FORWARD}[how]
    assert_same(transform(jax.jit(model)), transform(schedule(model, "xla")))


@pytest.mark.parametrize("how", TRANSFORMS)
def test_derivative_rules_of_the_function_are_kept(
    how: str, schedule: Any, assert_same: Any
) -> None:
    """A capture looks through custom_vjp and remat; the derivative must still use them."""
    assert_same(TRANSFORMS[how](jax.jit(with_rules)), TRANSFORMS[how](schedule(with_rules, "xla")))


def test_donation_is_kept(schedule: Any) -> None:
    fast = schedule(jax.jit(lambda x, y: (jnp.sort(x) + y, y.sum()), donate_argnums=0), "xla")
    x, y = jnp.arange(256.0), jnp.ones(256)
    lowered = fast.lower(x, y)
    assert "tf.aliasing_output" in lowered.as_text() or "jax.buffer_donor" in lowered.as_text()
    fast(x, y)
    assert x.is_deleted() and not y.is_deleted()


def test_no_custom_call_on_cpu(schedule: Any) -> None:
    """On a CPU the gates are identities: nothing of them is in the program."""
    fast = schedule(model, "xla")
    assert "dfx_" not in fast.lower(W, X).compile().as_text().replace("dfx_plan", "")


def test_gates_are_in_the_gpu_program(schedule: Any) -> None:
    """Two chains on one lane: only a gate can put the second behind the first."""

    def f(x: Any, y: Any) -> Any:
        a = jnp.tanh(x @ x) @ x
        b = jnp.tanh(y @ y) @ y
        return a, b

    fast = schedule(jax.jit(f), dfx.Sequential(), backend="xla", rules=[dfx.Op("dot_general")])
    assert fast._entry((X[:, :4], X[:, 4:]), {})[2].gates
    disabled = [jax.export.DisabledSafetyCheck.custom_call("dfx_order")]
    text = jax.export.export(fast._jit, platforms=["cuda"], disabled_checks=disabled)(
        X[:, :4], X[:, 4:]
    ).mlir_module()
    assert "dfx_order" in text


class OneLane(dfx.Strategy):
    """All on one lane, whose order then takes gates."""

    def __init__(self, parts: int | None) -> None:
        self.parts = parts

    def split(self, ctx: Any) -> Any:
        return dfx.Split.even(self.parts) if self.parts else dfx.Split()

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], lane=0)


@pytest.mark.parametrize("split", [None, 2])
def test_products_of_arguments_pass_as_results(
    split: int | None, schedule: Any, assert_same: Any
) -> None:
    """Nothing of an argument passes a gate where the result of its product can."""

    def f(v: Any, w: Any, x: Any) -> Any:
        with dfx.mark("left"):
            a = jnp.tanh(x @ v).sum(1)
        with dfx.mark("right"):
            b = jnp.sin(x @ w).sum(1)
        return a * b

    v, w, x = (
        jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in [(4, 64), (4, 64), (128, 4)]
    )
    axes = {"in_axes": (None, None, 0)} if split else {}
    fast = schedule(jax.jit(f), OneLane(split), backend="xla", **axes)
    gates = fast._entry((v, w, x), {})[2].gates.values()
    assert any(gate.products for gate in gates) and not any(gate.copied for gate in gates)
    assert_same(jax.jit(f)(v, w, x), fast(v, w, x))
    for transform in (
        lambda g: jax.grad(lambda *a: g(*a).sum(), argnums=(0, 1, 2))(v, w, x),
        lambda g: jax.jvp(g, (v, w, x), (v, w, x)),
        lambda g: jax.vmap(g, in_axes=(0, None, None))(jnp.stack([v, w]), w, x),
    ):
        assert_same(transform(jax.jit(f)), transform(fast))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("dfx_order")]
    text = jax.export.export(fast._jit, platforms=["cuda"], disabled_checks=disabled)(
        v, w, x
    ).mlir_module()
    assert "dfx_order" in text


@pytest.mark.parametrize(("choices", "inside"), [(4, True), (31, True), (32, False)])
def test_gates_wait_for_what_is_stored_anyway(
    choices: int, inside: bool, schedule: Any, assert_same: Any
) -> None:
    """XLA computes small reductions where they are read; a gate waits for what they reduce."""

    def f(v: Any, w: Any, x: Any) -> Any:
        with dfx.mark("router"):
            share = jax.nn.softmax(x @ v)
        with dfx.mark("expert"):
            y = jnp.tanh(x @ w)
        with dfx.mark("join"):
            return y * share[:, :1]

    v, w, x = (
        jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in [(8, choices), (8, 16), (16, 8)]
    )
    fast = schedule(jax.jit(f), OneLane(None), backend="xla")
    entry = fast._entry((v, w, x), {})[2]
    assert entry.gates and bool(entry.inside) == inside
    for region, values in entry.inside.items():
        made = [entry.pg.graph.ops[entry.pg.graph.values[value].producer] for value in values]
        assert entry.pg.regions[region].name == "router"
        assert [op.kind for op in made] == ["dot_general"]
    assert_same(jax.jit(f)(v, w, x), fast(v, w, x))
    for transform in (
        lambda g: jax.grad(lambda *a: g(*a).sum(), argnums=(0, 1, 2))(v, w, x),
        lambda g: jax.vmap(g, in_axes=(0, None, None))(jnp.stack([v, -v]), w, x),
    ):
        assert_same(transform(jax.jit(f)), transform(fast))
    disabled = [jax.export.DisabledSafetyCheck.custom_call("dfx_order")]
    exported = jax.export.export(fast._jit, platforms=["cuda"], disabled_checks=disabled)
    assert "dfx_order" in exported(v, w, x).mlir_module()


@jax.custom_vjp
def _doubled(x: Any) -> Any:
    return jnp.tanh(x)


_doubled.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * 2,))


def test_gates_do_not_wait_for_what_each_region_repeats(schedule: Any, assert_same: Any) -> None:
    def tangents(w: Any, x: Any) -> Any:
        def f(v: Any) -> Any:
            return jax.nn.softmax(jax.nn.silu(jax.nn.relu(x @ v) + jax.nn.relu6(x)))

        return jax.jvp(f, (w,), (jnp.cos(w),))

    fast = schedule(tangents, dfx.Branches())
    for a, b in zip(tangents(W, X), fast(W, X), strict=True):
        assert_same(a, b)


def test_products_that_wait_under_vmap_of_a_gradient(schedule: Any, assert_same: Any) -> None:
    """A split function with a rule of its own is made again from its plan's regions."""

    def f(v: Any, w: Any, x: Any) -> Any:
        with dfx.mark("left"):
            a = _doubled(x @ v).sum(1)
        with dfx.mark("right"):
            b = jnp.sin(x @ w).sum(1)
        return a * b

    v, w, x = (
        jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in [(4, 64), (4, 64), (128, 4)]
    )
    fast = schedule(jax.jit(f), OneLane(2), backend="xla", in_axes=(None, None, 0))
    assert any(gate.products for gate in fast._entry((v, w, x), {})[2].gates.values())

    def gradients(g: Any) -> Any:
        of_one = jax.grad(lambda *a: g(*a).sum(), argnums=(0, 1, 2))
        return jax.vmap(of_one, in_axes=(None, None, 0))(v, w, jnp.stack([x, x + 1]))

    assert_same(gradients(jax.jit(f)), gradients(fast))


def test_replacement(schedule: Any, assert_same: Any) -> None:
    class Swap(dfx.Strategy):
        def rules(self, graph: Any) -> Any:
            return [dfx.Op("sort")]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(
                        op, replace=(lambda x: -jnp.sort(-x)[::-1]) if "sort" in op.name else None
                    )

    f = lambda x: lax.sort(x) * 2 + x  # noqa: E731
    x = jnp.asarray([3.0, 1.0, 2.0])
    assert_same(jax.jit(f)(x), schedule(f, Swap(), backend="xla")(x))


# -- options ---------------------------------------------------------------------------------------


def test_options_of_the_plan_and_the_users(schedule: Any) -> None:
    fast = schedule(model, "xla", compiler_options={"xla_gpu_graph_min_graph_size": "3"})
    options = dfx.compiler_options(fast, W, X)
    assert options["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    assert options["xla_gpu_graph_min_graph_size"] == "3"  # the user's wins


def test_products_that_share_a_factor_are_kept_apart(schedule: Any) -> None:
    f = lambda x, y, w: (x @ w, y @ w)  # noqa: E731
    fast = schedule(f, "xla")
    assert dfx.compiler_options(fast, X, X, W)["xla_gpu_dot_merger_threshold_mb"] == "0"
    apart = schedule(lambda x, y: (x @ x.T, y @ y.T), "xla")
    assert "xla_gpu_dot_merger_threshold_mb" not in dfx.compiler_options(apart, X, X)


def test_unknown_jaxlib_is_said(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_options.jaxlib, "__version__", "0.99.0")
    fast = schedule(model, "xla")
    with pytest.warns(dfx.FallbackWarning, match="no XLA options are proved for jaxlib 0.99.0"):
        options = dfx.compiler_options(fast, W, X)
    assert options["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"


@pytest.mark.parametrize("others", [False, True])
def test_what_auto_chose_is_compiled_with_the_options_of_its_plan(
    others: bool, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """A call at top level, and ``lower``, as under a fixed strategy."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compiled: list[Any] = []
    real = jax.jit

    def jit(fn: Any = None, **options: Any) -> Any:
        def traced(*args: Any, **kwargs: Any) -> Any:
            compiled.append(options.get("compiler_options"))
            return fn(*args, **kwargs)

        return real(functools.wraps(fn)(traced), **options)

    fast = dfx.schedule(real(model), dfx.Auto(), backend="xla", lanes=2)
    child = fast.with_strategy(dfx.Branches(lanes=2))
    monkeypatch.setattr(jax, "jit", jit)
    if others:
        fast.decide(fast._signature((W, X[:2]), {}), auto.Choice(None, "slow"))
        assert_same(real(model)(W, X[:2]), fast(W, X[:2]))
    fast.decide(fast._signature((W, X), {}), auto.Choice(child, "fast"))
    options = dfx.compiler_options(fast, W, X)
    assert options["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    compiled.clear()
    for x in (X, X + 1, X - 1):
        assert_same(real(model)(W, x), fast(W, x))
    assert compiled == [options]
    for scheduled in (fast, dfx.schedule(real(model), dfx.Branches(), backend="xla", lanes=2)):
        compiled.clear()
        assert_same(real(model)(W, X), scheduled.lower(W, X).compile()(W, X))
        assert all(each == options for each in compiled), "what a call has compiled may be used"
        assert compiled or scheduled is fast


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [0, 65, True, "2"])
def test_bad_lanes(lanes: Any) -> None:
    with pytest.raises(dfx.PlanError, match="lanes must be an integer from 1 to 64"):
        dfx.schedule(model, backend="xla", lanes=lanes)


@pytest.mark.parametrize("target", ["h200", "nvidia-h300", 3, Path("/nowhere")])
def test_unknown_target(target: Any) -> None:
    with pytest.raises(dfx.PlanError, match=r"nvidia-b200, nvidia-h100, nvidia-h200"):
        dfx.schedule(model, target=target)


def test_target_needs_this_backend() -> None:
    with pytest.raises(dfx.PlanError, match="target='nvidia-h200' is for backend='xla'"):
        dfx.schedule(model, backend="ffi", target="nvidia-h200")


def test_compile_needs_this_backend(schedule: Any) -> None:
    with pytest.raises(dfx.UnsupportedError, match="compile is for backend='xla'"):
        dfx.compile(schedule(model), W, X)


def test_compile_needs_a_target(schedule: Any) -> None:
    with pytest.raises(dfx.PlanError, match="this machine has no GPU"):
        dfx.compile(schedule(model, "xla"), W, X)


def test_missing_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.jax.readback import deviceless

    monkeypatch.setattr(deviceless, "_PLUGINS", ("jax-no-such-plugin",))
    with pytest.raises(dfx.UnsupportedError, match=r"pip install 'dynaflow-xla\[cuda\]'"):
        dfx.compile(dfx.schedule(model, target="nvidia-h200"), W, X)


def test_profile_says_what_to_use(schedule: Any) -> None:
    with pytest.raises(dfx.UnsupportedError, match=r"jax\.profiler\.trace"):
        dfx.profile(schedule(model, "xla"), W, X)


@pytest.mark.parametrize("name", targets.names())
def test_target_texts_name_their_gpu(name: str) -> None:
    text = Path(targets.resolve(name)).read_text()
    assert f'name: "NVIDIA {name.split("-")[1].upper()}' in text


def test_explain(schedule: Any) -> None:
    text = dfx.explain(schedule(model, "xla"), W, X)
    assert "backend xla (cpu)" in text and "left" in text and "right" in text


def test_deep_explain_on_a_cpu(schedule: Any) -> None:
    """It tells what a CPU's program tells, and what it cannot."""
    text = dfx.explain(schedule(model, "xla"), W, X, deep=True)
    assert "compiled for this CPU" in text and "scheduled: fusions" in text and "peak" in text
    assert "no streams and no command buffers" in text and "target='nvidia-h200'" in text
    with pytest.raises(dfx.UnsupportedError, match="compile is for backend='xla'"):
        dfx.explain(schedule(model), W, X, deep=True)


def test_sharded_arguments_outside_shard_map(run_program: Any) -> None:
    run_program(
        """
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.sharding.Mesh(jax.devices(), ("d",))
        x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("d")))
        fast = spread(two_sorts, backend="xla")
        np.testing.assert_allclose(fast(x), jax.jit(two_sorts)(x), rtol=1e-5)
        """,
        devices=4,
    )


def test_collectives_of_nano_batches(run_program: Any) -> None:
    """A tensor-parallel layer under shard_map on 8 devices: values and gradients."""
    run_program(
        """
        from jax.sharding import Mesh, PartitionSpec as P

        def layer(x, up, down):
            with dfx.mark("up"):
                h = jax.nn.gelu(x @ up)
            with dfx.mark("down"):
                y = h @ down
            return x + jax.lax.psum(y, "tp")

        mesh = Mesh(np.array(jax.devices()), ("tp",))
        rng = np.random.default_rng(0)
        args = [jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in [(8, 32), (32, 64), (64, 32)]]
        specs = (P(), P(None, "tp"), P("tp", None))

        def spread_over(fn):
            return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))

        fast = dfx.schedule(layer, dfx.DualBatch(), backend="xla", in_axes=(0, None, None))
        f, g = spread_over(layer), spread_over(fast)
        assert g.lower(*args).as_text().count("all_reduce") == 2
        want, got = jax.block_until_ready(f(*args)), jax.block_until_ready(g(*args))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        for number in range(3):
            grads = [
                jax.block_until_ready(jax.jit(jax.grad(lambda *a: (h(*a) ** 2).sum(), number))(*args))
                for h in (f, g)
            ]
            np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-4)
        """,
        devices=8,
    )


def test_no_warning_on_cpu(schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(functools.partial(schedule(model, "xla"), W))(X)


def _recomputed(x: Any, ws: Any, prevent_cse: bool = True) -> Any:
    again = jax.checkpoint(lambda y, w: jnp.tanh(jnp.sin(y @ w) @ w), prevent_cse=prevent_cse)
    for n in range(3):
        x = again(x, ws[n])
    return (x**2).sum()


def _barriers(fn: Any, *args: Any) -> int:
    return str(jax.jit(fn).lower(*args).as_text()).count("stablehlo.optimization_barrier")


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_what_a_checkpoint_computes_again_is_not_merged_with_the_first_time(
    prevent_cse: bool,
) -> None:
    ws = jnp.asarray(RNG.standard_normal((3, 8, 8)), jnp.float32) / 3
    plain = jax.jit(jax.grad(functools.partial(_recomputed, prevent_cse=prevent_cse), 1))
    scheduled = dfx.schedule(plain, dfx.Branches(), backend="xla")
    assert _barriers(scheduled, X, ws) == _barriers(plain, X, ws)
    assert (_barriers(plain, X, ws) > 0) == prevent_cse
    np.testing.assert_allclose(scheduled(X, ws), plain(X, ws), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("strategy", [dfx.Branches(wide=False), dfx.Sequential(), dfx.NanoBatch(2)])
def test_recomputed_values_are_the_originals(strategy: Any, backend: str) -> None:
    ws = jnp.asarray(RNG.standard_normal((3, 8, 8)), jnp.float32) / 3
    plain = jax.jit(jax.grad(_recomputed, 1))
    axes = {}
    if isinstance(strategy, dfx.NanoBatch):
        axes = {"in_axes": (0, None), "out_axes": dfx.Sum()}
    fast = dfx.schedule(plain, strategy, backend=backend, lanes=2, **axes)
    assert "optimization_barrier" in {op.kind for op in dfx.graph(fast, X, ws).graph.ops}
    np.testing.assert_allclose(fast(X, ws), plain(X, ws), rtol=1e-5, atol=1e-6)
    if strategy == dfx.Sequential():
        return
    whole = dfx.schedule(jax.jit(_recomputed), strategy, backend=backend, lanes=2, **axes)
    np.testing.assert_allclose(jax.grad(whole, 1)(X, ws), plain(X, ws), rtol=1e-5, atol=1e-6)
