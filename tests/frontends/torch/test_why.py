"""``why`` for PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla import dispatch
from dynaflow_xla.planning.instructions import Launch

torch = pytest.importorskip("torch")


class _Towers(torch.nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        with dfx.mark("left"):
            a = torch.sort(x, dim=0).values
        with dfx.mark("right"):
            b = torch.sort(x * 2, dim=0).values
        return self.drop(self.norm(a + b))


def test_a_model_keeps_its_state() -> None:
    torch.manual_seed(0)
    model = _Towers().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    fast = dfx.schedule(model, dfx.Branches(wide=False), lanes=2)
    found = dfx.why(fast, torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), rounds=2)
    assert found.measured and found.original_ns > 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    ran = {s.name for s in found.timeline.spans if s.kind == "launch"}
    assert ran >= {"left", "right"} and all(ran >= {p.first, p.second} for p in found.pairs)
    assert all(p.text in str(found) for p in found.pairs[:12])
    assert found.timeline.kind == "measured"


def test_reasons_by_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaflow_xla.machine.cores", lambda: 2)

    def sorts(x: Any, y: Any) -> Any:
        return torch.sort(x).values + torch.sort(y).values

    def chain(x: Any, y: Any) -> Any:
        with dfx.mark("first"):
            x = torch.sort(x).values
        with dfx.mark("second"):
            return torch.sort(torch.sin(x) + y).values

    args = torch.randn(1 << 17), torch.randn(1 << 17)
    strategy = dfx.Branches(wide=False)
    assert dfx.why(dfx.schedule(sorts, strategy, lanes=2), *args, measure=False).gains
    found = dfx.why(dfx.schedule(chain, strategy, lanes=2), *args, measure=False)
    assert found.reason == "dependency", found


def _whole(x: Any, y: Any) -> tuple[Any, Any]:
    with dfx.mark("left"):
        a = torch.sort(x, dim=-1).values
    with dfx.mark("right"):
        b = torch.sort(y, dim=-1).values
    return a, b


def test_what_runs_alone_is_what_the_plan_runs() -> None:
    seen: list[int] = []

    def instead(x: Any) -> Any:
        seen.append(x.shape[0])
        return torch.sort(x, dim=-1).values

    class Replaced(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=1, replace=instead if op.name == "left" else None)

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    fast = dfx.schedule(_whole, Replaced(), lanes=2)
    fast(x, y)
    seen.clear()
    served = dispatch.serving(fast, "why", (x, y), {})
    made = served.alone((x, y), {}, 1)
    assert made is not None and seen
    launches = [s for s in made.spans if s.kind == "launch"]
    assert {s.lane for s in launches} == {0} and {s.cores for s in launches} == {1}
    plan = dfx.plan(fast, x, y)
    assert {s.region for s in launches} == {
        i.region for i in plan.instructions if isinstance(i, Launch)
    }


def test_regions_that_run_as_one_batch_are_measured_as_one() -> None:
    class Joined(dfx.NanoBatch):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                by_name: dict[str, list[Any]] = {}
                for op in ready:
                    by_name.setdefault(op.name, []).append(op)
                for ops in by_name.values():
                    s.execute(ops if len(ops) > 1 else ops[0], lane=0)

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    fast = dfx.schedule(_whole, Joined(2), lanes=2, in_axes=0)
    found = dfx.why(fast, x, y, rounds=1)
    assert not any("could not be measured" in note for note in found.notes)
    served = dispatch.serving(fast, "why", (x, y), {})
    made = served.alone((x, y), {}, 1)
    assert made is not None
    names = [s.region for s in made.spans if s.kind == "launch"]
    plan = dfx.plan(fast, x, y)
    assert names == [i.region for i in plan.instructions if isinstance(i, Launch)]


def test_a_graph_that_breaks_is_refused_by_name() -> None:
    def broken(x: Any) -> Any:
        y = torch.sort(x).values
        torch._dynamo.graph_break()
        return torch.sort(y * 2).values

    fast = dfx.schedule(broken, dfx.Branches(wide=False), lanes=2)
    with pytest.raises(dfx.UnsupportedError, match="runs as 2 graphs"):
        with pytest.warns(dfx.FallbackWarning, match="several graphs"):
            dfx.why(fast, torch.randn(64))


@pytest.mark.parametrize("backend", ["torch", "ffi"])
def test_a_tensor_given_twice(backend: str) -> None:
    if backend == "ffi":
        pytest.importorskip("jax")
    x = torch.randn(256)

    def twice(x: Any, y: Any) -> Any:
        return torch.sort(x).values + torch.sort(y * 2).values

    fast = dfx.schedule(twice, dfx.Branches(wide=False), lanes=2, backend=backend)
    found = dfx.why(fast, x, x, rounds=1)
    assert found.measured and not any("is estimated" in note for note in found.notes), found.notes


@pytest.mark.parametrize("strategy", ["branches", "auto", dfx.NanoBatch(2)], ids=str)
def test_meta_tensors_run_the_original(strategy: Any) -> None:
    fast = dfx.schedule(lambda x: torch.sort(x)[0] + torch.sort(x * 2)[0], strategy)
    x = torch.empty(8, 4, device="meta", dtype=torch.float64)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dfx.FallbackWarning)
            made = fast(x)
        assert made.is_meta and made.shape == x.shape and made.dtype == x.dtype
    assert "meta device" in dfx.explain(fast, x)
    real = torch.randn(8, 4)
    assert torch.equal(fast(real), fast.original(real))
