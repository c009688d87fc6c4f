"""A scheduled module behaves as the original in everything else than its calls' schedule."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import types
import warnings
import weakref
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from dynaflow_xla.frontends.torch._compat import operators  # noqa: E402
from dynaflow_xla.frontends.torch.tuning import keeping  # noqa: E402


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any, scale: Any = None) -> Any:
        y = self.norm(self.left(x) * self.right(x))
        return y if scale is None else y * scale


class Strict(dfx.Branches):
    """Fails where no graph runs: no test can pass because the original ran."""


X = torch.randn(5, 6)


@pytest.fixture
def model() -> Any:
    return Towers()


@pytest.fixture
def fast(model: Any) -> Any:
    return dfx.schedule(model, strategy=Strict())


def test_state_is_shared(model: Any, fast: Any) -> None:
    assert isinstance(fast, Towers) and fast.original is model
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    assert list(fast.state_dict()) == list(model.state_dict())
    other = Towers()
    fast.load_state_dict(other.state_dict())
    fast.eval(), other.eval()
    assert not model.training and not model.norm.training
    assert torch.equal(fast(X), other(X)) and torch.equal(model(X), other(X))
    fast.extra = nn.Linear(2, 2)
    assert "extra" in dict(model.named_children())


def test_train_and_eval_after_a_call(model: Any, fast: Any) -> None:
    for mode in (True, False, True):
        fast.train(mode)
        torch.manual_seed(1)
        got = fast(X)
        torch.manual_seed(1)
        reference = copy.deepcopy(model)
        for a, b in zip(reference.buffers(), model.buffers(), strict=True):
            assert a.shape == b.shape
        if mode is False:
            assert torch.equal(got, reference(X))


def test_to_dtype(model: Any, fast: Any) -> None:
    fast.eval()
    assert fast(X).dtype == torch.float32
    assert fast.to(torch.float64) is fast
    got = fast(X.double())
    assert got.dtype == torch.float64 and torch.equal(got, model(X.double()))


def test_deepcopy_is_apart(model: Any, fast: Any) -> None:
    twin = copy.deepcopy(fast.eval())
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    assert twin.original is not model
    assert torch.equal(fast(X), model(X)) and torch.equal(twin(X), twin.original(X))
    assert not torch.equal(fast(X), twin(X))


def test_pickle_and_save(model: Any, fast: Any) -> None:
    fast.eval()
    again = pickle.loads(pickle.dumps(fast))
    assert type(again) is type(fast) and torch.equal(again(X), fast(X))
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    assert torch.load(file).keys() == model.state_dict().keys()


def test_pickle_of_a_function() -> None:
    fast = dfx.schedule(torch.sin, strategy=Strict(), backend="torch")
    assert torch.equal(pickle.loads(pickle.dumps(fast))(X), X.sin())


def of_either(x: Any, y: Any) -> Any:
    """A function that pickle finds by its name, for tensors and arrays."""
    return abs(x) @ y + x.sum()


@pytest.mark.parametrize("selected", [False, True])
def test_pickle_of_a_function_of_either_framework(
    selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both are loaded its arguments tell whose it is: before any call, and after calls of each."""
    jax = pytest.importorskip("jax")
    # Tests are imported under names that pickle cannot import.
    monkeypatch.setitem(sys.modules, of_either.__module__, sys.modules[__name__])
    fast = (
        dfx.schedule(of_either, {"one": "sequential", "two": "branches"}, select=first_of_two)
        if selected
        else dfx.schedule(of_either, "sequential")
    )
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    arrays = [jax.numpy.asarray(t.numpy()) for t in (a, b)]
    for _ in range(2):
        again = pickle.loads(pickle.dumps(fast))
        assert type(again) is type(fast) and again.__name__ == "of_either"
        torch.testing.assert_close(again(a, b), of_either(a, b))
        got = torch.from_numpy(jax.device_get(again(*arrays)).copy())
        torch.testing.assert_close(got, of_either(a, b), rtol=1e-4, atol=1e-4)
        fast(a, b), fast(*arrays)


def first_of_two(call: Any) -> str:
    return "one"


def test_hooks(model: Any, fast: Any) -> None:
    fast.eval()
    fast(X)
    seen: list[str] = []
    outer = fast.register_forward_hook(lambda *_: seen.append("outer"))
    inner = model.left[0].register_forward_hook(lambda _, __, y: y + 1)
    before = model.right.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert torch.equal(fast(X), model(X))
    assert seen == ["outer", "outer"]
    outer.remove(), inner.remove(), before.remove()
    assert torch.equal(fast(X), model(X)) and len(seen) == 2


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2), dfx.Auto()])
def test_hooks_on_every_module(model: Any, strategy: Any) -> None:
    """Whoever registers them: the original runs as long as they are there, and that is told once.

    Where ``Auto`` has decided for the original there is nothing to tell.
    """
    model.eval()
    fast = dfx.schedule(model, strategy, lanes=2, in_axes=0)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
        seen: list[str] = []
        doubled = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: seen.append(type(module).__name__)
        )
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                want, called = model(X), seen.copy()
                seen.clear()
                assert torch.equal(fast(X), want)
                assert seen == called
                assert torch.equal(fast(X), want)
            texts = [str(w.message) for w in told if w.category is dfx.FallbackWarning]
            kept = isinstance(strategy, dfx.Auto) and "original runs" in dfx.explain(fast, X)
            assert len(texts) == (0 if kept else 1)
            assert all("hooks are registered on every module" in text for text in texts)
            assert "note: 'Towers' is called while hooks are registered" in dfx.explain(fast, X)
        finally:
            handle.remove(), doubled.remove()
        seen.clear()
        torch.testing.assert_close(fast(X), model(X))
        assert "while hooks are registered" not in dfx.explain(fast, X) and not seen


def test_our_hook_on_every_module_is_not_counted(model: Any) -> None:
    with keeping.called_modules_kept():
        assert not operators.hooks_on_all_modules()
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        assert operators.hooks_on_all_modules()
        handle.remove()
    assert not operators.hooks_on_all_modules()


def test_gradient_hooks(model: Any, fast: Any) -> None:
    seen: list[Any] = []
    model.left[0].weight.register_hook(lambda g: seen.append(g.clone()))
    fast.eval()
    fast(X).sum().backward()
    model(X).sum().backward()
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_of_it(model: Any, fast: Any, backend: str) -> None:
    fast.eval()
    compiled = torch.compile(fast, backend=backend)
    assert torch.equal(compiled(X), model(X))

    @torch.compile(backend=backend, fullgraph=True)
    def around(x: Any) -> Any:
        return fast(x) * 2

    assert torch.equal(around(X), model(X) * 2)


def test_of_a_compiled_module(model: Any) -> None:
    fast = dfx.schedule(torch.compile(model.eval()), strategy=Strict())
    assert torch.equal(fast(X), model(X))


def test_of_a_scheduled_module(model: Any, fast: Any) -> None:
    again = dfx.schedule(fast.eval(), strategy=dfx.Sequential())
    assert again.original is model and torch.equal(again(X), model(X))


def test_as_a_submodule(model: Any, fast: Any) -> None:
    whole = nn.Sequential(fast, nn.Linear(4, 2)).eval()
    assert torch.equal(whole(X), whole[1](model(X)))
    assert "0.left.0.weight" in whole.state_dict()


def test_inference_mode_and_no_grad(model: Any, fast: Any) -> None:
    fast.eval()
    with torch.inference_mode():
        got = fast(X)
        assert got.is_inference() and torch.equal(got, model(X))
    with torch.no_grad():
        assert not fast(X).requires_grad
    assert fast(X).requires_grad


def test_keywords(model: Any, fast: Any) -> None:
    fast.eval()
    assert torch.equal(fast(x=X, scale=2.0), model(X, 2.0))
    assert torch.equal(fast(X, scale=torch.tensor(3.0)), model(X, 3.0))


def test_methods_and_functions_as_decorator() -> None:
    class Holder:
        @dfx.schedule(strategy=Strict(), backend="torch")
        def double(self, x: Any) -> Any:
            "Twice."
            return x * 2

    assert torch.equal(Holder().double(X), X * 2)
    assert Holder.double.__doc__ == "Twice."


def test_threads_share_it(fast: Any, model: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    fast.eval()
    inputs = [torch.randn(n, 6) for n in (2, 3, 5, 8) * 4]
    with torch.no_grad():
        want = [model(x) for x in inputs]

    def call(x: Any) -> Any:
        with torch.no_grad():
            return fast(x)

    with ThreadPoolExecutor(4) as pool:
        for w, g in zip(want, pool.map(call, inputs), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)


def _lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(3)).eval()


@pytest.mark.parametrize("how", ["module", "method", "function", "auto"])
def test_lazy_modules_draw_what_the_originals_do(how: str) -> None:
    """The original makes the call that makes the parameters; what comes after is scheduled."""

    def scheduled(model: Any) -> Any:
        if how in ("module", "auto"):
            return dfx.schedule(model, *([Strict()] if how == "module" else []))
        called = model.forward if how == "method" else lambda x: model(x)
        return dfx.schedule(called, Strict(), backend="torch")

    torch.manual_seed(0)
    wanted = [_lazy() for _ in range(2)]
    for model in wanted:
        model(X)
    torch.manual_seed(0)
    models = [_lazy() for _ in range(2)]
    calls = [scheduled(model) for model in models]
    results = [call(X) for call in calls]
    for model, want, result in zip(models, wanted, results, strict=True):
        torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=0, atol=0)
        assert torch.equal(result, want(X))
    assert dfx.plan(calls[0], X).instructions
    assert torch.equal(calls[0](X), results[0])


def test_lazy_modules_are_not_planned_before_their_first_call() -> None:
    fast = dfx.schedule(nn.LazyLinear(4), Strict())
    assert "lazy modules" in dfx.explain(fast, X)
    for ask in (dfx.plan, dfx.verify, dfx.profile):
        with pytest.raises(dfx.UnsupportedError, match="lazy modules.*call it once"):
            ask(fast, X)
    measured = dfx.schedule(nn.LazyLinear(4))
    with pytest.raises(dfx.UnsupportedError, match="lazy modules.*call it once"):
        dfx.tune(measured, X)
    assert fast.has_uninitialized_params()
    fast(X)
    assert "lazy modules" not in dfx.explain(fast, X)
    assert dfx.plan(fast, X).instructions


def test_objects_that_its_class_makes_are_the_users() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    fast = dfx.schedule(model, strategy=Strict())
    assert torch.equal(fast[:2](X), model[:2](X))
    made = type(fast)(nn.Tanh())
    assert type(made) is nn.Sequential and torch.equal(made(X), X.tanh())

    class Derived(type(fast)):  # type: ignore[misc]
        pass

    with pytest.raises(dfx.UnsupportedError, match="derive it from Sequential itself"):
        Derived(nn.Tanh())


def test_its_class_is_named_as_the_users() -> None:
    registered = []

    class Named(Towers):
        def __init_subclass__(cls) -> None:
            registered.append(cls)

    fast = dfx.schedule(Named(), strategy=Strict())
    assert type(fast).__name__ == "Named" and type(fast).__qualname__ == Named.__qualname__
    assert type(fast) is not Named and not registered
    assert repr(fast).startswith("<scheduled Named with ")


def test_what_a_transformers_model_saves_names_its_own_class(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    fast = dfx.schedule(transformers.BertModel(config).eval(), strategy=Strict())
    fast.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["BertModel"]
    again = type(fast).from_pretrained(tmp_path)
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert type(again) is transformers.BertModel
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, fast.original(ids).last_hidden_state)


def test_its_end_is_not_the_originals() -> None:
    ended: list[Any] = []

    class Holds(Towers):
        def __del__(self) -> None:
            ended.append(type(self))

    model = Holds()
    fast = dfx.schedule(model, strategy=Strict())
    del fast
    gc.collect()
    assert not ended
    del model
    gc.collect()
    assert ended == [Holds]


@pytest.mark.parametrize("training", [True, False])
def test_what_was_planned_ends_with_it(training: bool) -> None:
    """Guards of Dynamo's on what lives on keep the globals of its code, and these what was compiled."""
    model = Towers()
    fast = dfx.schedule(model, strategy=Strict())
    with torch.set_grad_enabled(training):
        out = fast(X)
    planned = [weakref.ref(entry) for entry in fast._dfx_core.all_planned((X,), {})]
    if training:
        out.sum().backward()
    del fast, out
    gc.collect()  # the function that was captured
    gc.collect()  # what had been compiled for it
    assert planned and not any(ref() for ref in planned)


def test_something_of_its_own_named_original_is_refused() -> None:
    class Method(Towers):
        def original(self) -> None: ...

    held = []
    for what in (nn.Linear(2, 2), nn.Parameter(X), 3, None):
        held.append(Towers())
        held[-1].original = what
    buffered = Towers()
    buffered.register_buffer("original", None)
    for model in (*held, buffered, Method()):
        with pytest.raises(dfx.UnsupportedError, match="named 'original'.*Rename it, or schedule"):
            dfx.schedule(model, strategy=Strict())


def test_pickle_of_what_stands_in_the_place_of_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("decorated")
    monkeypatch.setitem(sys.modules, "decorated", module)
    text = """
import dynaflow_xla as dfx

@dfx.schedule(strategy="sequential", backend="torch")
def top(x):
    return x.sin()

class Inside:
    @dfx.schedule(strategy="sequential", backend="torch")
    def method(self, x):
        return x.cos()
"""
    exec(text, module.__dict__)
    for fast in (module.top, module.Inside.method):
        assert pickle.loads(pickle.dumps(fast)) is fast
    assert torch.equal(pickle.loads(pickle.dumps(module.top))(X), X.sin())
    assert copy.deepcopy(module.top) is module.top


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2)], ids=["whole", "nano"])
def test_hooks_on_results_that_others_are_made_of_are_told(strategy: dfx.Strategy) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(layers[0](x))
        first, *_ = torch.split(layers[1](hidden), 2, -1)
        return x, hidden, hidden.shape, first, layers[2](hidden.detach())

    x = torch.randn(4, 4, requires_grad=True)

    def told(watch: int, of: int, hook: bool) -> list[str]:
        fast = dfx.schedule(three, strategy, backend="torch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                results = fast(x)
                if hook:
                    results[watch].register_hook(lambda gradient: None)
                else:
                    results[watch].retain_grad()
                results[of].sum().backward()
        seen = [w for w in caught if "share one backward" in str(w.message)]
        assert len(seen) < 2
        assert all("test_modules" in w.filename for w in seen)
        return [str(w.message) for w in seen]

    for hook in (False, True):
        assert "a result of 'three' has a hook" in told(1, 3, hook)[0]
        for watch, of in ((1, 1), (3, 3), (0, 3), (1, 4), (4, 3)):
            assert not told(watch, of, hook), (watch, of)
