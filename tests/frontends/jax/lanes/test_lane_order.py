"""What gates of a lane's program wait for, and what waits for them."""

from __future__ import annotations

import re
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from edited_plans import ByName  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

GATE = re.compile(r"custom_call @dfx_gate\w*\(.*?\) \{(.*?)\} :", re.DOTALL)


def gates(fast: Any, lane: int, *args: Any) -> list[dict[str, int]]:
    """Of each gate of a lane, in order: what it orders, passes through, and whether it is the last."""
    (stage,) = [s for s, _ in fast.planned(args, {}).stages if s is not None]
    text = stage.lane_texts[lane]
    made = []
    for found in GATE.findall(text):
        (deps,) = re.findall(r"deps = (\d+)", found)
        (done,) = re.findall(r"done = (\w+)", found)
        through = found.count("output_operand_alias<")
        made.append({"deps": int(deps), "through": through, "done": done in ("1", "true")})
    return made


def normals(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def test_what_a_lane_itself_reads_need_not_be_in_memory() -> None:
    """A gate that read the middle of a chain would keep XLA from fusing it."""

    def chain(x: Any) -> Any:
        with dfx.mark("first"):
            y = jnp.tanh(x)
        with dfx.mark("second"):
            z = y * 2.0
        with dfx.mark("third"):
            return z - 1.0

    fast = dfx.schedule(chain, dfx.Sequential(wide=False), lanes=1)
    (gate,) = gates(fast, 0, normals(64, 64))
    assert gate["done"] and gate["deps"] == 0


def test_what_a_lane_has_begun_is_done_before_it_waits() -> None:
    """A wait in front of work that is ready would hold the lane's thread."""

    def f(x: Any, w: Any) -> Any:
        with dfx.mark("far"):
            a = jnp.sort(w)
        with dfx.mark("near"):
            b = jnp.tanh(x)
        with dfx.mark("next"):
            c = b * 2.0
        with dfx.mark("both"):
            return a + c

    args = normals(64, 64), normals(64, 65)[:, :64]
    fast = dfx.schedule(f, ByName("far"), lanes=2)
    receiving, last = gates(fast, 0, *args)
    assert receiving["deps"] == 1 and last == {"deps": 0, "through": 0, "done": True}
    np.testing.assert_allclose(fast(*args), f(*args), rtol=1e-6, atol=1e-6)


def test_what_a_key_is_made_of_is_waited_for_itself() -> None:
    """Gates do not read keys."""

    def f(x: Any, w: Any) -> Any:
        with dfx.mark("far"):
            a = jnp.sort(w)
        with dfx.mark("near"):
            b = x.sum().astype(jnp.int32)
        with dfx.mark("next"):
            key = jax.random.fold_in(jax.random.key(0), b)
        with dfx.mark("both"):
            return a + jax.random.normal(key, w.shape)

    args = normals(64, 64), normals(64, 65)[:, :64]
    fast = dfx.schedule(f, ByName("far"), lanes=2)
    assert gates(fast, 0, *args)[0]["deps"] == 1
    np.testing.assert_allclose(fast(*args), f(*args), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [512, 16])
def test_a_long_region_does_not_start_before_what_another_lane_waits_for(rows: int) -> None:
    """If it is long enough for the copy of an argument, which is what keeps it back."""

    def f(x: Any, w: Any, v: Any) -> Any:
        with dfx.mark("here"):
            a = jnp.tanh(x)
        with dfx.mark("sent"):
            b = x @ w
        with dfx.mark("long"):
            c = jnp.sin(x) @ v
        with dfx.mark("both"):
            d = a[:, :1] + b
        with dfx.mark("end"):
            return d.sum() + c.sum()

    args = normals(rows, 256), normals(256, 256) / 16, normals(256, 256) / 16
    fast = dfx.schedule(f, ByName("sent", "long"), lanes=2)
    sending = [gate for gate in gates(fast, 1, *args) if not gate["done"]]
    assert sending[0]["through"] == (2 if rows == 512 else 1), sending
    np.testing.assert_allclose(fast(*args), f(*args), rtol=1e-4)
