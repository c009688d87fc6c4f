"""What a decision on disk depends on: another program, or other settings of it, has another key."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.tuning import autotune  # noqa: E402

FAST_MATH = {"xla_cpu_enable_fast_math": True}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are looked up; each time the disk says that the original won."""
    asked: list[str] = []

    def load(key: str) -> dict[str, Any]:
        asked.append(key)
        return {
            "choice": "original", "reason": "it won", "medians_ms": {}, "predicted_ms": {},
            "left_out": {}, "seconds": 0.0, "costs": None, "far": False, "unsure": False,
        }  # fmt: skip

    monkeypatch.setattr(autotune, "load", load)
    return asked


def f(x: Any, y: Any) -> Any:
    return jnp.tanh(x @ x.T).sum() + jnp.sin(y @ y.T).sum()


def _differ(keys: list[str], call: Any, variants: list[Any]) -> None:
    for variant in variants:
        call(variant)
    assert len(keys) == len(variants), "each is looked up"
    assert len(set(keys)) == len(variants)
    call(variants[0])
    assert keys[-1] == keys[0], "the same again has the same key"


def test_jax(keys: list[str]) -> None:
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    variants = [
        (f, {}),
        (f, {"compiler_options": FAST_MATH}),
        (f, {"compiler_options": {"xla_cpu_enable_fast_math": False}}),
        (jax.jit(f, compiler_options={"xla_cpu_enable_fast_min_max": False}), {}),
        (f, {"strategy": dfx.Auto(margin=0.5)}),
    ]

    def call(variant: Any) -> None:
        fn, options = variant
        strategy = options.get("strategy", "auto")
        made = dfx.schedule(fn, **{**options, "strategy": strategy})
        np.testing.assert_allclose(made(jnp.array(x), jnp.array(x)), f(x, x), rtol=1e-2)

    _differ(keys, call, variants)


def test_a_setting_of_jax(keys: list[str]) -> None:
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)

    def call(value: bool) -> None:
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", value)
        try:
            dfx.schedule(f, "auto")(x, x)
        finally:
            jax.config.update("jax_disable_most_optimizations", before)

    _differ(keys, call, [False, True])


def test_torch(keys: list[str]) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(256, 256)

    def g(a: Any, b: Any) -> Any:
        return torch.tanh(a @ a.T).sum() + torch.sin(b @ b.T).sum()

    variants: list[dict[str, Any]] = [
        {},
        {"compiler_options": {"dynamic": False}},
        {"strategy": dfx.Auto(margin=0.5)},
    ]

    def call(options: dict[str, Any]) -> None:
        made = dfx.schedule(g, **{"strategy": "auto", **options})
        torch.testing.assert_close(made(x, x), g(x, x))

    _differ(keys, call, variants)
