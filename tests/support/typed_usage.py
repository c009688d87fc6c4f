"""What type checkers are to make of scheduled functions and modules; checked by ``make lint``, never run."""

from __future__ import annotations

from collections.abc import Callable
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
    def step(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x

    @dfx.schedule
    def plain(self, x: torch.Tensor) -> int:
        return 1

    @dfx.schedule
    @jax.jit
    def jitted(self, x: jax.Array) -> jax.Array:
        return x

    @staticmethod
    @dfx.schedule
    def static(x: jax.Array) -> jax.Array:
        return x


def used(x: jax.Array, t: torch.Tensor) -> None:
    assert_type(bare(x, scale=2.0), jax.Array)
    assert_type(with_options(x), tuple[jax.Array, int])
    assert_type(Model().step(t, scale=2.0), torch.Tensor)
    assert_type(Model().plain(t), int)
    assert_type(Model().static(x), jax.Array)
    Model().jitted(x)
    method: Callable[[torch.Tensor], int] = Model().plain
    dfx.explain(method, t)
    assert_type(Model.step(Model(), t), torch.Tensor)
    assert_type(with_options.original(x), tuple[jax.Array, int])
    assert_type(dfx.schedule(torch.nn.Linear(2, 2), dfx.NanoBatch(2), in_axes=0), torch.nn.Linear)
    assert_type(dfx.schedule(jax.jit(bare))(x), Any)
    bare.lower(x).compile()
    dfx.explain(bare, x)
    bare("text")  # type: ignore[arg-type]
    bare.original("text")  # type: ignore[arg-type]
    Model().step(t, scale="text")  # type: ignore[call-overload]
    Model().step(t, size=1.0)  # type: ignore[call-overload]
    Model().plain()  # type: ignore[call-overload]
    dfx.schedule(bare, stratgy="auto")  # type: ignore[call-overload]


def caught(run: Callable[[], object]) -> str:
    try:
        run()
    except dfx.VerificationError as error:
        return str(error.report)
    return ""
