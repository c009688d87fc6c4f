"""What type checkers are to make of scheduled functions and modules; checked by ``make lint``, never run."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import torch

import dynaflow_xla as dfx


@dfx.schedule
def bare(x: jax.Array, scale: float = 1.0) -> jax.Array:
    return x * scale


@dfx.schedule(strategy="branches", in_axes=0)
def with_options(x: jax.Array) -> tuple[jax.Array, int]:
    return x, 1


class Model:
    @dfx.schedule(lanes=2)
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x


def used(x: jax.Array, t: torch.Tensor) -> None:
    assert_type(bare(x, scale=2.0), jax.Array)
    assert_type(with_options(x), tuple[jax.Array, int])
    assert_type(Model().step(t), torch.Tensor)
    assert_type(dfx.schedule(torch.nn.Linear(2, 2), dfx.NanoBatch(2), in_axes=0), torch.nn.Linear)
    assert_type(dfx.schedule(jax.jit(bare))(x), Any)
    bare.lower(x).compile()
    dfx.explain(bare, x)
    bare("text")  # type: ignore[arg-type]
    dfx.schedule(bare, stratgy="auto")  # type: ignore[call-overload]
