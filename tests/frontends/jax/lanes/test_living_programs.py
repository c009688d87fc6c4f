"""Programs known by content hash: equal ones are shared, living ones are never lost, others differ."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jaxlib import xla_client  # noqa: E402
from round_robin import RoundRobin  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.ffi import _engine, device_lanes, programs  # noqa: E402
from dynaflow_xla.frontends.jax.capture import costs  # noqa: E402
from dynaflow_xla.frontends.jax.lanes import device_stage  # noqa: E402

_plugin = (
    importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    if importlib.util.find_spec("xla_plugins")
    else None
)


def two_ways(x: Any) -> Any:
    return jnp.tanh(x) @ x + jnp.cos(-x) @ x.T


def _given(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((24, 24)).astype(np.float32)


def _schedule(**options: Any) -> Any:
    return dfx.schedule(two_ways, RoundRobin(), lanes=2, **options)


def _hashes(fast: Any, *args: Any) -> list[str]:
    return [s.hash for s, _ in fast.planned(args, {}).stages if s is not None]


def _device_lanes(alignment: int = 64) -> Any:
    folder = Path(next(iter(_plugin.submodule_search_locations)))
    jax.devices()
    if not xla_client.pjrt_plugin_loaded("dfx_cpu_pjrt"):
        xla_client.load_pjrt_plugin_dynamically("dfx_cpu_pjrt", str(folder / "xla_cpu_pjrt.so"))
        xla_client.initialize_pjrt_plugin("dfx_cpu_pjrt")
    api = device_lanes.plugin_api(folder / "xla_cpu_pjrt.so")

    def make_client() -> Any:
        return xla_client.make_c_api_client("dfx_cpu_pjrt", {})

    return device_lanes.DeviceLanes("cpu", make_client, api, alignment)


@pytest.fixture(params=["cpu", "device"])
def lanes(request: pytest.FixtureRequest) -> Any:
    if request.param == "device" and _plugin is None:
        pytest.skip("needs the package xla-cpu-pjrt")
    with device_stage.use_lanes(_device_lanes() if request.param == "device" else None):
        yield request.param


@pytest.mark.parametrize("dropped", [0, 1], ids=["first", "second"])
def test_one_of_two_equal_schedules_is_dropped(lanes: str, dropped: int) -> None:
    made = [_schedule(), _schedule()]
    x = _given(0)
    for fast in made:
        np.testing.assert_allclose(fast(x), two_ways(x), rtol=1e-4, atol=1e-4)
    assert _hashes(made[0], x) == _hashes(made[1], x)
    del fast
    del made[dropped]
    gc.collect()
    kept = made[0]
    for seed in range(1, 3):  # lowered and instantiated anew, with the hash of both
        x = _given(seed)
        again = jax.jit(lambda y: kept(y) * 2)(x)
        np.testing.assert_allclose(again, two_ways(x) * 2, rtol=1e-4, atol=1e-4)


def test_equal_schedules_share_what_was_compiled(lanes: str) -> None:
    first, second = _schedule(), _schedule()
    x = _given(3)
    compiled = [s.program for s, _ in first.planned((x,), {}).stages if s is not None]
    again = [s.program for s, _ in second.planned((x,), {}).stages if s is not None]
    assert compiled and all(a is b for a, b in zip(compiled, again, strict=True))


def test_what_nobody_owns_is_forgotten(lanes: str) -> None:
    first, second = _schedule(), _schedule()
    x = _given(4)
    (name,) = set(_hashes(first, x) + _hashes(second, x))
    del first
    gc.collect()
    assert _engine.is_registered(name) and programs.living(name) is not None
    del second
    gc.collect()
    _engine.release_pending()
    assert not _engine.is_registered(name) and programs.living(name) is None


def test_an_executable_keeps_its_program_beside_a_new_one() -> None:
    """The older of two equal programs lives in a compiled function alone; the newer one goes."""
    first, x = _schedule(), _given(5)
    (name,) = _hashes(first, x)
    compiled = jax.jit(first).lower(x).compile()
    del first
    gc.collect()
    second = _schedule()
    assert _hashes(second, x) == [name]
    del second
    gc.collect()
    assert _engine.is_registered(name)
    np.testing.assert_allclose(compiled(x), two_ways(x), rtol=1e-4, atol=1e-4)


def test_the_engine_keeps_every_living_program_of_a_hash() -> None:
    def program() -> Any:
        made = _engine.Program(1, 0, 0, 0, 0, "p")
        made.finish()
        made.register("test_living_programs")
        return made

    first, second = program(), program()
    second.register("test_living_programs")  # twice the same one counts once
    del second
    assert _engine.is_registered("test_living_programs")
    del first
    assert not _engine.is_registered("test_living_programs")


def test_what_changes_the_program_changes_the_hash() -> None:
    x = _given(6)
    variants = [
        _schedule(),
        _schedule(compiler_options={"xla_cpu_enable_fast_math": True}),
        _schedule(compiler_options={"xla_cpu_enable_fast_math": False}),
        dfx.schedule(
            jax.jit(two_ways, compiler_options={"xla_cpu_enable_fast_min_max": False}),
            RoundRobin(),
            lanes=2,
        ),
    ]
    names = [name for fast in variants for name in _hashes(fast, x)]
    assert len(names) == len(set(names)) == len(variants)
    same = _schedule(compiler_options={"xla_cpu_enable_fast_math": True})
    assert _hashes(same, x) == [names[1]]


def test_settings_of_jax_that_change_what_is_compiled_change_the_hash() -> None:
    x = _given(6)
    plain = _schedule()
    (name,) = _hashes(plain, x)
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        assert _hashes(_schedule(), x) != [name]
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.skipif(_plugin is None, reason="needs the package xla-cpu-pjrt")
def test_lanes_settings_and_options_change_the_hash_on_devices() -> None:
    x = _given(7)
    names = []
    for lanes in (None, _device_lanes(), _device_lanes(alignment=128)):
        with device_stage.use_lanes(lanes):
            names += _hashes(_schedule(), x)
            names += _hashes(_schedule(compiler_options={"xla_cpu_enable_fast_math": True}), x)
    assert len(set(names)) == 6


def test_many_threads_make_the_same_program() -> None:
    x = _given(8)
    want = two_ways(x)
    wrong: list[str] = []

    def call() -> None:
        try:
            for _ in range(2):
                np.testing.assert_allclose(_schedule()(x), want, rtol=1e-4, atol=1e-4)
        except Exception as error:  # shown by the assertion below
            wrong.append(repr(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("strategy", [dfx.Sequential(wide=False), RoundRobin()])
def test_functions_that_call_back_share_no_program(
    strategy: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lowered program holds the number of what it calls back, which is the same in both."""
    buffers = pytest.importorskip("jax.experimental.buffer_callback")
    if not known:  # as a callback of a later JAX
        monkeypatch.setattr(costs, "CALLBACKS", costs.CALLBACKS - {"buffer_callback"})

    def scaled(scale: float) -> Any:
        def write(_: Any, out: Any, x: Any) -> None:
            np.asarray(out)[...] = np.asarray(x) * scale

        def called_back(x: Any) -> Any:
            y = buffers.buffer_callback(write, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
            return jnp.sort(y), jnp.sort(x) + 1

        return dfx.schedule(jax.jit(called_back), strategy, lanes=2)

    x = jnp.arange(8.0)
    two, five = scaled(2.0), scaled(5.0)
    for fast, scale in ((two, 2.0), (five, 5.0), (two, 2.0)):
        np.testing.assert_array_equal(fast(x)[0], scale * np.arange(8.0))
    assert ("calls back into Python" in dfx.explain(two, x)) == known


def test_a_thread_that_outlives_the_main_one_compiles() -> None:
    """Pools of Python's take no work by then; ``jax.jit`` compiles."""
    program = """
import threading, time
import jax, jax.numpy as jnp
import dynaflow_xla as dfx
f = dfx.schedule(jax.jit(lambda x: jnp.sort(x) + jnp.sort(-x)), dfx.Branches(wide=False, margin=-1.0))
def work():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("made", f(jnp.arange(3000.0))[:2])
threading.Thread(target=work).start()
"""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "made [-2999. -2997.]" in done.stdout, done.stdout + done.stderr
