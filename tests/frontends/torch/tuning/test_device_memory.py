"""What trials of ``Auto`` take of a device's memory: copies and CUDA graphs; what happens without any."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fastest import always

import dynaflow_xla as dfx
from dynaflow_xla.caches import private_files
from dynaflow_xla.frontends.torch import core
from dynaflow_xla.frontends.torch.native import entry as entries
from dynaflow_xla.frontends.torch.native.compiling import compilers
from dynaflow_xla.frontends.torch.tuning import copying, keeping
from dynaflow_xla.tuning import autotune, quiet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("timeless")


def auto(fn: Any, **options: Any) -> Any:
    given = {"lanes": 2, "backend": "torch", **options}
    return dfx.schedule(fn, dfx.Auto(min_cost_ns=0.0), **given)


class Towers(nn.Module):
    """Writes one of its parameters if it is asked to, and a buffer."""

    def __init__(self, writes: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.writes, self.breaks = writes, breaks

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            if not self.breaks:
                self.calls.add_(1)
            if self.writes:
                self.b.weight.mul_(1.5)
                self.b.bias.data.add_(1)
        y = self.a(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return y * self.b(x).sin()


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tensors that measurements copied to give their values back."""
    made: list[Any] = []
    own = keeping.own_runs

    def own_runs(*args: Any, **options: Any) -> Any:
        value = keeping._Value

        class Noted(value):
            def __init__(self, tensor: Any, since: int) -> None:
                made.append(tensor)
                super().__init__(tensor, since)

        with monkeypatch.context() as here:
            here.setattr(keeping, "_Value", Noted)
            kept = own(*args, **options)
            given = kept.__enter__()

        class Kept:
            def __enter__(self) -> Any:
                return given

            def __exit__(self, *error: Any) -> Any:
                return kept.__exit__(*error)

        return Kept()

    monkeypatch.setattr(keeping, "own_runs", own_runs)
    return made


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("how", ["reads", "writes", "breaks"])
def test_what_is_only_read_is_not_copied(
    monkeypatch: pytest.MonkeyPatch, saved: list[Any], how: str, gradients: bool
) -> None:
    """A copy of all parameters may be more than a device has room for."""
    always(monkeypatch, "original")
    torch.manual_seed(0)
    model, same = (Towers(how == "writes", how == "breaks") for _ in range(2))
    same.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    told = pytest.warns(dfx.FallbackWarning, match="in several graphs")
    with torch.set_grad_enabled(gradients), told if how == "breaks" else nullcontext():
        fast = auto(model)
        torch.testing.assert_close(fast(x), same(x))
    want = {
        "reads": [model.calls],
        "writes": [model.calls, model.b.weight, model.b.bias],
        "breaks": [model.calls, *model.parameters()],  # what runs between graphs is not known
    }[how]
    assert {id(t) for t in saved} == set(map(id, want))
    for name, value in same.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def _without_room(
    monkeypatch: pytest.MonkeyPatch, works: Callable[[Any], bool], after: bool = False
) -> None:
    """The device has no memory for candidates other than these, or for what comes after them."""
    own = core.Core.call

    def call(self: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        fails = self.parent is not None and not works(self.options.strategy)
        result = None if fails and not after else own(self, args, kwargs, **options)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")
        return result

    monkeypatch.setattr(core.Core, "call", call)


def test_a_candidate_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = always(monkeypatch, "original")
    _without_room(monkeypatch, lambda strategy: not isinstance(strategy, dfx.NanoBatch))
    model, x = Towers(), torch.randn(8, 16)
    fast = auto(model)
    with torch.no_grad():
        with pytest.warns(dfx.FallbackWarning, match="had no memory for trying") as told:
            torch.testing.assert_close(fast(x), model(x))
        assert len(told) == 1
        assert not any("NanoBatch" in name for name in seen[0]) and len(seen[0]) > 1
        text = dfx.explain(fast, x)
    assert "NanoBatch(2): not measured: it fails: CUDA out of memory" in text
    assert "the original runs" in text
    assert not list(Path(private_files.cache_folder()).glob("*.json")), "later there may be room"


@pytest.mark.parametrize("what", ["arguments", "state", "original"])
def test_the_original_runs_where_nothing_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model, x = Towers(), torch.randn(8, 16)
    want = Towers()
    want.load_state_dict(model.state_dict())

    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    if what == "arguments":
        monkeypatch.setattr(copying.Copies, "_clone", refuse)
    elif what == "state":
        monkeypatch.setattr(keeping, "own_runs", refuse)
    else:

        def refuse_copies(module: Any, given: Any) -> None:
            if given[0] is not x and not torch.compiler.is_compiling():
                refuse()

        own = Towers.forward
        monkeypatch.setattr(
            Towers, "forward", lambda self, y: (refuse_copies(self, (y,)), own(self, y))[1]
        )
    fast = auto(model)
    with torch.no_grad():
        with pytest.warns(dfx.FallbackWarning, match="no memory for trying it, so the original"):
            torch.testing.assert_close(fast(x), want(x) if what != "original" else own(want, x))
        assert "not measured: the device had no memory" in dfx.explain(fast, x)
    assert torch.equal(model.calls, want.calls)


@pytest.mark.parametrize("end", ["decided", "disturbed", "interrupted", "alone", "no budget"])
def test_graphs_of_trials_are_given_back_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    always(monkeypatch, "original")
    holding: dict[int, Any] = {}  # what ran, and was not given back since
    ran: list[str] = []
    own = entries.NativeEntry.__call__

    def call(self: Any, inputs: Any) -> Any:
        holding[id(self)] = self
        ran.append(repr(self.options.strategy))
        return own(self, inputs)

    monkeypatch.setattr(entries.NativeEntry, "__call__", call)
    monkeypatch.setattr(entries.NativeEntry, "release", lambda self: holding.pop(id(self), None))
    raised: dict[str, type[BaseException]] = {
        "disturbed": quiet.Disturbed, "interrupted": KeyboardInterrupt,
        "no budget": autotune.BudgetTooSmall,
    }  # fmt: skip
    if end in raised:

        def measure(*_: Any, **__: Any) -> Any:
            raise raised[end]("as asked for")

        monkeypatch.setattr(autotune, "measure", measure)
    if end == "alone":
        _without_room(monkeypatch, lambda strategy: False, after=True)
        monkeypatch.setattr(core.one_thread, "may_help", lambda *_: False)
    model, x = Towers(), torch.randn(8, 16)
    fast = auto(model)
    with torch.no_grad():
        if end == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                fast(x)
        elif end == "alone":
            with pytest.warns(dfx.FallbackWarning, match="no memory"):
                fast(x)
        else:
            fast(x)
    assert len(set(ran)) > 1 and not holding


def test_one_lane_by_inductor_is_measured_where_it_is_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph of what Inductor made is none of what ``torch.compile`` does by itself."""
    monkeypatch.setattr(compilers.Compiler, "__call__", lambda self, works: works)
    monkeypatch.setattr(core.CompiledOriginal, "call", lambda self, a, k: chain(*a, **k))
    seen = always(monkeypatch, "original")
    monkeypatch.setattr(autotune, "load", lambda key: None)

    def chain(x: Any) -> Any:
        return x.sin().flip(0).cos().flip(1).tanh()

    x = torch.randn(8, 8)
    for graphed in (False, True):
        monkeypatch.setattr(entries.NativeEntry, "graphed", graphed)
        monkeypatch.setattr(entries.NativeEntry, "release", lambda self: None)
        monkeypatch.setattr(entries.NativeEntry, "describe", lambda self: [])
        fast = auto(chain, compiler="inductor")
        with torch.no_grad():
            torch.testing.assert_close(fast(x), chain(x))
            text = dfx.explain(fast, x)
        ours = seen[-1] - {"original", "torch.compile", "original on one thread"}
        assert bool(ours) == graphed, (seen[-1], text)
        assert ("torch.compile compiles the same" in text) != graphed
