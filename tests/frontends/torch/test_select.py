"""Several plans of a torch callable side by side; one is chosen at each call."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

import dynaflow_xla as dfx


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.tanh(self.layer(x))
        return made if mask is None else made * mask


def above_four(call: Any) -> str:
    return "split" if call.batch > 4 else call.context.get("small", "whole")


PLANS = {"whole": "branches", "split": dfx.NanoBatch(2), "plain": "original"}


def scheduled(model: Any, select: Any = above_four, plans: Any = PLANS, **options: Any) -> Any:
    options = {"in_axes": {"x": 0, "mask": 0}, **options}
    return dfx.schedule(model, plans, select=select, backend="torch", **options)


def test_split_only_above_some_rows_forward_and_backward() -> None:
    model = Model()
    fast = scheduled(model)
    for n in (8, 3, 8):
        x = torch.randn(n, 8)
        grads = []
        for call in (model, fast):
            model.zero_grad()
            call(x, mask=x).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for want, got in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(fast(x), model(x))
    told = dfx.explain(fast, torch.randn(8, 8))
    assert told.startswith("Model: select chooses 'split' for these arguments")
    assert "whole: Branches(), 2 calls" in told and "split: NanoBatch(2), 4 calls, ran last" in told
    assert "strategy NanoBatch(2)" in told
    assert dfx.plan(fast, torch.randn(3, 8)).strategy == "Branches()"
    assert dfx.plan(fast, torch.randn(8, 8)).strategy == "NanoBatch(2)"
    assert isinstance(fast, torch.nn.Module) and list(fast.state_dict()) == list(model.state_dict())


def test_switching_makes_nothing_and_threads_choose_for_themselves() -> None:
    model = Model()
    fast = scheduled(model)
    given = {n: torch.randn(n, 8) for n in (8, 3)}
    with torch.no_grad():
        want = {n: model(x) for n, x in given.items()}
        for x in given.values():
            fast(x)
        before = dfx.stats()
        failed: list[BaseException] = []

        def work(n: int) -> None:
            try:
                with torch.no_grad():
                    for _ in range(6):
                        torch.testing.assert_close(fast(given[n]), want[n])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in (8, 3, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not failed and not any(thread.is_alive() for thread in threads)
    after = dfx.stats()
    assert after.plans == before.plans and after.selected - before.selected == 18
    assert dfx.simulate(fast, given[8]).meta["notes"] == [
        "select chooses 'split' for these arguments"
    ]


def test_prefill_or_decode_by_context() -> None:
    model, state = Model(), {"small": "whole"}
    fast = scheduled(model, context=state)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for phase in ("whole", "plain", "whole", "plain"):
            state["small"] = phase
            torch.testing.assert_close(fast(x), model(x))
        state["small"] = "plain"
        assert dfx.explain(fast, x).endswith("the original runs: it has no plan")
        assert str(dfx.verify(fast, x)) == ""
        with pytest.raises(dfx.PlanError, match="which is the original: it has no plan"):
            dfx.plan(fast, x)
        state["small"] = "whole"
        told = dfx.explain(fast, x)
        assert (
            "whole: Branches(), 2 calls" in told
            and "plain: the original, 2 calls, ran last" in told
        )
        dfx.verify(fast, x)
        state["small"] = "other"
        with pytest.raises(dfx.PlanError, match="must return one of 'whole', 'split', 'plain'"):
            fast(x)


def test_a_value_decides() -> None:
    def sort(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values

    fast = scheduled(
        sort,
        lambda call: call.args[0].sum() > 0,
        {"low": "sequential", "high": "branches"},
        in_axes=None,
    )
    x = torch.rand(50)
    for value in (x, -x, -x):
        torch.testing.assert_close(fast(value), sort(value))
    told = dfx.explain(fast, x)
    assert "low: Sequential(), 2 calls, ran last" in told and "high: Branches(), 1 call" in told
    assert "'high' for these arguments" in told


def test_errors_of_the_choice() -> None:
    model, x = Model(), torch.randn(2, 8)
    with pytest.raises(dfx.PlanError, match="raised ZeroDivisionError") as found:
        scheduled(model, lambda call: 1 / 0)(x)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    with pytest.raises(dfx.PlanError, match="an index from 0 to 2; got 3"):
        scheduled(model, lambda call: 3)(x)
    program = torch.export.export(model, (x,))
    with pytest.raises(dfx.UnsupportedError, match="select takes a module or a function"):
        dfx.schedule(program, PLANS, select=above_four)


def test_copies() -> None:
    model, x = Model(), torch.randn(6, 8)
    fast = scheduled(model)
    fast(x)
    for again in (copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            torch.testing.assert_close(again(x), model(x))
            assert "split: NanoBatch(2), 1 call, ran last" in dfx.explain(again, x)
    assert copy.deepcopy(fast).layer.weight is not model.layer.weight
    assert copy.copy(fast).layer.weight is model.layer.weight
    assert "select among whole, split, plain" in repr(fast)
