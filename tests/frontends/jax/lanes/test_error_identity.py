"""An error is known by what it is, not by the words in it; ours are not taken for somebody else's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ffi import _engine, xla

X = jnp.linspace(-1.0, 1.0, 256)


def two_sorts(x: Any) -> Any:
    return jnp.sort(x) + jnp.sort(jnp.cos(x))


def test_a_users_error_that_speaks_of_an_engine_is_not_ours() -> None:
    def fail(v: Any) -> Any:
        raise RuntimeError("EngineError: of a car")

    def g(x: Any) -> Any:
        y = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.sort(x))
        return jnp.cos(y) + jnp.sort(y)

    fast = dfx.schedule(g, "branches")
    with pytest.raises(Exception, match="of a car") as caught:
        jax.block_until_ready(fast(X))
    assert not isinstance(caught.value, dfx.DynaflowError)
    for error in (caught.value, jax.errors.JaxRuntimeError("INTERNAL: EngineError: of a car")):
        assert xla.engine_error(error) is None


def test_the_engines_error_is_found_in_xlas_text() -> None:
    told = jax.errors.JaxRuntimeError(f"INTERNAL: {_engine.ENGINE_ERROR_MARK}lane 1 failed: why")
    made = xla.engine_error(told)
    assert isinstance(made, dfx.EngineError)
    assert isinstance(made, RuntimeError)
    assert str(made) == "lane 1 failed: why"
    assert made.__cause__ is told
    for kind in (jax.errors.JaxRuntimeError, ValueError):  # what the original raises
        assert isinstance(xla.engine_error(kind(str(told))), kind)


def test_the_engine_itself_raises_its_own_type() -> None:
    def fail(addresses: Any) -> None:
        raise KeyError("a step")

    program = _engine.Program(lanes=1, events=0, args=0, results=0, scratch_bytes=0, name="p")
    program.add_python_launch(lane=0, name="s", callable=fail, ins=[], outs=[])
    program.finish()
    with pytest.raises(dfx.EngineError, match="KeyError: 'a step'"):
        program.run([], [])


def test_a_replacements_own_error_is_not_called_a_wrong_number_of_inputs() -> None:
    inner = dfx.schedule(two_sorts, dfx.NanoBatch(2), in_axes=("a", "b"))

    class Replaces(dfx.Strategy):
        def rules(self, graph: Any) -> Any:
            return [dfx.Op("sort")]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, replace=inner if op.name.startswith("sort") else None)

    with pytest.raises(dfx.PlanError) as caught:
        dfx.schedule(two_sorts, Replaces())(X)
    assert "must take its" not in str(caught.value)
    assert "in_axes" in str(caught.value)


def test_an_inner_plans_error_is_not_called_a_wrong_batch() -> None:
    def g(x: Any) -> Any:
        if x.shape[0] != 8:
            raise dfx.PlanError("this function knows eight rows only")
        return jnp.sort(x) + 1

    fast = dfx.schedule(g, dfx.NanoBatch(2), in_axes=0)
    with pytest.raises(dfx.PlanError, match="eight rows only") as caught:
        fast(jnp.ones((8, 4)))
    assert not isinstance(caught.value, dfx.SeparabilityError)


def test_an_inner_plans_error_comes_through_vmap() -> None:
    def refuses(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            raise dfx.PlanError("not in here")
        return x

    with pytest.raises(dfx.PlanError, match="not in here"):
        jax.vmap(dfx.schedule(lambda x: refuses(jnp.sort(x)), "branches"))(jnp.ones((3, 4)))
