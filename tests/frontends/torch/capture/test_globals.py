"""Functions whose module cannot be imported, or is another one than their globals say."""

from __future__ import annotations

import gc
import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaflow_xla as dfx

TEXT = """
import functools
import torch
SCALE = 3.0

def helper(x):
    return x * SCALE

def function(x):
    return torch.sort(helper(x))[0] + torch.cumsum(x, 0) * SCALE

def decorated(f):
    @functools.wraps(f)
    def call(*args):
        return f(*args) + SCALE
    return call

wrapped = decorated(function)

class Model(torch.nn.Module):
    def forward(self, x):
        return function(x) * SCALE

class Callable:
    def __call__(self, x):
        return function(x) - SCALE

model = Model()
bound = model.forward
called = Callable()
partial = functools.partial(function)
"""


@pytest.fixture(params=["by path", "run as main", "exec", "exec under a name that is taken"])
def scope(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    path = tmp_path / "plugin_of_nobody.py"
    path.write_text(TEXT)
    if request.param == "by path":
        spec = importlib.util.spec_from_file_location("plugin_of_nobody", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return vars(module)
    if request.param == "run as main":
        return runpy.run_path(str(path), run_name="__main__")
    found: dict[str, Any] = {}
    if request.param != "exec":
        found["__name__"] = "linecache"
    exec(compile(TEXT, str(path), "exec"), found)
    return found


@pytest.mark.parametrize("name", ["function", "wrapped", "model", "bound", "called", "partial"])
def test_it_is_scheduled_with_its_own_globals(scope: Any, name: str) -> None:
    original = scope[name]
    fast, x = dfx.schedule(original, "branches"), torch.randn(64)
    torch.testing.assert_close(fast(x), original(x), rtol=0, atol=0)
    assert dfx.plan(fast, x).graph
    scope["SCALE"] = 5.0  # it is guarded, as any global
    torch.testing.assert_close(fast(x), original(x), rtol=0, atol=0)


def test_what_was_compiled_goes_with_the_schedule() -> None:
    found: dict[str, Any] = {"__name__": "module_of_nobody"}
    exec(TEXT, found)
    fast, other = (dfx.schedule(found["function"], "branches") for _ in range(2))
    x = torch.randn(8)
    fast(x), other(x)
    graphs = {name for name in found if name.startswith("__compiled_fn")}
    assert graphs and all(found[name] is not None for name in graphs)
    del fast
    gc.collect()
    assert 0 < sum(found.get(name) is None for name in graphs) < len(graphs)
    torch.testing.assert_close(other(x), found["function"](x), rtol=0, atol=0)


class WithoutForward:
    @property
    def forward(self) -> Any:
        raise RuntimeError("no forward")

    def __call__(self, x: Any) -> Any:
        return x.sort(0)[0]


def wrapped_in_itself(x: Any) -> Any:
    return x.sort(0)[0]


wrapped_in_itself.__wrapped__ = wrapped_in_itself  # type: ignore[attr-defined]


@pytest.mark.parametrize("fn", [WithoutForward(), wrapped_in_itself], ids=["property", "itself"])
def test_what_is_called_is_found_without_a_word(fn: Any) -> None:
    x = torch.randn(8)
    torch.testing.assert_close(dfx.schedule(fn, "branches")(x), x.sort(0)[0], rtol=0, atol=0)
