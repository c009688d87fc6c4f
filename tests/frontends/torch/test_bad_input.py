"""Bad input gets an error that says what must hold, what it got, where, and the way out."""

from __future__ import annotations

import collections
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
compare = pytest.importorskip("dynaflow_xla.frontends.torch.compare").compare
serving = pytest.importorskip("dynaflow_xla.frontends.torch.serving")
nn = torch.nn

X = torch.randn(4, 6)


def scheduled(fn: Any, strategy: Any = None, **options: Any) -> Any:
    return dfx.schedule(fn, strategy=strategy or dfx.Branches(), backend="torch", **options)


def test_another_device() -> None:
    with pytest.raises(dfx.UnsupportedError, match=r"an argument .*is on meta"):
        scheduled(lambda a, b: (a.sin(), b + 1))(X, X.to("meta"))
    with pytest.raises(dfx.UnsupportedError, match=r"(?s)CPU.*is on meta"):
        scheduled(lambda a: (a.sin(), torch.ones(3, device="meta") * 2))(X)


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    with pytest.raises(dfx.UnsupportedError, match="JAX array"):
        scheduled(nn.Linear(6, 6))(jnp.ones((4, 6)))
    with pytest.raises(dfx.UnsupportedError, match="JAX array"):
        scheduled(lambda a, b: a)(X, b=jnp.ones(3))
    with pytest.raises(dfx.UnsupportedError, match="torch tensors and JAX arrays"):
        dfx.schedule(lambda a, b: a, strategy=dfx.Branches())(X, jnp.ones(3))


def test_small_calls_ask_no_pytree_for_their_framework(monkeypatch: Any) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    fast = dfx.schedule(lambda tree, more=1: tree["a"][0] * more, strategy=dfx.Branches())
    x = jax.numpy.arange(3.0)
    a = np.asarray(fast({"a": (x, [None, 2.0])}, more=2))
    made = collections.OrderedDict(a=[x])  # pytree knows it
    b = np.asarray(fast(made, more=2))
    with monkeypatch.context() as patched:
        patched.setattr(serving.pytree, "tree_leaves", None)
        c = np.asarray(fast({"a": (x, [None, 2.0])}, more=2))
    assert np.array_equal(a, 2 * np.asarray(x)) and np.array_equal(a, b) and np.array_equal(a, c)
    deep = [[[[[X]]]]]
    for tree in (
        collections.OrderedDict(a=[X]),
        {"a": [X], "b": deep},
        deep,
        collections.deque([X]),
    ):
        assert serving.kinds((tree,), {}) == (True, False)
        assert serving.kinds((tree,), {"y": x}) == (True, True)
    loop: list[Any] = [X]
    loop.append(loop)
    with pytest.raises(RecursionError):
        serving.kinds((loop,), {})


def test_an_error_inside_a_region_names_it_and_the_line(round_robin: Any) -> None:
    fast = scheduled(lambda a, i: a.sin()[i] + 1, round_robin)
    with pytest.raises(dfx.EngineError, match=r"test_bad_input.py:\d+.*IndexError.*100") as caught:
        fast(X, torch.tensor([100]))
    assert isinstance(caught.value.__cause__, IndexError)
    assert torch.equal(fast(X, torch.tensor([1])), X.sin()[1:2] + 1)  # lanes are clean again


def test_shapes_that_do_not_fit() -> None:
    """The original's own error, from the user's line."""
    with pytest.raises(RuntimeError) as wanted:
        X @ X
    with pytest.raises(RuntimeError) as caught:
        scheduled(lambda a, b: a @ b)(X, X)
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == str(wanted.value)
    assert caught.value.__context__ is None
    assert caught.traceback[-1].path.name == "test_bad_input.py"


class Halves(dfx.Strategy):
    def split(self, ctx: Any) -> Any:
        return dfx.Split.even(2).joining(joins=False)

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=0)


def test_splits_are_refused() -> None:
    with pytest.raises(dfx.DynaflowError, match="batch"):
        scheduled(nn.BatchNorm1d(6), Halves())(X)


@pytest.mark.parametrize("option", [{"select": "x"}])
def test_options_of_another_version(option: dict[str, Any]) -> None:
    with pytest.raises(dfx.DynaflowError, match=next(iter(option))):
        dfx.schedule(nn.Linear(2, 2), **option)


def test_options() -> None:
    with pytest.raises(dfx.PlanError, match="target must be one of"):
        dfx.schedule(nn.Linear(2, 2), target="h200")
    with pytest.raises(dfx.PlanError, match="compiler must be"):
        dfx.schedule(nn.Linear(2, 2), compiler="nvcc")
    with pytest.raises(dfx.UnsupportedError, match=r"compiler_options.*mode"):
        scheduled(nn.Linear(2, 2), compiler_options={"mode": "max-autotune"})


def test_torchscript() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        made = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(dfx.UnsupportedError, match="TorchScript"):
        dfx.schedule(made)


class Replacing(dfx.Strategy):
    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("sin")]

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=0, replace=self.fn if op.name == "sin" else None)


def test_replacements() -> None:
    good = scheduled(lambda x: x.sin() + 1, Replacing(lambda x: x.cos()))
    assert torch.equal(good(X), X.cos() + 1)
    with pytest.raises(dfx.VerificationError, match="result"):
        dfx.verify(good, X)
    for bad in (lambda x: x[:1], lambda x: x.double(), lambda x: (x, x), lambda x: 3):
        with pytest.raises(dfx.PlanError, match=r"replacement of region 'sin'.*must return"):
            scheduled(lambda x: x.sin() + 1, Replacing(bad))(X)


def test_replacements_where_sizes_are_open() -> None:
    """A graph for all sizes knows those of a call by the region's inputs."""

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.cos() if x.shape[0] < 7 else x[:1].cos()

    fast = scheduled(lambda x: x.sin() + 1, Replacing(wrong))
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), x.cos() + 1)
    with pytest.raises(
        dfx.PlanError, match=r"must return float32\[8, 4\]; it returned float32\[1, 4\]"
    ):
        fast(torch.randn(8, 4))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "complex64", "int32", "bool"],
)
def test_what_verify_compares(dtype: str) -> None:
    """Of every type, conjugated views included; small elements beside large ones too."""
    want = (torch.rand(50) + 1).to(getattr(torch, dtype))
    want[0] = 100
    assert compare("result", want, want.clone())[4]
    for x in (want.conj(), want[::2], want.requires_grad_() if dtype == "float32" else want):
        assert compare("result", x, x.clone())[2] == 0.0
    with torch.no_grad():
        got = want.clone()
        got[5] = 0
    with pytest.raises(dfx.VerificationError, match="result"):
        compare("result", want, got)


def test_an_unsupported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with pytest.raises(dfx.UnsupportedError, match=r"2\.11.*2\.3\.1.*pip install"):
        dfx.schedule(nn.Linear(2, 2))


def test_without_torch() -> None:
    text = """
import sys
sys.modules["torch"] = None
import dynaflow_xla as dfx
try:
    dfx.schedule(lambda x: x, backend="torch")
except dfx.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True,
                          timeout=360)  # fmt: skip
    assert done.returncode == 0 and "torch" in done.stdout, done.stdout + done.stderr


def test_a_forked_child() -> None:
    text = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, dynaflow_xla as dfx
fn = lambda x, y: (torch.sort(x).values, torch.sort(y).values)
fast = dfx.schedule(fn, strategy=dfx.Branches(wide=False), backend="torch", lanes=LANES)
x = torch.randn(3000)
fast(x, x)
pid = os.fork()
if pid == 0:
    try:
        fast(x, x)
    except dfx.EngineError as error:
        os._exit(7 if "spawn" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    import os

    lanes = min(2, len(os.sched_getaffinity(0)))
    if lanes < 2:
        pytest.skip("needs two cores")
    text = text.replace("LANES", str(lanes))
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True,
                          timeout=360)  # fmt: skip
    assert done.stdout.split() == ["7"], done.stdout + done.stderr


def test_exported_programs_check_their_arguments() -> None:
    with torch.no_grad():
        program = torch.export.export(nn.Linear(6, 3), (X,))
    fast = dfx.schedule(program, strategy=dfx.Branches())
    with torch.no_grad():
        assert torch.equal(fast(X), program.module()(X))
    for bad in (X[:3], X.double(), 3.0):
        with pytest.raises(dfx.UnsupportedError, match=r"exported as torch.float32\[4, 6\]; got"):
            fast(bad)
    with pytest.raises(dfx.UnsupportedError, match="exported for arguments"):
        fast(X, X)
    with pytest.raises(dfx.UnsupportedError, match="no backward"):
        fast(X)


def test_exported_programs_with_state_and_any_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return {"y": self.norm(x), "n": 2}

    dim = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(Model(), (X,), dynamic_shapes=({0: dim},))
        fast = dfx.schedule(program, strategy=dfx.Branches())
        reference = torch.export.export(Model(), (X,), dynamic_shapes=({0: dim},)).module()
        for n in (4, 9, 2):
            x = torch.randn(n, 6)
            want, got = reference(x), fast(x)
            assert torch.equal(want["y"], got["y"]) and got["n"] == 2
    for w, g in zip(reference.buffers(), fast.original.buffers(), strict=True):
        assert torch.equal(w, g)


class Sums(nn.Module):
    def forward(self, x: Any, y: Any, n: int) -> Any:
        return x.sin() + y.sum() * n


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 8, 3), ""),
        ((7, 14, 5), ""),
        ((7, 14, 6), ""),
        ((11, 22, 3), "for dimension 0 of argument x of at most 10; got 11"),
        ((2, 4, 3), "for dimension 0 of argument x of at least 3; got 2"),
        ((4, 9, 3), "argument y to follow .* dimension 0 of argument x is 4, it must be 8; got 9"),
        ((4, 8, 3.5), "argument n was exported as an integer; got 3.5"),
    ],
)
def test_exported_programs_check_their_open_sizes(sizes: Any, words: str) -> None:
    rows, dynamic = torch.export.Dim("rows", min=3, max=10), torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(
            Sums(),
            (torch.randn(4), torch.randn(8), 3),
            dynamic_shapes={"x": {0: rows}, "y": {0: 2 * rows}, "n": dynamic},
        )
        fast, module = dfx.schedule(program, strategy=dfx.Branches()), program.module()
        args = torch.randn(sizes[0]), torch.randn(sizes[1]), sizes[2]
        for _ in range(2):  # what fitted once is remembered
            if words:
                with pytest.raises(dfx.UnsupportedError, match=words):
                    fast(*args)
            else:
                torch.testing.assert_close(fast(*args), module(*args))


class Adds(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x.reshape(-1) + y


def test_exported_programs_check_sizes_that_were_equal_or_computed() -> None:
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    half = torch.export.Dim("half")
    with torch.no_grad():
        same = torch.export.Dim("same")
        program = torch.export.export(
            Adds(),
            (torch.randn(4), torch.randn(4)),
            dynamic_shapes={"x": {0: same}, "y": {0: same}},
        )
        fast = dfx.schedule(program, strategy=dfx.Branches())
        assert fast(torch.randn(7), torch.randn(7)).shape == (7,)
        with pytest.raises(dfx.UnsupportedError, match="it must be 7; got 1"):
            fast(torch.randn(7), torch.randn(1))
        product = torch.export.export(
            Adds(),
            (torch.randn(4, 3), torch.randn(12)),
            dynamic_shapes={"x": auto, "y": {0: auto[0]}},
        )
        fast = dfx.schedule(product, strategy=dfx.Branches())
        assert fast(torch.randn(6, 2), torch.randn(12)).shape == (12,)
        with pytest.raises(dfx.UnsupportedError, match="is 5 and .* is 2, it must be 10; got 12"):
            fast(torch.randn(5, 2), torch.randn(12))
        odd = torch.export.export(
            nn.Tanh(), (torch.randn(9),), dynamic_shapes={"input": {0: 2 * half + 1}}
        )
        fast = dfx.schedule(odd, strategy=dfx.Branches())
        assert fast(torch.randn(5)).shape == (5,)
        with pytest.raises(dfx.UnsupportedError, match=r"of the form 2\*\w+ \+ 1; got 6"):
            fast(torch.randn(6))
