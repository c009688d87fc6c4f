"""Programs that leave the process, and rules given one by one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import export  # noqa: E402
from jax.experimental import serialize_executable  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402


def fn(x: Any) -> Any:
    return jnp.sort(x) * 2 + jnp.sin(x)


@pytest.mark.parametrize("jitted", [False, True])
def test_exported_programs_hold_the_original(jitted: bool) -> None:
    fast = dfx.schedule(jax.jit(fn), "branches")
    x = jnp.arange(8.0)[::-1]
    with pytest.warns(dfx.FallbackWarning, match=r"fast\.original"):
        made = export.export(jax.jit(fast) if jitted else fast)(x)
    assert "dfx_run" not in made.mlir_module()
    again = export.deserialize(made.serialize())
    np.testing.assert_allclose(again.call(x), fn(x), rtol=1e-6)


def test_symbolic_sizes() -> None:
    fast = dfx.schedule(jax.jit(fn), "branches")
    spec = jax.ShapeDtypeStruct(export.symbolic_shape("b"), jnp.float32)
    with pytest.warns(dfx.FallbackWarning, match="symbolic"):
        made = export.export(jax.jit(fast))(spec)
    for size in (3, 8):
        x = jax.random.normal(jax.random.key(size), (size,))
        np.testing.assert_allclose(made.call(x), fn(x), rtol=1e-6)


class OneRule(dfx.Strategy):
    def rules(self, graph: Any) -> Any:
        return dfx.Op("sort")

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=0)


def test_a_strategy_may_return_one_rule() -> None:
    x = jnp.arange(8.0)
    fast = dfx.schedule(jax.jit(fn), OneRule())
    np.testing.assert_allclose(fast(x), fn(x), rtol=1e-6)
    assert any("sort" in region.name for region in dfx.graph(fast, x).regions)


@pytest.mark.parametrize("ordered", [False, True])
def test_derivatives_of_functions_that_print(ordered: bool, capfd: Any) -> None:
    def loss(x: Any) -> Any:
        jax.debug.print("first {}", x[0], ordered=ordered)
        return (jnp.sort(x) ** 2).sum()

    x = jnp.arange(8.0)
    fast = dfx.schedule(loss, "branches")
    for gradient in (jax.grad(fast), jax.jit(jax.grad(fast))):
        np.testing.assert_allclose(gradient(x), 2 * x, rtol=1e-6)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("first 0.0") == 2
    np.testing.assert_allclose(fast(x), loss(x), rtol=1e-6)
    many = jax.lax.map(fast, jnp.stack([x, -x]))
    np.testing.assert_allclose(many, [loss(x)] * 2, rtol=1e-6)


_ELSEWHERE = """
import pathlib, pickle, sys
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
import dynaflow_xla.ffi.xla
dynaflow_xla.ffi.xla.ensure_registered()
made = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
print(serialize_executable.deserialize_and_load(*made)(jnp.arange(8.0)))
"""


def test_a_compiled_program_in_another_process_names_the_original(tmp_path: Path) -> None:
    fast = dfx.schedule(jax.jit(fn), "branches")
    compiled = jax.jit(lambda x: fast(x)).lower(jnp.arange(8.0)).compile()
    file = tmp_path / "program.pickle"
    file.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ELSEWHERE, str(file)],
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no plan" in done.stderr and "fast.original" in done.stderr, done.stderr
