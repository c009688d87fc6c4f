"""Compilers as something to choose: ``compiler="auto"``, and ``torch.compile`` as what has to be beaten."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from fastest import always

import dynaflow_xla as dfx
from dynaflow_xla.caches import private_files
from dynaflow_xla.frontends.torch import core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.native.compiling import compilers
from dynaflow_xla.frontends.torch.tuning import auto, trial
from dynaflow_xla.tuning import autotune, budget, quiet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("timeless")


class Plain(core.CompiledOriginal):
    """In the place of ``torch.compile``: counts calls."""

    calls = 0

    def __init__(self, original: Any, options: Any) -> None:
        self.original = original

    def call(self, args: Any, kwargs: Any) -> Any:
        Plain.calls += 1
        return self.original(*args, **kwargs)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled; by whom it would have been."""
    asked: list[str] = []

    def same(compiler: Any, works: Any) -> Any:
        asked.append(compiler.name)
        return works

    monkeypatch.setattr(compilers.Compiler, "__call__", same)
    monkeypatch.setattr(core, "CompiledOriginal", Plain)
    return asked


def net() -> Any:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def scheduled(fn: Any, **options: Any) -> Any:
    given = {"lanes": 2, "backend": "torch", "compiler": "auto", **options}
    return dfx.schedule(fn, given.pop("strategy", dfx.Auto(min_cost_ns=0.0)), **given)


def test_every_compiler_is_measured(monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]) -> None:
    seen = always(monkeypatch, "NanoBatch(2) by aoti")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        text = dfx.explain(fast, x)
        split = [f"NanoBatch({n}){by}" for n in (2, 4) for by in ("", " by aoti", " by inductor")]
        assert seen == [{"original", "torch.compile", *split}]
        assert {"aoti", "inductor"} == set(uncompiled)
        assert "auto: NanoBatch(2) by aoti runs" in text and "regions aoti" in text
        assert "torch.compile compiles the same" in text  # a plan with one lane
        (file,) = Path(private_files.cache_folder()).glob("*.json")
        assert json.loads(file.read_text())["choice"] == "NanoBatch(2) by aoti"
        again = scheduled(model)
        torch.testing.assert_close(again(x), model(x))
        assert "NanoBatch(2) by aoti runs; cached" in dfx.explain(again, x)
    assert len(seen) == 1


def test_torch_compile_is_the_opponent(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """With one compiler, too: what nobody beats by a margin runs, and it is the faster plain way."""
    seen = always(monkeypatch, "torch.compile")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model, compiler="inductor")
    with torch.no_grad():
        fast(x)
        before = Plain.calls
        torch.testing.assert_close(fast(x), model(x))
        assert Plain.calls == before + 1
        assert seen == [{"original", "torch.compile", "NanoBatch(2)", "NanoBatch(4)"}]
        text = dfx.explain(fast, x)
    assert "auto: torch.compile runs; torch.compile (1 ms) is not beaten" in text
    assert "a candidate of Auto's, which does not run" in text


def test_one_strategy_by_several_compilers(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """A strategy of the user's runs in any case; only who compiles it is measured."""
    seen = always(monkeypatch, "NanoBatch(2) by inductor")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model, strategy=dfx.NanoBatch(2), in_axes=0)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        text = dfx.explain(fast, x)
    assert seen == [{"NanoBatch(2)", "NanoBatch(2) by inductor", "NanoBatch(2) by aoti"}]
    assert "auto: NanoBatch(2) by inductor runs" in text and "regions inductor" in text
    with pytest.raises(dfx.SeparabilityError, match="moves rows"):
        with torch.no_grad():
            scheduled(lambda x: x.flip(0), strategy=dfx.NanoBatch(2, joins=False), in_axes=0)(x)


def test_what_fails_to_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    class Fails(Plain):
        def call(self, args: Any, kwargs: Any) -> Any:
            raise RuntimeError("no C++ compiler")

    def refused(compiler: Any, works: Any) -> Any:
        raise RuntimeError(f"{compiler.name} found no C++ compiler")

    monkeypatch.setattr(core, "CompiledOriginal", Fails)
    monkeypatch.setattr(compilers.Compiler, "__call__", refused)
    seen = always(monkeypatch, "original")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        text = dfx.explain(fast, x)
    assert seen == [{"original", "NanoBatch(2)", "NanoBatch(4)"}]
    assert "torch.compile: not measured: no C++ compiler" in text
    assert "not measured: aoti fails: aoti found no C++ compiler" in text


def test_compiling_is_bounded_by_the_budget(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """Plans may take as long to compile as ``torch.compile`` did, not longer."""
    now = [0.0]

    class Slow(Plain):
        first = True

        def call(self, args: Any, kwargs: Any) -> Any:
            if Slow.first:
                Slow.first, now[0] = False, now[0] + 5.0
            return super().call(args, kwargs)

    monkeypatch.setattr(core, "CompiledOriginal", Slow)
    monkeypatch.setattr(budget, "clock", lambda: now[0])
    always(monkeypatch, "torch.compile")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        text = dfx.explain(fast, x)
    assert "compiling and measuring NanoBatch(2) by aoti would take about" in text
    assert "aoti" not in uncompiled


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())

    def forward(self, x: Any) -> Any:
        with dfx.mark("layers"):
            return self.layers(x)


def test_torch_compile_trains_as_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real: with the original's random numbers, its gradients, marks, other sizes and modes."""
    monkeypatch.setattr(compilers.Compiler, "__call__", lambda compiler, works: works)
    always(monkeypatch, "torch.compile")
    model = Marked().train()
    fast = scheduled(model)
    for rows in (4, 4, 7):
        x = torch.randn(rows, 8)
        made = []
        for m in (model, fast):
            model.zero_grad()
            torch.manual_seed(3)
            result = m(x)
            result.square().sum().backward()
            made.append((result.detach(), [p.grad.clone() for p in model.parameters()]))
        (want, grads), (got, found) = made
        assert torch.equal(want == 0, got == 0)  # the same elements are dropped
        torch.testing.assert_close(got, want)
        for g, w in zip(found, grads, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert "auto: torch.compile runs" in dfx.explain(fast, x)


def test_names_of_compilers() -> None:
    with pytest.raises(dfx.PlanError, match="eager, inductor, aoti or auto; got 'nvcc'"):
        dfx.schedule(net(), compiler="nvcc")
    with pytest.raises(dfx.UnsupportedError, match="compiler='auto' is for backend='torch'"):
        dfx.schedule(net(), compiler="auto", backend="ffi")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that calls run."""
    noted: list[Any] = []
    note = running.note_run

    def note_run(entry: Any) -> None:
        noted.append(entry)
        note(entry)

    monkeypatch.setattr(running, "note_run", note_run)
    return noted


NAME = "NanoBatch(2, joins=False)"


def regions(ran: list[Any], fast: Any, *args: Any) -> tuple[Any, list[str]]:
    """What a call gives, and the names of the regions of the graph that it runs last."""
    ran.clear()
    made = fast(*args)
    return made, [region.name for entry in ran[-1:] for region in entry.pg.regions]


@pytest.mark.parametrize("wanted", [NAME, f"{NAME} by inductor"])
def test_ones_own_strategy_runs_at_other_sizes(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str], ran: list[Any], wanted: str
) -> None:
    """At sizes that come once, too, and where rows are fewer than nano-batches asked for."""
    always(monkeypatch, wanted)
    model = net()
    fast = scheduled(model, strategy=dfx.NanoBatch(2, joins=False), in_axes=0)
    with torch.no_grad():
        for rows in (8, 12, 1, 1, 6):
            x = torch.randn(rows, 16)
            asked = len(uncompiled)
            made, names = regions(ran, fast, x)
            torch.testing.assert_close(made, model(x))
            assert names, "the original ran"
            assert rows == 1 or any(name.endswith("@1") for name in names)
            assert rows not in (12, 6) or len(uncompiled) == asked, (
                "compiled for sizes that came once"
            )
        text = dfx.explain(fast, torch.randn(6, 16))
    assert f"auto: {NAME} runs; these sizes came once" in text and "@1" in text


@pytest.mark.parametrize(
    "error",
    [
        quiet.NotMyTurn("another measures"),
        quiet.Disturbed("something ran"),
        autotune.BudgetTooSmall("too small"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_ones_own_strategy_runs_while_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str], ran: list[Any], error: Exception
) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(auto, "choose", raises)
    monkeypatch.setattr(quiet, "_FIRST_PAUSE_S", 0.0)
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model, strategy=dfx.NanoBatch(2, joins=False), in_axes=0)
    with torch.no_grad():
        for _ in range(10):  # put off, and at last given up
            made, names = regions(ran, fast, x)
            torch.testing.assert_close(made, model(x))
            assert any(name.endswith("@1") for name in names)
            text = dfx.explain(fast, x)
            assert "original runs" not in text and "does not run" not in text


def test_ones_own_strategy_does_not_hide_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """What mixes rows is an error at every size, as with one compiler."""
    always(monkeypatch, NAME)

    def fn(x: Any) -> Any:
        return x.flip(0) if x.shape[0] == 12 else x * 2

    fast = scheduled(fn, strategy=dfx.NanoBatch(2, joins=False), in_axes=0)
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), x * 2)
        for _ in range(2):
            with pytest.raises(dfx.SeparabilityError, match="cannot be split"):
                fast(torch.randn(12, 16))
        torch.testing.assert_close(fast(x), x * 2)


def test_ones_own_strategy_refuses_after_its_decision(
    monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """Something changed that is no argument: the same call is refused now."""
    always(monkeypatch, NAME)
    mixes = [False]

    def fn(x: Any) -> Any:
        return x.flip(0) if mixes[0] else x * 2

    fast = scheduled(fn, strategy=dfx.NanoBatch(2, joins=False), in_axes=0)
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), x * 2)
        mixes[0] = True
        for _ in range(2):
            with pytest.raises(dfx.SeparabilityError, match="moves rows"):
                fast(x)


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inductor without code of its own, which fails as soon as there is a message."""
    failing: list[str] = []

    def compile_fx(gm: Any, *_: Any, **__: Any) -> Any:
        if failing:
            raise RuntimeError(failing[0])
        return gm.forward

    monkeypatch.setattr(compilers.Compiler, "__call__", lambda compiler, works: works)
    module = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(module, "compile_fx", compile_fx)
    return failing


def test_the_original_runs_where_torch_compile_fails_later(
    monkeypatch: pytest.MonkeyPatch, inductor: list[str]
) -> None:
    always(monkeypatch, "torch.compile")
    model, x, other = net(), torch.randn(8, 16), torch.randn(12, 16)
    fast = scheduled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        inductor.append("no C++ compiler")
        with pytest.warns(
            dfx.FallbackWarning, match="torch.compile fails: .*no C.. compiler"
        ) as told:
            for _ in range(3):
                torch.testing.assert_close(fast(other), model(other))
            torch.testing.assert_close(fast(x), model(x))
            ours = [w for w in told if w.category is dfx.FallbackWarning]
        assert len(ours) == 1
        text = dfx.explain(fast, other)
        assert "the original runs; torch.compile fails: " in text and "no C++ compiler" in text
        assert "auto: torch.compile runs" in dfx.explain(fast, x)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):  # the original's own
            fast(torch.randn(8, 15))


def test_hooks_that_come_after_torch_compile(
    monkeypatch: pytest.MonkeyPatch, inductor: list[str]
) -> None:
    always(monkeypatch, "torch.compile")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model)
    with torch.no_grad():
        for module in (model, model[0]):
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x))
            handle = module.register_forward_hook(lambda module, args, y: y * 2 + 1)
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x))
            handle.remove()
        assert "auto: torch.compile runs" in dfx.explain(fast, x)


def test_what_has_run_in_part_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, inductor: list[str]
) -> None:
    def fn(x: Any) -> Any:
        y = torch.tanh(x) + 1
        torch._dynamo.graph_break()
        return torch.tanh(y @ x.T)

    always(monkeypatch, "torch.compile")
    fast, x = scheduled(fn), torch.randn(8, 16)
    with torch.no_grad():
        with pytest.warns(dfx.FallbackWarning, match="several graphs"):
            torch.testing.assert_close(fast(x), fn(x))
        assert "auto: torch.compile runs" in dfx.explain(fast, x)
        inductor.append("no C++ compiler")
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="compiler"):
            fast(torch.randn(12, 16))


# -- a compiler that is wrong ------------------------------------------------------------------------


class Wrong(Plain):
    """In the place of ``torch.compile``: computes something else, or other gradients."""

    gradients = False

    def call(self, args: Any, kwargs: Any) -> Any:
        y = super().call(args, kwargs)
        return y + (y - y.detach()) * 0.1 if Wrong.gradients else y * 1.05


@pytest.mark.parametrize("gradients", [False, True])
def test_a_compiler_that_computes_something_else_is_not_chosen(
    gradients: bool, monkeypatch: pytest.MonkeyPatch, uncompiled: list[str]
) -> None:
    """As Inductor does in PyTorch 2.13 of a masked assignment behind ``index_add_``."""
    monkeypatch.setattr(core, "CompiledOriginal", Wrong)
    monkeypatch.setattr(Wrong, "gradients", gradients)
    always(monkeypatch, "torch.compile")
    model, x = net(), torch.randn(8, 16)
    fast = scheduled(model, compiler="inductor")
    said = "torch.compile is left out: its values are not the original's: " + (
        "gradients differ" if gradients else "result 0 differs"
    )
    with pytest.warns(dfx.FallbackWarning, match=said), torch.set_grad_enabled(gradients):
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    with torch.set_grad_enabled(gradients):
        assert said.partition(": ")[2] in dfx.explain(fast, x)
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)


def kept(*results: Any, found: Any = ()) -> trial._Values:
    values = trial._Values(results)
    values.gradients(found)
    return values


NAN, INF = float("nan"), float("inf")
T = torch.tensor


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ([T([1.0, -2.0])], [T([1.001, -2.0])]),
        ([T([1.0, 2.0]).bfloat16()], [T([1.04, 2.0]).bfloat16()]),
        ([T([1e-9, -1e-9])], [T([-3e-8, 2e-8])]),  # what should be zero
        ([T([NAN, INF, 1.0])], [T([0.0, 0.0, 1.0])]),
        ([T([1, 2]), T([True]), None, "text"], [T([2, 1]), T([False]), None, "other"]),
        ([torch.empty(0)], [torch.empty(0)]),
        ([T([1.0 + 2.0j])], [T([1.0 + 2.001j])]),
    ],
)
def test_what_is_rounding(want: Any, got: Any) -> None:
    kept(*got, found=got).compare(kept(*want, found=want))


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ([T([1.0, -2.0])], [T([1.1, -2.0])]),
        ([T([1.0, 2.0]).half()], [T([1.4, 2.0]).half()]),
        ([T([1.0, 5.0]), T([0.0, 0.0])], [T([1.0, 5.0]), T([0.0, 1e-3])]),
        ([T([1.0, 2.0])], [T([1.0, NAN])]),
        ([T([1.0 + 2.0j])], [T([1.0 - 2.0j])]),
    ],
)
def test_what_is_none(want: Any, got: Any) -> None:
    with pytest.raises(dfx.VerificationError, match=r"result \d differs"):
        kept(*got).compare(kept(*want))


def test_gradients_are_looked_at_together() -> None:
    want, noise = T([3.0, 4.0]), T([1e-9])
    kept(found=[want, -noise]).compare(kept(found=[want, noise]))
    kept(found=[-noise]).compare(kept(found=[noise]))
    with pytest.raises(dfx.VerificationError, match="gradients differ by 0.2 of the norm"):
        kept(found=[T([3.0, 5.0]), None]).compare(kept(found=[want, noise]))


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_KEPT", 16)
    first, second = kept(T([1.0, 2.0]), torch.ones(4)).results
    assert first is not None and second is None
