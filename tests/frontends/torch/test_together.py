"""Several PyTorch functions and modules as one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaflow_xla as dfx


class ByFunction(dfx.Strategy):
    """Each function on a lane of its own."""

    def schedule(self, s: Any) -> None:
        names = sorted({h.function for h in s.handles} - {""})
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=names.index(op.function) % s.lanes if op.function else 0)


def _models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return head, layer


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def _gradients(call: Any, modules: Any, *calls: Any) -> list[Any]:
    for module in modules:
        module.zero_grad()
    first, second = call(*calls)
    (first.square().sum() + second.sin().sum()).backward()
    return [p.grad.clone() for m in dict.fromkeys(modules) for p in m.parameters()]


def test_modules_beside_each_other_with_gradients() -> None:
    head, layer = _models()
    layer.eval()
    both = dfx.together(head, layer, strategy=ByFunction(), names=("student", "teacher"), lanes=2)
    x, y = torch.randn(6, 16), torch.randn(2, 5, 16)
    calls = ((x,), {"src": y})
    _close(both(*calls), both.original(*calls))
    graph = dfx.graph(both, *calls)
    assert {r.function for r in graph.regions} == {"student", "teacher"}
    for region in graph.regions:
        assert {graph.graph.ops[i].function for i in region.ops} == {region.function}
    # The scope of a module is what it is alone.
    assert ("0",) in {op.scope for op in graph.graph.ops if op.function == "student"}
    _close(
        _gradients(both, (head, layer), *calls), _gradients(both.original, (head, layer), *calls)
    )
    dfx.verify(both, *calls)
    assert "teacher" in dfx.explain(both, *calls)


def test_modes_and_parameters_stay_each_module_s_own() -> None:
    head, layer = _models()
    both = dfx.together(head, layer, strategy="branches")
    x, y = torch.randn(6, 16), torch.randn(2, 5, 16)
    layer.train()
    torch.manual_seed(5)
    noisy = both(x, y)[1]
    torch.manual_seed(5)
    _close(noisy, both.original(x, y)[1])
    layer.eval()
    _close(both(x, y), both.original(x, y))
    assert head.training and not layer.training
    with torch.no_grad():
        head[0].weight.mul_(2)
    _close(both(x, y), both.original(x, y))


def test_one_module_twice_shares_its_weights() -> None:
    head, _ = _models()
    both = dfx.together(head, head, names=("a", "b"), strategy="branches")
    calls = (torch.randn(6, 16), torch.randn(3, 16))
    _close(_gradients(both, (head,), *calls), _gradients(both.original, (head,), *calls))


def test_what_one_writes_the_other_may_not_use() -> None:
    norm = torch.nn.BatchNorm1d(16).train()
    two = dfx.together(norm, norm, names=("a", "b"), strategy="branches")
    before = norm.running_mean.clone()
    with pytest.raises(dfx.PlanError, match=r"'a' and 'b' share '(running_|num_batches)"):
        two(torch.randn(4, 16), torch.randn(4, 16))
    assert torch.equal(norm.running_mean, before)
    norm.eval()
    two(torch.randn(4, 16), torch.randn(4, 16))

    def fills(b: Any, v: Any) -> Any:
        b.fill_(2.0)
        return v * 2

    def reads(b: Any, v: Any) -> Any:
        return b + v

    memory = torch.zeros(4)
    one = torch.ones(4)
    for first, second, given in (
        (fills, fills, memory),
        (fills, reads, memory),
        (reads, fills, memory),
        (fills, fills, memory.view(2, 2).view(4)),
    ):
        both = dfx.together(first, second, names=("first", "second"), strategy="branches")
        with pytest.raises(
            dfx.PlanError, match="'first' and 'second' share \"argument 0 of 'first'"
        ):
            both((memory, one), (given, one))
    assert torch.equal(memory, torch.zeros(4))
    other = torch.zeros(4)
    dfx.together(fills, fills, strategy="branches")((memory, one), (other, one))
    assert torch.equal(memory, other) and memory[0] == 2


def test_functions_that_break_the_graph_say_so() -> None:
    @torch.compiler.disable
    def hidden(v: Any) -> Any:
        return v.sin()

    def broken(v: Any) -> Any:
        return hidden(v * 2) + 1

    x = torch.randn(4, 16)
    both = dfx.together(broken, torch.sort, names=("f", "g"), strategy="branches")
    with pytest.warns(dfx.FallbackWarning, match="captured in several graphs"):
        got = both(x, x)
    _close(got[0], broken(x))


def test_one_framework_only() -> None:
    jax = pytest.importorskip("jax")
    head, _ = _models()
    with pytest.raises(dfx.UnsupportedError, match="'Sequential' is torch's, 'f' is jax's"):
        dfx.together(head, jax.jit(lambda v: v), names=("Sequential", "f"))
    plain = dfx.together(lambda v: v * 2, lambda v: v + 1, strategy="branches")
    x = torch.ones(3)
    _close(plain(x, x), (x * 2, x + 1))
    assert isinstance(plain(jax.numpy.ones(3), jax.numpy.ones(3))[0], jax.Array)
    with pytest.raises(dfx.UnsupportedError, match="torch tensors and JAX arrays"):
        plain(x, jax.numpy.ones(3))


def test_the_batch_of_one_of_them_is_split() -> None:
    head, layer = _models()
    layer.eval()
    both = dfx.together(
        head, layer, strategy=dfx.NanoBatch(2), names=("head", "enc"), in_axes={"head": 0}
    )
    x, y = torch.randn(6, 16), torch.randn(2, 5, 16)
    _close(both(x, y), both.original(x, y))
    nanos = {(r.function, r.nano) for r in dfx.graph(both, x, y).regions}
    assert ("head", 1) in nanos and ("enc", 1) not in nanos


def test_scheduled_and_compiled_members_are_taken_as_written() -> None:
    head, layer = _models()
    layer.eval()
    both = dfx.together(dfx.schedule(head, "branches"), torch.compile(layer), strategy="branches")
    x, y = torch.randn(6, 16), torch.randn(2, 5, 16)
    _close(both(x, y), (head(x), layer(y)))
    with pytest.raises(dfx.UnsupportedError, match=r"program.module\(\)"):
        dfx.together(torch.export.export(head, (x,)), layer, strategy="branches")(x, y)
