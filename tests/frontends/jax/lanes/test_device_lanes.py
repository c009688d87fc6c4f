"""Plans on device lanes: clients of a CPU plugin that speaks the PJRT C API stand in for a GPU's."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jaxlib import xla_client  # noqa: E402
from round_robin import RoundRobin  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import EngineError, UnsupportedError  # noqa: E402
from dynaflow_xla.ffi import _engine, device_lanes, xla  # noqa: E402
from dynaflow_xla.frontends.jax.lanes import device_stage  # noqa: E402

_plugin = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt") if (
    importlib.util.find_spec("xla_plugins")
) else None  # fmt: skip
pytestmark = [
    pytest.mark.skipif(_plugin is None, reason="needs the package xla-cpu-pjrt"),
    pytest.mark.usefixtures("quick_to_compile"),
]

_clients: list[Any] = []


def _make_lanes(how: str) -> device_lanes.DeviceLanes:
    folder = Path(next(iter(_plugin.submodule_search_locations)))
    library = folder / "xla_cpu_pjrt.so"
    jax.devices()
    if not xla_client.pjrt_plugin_loaded("dfx_cpu_pjrt"):
        xla_client.load_pjrt_plugin_dynamically("dfx_cpu_pjrt", str(library))
        xla_client.initialize_pjrt_plugin("dfx_cpu_pjrt")
    api = device_lanes.plugin_api(library) if how == "c-api" else 0
    made = device_lanes.DeviceLanes(
        "cpu", lambda: xla_client.make_c_api_client("dfx_cpu_pjrt", {}), api, 64
    )
    made.clients = _clients  # one process, few clients
    return made


@pytest.fixture(params=["c-api", "python"])
def lanes(request: pytest.FixtureRequest) -> Iterator[device_lanes.DeviceLanes]:
    made = _make_lanes(request.param)
    with device_stage.use_lanes(made):
        yield made


def branches(x: Any, y: Any) -> Any:
    a = jnp.sin(x) @ y
    b = jnp.cos(y) @ x
    c = jnp.tanh(a) + b
    return c, {"sum": a + b, "ints": (x * 10).astype(jnp.int32)}


def _close(want: Any, got: Any) -> None:
    jax.tree_util.tree_map(
        lambda w, g: np.testing.assert_allclose(
            np.asarray(w, np.float64), np.asarray(g, np.float64), rtol=2e-5, atol=2e-5
        ),
        want,
        got,
    )


def _stages(fast: Any, *args: Any) -> list[Any]:
    return [s for s, _ in fast.planned(args, {}).compiled if s is not None]


@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.Branches(), dfx.Sequential()], ids=repr)
def test_values_are_the_originals(lanes: Any, strategy: Any) -> None:
    fast = dfx.schedule(branches, strategy=strategy, lanes=2)
    for seed in range(3):
        x, y = np.random.default_rng(seed).standard_normal((2, 32, 32)).astype(np.float32)
        _close(branches(x, y), fast(x, y))
    stages = _stages(fast, x, y)
    assert stages and all(s.counters for s in stages)
    assert all(c.executions > 0 for s in stages for c in s.counters)
    text = dfx.explain(fast, x, y)
    assert ("from Python" in text) == bool(lanes.problem)
    assert "compiled programs" in text


def test_outputs_are_written_in_place_through_the_c_api() -> None:
    with device_stage.use_lanes(_make_lanes("c-api")):
        fast = dfx.schedule(branches, strategy=RoundRobin(), lanes=2)
        x, y = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
        for _ in range(5):
            jax.block_until_ready(fast(x, y))
        counters = [c for s in _stages(fast, x, y) for c in s.counters]
    assert sum(c.executions for c in counters) > 0
    assert sum(c.copied_outputs for c in counters) == 0


def test_inside_jit_and_grad(lanes: Any) -> None:
    fast = dfx.schedule(
        lambda x, y: jnp.sum(jnp.sin(x) @ y) + jnp.sum(x * y), RoundRobin(), lanes=2
    )
    x, y = np.random.default_rng(1).standard_normal((2, 16, 16)).astype(np.float32)
    _close(fast.original(x, y), jax.jit(lambda a, b: fast(a, b))(x, y))
    _close(jax.grad(fast.original, (0, 1))(x, y), jax.grad(fast, (0, 1))(x, y))


def test_dtypes_constants_and_keys_cross_lanes(lanes: Any) -> None:
    table = np.arange(64, dtype=np.float32)

    def f(x: Any, key: Any) -> Any:
        half = x.astype(jnp.bfloat16) * 2
        mask = x > 0
        noise = jax.random.normal(jax.random.fold_in(key, 3), x.shape)
        wide = jnp.where(mask, half.astype(jnp.float32), -x) + table
        return wide + noise, mask, (x * 1j), half

    fast = dfx.schedule(f, strategy=RoundRobin(), lanes=2)
    x = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    key = jax.random.key(7)
    want, got = f(x, key), fast(x, key)
    for w, g in zip(want, got, strict=True):
        assert w.dtype == g.dtype
        np.testing.assert_allclose(
            np.asarray(w, np.complex128), np.asarray(g, np.complex128), rtol=2e-2
        )


def test_nano_batches_share_one_compile_between_lanes() -> None:
    def f(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w

    with device_stage.use_lanes(_make_lanes("c-api")):
        fast = dfx.schedule(f, strategy=dfx.NanoBatch(2), in_axes=(None, 0), lanes=2)
        w = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
        x = np.random.default_rng(4).standard_normal((64, 32)).astype(np.float32)
        _close(f(w, x), fast(w, x))
        notes = [s.note for s in _stages(fast, w, x)]
    assert any("2 steps of 1 compiled programs" in note for note in notes), notes


def test_many_threads(lanes: Any) -> None:
    fast = dfx.schedule(branches, strategy=RoundRobin(), lanes=2)
    x, y = np.random.default_rng(5).standard_normal((2, 16, 16)).astype(np.float32)
    want = jax.block_until_ready(branches(x, y))
    jax.block_until_ready(fast(x, y))
    wrong: list[str] = []

    def call() -> None:
        try:
            for _ in range(100):
                _close(want, fast(x, y))
        except Exception as error:  # shown by the assertion below
            wrong.append(repr(error))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_profile_says_what_to_use_instead(lanes: Any) -> None:
    fast = dfx.schedule(branches, strategy=dfx.Sequential(), lanes=1)
    x = np.ones((8, 8), np.float32)
    with pytest.raises(UnsupportedError, match="Nsight"):
        dfx.profile(fast, x, x)


def test_a_lane_that_cannot_be_made_is_an_error_with_a_way_out() -> None:
    def refuse() -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    broken = device_lanes.DeviceLanes("cuda", refuse, 0, 256)
    with pytest.raises(EngineError, match="cannot make lane 0 on cuda.*RESOURCE_EXHAUSTED.*fewer"):
        broken.client(0)
    with device_stage.use_lanes(broken):
        fast = dfx.schedule(branches, strategy=dfx.Sequential(), lanes=1)
        with pytest.raises(EngineError, match="cannot make lane"):
            fast(np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))


@pytest.mark.skipif(not _engine.cuda_problem(), reason="this machine has a CUDA device")
def test_without_cuda_the_reason_is_told() -> None:
    with pytest.raises(EngineError, match="no CUDA lanes: .*CUDA driver"):
        device_lanes.cuda_lanes(jax.devices()[0])


@pytest.mark.parametrize(
    ("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_enqueueing_that_nothing_orders_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, refused: bool
) -> None:
    monkeypatch.setenv("PJRT_GPU_ENABLE_ASYNC_DISPATCH", value)
    monkeypatch.setattr(device_lanes, "_engine", SimpleNamespace(cuda_problem=lambda: ""))
    monkeypatch.setattr(device_lanes, "_cuda_api", lambda: 0)
    device = SimpleNamespace(local_hardware_id=0)
    if refused:
        with pytest.raises(
            EngineError, match="no CUDA lanes: PJRT_GPU_ENABLE_ASYNC_DISPATCH .*unset"
        ):
            device_lanes.CudaLanes(device)
    else:
        device_lanes.CudaLanes(device)


def test_an_unknown_dtype_is_refused() -> None:
    from dynaflow_xla.ffi import device_steps

    with pytest.raises(UnsupportedError, match="int4"):
        device_steps.tensor(jax.ShapeDtypeStruct((2,), jnp.int4))


def test_lanes_on_a_gpu_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = np.ones((4, 4), np.float32)
    by_default = dfx.schedule(branches, strategy=RoundRobin())
    assert "backend='auto' is 'xla' here: JAX computes on a GPU" in dfx.explain(by_default, x, x)
    asked = dfx.schedule(branches, strategy=RoundRobin(), backend="ffi")
    if _engine.cuda_problem():
        with pytest.raises(EngineError, match="no CUDA lanes"):
            asked(x, x)


def test_threads_that_come_together_make_one_client_a_lane() -> None:
    made: list[int] = []
    start = threading.Barrier(4)

    def make_client() -> Any:
        number = len(made)
        time.sleep(0.02)  # the others are let in here
        made.append(number)
        return f"client {number}"

    lanes = device_lanes.DeviceLanes("cpu", make_client, 0, 64)
    got: list[list[Any]] = []

    def ask() -> None:
        start.wait()
        got.append([lanes.client(lane) for lane in range(3)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [0, 1, 2]
    assert got == [["client 0", "client 1", "client 2"]] * 4


class _Owner:
    """Says which thread let go of it."""

    def __init__(self, where: list[int]) -> None:
        self.where = where

    def __del__(self) -> None:
        self.where.append(threading.get_ident())


def test_what_a_program_owns_is_dropped_by_the_main_thread_whoever_drops_the_program() -> None:
    """The thread that drops it may be XLA's, and one that has the interpreter lock may wait for that."""
    from dynaflow_xla.ffi import _compat

    lanes = _make_lanes("c-api")
    if lanes.problem:
        pytest.skip(lanes.problem)
    client = lanes.client(0)
    x = jax.ShapeDtypeStruct((4,), np.float32, sharding=jax.sharding.SingleDeviceSharding(
        lanes.device(0)))  # fmt: skip
    executable = jax.jit(jnp.sin).lower(x).compile().runtime_executable()
    where: list[int] = []
    kept = [_engine.Program(1, 0, 1, 1, 0, "p")]
    buffers = [kept[0].add_buffer("arg", 0, 0, 16), kept[0].add_buffer("result", 0, 0, 16)]
    _engine.add_pjrt_launch(
        kept[0], 0, "s", lanes.api, _compat.client_pointer(client),
        _compat.executable_pointer(executable), (_Owner(where), client, executable), [], [],
        [(11, [4])], [(11, [4])], [False], buffers[:1], buffers[1:],
    )  # fmt: skip

    def drop() -> None:
        kept.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    _engine.release_pending()  # at the latest
    assert where == [threading.get_ident()]


def test_explain_says_where_the_lanes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((4, 4), np.float32)
    fast = dfx.schedule(branches, strategy=RoundRobin(), lanes=2, backend="ffi")
    assert "backend ffi (cpu)" in dfx.explain(fast, x, x)
    with device_stage.use_lanes(_make_lanes("c-api")):
        assert "backend ffi (device lanes on cpu)" in dfx.explain(fast, x, x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "backend ffi (cuda)" in dfx.explain(fast, x, x)


class _LanesOfThisCpu(device_lanes.CudaLanes):
    """CUDA lanes whose clients are this CPU's, and whose driver tells a number as a stream."""

    def __init__(self) -> None:
        device_lanes.DeviceLanes.__init__(self, "cuda", lane_client, 0, 256)
        self._streams: list[int] = []


def lane_client() -> Any:
    return xla_client.make_cpu_client(asynchronous=False)


def test_streams_of_lanes_are_found_while_a_program_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes are asked for when a plan is first lowered, which is inside somebody's trace."""
    xla.ensure_registered()
    streams = iter([0, 0x100, 0, 0x200, 0, 0x300, 0, 0x400, 0, 0x500])
    # A custom call of the CPU that hands its argument on takes the place of the one that sees a stream.
    monkeypatch.setattr(device_lanes, "STREAM_TARGET", xla.FAIL_TARGET)
    monkeypatch.setattr(device_lanes._engine, "take_lane_stream", lambda: next(streams))
    lanes, found = _LanesOfThisCpu(), list[int]()

    def f(x: Any) -> Any:
        found.append(lanes._find_stream(0))
        return jnp.sin(x).sum()

    x = jnp.ones(4)
    jax.jit(f)(x)
    jax.grad(f)(x)
    jax.vmap(f)(x[None])
    jax.lax.scan(lambda c, v: (c, f(v)), 0, x[None])
    jax.eval_shape(lambda v: f(v) + 1, x)
    assert found == [0x100, 0x200, 0x300, 0x400, 0x500]


@pytest.mark.parametrize("axis", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_lanes_are_of_no_mesh_of_the_caller(lanes: Any, axis: Any) -> None:
    """A mesh that is set names JAX's own devices, and the clients of lanes have others."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(axis,))
    x, y = np.random.default_rng(8).standard_normal((2, 8, 8)).astype(np.float32)
    want = branches(x, y)
    fast = dfx.schedule(branches, RoundRobin(), lanes=2)
    inside = dfx.schedule(branches, RoundRobin(), lanes=2)
    with jax.set_mesh(mesh):
        _close(want, fast(x, y))
        _close(want, jax.jit(lambda a, b: inside(a, b))(x, y))
        assert _stages(fast, x, y) and _stages(inside, x, y)


def test_streams_of_lanes_are_found_while_a_mesh_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    xla.ensure_registered()
    streams = iter([0, 0x100, 0, 0x200])
    monkeypatch.setattr(device_lanes, "STREAM_TARGET", xla.FAIL_TARGET)
    monkeypatch.setattr(device_lanes._engine, "take_lane_stream", lambda: next(streams))
    lanes, found = _LanesOfThisCpu(), list[int]()

    def f(x: Any) -> Any:
        found.append(lanes._find_stream(0))
        return jnp.sin(x)

    with jax.set_mesh(jax.make_mesh((1,), ("rows",))):
        f(1.0)
        jax.jit(f)(jnp.ones(4))
    assert found == [0x100, 0x200]


def test_lanes_are_of_the_default_gpu_however_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [first, second])
    assert device_stage.default_gpu() is first
    for chosen in ("cpu", "gpu", jax.devices("cpu")[0]):
        monkeypatch.setattr(device_stage.jax, "config", SimpleNamespace(jax_default_device=chosen))
        assert device_stage.default_gpu() is first
    monkeypatch.setattr(device_stage.jax, "config", SimpleNamespace(jax_default_device=second))
    assert device_stage.default_gpu() is second
