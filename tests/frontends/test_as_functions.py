"""What is scheduled is used as the function: bound, decorated, pickled, with any names of arguments."""

from __future__ import annotations

import functools
import pickle
import sys
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx

jax = pytest.importorskip("jax", reason="JAX is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@dfx.schedule(strategy="branches", backend="ffi", lanes=1)
def of_jax(x: Any) -> Any:
    return jax.numpy.sort(x) + x


@dfx.schedule(strategy="branches", backend="torch", lanes=1)
def of_torch(x: Any) -> Any:
    return torch.sort(x)[0] + x


@dfx.schedule(strategy="branches", lanes=1)
def of_either(x: Any) -> Any:
    return abs(x) + x


@dfx.schedule(
    strategy={"one": "sequential", "two": "branches"}, select=lambda call: 0, backend="ffi"
)
def of_several(x: Any) -> Any:
    return jax.numpy.sort(x) + x


def _given(name: str) -> Any:
    x = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    return torch.from_numpy(x) if name == "of_torch" else jax.numpy.asarray(x)


@pytest.mark.parametrize("name", ["of_jax", "of_torch", "of_either", "of_several"])
def test_a_decorated_function_is_pickled_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain ones: processes that are spawned get it so."""
    fast = globals()[name]
    # Tests are imported under names that pickle cannot import.
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    for _ in range(2):  # before a call and behind it
        assert pickle.loads(pickle.dumps(fast)) is fast
        fast(_given(name))


@pytest.mark.parametrize("backend", ["ffi", "torch", None])
def test_a_function_of_a_script_is_pickled_by_value_where_functions_are(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cloudpickle does, for processes that run another script."""
    cloudpickle = pytest.importorskip("cloudpickle")
    main: Any = sys.modules["__main__"]
    scope = {"__name__": "__main__"}
    exec("def doubled(x): return abs(x) + x", scope)
    given: dict[str, Any] = {} if backend is None else {"backend": backend}
    fast = dfx.schedule(scope["doubled"], "sequential", **given)
    monkeypatch.setattr(main, "doubled", fast, raising=False)
    x = _given("of_torch" if backend == "torch" else "of_jax")
    want = fast(x)
    assert pickle.loads(pickle.dumps(fast)) is fast
    written = cloudpickle.dumps([fast])
    monkeypatch.delattr(main, "doubled")
    (read,) = pickle.loads(written)
    np.testing.assert_array_equal(np.asarray(read(x)), np.asarray(want))


class Model:
    factor = 2.0

    @dfx.schedule(strategy="branches", backend="torch", lanes=1)
    def torchs(self, x: Any, *, shift: float = 0.0) -> Any:
        return torch.sort(x)[0] * self.factor + x + shift

    @dfx.schedule(strategy="branches", lanes=1)
    @functools.partial(jax.jit, static_argnums=0)
    def jaxs(self, x: Any, *, shift: float = 0.0) -> Any:
        return jax.numpy.sort(x) * self.factor + x + shift


@pytest.mark.parametrize("name", ["torchs", "jaxs"])
def test_a_bound_method_can_be_looked_at(name: str) -> None:
    model, x = Model(), _given("of_torch" if name == "torchs" else "of_jax")
    bound = getattr(model, name)
    assert str(dfx.verify(bound, x, shift=1.0))
    assert dfx.plan(bound, x, shift=1.0) == dfx.plan(getattr(Model, name), model, x, shift=1.0)
    assert "strategy Branches()" in dfx.explain(functools.partial(bound, shift=1.0), x)
    assert dfx.profile(bound, x).spans
    with pytest.raises(dfx.UnsupportedError, match="got partial"):
        dfx.plan(functools.partial(abs, 1))


def test_arguments_may_have_any_name() -> None:
    """Also those of the functions that take them along."""

    def named(self: Any, fast: Any, args: Any) -> Any:
        return abs(self) + fast * args

    given = {"backend": "ffi"}, {"backend": "torch"}, {}
    for options in given:
        scheduled = dfx.schedule(named, "sequential", **options)  # type: ignore[arg-type]
        x = _given("of_torch" if options == given[1] else "of_jax")
        names = {"self": x, "fast": x, "args": x}
        want = named(**names)
        np.testing.assert_allclose(np.asarray(scheduled(**names)), np.asarray(want), rtol=1e-6)
        dfx.verify(scheduled, **names)
        assert dfx.plan(scheduled, **names).graph == "named"
