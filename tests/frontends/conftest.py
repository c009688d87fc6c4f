"""What the frontend tests share: strategies, an equality check, a subprocess with a hard limit."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import cheap  # noqa: E402
import numpy as np  # noqa: E402
from round_robin import RoundRobin  # noqa: E402
from watched import JAX, ended, told, watched  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402

# The engine is part of the package: a package without it is a broken installation, not a skip.
if not os.environ.get(
    "DYNAFLOW_XLA_STANDIN"
):  # where a stand-in driver is the device that is tested
    jax.config.update("jax_platforms", "cpu")

LANES = min(2, len(os.sched_getaffinity(0)))

# (relative, absolute) to the largest element: a cut changes fusion, hence rounding.
TOLERANCES = {"bfloat16": 4e-2, "float16": 4e-3, "float64": 1e-12, "complex128": 1e-12}
DEFAULT_TOLERANCE = 4e-5


STRATEGIES = {
    "sequential": dfx.Sequential,
    "branches": dfx.Branches,
    "round_robin": RoundRobin,
    "xla": RoundRobin,  # the same plan as one XLA program
}


def _schedule(fn: Any, strategy: str = "round_robin", **options: Any) -> Any:
    made = STRATEGIES[strategy]() if isinstance(strategy, str) else strategy
    if strategy == "xla":
        options = {"backend": "xla", **options}
    return dfx.schedule(fn, made, lanes=LANES, **options)


def _comparable(x: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _assert_same(want: Any, got: Any) -> None:
    """Same tree, types and weak types; same values within rounding; same NaN, infinities, ints."""
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    assert want_tree == got_tree
    for (path, w), (_, g) in zip(want_leaves, got_leaves, strict=True):
        where = "result" + jax.tree_util.keystr(path)
        if not hasattr(w, "dtype"):
            assert type(w) is type(g) and w == g, where
            continue
        assert w.dtype == g.dtype and w.shape == g.shape, f"{where}: {w.dtype} {g.dtype}"
        assert getattr(w, "weak_type", False) == getattr(g, "weak_type", False), where
        a, b = _comparable(w), _comparable(g)
        if a.dtype.kind in "biuSU" or str(a.dtype).startswith(("int", "uint")):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        tolerance = TOLERANCES.get(str(a.dtype), DEFAULT_TOLERANCE)
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
        np.testing.assert_allclose(
            b, a, rtol=tolerance, atol=tolerance * scale, equal_nan=True, err_msg=where
        )


_TWO_SORTS = """
def two_sorts(x):
    return jnp.sort(x) @ x.T + jnp.sort(-x, axis=0) @ x.T
"""


def _run_program(code: str, *, limit_s: int = 360, devices: int = 1) -> str:
    """Runs a program in a fresh interpreter; fails the test if it hangs, crashes or exits non-zero.

    Returns:
        Its standard output.
    """
    flags = cheap.flags()
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    source = watched(limit_s) + JAX + _TWO_SORTS + textwrap.dedent(code)
    done = ended(source, limit_s=limit_s, XLA_FLAGS=flags)
    assert done.returncode == 0, told(done)
    return str(done.stdout)


def _quick_to_compile() -> Iterator[None]:
    """Values are what is tested, not the compiler's optimisations, which take most of the time."""
    from jax._src import compiler

    made, few = compiler.get_compile_options, cheap.options()

    def get_compile_options(*args: Any, **options: Any) -> Any:
        given = options.pop("env_options_overrides", None) or {}
        return made(*args, env_options_overrides={**few, **given}, **options)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", get_compile_options)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


quick_to_compile = pytest.fixture(_quick_to_compile, scope="module", name="quick_to_compile")
one_quick_to_compile = pytest.fixture(_quick_to_compile, name="one_quick_to_compile")
"""For single tests of a module."""


@pytest.fixture
def assumed_numbers() -> Iterator[None]:
    """Plans by the numbers that are assumed, not by those of this machine."""
    machine.use(machine.ASSUMED)
    yield
    machine.use(None)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch, assumed_numbers: None) -> None:
    """The same for two cores, whatever there are."""
    monkeypatch.setattr(machine, "cores", lambda: 2)


@pytest.fixture(scope="session")
def schedule() -> Any:
    """schedule(fn, "round_robin" | "branches" | ... | strategy, **options) on two lanes."""
    return _schedule


@pytest.fixture(scope="session")
def assert_same() -> Any:
    return _assert_same


@pytest.fixture(scope="session")
def run_program() -> Any:
    return _run_program


@pytest.fixture(scope="session")
def lanes() -> int:
    return LANES


@pytest.fixture(params=sorted(STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)
