"""Whose a plain function is: by its arguments, else by what it names; JAX is not imported for it."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla import dispatch


def root(name: str) -> Any:
    """A module of a framework, as far as its name tells."""
    made = types.ModuleType(name)
    made.__dict__["Thing"] = type("Thing", (), {"__module__": f"{name}.inside"})
    return made


torch, jnp = root("torch"), root("jax.numpy")


class Model(torch.Thing):  # type: ignore[misc]
    """As a user's ``nn.Module``."""


class Service:
    def __init__(self) -> None:
        self.model = Model()

    def run(self, rows: Any) -> Any:
        return self.model, rows

    __call__ = run


def nothing(x: Any) -> Any:
    return x


def one(x: Any) -> Any:
    return torch.Thing, x


def other(x: Any) -> Any:
    return [jnp.Thing for _ in x]


def both(x: Any) -> Any:
    return torch, jnp


def calls(x: Any) -> Any:
    return one(x)


def imports(x: Any) -> Any:
    import jax.numpy as inside

    return inside.ones(x)


def closed(*held: Any) -> Any:
    return lambda: held


@pytest.mark.parametrize(
    ("fn", "whose"),
    [
        (nothing, ""), (one, "torch"), (other, "jax"), (both, ""), (calls, "torch"), (imports, "jax"),
        (closed(Model()), "torch"), (closed({"w": [jnp.Thing()]}), "jax"), (closed(3, "jax"), ""),
        (functools.partial(nothing, Model()), "torch"), (functools.partial(calls, 1), "torch"),
        (Service(), "torch"), (Service().run, "torch"), (functools.partial(Service().run, 1), "torch"),
        (functools.wraps(one)(lambda *args: args), "torch"),
    ],
)  # fmt: skip
def test_what_a_function_names_tells(fn: Any, whose: str) -> None:
    assert dispatch._named_by((fn,)) == whose


SCRIPT = """
import sys
import torch
import dynaflow_xla as dfx

model = torch.nn.Linear(3, 2)

def of_rows(rows):
    return model(torch.tensor(rows))

def of_a_size(size=4):
    return torch.ones(size, 3).relu()

def of_nothing():
    return helper()

def helper():
    return torch.arange(3) * 2

for fn, args in ((of_rows, ([[1.0, 2.0, 3.0]],)), (of_a_size, (2,)), (of_a_size, ()), (of_nothing, ())):
    fast = dfx.schedule(fn, "sequential")
    assert torch.equal(fast(*args), fn(*args)), fn
together = dfx.together(of_a_size, of_nothing, strategy="sequential")
assert [tuple(x.shape) for x in together((2,), ())] == [(2, 3), (3,)]
double = dfx.schedule(lambda x: x + x, "sequential")
assert "jax" not in sys.modules
"""

LATER = """
import numpy as np
import jax
assert isinstance(double(np.ones(3, np.float32)), jax.Array)
assert torch.is_tensor(fast())
"""


@pytest.mark.parametrize("later", [False, True])
def test_jax_is_not_imported_for_a_function_that_names_torch(later: bool) -> None:
    """It may be imported after ``schedule``: a call looks again."""
    if importlib.util.find_spec("torch") is None or (
        later and importlib.util.find_spec("jax") is None
    ):
        pytest.skip("needs the frameworks")
    code = textwrap.dedent(SCRIPT + later * LATER)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("given", [42, "f", [1], sys, object()])
def test_what_cannot_be_called_is_refused_without_jax_too(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch alone was taken for the framework of everything."""
    there = dispatch.optional.available
    for missing in ("", "jax"):
        monkeypatch.setattr(
            dispatch.optional, "available", lambda name, m=missing: name != m and there(name)
        )
        with pytest.raises(
            TypeError, match="schedule takes a function, a jax.jit function or a model"
        ):
            dfx.schedule(given, "branches")
