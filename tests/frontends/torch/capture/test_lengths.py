"""Sizes that change from call to call: captured twice, then no more, with the original's values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.capture import for_sizes


class Tagger(nn.Module):
    """An embedding, a recurrent layer, a dense one."""

    def __init__(self, make: Any, width: int, **given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layer = make(6, 6, batch_first=True, **given)
        self.dense = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.layer(self.embed(ids))[0])


RECURRENT: dict[str, Any] = {
    "lstm": lambda: Tagger(nn.LSTM, 6),
    "bidirectional": lambda: Tagger(nn.LSTM, 12, num_layers=2, bidirectional=True),
    "projected": lambda: Tagger(nn.LSTM, 8, proj_size=4, bidirectional=True),
    "gru": lambda: Tagger(nn.GRU, 6, num_layers=2),
    "rnn": lambda: Tagger(nn.RNN, 6, nonlinearity="relu", bias=False),
}


def captures(fast: Any) -> int:
    """How often a forward was captured."""
    return sum(entry.kind != "backward" for entry in fast._dfx_core.entries)


def trained(model: Any, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients."""
    model.zero_grad()
    result = call(x)
    (result.square().sum() / result.numel()).backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


def close(wants: list[torch.Tensor], gots: list[torch.Tensor]) -> None:
    for want, got in zip(wants, gots, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")  # the original's, too
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_model_is_captured_twice_for_all_lengths(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = RECURRENT[name]()
    fast = dfx.schedule(model, "branches")
    lengths = range(3, 43) if (name, training) == ("lstm", True) else range(3, 13)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dfx.FallbackWarning)
        for length in lengths:
            x = torch.randint(0, 20, (2, length))
            if training:
                close(trained(model, model, x), trained(model, fast, x))
            else:
                with torch.no_grad():
                    torch.testing.assert_close(fast(x), model(x))
    assert captures(fast) == 2


def test_batch_and_length_change_together() -> None:
    torch.manual_seed(1)
    model = Tagger(nn.LSTM, 6)
    fast = dfx.schedule(model, "branches")
    for batch, length in ((2, 3), (4, 7), (3, 5), (5, 9), (7, 4), (6, 6)):
        x = torch.randint(0, 20, (batch, length))
        close(trained(model, model, x), trained(model, fast, x))
    assert captures(fast) == 2


def test_open_sizes_from_the_start() -> None:
    torch.manual_seed(2)
    model = Tagger(nn.GRU, 6)
    fast = dfx.schedule(model, "branches", compiler_options={"dynamic": True})
    for length in range(3, 11):
        x = torch.randint(0, 20, (2, length))
        close(trained(model, model, x), trained(model, fast, x))
    assert captures(fast) == 1


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_others_captures_are_as_they_were() -> None:
    """Whoever compiles a recurrent layer without us gets PyTorch's own operators."""
    layer = nn.GRU(3, 3)
    fast = dfx.schedule(layer, "branches")
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(fast(x)[0], layer(x)[0])
    program = torch.export.export(layer, (x,)).run_decompositions()
    assert not any("dynaflow" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x)[0], layer(x)[0])


class Sorted(nn.Module):
    """Costs that change with the length, and a result that says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, -1)[0].cumsum(-1) / x.shape[-1] + torch.sort(x.cos(), -1)[0]


def test_one_plan_for_each_power_of_two() -> None:
    seen = []

    class Notes(dfx.Sequential):
        def schedule(self, s: dfx.Recorder) -> None:
            seen.append((s.context.shapes, sum(h.cost_ns for h in s.handles)))
            super().schedule(s)

    model = Sorted()
    fast = dfx.schedule(model, Notes())
    x = torch.randn(3, 700)
    for length in (*range(8, 24), 600, 601, 602):
        torch.testing.assert_close(fast(x[:, :length]), model(x[:, :length]))
    assert captures(fast) == 2
    # The first capture's, then those of 8 to 15, 16 to 31, and 512 to 1023.
    lengths = [shapes[-1][-1] for shapes, _ in seen]
    assert lengths == [8, 9, 16, 600]
    assert seen[-1][1] > 5 * seen[1][1]
    said = dfx.explain(fast, x[:, :600])
    assert "captured once, with a plan for each power of two" in said
    assert "=600" in said
    assert "=9" in dfx.explain(fast, x[:, :9])


def test_xla_compiles_for_some_sizes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setattr(for_sizes, "AT_ONCE", 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Sorted())
    fast = dfx.schedule(model, "branches", backend="ffi")
    with pytest.warns(dfx.FallbackWarning, match="come in many sizes") as told:
        for rows in range(2, 7):
            x = torch.randn(rows, 4)
            close(trained(model, model, x), trained(model, fast, x))
    assert captures(fast) == 2
    assert sum("come in many sizes" in str(w.message) for w in told) == 2  # forward, backward
    opened = fast._dfx_core.entries[2]
    before = opened.programs.made
    assert before == 2
    close(trained(model, model, x), trained(model, fast, x))  # these sizes come again
    assert opened.programs.made == before + 1
    assert "of the first 2 and for those that come again" in dfx.explain(fast, x)


def test_compiled_regions_are_for_some_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.native.compiling import compilers

    asked = []

    def nothing(compiler: Any, works: Any) -> Any:
        captured = compiler.captured
        assert not captured.symbolic
        asked.append(captured.graph.values[captured.graph.inputs[0]].shape)
        return works

    monkeypatch.setattr(compilers.Compiler, "__call__", nothing)
    model = Sorted()
    fast = dfx.schedule(model, "branches", compiler="inductor")
    with pytest.warns(dfx.FallbackWarning, match="come in many sizes"):
        for length in range(8, 20):
            x = torch.randn(3, length)
            torch.testing.assert_close(fast(x), model(x))
    assert captures(fast) == 2
    assert len(asked) == 1 + 8
    torch.testing.assert_close(fast(x), model(x))
    assert len(asked) == 1 + 9
    assert "of the first 8 and for those that come again" in dfx.explain(fast, x)


def test_no_silent_end_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.dynamo import capturing

    monkeypatch.setattr(capturing, "MAX_CAPTURES", 3)
    fast = dfx.schedule(lambda x, way: torch.sort(x)[0] if way else x, "branches")
    x = torch.randn(5)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        pytest.warns(
            dfx.FallbackWarning, match=r"captured 3 times.* == 'a'.*the original runs"
        ) as told,
    ):
        for way in ("a", "b", "c", "d", "e"):
            torch.testing.assert_close(fast(x, way), torch.sort(x)[0])
    assert sum("could be captured" in str(w.message) for w in told) == 0
    assert "captured 3 times" in dfx.explain(fast, x, "e")
    assert "captured 3 times" not in dfx.explain(fast, x, "a")


def test_schedules_of_one_class_do_not_use_up_each_others_captures() -> None:
    # Behind a break all of them run the same code, of which Dynamo keeps eight captures by itself.
    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            y = x.sin().sort(0)[0]
            torch._dynamo.graph_break()
            return (y * 2).sort(1)[0] + y.cumsum(0)

    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        layer = Layer()
        fast, x = dfx.schedule(layer, "branches"), torch.randn(6, 5)
        with pytest.warns(dfx.FallbackWarning, match="several graphs") as told:
            torch.testing.assert_close(fast(x), layer(x), rtol=0, atol=0)
        assert not [w for w in told if "original runs" in str(w.message)]
        assert "the original runs" not in dfx.explain(fast, x)
    assert torch._dynamo.config.recompile_limit == limit
