"""The driver under XLA's own calls: conditional nodes, contexts, what it lacks and what it forbids."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import build  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, assert_close, matrix, scheduled, wanted

import dynaflow_xla as dfx

GRAPHS = {"xla_gpu_graph_min_graph_size": 1}


def branch(which: Any, x: Any) -> Any:
    options = [lambda a: jnp.sin(a) * 2, lambda a: jnp.cos(a @ a), lambda a: a - 1]
    return jax.lax.switch(which, options, x + 1) * 3


def flag(which: Any, x: Any) -> Any:
    return jax.lax.cond(which > 1, lambda a: jnp.tanh(a @ a), lambda a: a * a, x * 2) + 1


def until(count: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda i, c: jnp.sin(c) + i, x * 2)


@pytest.mark.values
@pytest.mark.parametrize("mode", ["LHS", "CONCURRENT"])
@pytest.mark.parametrize("fn", [branch, flag, until])
def test_conditional_nodes(fn: Any, mode: str, driver: Any, values: Any) -> None:
    """Recorded once, replayed with each answer."""
    options = {
        **GRAPHS,
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CONDITIONAL,WHILE",
        "xla_gpu_command_buffer_scheduling_mode": mode,
    }
    spec = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    run = jax.jit(fn).lower(*spec).compile(compiler_options=options)
    driver.delay(100)
    seen = 0
    for which in (0, 1, 2, 1, 2, 0):
        x = matrix(which, 16)
        given = jax.block_until_ready(jax.device_put((np.int32(which), x)))
        with driver.tracing(values.kernel) as traces:
            got = jax.block_until_ready(run(*given))
        assert_close(wanted(fn, np.int32(which), x), got)
        seen += any(o.kind == "conditional" for o in traces[0].operations)
    assert seen == 6, "no conditional node was launched"


def _well(a: Any) -> Any:
    """A matrix that can be divided by."""
    return a + 6 * jnp.eye(a.shape[-1])


HALF = jnp.bfloat16
PRODUCTS: dict[str, tuple[str, Any]] = {
    "plain": ("cublasLtMatmul", lambda a, b: a @ b.T),
    "batches": ("cublasLtMatmul", lambda a, b: jnp.einsum("bij,kj->bik", jnp.stack([a, b]), b)),
    "narrow": ("cublasLtMatmul", lambda a, b: a.astype(HALF) @ b.astype(HALF)),
    "complex": ("cublasLtMatmul", lambda a, b: jnp.abs((a + 1j * b) @ (a - 2j * b).conj().T)),
    "epilogue": ("cublasLtMatmul", lambda a, b: jax.nn.gelu(a @ b + b[0])),
    "triangle": (
        "cublasStrsm_v2",
        lambda a, b: jax.scipy.linalg.solve_triangular(jnp.tril(_well(a)), b, lower=True),
    ),
    "transposed_triangles": (
        "cublasStrsmBatched",
        lambda a, b: jax.lax.linalg.triangular_solve(
            jnp.triu(_well(jnp.stack([a, a.T]))), jnp.stack([b, -b]), transpose_a=True
        ),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_libraries(name: str, driver: Any, values: Any) -> None:
    """Computed from cuBLAS's own descriptions; the trace knows what they read and write."""
    function, fn = PRODUCTS[name]
    a, b = matrix(1, 24), matrix(2, 24)
    options = {"xla_gpu_enable_triton_gemm": False}
    run = jax.jit(fn).lower(*jax.device_put((a, b))).compile(compiler_options=options)
    given = jax.block_until_ready(jax.device_put((a, b)))
    with driver.tracing(values.kernel) as traces:
        got = jax.block_until_ready(run(*given))
    assert not traces[0].races()
    made = [k for k in traces[0].kernels() if k.name == function]
    assert made and made[0].accesses
    want = np.asarray(wanted(fn, a, b), np.float32)
    tolerance = 0.05 if name == "narrow" else 1e-4
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance)


@pytest.mark.values
def test_branches_beside_a_conditional(driver: Any) -> None:
    """A plan in one XLA program, one of whose regions chooses."""

    def fn(x: Any) -> Any:
        with dfx.mark("left"):
            a = jnp.tanh(x @ x)
        with dfx.mark("right"):
            b = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        with dfx.mark("join"):
            return a + b

    fast = dfx.schedule(fn, dfx.Branches(), backend="xla", lanes=dfx.Lanes(2))
    driver.delay(100)
    for seed in range(4):
        x = matrix(seed) * (-1) ** seed
        assert_close(wanted(fn, x), fast(x))


def _everything_on_this_thread() -> list[Any]:
    """XLA's kernels that come in a plugin's binary are launched through the CUDA runtime."""
    x = jax.device_put(matrix(3))
    return [
        jnp.tanh(x @ x),
        x + 1,
        jnp.cumsum(x, 0),
        jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    ]


def _current() -> int | None:
    found = ctypes.c_void_p()
    library = ctypes.CDLL(os.environ["DYNAFLOW_XLA_STANDIN"])
    assert library.cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value


@pytest.mark.parametrize("first", ["engine", "xla"])
def test_a_thread_has_the_context_that_it_had(first: str) -> None:
    """Whoever is called first on a thread, the other finds what it needs afterwards."""
    fast = scheduled(CASES["branches"], "ffi")
    jax.block_until_ready(fast(matrix(0)))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for who in (first, "engine", "xla", "engine", "xla"):
                before = _current()
                if who == "engine":
                    assert_close(wanted(CASES["branches"].fn, matrix(1)), fast(matrix(1)))
                else:
                    with jax.default_device(jax.devices()[0]):
                        got = _everything_on_this_thread()
                    with jax.default_device(jax.devices("cpu")[0]):
                        want = _everything_on_this_thread()
                    assert_close(want, got)
                assert before is None or _current() == before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


# -- what the driver lacks and what it forbids ------------------------------------------------------

LACKING = """
import ctypes, os

def test_it(driver):
    library, found = ctypes.CDLL(os.environ["DYNAFLOW_XLA_STANDIN"]), ctypes.c_void_p()
    status = library.cuGetProcAddress_v2(b"cuOfTheFuture", ctypes.byref(found), 14000, 0, None)
    assert status == 500 and not found.value

def test_another(driver):
    assert driver.missing() == []
"""


def test_a_function_that_the_driver_lacks_fails_the_test_by_its_name(tmp_path: Path) -> None:
    """That test alone, and nothing crashes."""
    (tmp_path / "test_lacking.py").write_text(LACKING)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "standin_plugin", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "2 passed, 1 error" in said, said
    assert "functions that the stand-in driver lacks: ['cuOfTheFuture']" in said, said


def test_every_stub_says_its_name() -> None:
    """Of each library, a function that the plugin can look up and nobody wrote."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1])[sys.argv[2]]())"
    folder = Path(os.environ["DYNAFLOW_XLA_STANDIN"]).parent
    for library, name, status in (
        ("libcuda.so.1", "cuMulticastCreate", 801),
        ("libcudnn.so.9", "cudnnGetStream", 3000),
    ):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, str(folder / library), name],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == str(status), (name, done.stdout, done.stderr)
        assert f"the stand-in driver has no {name}" in done.stderr


@pytest.mark.parametrize("lacks", ["compiler", "headers", "plugin", "libdevice"])
def test_what_the_machine_lacks_is_the_reason(lacks: str, monkeypatch: Any, tmp_path: Path) -> None:
    if lacks == "compiler":
        monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
        monkeypatch.setenv("PATH", str(tmp_path))
    elif lacks == "plugin":
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(build, "_toolkits", lambda: iter([tmp_path]))
    with pytest.raises(build.Unavailable, match="no |not installed"):
        getattr(build, lacks)()


def test_a_python_without_any_plugin_of_jax_gets_the_reason() -> None:
    script = Path(build.__file__)
    for words in (["--check"], ["-c", "print('ran')"]):
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(script), *words], capture_output=True, text=True, timeout=120,
            env={**os.environ, "STANDIN_BUILD": str(Path(os.environ["DYNAFLOW_XLA_STANDIN"]).parents[2])},
        )  # fmt: skip
        assert "JAX's CUDA plugin is not installed: pip install" in done.stdout, done.stderr
        assert not done.stderr and "ran" not in done.stdout


def test_misuse_is_told(driver: Any) -> None:
    """A call from a host function, and memory that is freed twice, as a real driver would not forgive."""
    library = driver.functions
    library.fake_stream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.fake_stream())
    address = ctypes.c_uint64()
    context = ctypes.c_void_p()
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert library.cuCtxPushCurrent_v2(context) == 0
    assert library.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(64), stream) == 0
    assert library.cuMemFreeAsync(address, stream) == 0
    assert library.cuStreamSynchronize(stream) == 0
    assert library.cuMemFreeAsync(address, stream) == 400
    assert driver.misuse() == "memory freed twice"
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: library.cuStreamQuery(stream))
    assert library.cuLaunchHostFunc(stream, function, None) == 0
    assert library.cuStreamSynchronize(stream) == 0
    assert driver.misuse() == "cuStreamQuery called by a host function"
    assert library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
