"""A new backend is one folder and one row: ``tests/support/toy_backend`` and ``backends.BACKENDS``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import toy_backend

import dynaflow_xla as dfx
from dynaflow_xla import backends
from dynaflow_xla.settings import Settings


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "toy", toy_backend.ROW)
    toy_backend.LAUNCHED.clear()


def launched(plan: Any) -> list[str]:
    """The names of the plan's regions, in its order."""
    return [i.name for i in plan.instructions if hasattr(i, "region")]


def on_jax() -> tuple[Any, Any]:
    jnp = pytest.importorskip("jax.numpy")

    def two(x: Any, y: Any) -> Any:
        with dfx.mark("left"):
            a = jnp.sin(x) @ y
        with dfx.mark("right"):
            b = jnp.cos(y) @ x
        return a - b, a @ b

    return two, jnp.asarray


def on_torch() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")

    def two(x: Any, y: Any) -> Any:
        with dfx.mark("left"):
            a = torch.sin(x) @ y
        with dfx.mark("right"):
            b = torch.cos(y) @ x
        return a - b, a @ b

    return two, torch.as_tensor


@pytest.mark.parametrize("made", [on_jax, on_torch])
def test_it_runs_the_plan(made: Any) -> None:
    f, array = made()
    fast = dfx.schedule(f, "branches", lanes=2, backend="toy")
    rng = np.random.default_rng()
    for _ in range(2):
        x, y = (array(rng.standard_normal((6, 6), np.float32)) for _ in range(2))
        for got, want in zip(fast(x, y), f(x, y), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)
    plan = dfx.plan(fast, x, y)
    names = launched(plan)
    assert {"left", "right"} <= set(names)
    assert toy_backend.LAUNCHED[: len(names)] == names
    assert "toy (in turn)" in dfx.explain(fast, x, y)
    assert dfx.verify(fast, x, y)


def test_derivatives_of_nano_batches_in_jax() -> None:
    jax = pytest.importorskip("jax")

    def f(x: Any, y: Any) -> Any:
        return jax.numpy.tanh(x @ y) @ y

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=(0, None), backend="toy")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 6, 6), np.float32)

    def gradients(g: Any) -> Any:
        return jax.grad(lambda *a: (g(*a) ** 2).sum(), (0, 1))(x, y)

    for got, want in zip(gradients(fast), gradients(f), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert toy_backend.LAUNCHED


def test_gradients_in_torch() -> None:
    torch = pytest.importorskip("torch")
    f, _ = on_torch()
    fast = dfx.schedule(f, "branches", lanes=2, backend="toy")
    x, y = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)
    (want,) = torch.autograd.grad(sum(r.sum() for r in f(x, y)), x)
    (got,) = torch.autograd.grad(sum(r.sum() for r in fast(x, y)), x)
    torch.testing.assert_close(got, want)
    assert toy_backend.LAUNCHED


def test_what_it_refuses_is_told() -> None:
    torch = pytest.importorskip("torch")
    fast = dfx.schedule(torch.sin, dfx.NanoBatch(2), in_axes=0, backend="toy")
    with pytest.raises(dfx.UnsupportedError, match="does not split"):
        fast(torch.randn(6, 5))


def test_messages_know_it() -> None:
    with pytest.raises(dfx.PlanError, match="auto, ffi, xla, torch or toy; got 'toys'"):
        dfx.schedule(max, backend="toys")


@pytest.mark.parametrize(("framework", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_framework_that_it_does_not_run(
    framework: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = backends.BackendRow(**{other: getattr(toy_backend.ROW, other)})
    monkeypatch.setitem(backends.BACKENDS, "toy", row)
    assert backends.only_framework("toy") == other
    given = Settings("f", dfx.Branches(), 2, backend="toy")
    with pytest.raises(dfx.UnsupportedError, match=f"no function of {framework}; ffi, xla"):
        backends.made(framework, given)


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("name", ["ffi", "xla", "torch", "toy"])
def test_no_backend_lacks_what_the_protocol_has(framework: str, name: str) -> None:
    pytest.importorskip(framework)
    pytest.importorskip("jax")
    if framework == "jax":
        from dynaflow_xla.frontends.jax.backend import Backend
    else:
        from dynaflow_xla.frontends.torch.backend import Backend  # type: ignore[assignment]
    if getattr(backends.BACKENDS[name], framework) is None:
        pytest.skip(f"{name} runs no function of {framework}")
    made = backends.made(framework, Settings("two", dfx.Branches(), 2, backend=name))
    wanted = {*Backend.__annotations__, *(n for n in vars(Backend) if not n.startswith("_"))}
    assert len(wanted) > 10
    assert not {n for n in wanted if not hasattr(made, n)}
