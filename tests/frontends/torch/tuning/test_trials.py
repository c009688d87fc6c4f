"""Calls that ``Auto`` and the tools try: on copies that are like the arguments, and without a trace."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
from fastest import always

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.capture.mutation.effects import Changes
from dynaflow_xla.frontends.torch.capture.random import states
from dynaflow_xla.frontends.torch.tuning import copying, keeping
from dynaflow_xla.tuning import quiet
from dynaflow_xla.tuning.put_back import Saved

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("timeless")

two_lanes = {"lanes": 2, "backend": "torch"}


def auto(fn: Any, **options: Any) -> Any:
    return dfx.schedule(fn, dfx.Auto(min_cost_ns=0.0), **{**two_lanes, **options})


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.a(x).tanh() * self.b(x).sin()


class InPlace(Towers):
    def forward(self, x: Any) -> Any:
        return super().forward(x.relu_())


@pytest.mark.parametrize("tool", [dfx.verify, dfx.profile, dfx.debug, dfx.check_determinism])
def test_tools_take_a_computed_argument_that_is_written_in_place(tool: Any) -> None:
    fast = dfx.schedule(InPlace(), "branches", **two_lanes)
    tool(fast, nn.Linear(16, 16)(torch.randn(8, 16)))


def test_a_computed_argument_that_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    model, layer, x = InPlace(), nn.Linear(16, 16), torch.randn(8, 16)
    fast = auto(model)
    fast(layer(x)).sum().backward()
    got = layer.weight.grad
    layer.weight.grad = None
    model(layer(x)).sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)
    dfx.tune(auto(model), layer(x))


def test_copies_are_as_the_first_call_found_them() -> None:
    leaf = torch.ones(3, requires_grad=True)
    computed, cache, kept = leaf * 2, torch.zeros(3), [torch.zeros(2)]
    made = copying.Copies((computed, cache, kept, computed))
    for _ in range(2):
        x, written, grown, again = made.anew()
        assert x is again and not x.is_leaf and x.requires_grad
        assert torch.equal(written, cache) and not written.requires_grad and len(grown) == 1
        x.mul_(3)
        written.add_(x)
        grown.append(x)
        grown[0].add_(1)
    assert len(kept) == 1 and float(kept[0].sum()) == 0
    (wanted,) = made.wanted
    x = made.anew()[0]
    assert torch.equal(torch.autograd.grad(x.sum(), wanted)[0], torch.ones(3))


@pytest.mark.parametrize("gradients", [True, False])
def test_lists_are_as_long_in_every_run(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    always(monkeypatch, "original")
    lengths: list[int] = []

    class Cached(Towers):
        def forward(self, x: Any, cache: list[Any]) -> Any:
            if not torch.compiler.is_compiling():
                lengths.append(len(cache))
            cache.append(self.a(x))
            return torch.stack(cache).sum(0) + self.b(x)

    fast, cache = auto(Cached()), []  # type: ignore[var-annotated]
    with torch.set_grad_enabled(gradients):
        fast(torch.randn(8, 16), cache)
    assert set(lengths) == {0} and len(lengths) > 2 and len(cache) == 1


class Hyper(Towers):
    """A weight that another network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None

    def forward(self, x: Any) -> Any:
        return (x @ self.made).tanh() * self.b(x).sin()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_graph_in_an_attribute_stays(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    seen = always(monkeypatch, "original")
    model, x = Hyper(), torch.randn(8, 16)
    fast = auto(model, compiler=compiler)
    model.made = model.a(torch.eye(16)).sigmoid()
    fast(x).sum().backward()
    got = model.a.weight.grad
    model.zero_grad()
    model.made = model.a(torch.eye(16)).sigmoid()
    model(x).sum().backward()
    torch.testing.assert_close(got, model.a.weight.grad)
    told = "the module holds tensors with a graph of autograd's (made)"
    assert bool(seen) == (compiler == "eager") == (told not in dfx.explain(fast, x))


def test_what_fails_on_copies_only_is_not_the_callers_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, "original")

    x = torch.randn(8, 16, requires_grad=True)

    def fn(given: Any) -> Any:
        if not torch.compiler.is_compiling() and given is not x:
            raise ValueError("a copy")
        return given.sin() * given.cos()

    fast = auto(fn)
    assert torch.equal(fast(x), fn(x))
    assert "the original fails on copies of the arguments, or its backward (a copy)" in dfx.explain(
        fast, x
    )
    with pytest.raises(ValueError, match="a copy"):
        dfx.tune(fast, x)


def test_sparse_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "NanoBatch(2)")
    model, x = Towers(), torch.randn(8, 16)
    model.register_buffer("near", torch.eye(16).to_sparse())
    fast = auto(model)
    torch.testing.assert_close(fast(x), model(x))
    assert dfx.verify(fast, x)


def test_a_buffer_that_is_not_a_number_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "original")
    model, x = Towers(), torch.randn(8, 16, requires_grad=True)
    model.register_buffer("none", torch.full((16,), float("nan")))
    earlier = (x * model.none).sum()
    auto(model)(x)
    earlier.backward()


class Uncounted(Towers):
    """Writes that PyTorch does not count, as batch norm's are not, either."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.steps.data.add_(1)
        return super().forward(x)


def test_writes_that_are_not_counted_are_put_back_without_being_counted() -> None:
    model = Uncounted()
    with keeping.called_modules_kept():
        model(torch.randn(2, 16))
    assert float(model.steps.sum()) == 0 and model.steps._version == 0


def test_what_other_threads_write_beside_a_measurement_stays() -> None:
    model = Towers()
    model.register_buffer("ours", torch.zeros(2))
    model.register_buffer("once", torch.zeros(2))
    model.register_buffer("theirs", torch.zeros(2))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with keeping.own_runs(model, Changes(), (), {}, quiet.ActivityWatch()) as runs:
            for number in range(4):
                given = runs.begin(((), {}), look=True)
                model.ours.add_(1)
                if number == 0:
                    model.once.add_(1)
                if number == 2:
                    model.theirs.add_(1)
                del given
                model.theirs.add_(1)
    finally:
        stop.set()
        thread.join()
    assert model.ours.tolist() == [0, 0] and model.once.tolist() == [0, 0]
    assert model.theirs.tolist() == [5, 5]


def test_numbers_that_other_threads_draw_beside_a_measurement_are_not_repeated() -> None:
    watch = quiet.ActivityWatch()
    runs = keeping.OwnRuns(Saved(), keeping._Values(), states.Generators((), {}), watch)
    drawn = []
    for number in range(3):  # runs draw from PyTorch's generator, somebody else from Python's
        before = torch.get_rng_state()
        given = runs.begin(((), {}), look=number < 2)
        torch.rand(3)
        if number:
            drawn.append(random.random())
        del given
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(random.random())
    assert len(set(drawn)) == len(drawn)
    watch.begin()
    watch.check()
    torch.rand(1)  # between runs
    after = torch.get_rng_state()
    given = runs.begin(((), {}), look=False)
    torch.rand(1)
    del given
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(quiet.Disturbed, match="drew random numbers"):
        watch.check()


def test_a_generator_of_pythons_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "original")

    class Steps(Towers):
        def forward(self, x: Any, *extra: Any) -> Any:
            for e in extra:
                next(e)
            return super().forward(x)

    fast, steps = auto(Steps()), (n for n in range(9))
    fast(torch.randn(8, 16), steps)
    assert next(steps) == 1
    assert "an argument of type generator cannot be copied" in " ".join(
        choice.reason for choice in fast._dfx_core.decisions.values()
    )


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_failed_call_keeps_nothing(lanes: int) -> None:
    class Looked(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(5, 16)

        def forward(self, x: Any, i: Any) -> Any:
            return super().forward(x) + self.e(i)

    fast = dfx.schedule(Looked(), "branches", lanes=lanes, backend="torch")
    fast(torch.randn(4, 16), torch.zeros(4, dtype=torch.long))
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 16)
        kept = weakref.ref(x)
        with pytest.raises(Exception, match="index"):
            fast(x, torch.full((4,), 9))
        del x
        assert kept() is None
    finally:
        gc.enable()
