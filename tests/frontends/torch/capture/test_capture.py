"""Capture: marks, rules, graph breaks, sizes, mutations, aliases, training in its variants."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn
F = torch.nn.functional

from dynaflow_xla.frontends.torch._compat import captures  # noqa: E402


def scheduled(fn: Any, strategy: Any = None, **options: Any) -> Any:
    return dfx.schedule(fn, strategy=strategy or dfx.Branches(), backend="torch", **options)


def regions(fast: Any, *args: Any) -> list[str]:
    return [region.name for region in dfx.graph(fast, *args).regions]


# -- marks and rules -------------------------------------------------------------------------------


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        with dfx.mark("left", resource="memory", tags={"branch"}):
            u = self.a(x).tanh()
        with dfx.mark("right", tags={"branch"}):
            v = self.b(x).sin()
        return u @ v.T


X = torch.randn(5, 6)


def test_marks_become_regions_forward_and_backward() -> None:
    fast = scheduled(Marked())
    pg = dfx.graph(fast, X)
    left = next(r for r in pg.regions if r.name == "left")
    assert left.resource == "memory" and "branch" in left.tags
    assert "right" in [r.name for r in pg.regions]
    fast(X).sum().backward()
    backward = dfx.explain(fast, X).split("(backward)")[1]
    assert "left" in backward and "right" in backward


def test_a_mark_in_a_loop_is_a_region_each() -> None:
    def fn(x: Any) -> Any:
        for _ in range(3):
            with dfx.mark("step"):
                x = torch.sin(x) * 2
        return x

    assert regions(scheduled(fn), X) == ["step", "step_1", "step_2"]


def test_a_mark_as_decorator_and_nested() -> None:
    @dfx.mark("inner")
    def inner(x: Any) -> Any:
        return x.sin().cos()

    def fn(x: Any) -> Any:
        with dfx.mark("outer"):
            y = x.exp() + 1
            z = inner(y)
        return z * 2

    names = regions(scheduled(fn), X)
    assert "inner" in names and "outer" in names


def test_a_mark_without_a_schedule_does_nothing() -> None:
    model = Marked()
    assert model(X).shape == (5, 5)


def test_a_mark_around_a_graph_break_is_an_error() -> None:
    def fn(x: Any) -> Any:
        with dfx.mark("cut"):
            y = x.sin()
            if y.sum() > 0:
                y = y + 1
        return y

    with (
        warnings.catch_warnings(),
        pytest.raises(dfx.UnsupportedError, match=r"'cut'.*test_capture.py:\d+.*"),
    ):
        warnings.simplefilter("ignore", dfx.FallbackWarning)
        scheduled(fn)(X)


def test_module_rules_by_class_and_path() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 6), nn.Tanh())
    by_class = scheduled(model, rules=[dfx.Module(nn.Linear, tags={"gemm"})])
    pg = dfx.graph(by_class, X)
    assert sum("gemm" in r.tags for r in pg.regions) == 2
    by_path = scheduled(model, rules=[dfx.Module("0/*"), dfx.Module("2", name="last")])
    assert "last" in regions(by_path, X)


def test_a_module_called_twice_is_two_regions() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return self.shared(self.shared(x).relu())

    fast = scheduled(Twice(), rules=[dfx.Module(nn.Linear)])
    assert len([n for n in regions(fast, X) if n.startswith("shared")]) == 2


@pytest.mark.parametrize("rule", [dfx.Module("nope/*"), dfx.Module(nn.GRU), dfx.Op("no_such")])
def test_a_rule_without_a_match(rule: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    with pytest.raises(dfx.RuleError, match="matches nothing"):
        scheduled(model, rules=[rule])(X)


# -- graph breaks ----------------------------------------------------------------------------------


def test_graph_breaks_warn_once_with_the_line() -> None:
    def fn(x: Any) -> Any:
        y = torch.sort(x).values
        if y.sum() > 0:
            return y + 1
        return y - 1

    fast = scheduled(fn)
    with pytest.warns(dfx.FallbackWarning, match=r"test_capture.py:\d+: control flow") as caught:
        for sign in (1, -1, 1):
            assert torch.equal(fast(X * sign), fn(X * sign))
    ours = [w for w in caught if issubclass(w.category, dfx.FallbackWarning)]
    assert len(ours) == 1 and ours[0].filename == __file__
    assert "graph break" in dfx.explain(fast, X)
    with pytest.raises(dfx.UnsupportedError, match="graphs for these arguments"):
        dfx.plan(fast, X)


@pytest.mark.parametrize("backend", ["torch", "xla"])
@pytest.mark.parametrize(
    "rule", [dfx.Module(nn.Linear, name="mine"), dfx.Op("sin*", name="mine"), dfx.Op("no_such")]
)
def test_rules_match_in_some_of_several_graphs(rule: Any, backend: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            y = self.left(x).relu() + self.right(x)
            torch._dynamo.graph_break()
            return y.sin() + 1

    model = Broken()
    fast = dfx.schedule(model, strategy=dfx.Branches(), rules=[rule], backend=backend)
    with pytest.warns(
        dfx.FallbackWarning, match="by those rules that match in it: graph break"
    ) as caught:
        got = fast(X)
    assert sum(issubclass(w.category, dfx.FallbackWarning) for w in caught) == 1
    torch.testing.assert_close(got, model(X), rtol=1e-5, atol=1e-6)
    leaves = list(model.parameters())
    for g, w in zip(
        torch.autograd.grad(fast(X).square().sum(), leaves),
        torch.autograd.grad(model(X).square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    told = dfx.explain(fast, X)
    assert ("mine" in told) == (rule.name == "mine")


def test_fullgraph_refuses_breaks() -> None:
    def fn(x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(Exception, match=r"(?s)Data-dependent branching.*test_capture.py"):
        scheduled(fn, compiler_options={"fullgraph": True})(X)


# -- sizes -----------------------------------------------------------------------------------------


def test_one_capture_for_many_batch_sizes(round_robin: Any) -> None:
    model = Marked()
    fast = scheduled(model, round_robin)
    for n in (3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 33):
        x = torch.randn(n, 6)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert len(fast._dfx_core.entries) == 2  # fixed, then any


def test_sizes_open_from_the_start() -> None:
    model = Marked()
    fast = scheduled(model, compiler_options={"dynamic": True})
    for n in (2, 7, 4):
        x = torch.randn(n, 6)
        fast(x).sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        for g, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad, rtol=1e-6, atol=1e-6)
        model.zero_grad()
    forward = [e for e in fast._dfx_core.entries if e.kind == "forward"]
    assert len(forward) == 1


# -- mutations and aliases -------------------------------------------------------------------------

CASES = {
    "in place": lambda a, b: (a.add_(1), b * 2),
    "in place in the middle": lambda a, b: (a.mul_(2).sort().values + b, a),
    "view of an argument": lambda a, b: (a.view(-1)[2:], b.t()),
    "argument returned": lambda a, b: (a, b, a * 1),
    "write through a view": lambda a, b: (a.view(-1)[:2].copy_(b.view(-1)[:2]), a.sum()),
    "two outputs, one storage": lambda a, b: (lambda c: (c, c.view(-1)))(a + b),
    "resized result": lambda a, b: (torch.cat([a, b]).unfold(0, 2, 1), a.sum()),
    "index put": lambda a, b: (a.index_put_((torch.tensor([0]),), b[0]), a + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_mutations_and_aliases(name: str, round_robin: Any) -> None:
    fn = CASES[name]
    fast = scheduled(fn, round_robin)
    for _ in range(2):
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        c, d = a.clone(), b.clone()
        want, got = fn(a, b), fast(c, d)
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w, g) and w.stride() == g.stride()
        assert torch.equal(a, c) and torch.equal(b, d)
        want[0].add_(1), got[0].add_(1)  # whoever shares memory in the original shares it here
        for w, g in zip((*want, a, b), (*got, c, d), strict=True):
            assert torch.equal(w, g)


def test_arguments_that_overlap() -> None:
    def fn(a: Any, b: Any) -> Any:
        return a.add_(1), b * 2

    base, other = torch.zeros(4), torch.zeros(4)
    want, got = fn(base[:3], base[1:]), scheduled(fn)(other[:3], other[1:])
    assert torch.equal(base, other)
    assert all(torch.equal(w, g) for w, g in zip(want, got, strict=True))


def test_python_state_moves_as_in_the_original() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            self.total += x.sum()
            return x * self.total

    model = Counter()
    fast = scheduled(copy.deepcopy(model))
    for n in range(4):
        assert torch.equal(model(X + n), fast(X + n))
    assert fast.calls == 4 and torch.equal(model.total, fast.total)


def test_results_that_are_no_tensors() -> None:
    def fn(x: Any) -> Any:
        return {"y": x + 1, "n": 3, "text": "t", "none": None, "shape": (x.shape[0], 2.5)}

    got, want = scheduled(fn)(X), fn(X)
    assert torch.equal(got.pop("y"), want.pop("y")) and got == want


def test_dtypes_stay(round_robin: Any) -> None:
    def fn(x: Any, i: Any, c: Any) -> Any:
        return x.double() * 3, i + 2**40, c * 1j, (x > 0), i.to(torch.uint8), x.half()

    args = X, torch.arange(4), torch.randn(3, dtype=torch.complex64)
    for w, g in zip(fn(*args), scheduled(fn, round_robin)(*args), strict=True):
        assert w.dtype == g.dtype and torch.equal(w, g)


# -- training --------------------------------------------------------------------------------------


def test_gradient_accumulation(round_robin: Any) -> None:
    model = Marked()
    fast = scheduled(copy.deepcopy(model), round_robin)
    for m in (model, fast):
        for seed in range(3):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            (m(x).square().mean() / 3).backward()
    for w, g in zip(model.parameters(), fast.parameters(), strict=True):
        assert torch.equal(w.grad, g.grad)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool, round_robin: Any) -> None:
    model = Marked()
    if inside:

        def fn(x: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        fast = scheduled(fn, round_robin)
        assert torch.equal(fn(X), fast(X)) and fast(X).dtype == torch.bfloat16
        return
    fast = scheduled(model, round_robin)
    assert fast(X).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = model(X), fast(X)
    assert got.dtype == torch.bfloat16 and torch.equal(want, got)
    want.float().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got.float().sum().backward()
    for g, p in zip(grads, model.parameters(), strict=True):
        assert torch.equal(g, p.grad)


def test_grad_modes_inside(round_robin: Any) -> None:
    def fn(x: Any) -> Any:
        with torch.no_grad():
            a = x.sin()
        return a * x.cos() + x.detach()

    fast = scheduled(fn, round_robin)
    gradients = []
    for call in (fn, fast):
        x = X.clone().requires_grad_()
        call(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_dropout_draws_from_the_callers_generator(round_robin: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.2))
    fast = scheduled(copy.deepcopy(model), round_robin)
    results = []
    for m in (model, fast):
        torch.manual_seed(5)
        with torch.random.fork_rng():
            torch.manual_seed(9)
            first = m(X)
        results.append((first, m(X), torch.rand(2), torch.get_rng_state()))
    for w, g in zip(*results, strict=True):
        assert torch.equal(w, g)


def test_second_derivatives_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(scheduled(lambda x: x.sin() ** 2)(x).sum() + (x**3).sum(), x,
                               create_graph=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(g.sum(), x)


def test_checkpointing(round_robin: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def fn(x: Any) -> Any:
        return checkpoint(model, x, use_reentrant=False).sin()

    fast = scheduled(fn, round_robin)
    fn(X).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fast(X).sum().backward()
    for w, p in zip(want, model.parameters(), strict=True):
        assert torch.equal(w, p.grad)


def begun_before(fn: Any) -> None:
    """As a trace that began before Dynamo put a wrapper around ``trace``, which it does as it compiles."""
    inspect.unwrap(torch.fx.Tracer.trace)(torch.fx.Tracer(), fn)


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, begun_before])
def test_another_thread_traces(trace: Any) -> None:
    """Before 2.15 PyTorch keeps one flag of ``torch.fx`` for all threads: a call waits for that trace."""
    begun, go_on = threading.Event(), threading.Event()

    def traced(x: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return x + 1

    other = threading.Thread(target=trace, args=(traced,), daemon=True)
    fast, x = dfx.schedule(lambda x: x.sin() * 2, "branches"), torch.randn(8)
    fast(x[:3])
    other.start()
    assert begun.wait(60)
    threading.Timer(0.2, go_on.set).start()
    torch.testing.assert_close(fast(x), x.sin() * 2)
    other.join(60)
    assert not other.is_alive()
    again = scheduled(lambda x: x.cos() * 2)
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        torch.fx.symbolic_trace(lambda x: again(x))


one_flag = pytest.mark.skipif(
    not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"),
    reason="PyTorch keeps a flag of torch.fx for each thread",
)


@one_flag
def test_traces_of_others_that_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's flag then stays: nothing to wait for, and PyTorch's own calls raise, too."""
    fast, x = dfx.schedule(lambda x: x.sin() * 3, "branches"), torch.randn(8)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        # Two traces that overlap leave modules patched, too, for all tests that follow.
        patch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
        call = pool.submit(fast, x)
        wait([call], 30)
        patch.undo()
        with pytest.raises(RuntimeError, match="no thread traces"):
            call.result(30)
    torch.testing.assert_close(fast(x), x.sin() * 3)


@one_flag
def test_a_trace_that_waits_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call could only wait for the trace: after some time it raises."""
    monkeypatch.setattr(captures, "STILL_S", 0.5, raising=False)
    fast, x = dfx.schedule(lambda x: x.sin() * 4, "branches"), torch.randn(7)
    with ThreadPoolExecutor(1) as pool:

        def traced(given: Any) -> Any:
            return given + pool.submit(fast, x).result(30)

        with pytest.raises(RuntimeError, match="If that trace waits for this call"):
            torch.fx.symbolic_trace(traced)
    torch.testing.assert_close(fast(x), x.sin() * 4)


@pytest.mark.parametrize("message", [(), ("must be positive",)], ids=["no message", "message"])
def test_assertions_on_tensors_are_kept(message: tuple[str, ...]) -> None:
    def f(x: Any) -> Any:
        torch._assert_async(x.sum() > 0, *message)
        return torch.sort(x).values, torch.sort(-x).values

    fast, x = dfx.schedule(f, dfx.Branches(wide=False), lanes=2), torch.ones(3)
    torch.testing.assert_close(fast(x), f(x), rtol=0, atol=0)
    with pytest.raises(dfx.EngineError, match=message[0] if message else "nonzero"):
        fast(-x)


def test_marks_in_and_around_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    def inner(x: Any) -> Any:
        with dfx.mark("inner", tags={"t"}):
            y = torch.sort(x).values
        return y.cos()

    def f(x: Any) -> Any:
        with dfx.mark("outer"):
            y = checkpoint(inner, x.sin(), use_reentrant=False)
        return y + 1.0

    fast = scheduled(f)
    assert {"outer", "inner"} <= set(regions(fast, X))
    assert [r.name for r in dfx.graph(fast, X).regions if "t" in r.tags] == ["inner"]
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    fast(x).square().sum().backward()
    f(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


_MADE_OUTSIDE = dfx.mark("outside")


def test_a_mark_that_is_made_outside_of_the_function() -> None:
    def f(x: Any) -> Any:
        with _MADE_OUTSIDE:
            return x.sin() + x.cos()

    with pytest.raises(
        dfx.errors.UnsupportedError, match=r"made outside.*with dfx\.mark\('outside'\)"
    ):
        scheduled(f)(X)


@pytest.mark.parametrize("strategy", ["auto", "sequential", "branches"])
def test_nested_tensors_of_both_layouts(strategy: str) -> None:
    layer = nn.Linear(6, 6)
    fast = dfx.schedule(layer, strategy)
    parts = [torch.randn(3, 6), torch.randn(4, 6)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # jagged ones are not captured, and PyTorch calls others a prototype
        for layout in (torch.jagged, torch.strided, torch.strided, torch.strided):
            got = fast(torch.nested.nested_tensor(parts, layout=layout)).unbind()
            for mine, part in zip(got, parts, strict=True):
                torch.testing.assert_close(mine, layer(part))
        parts.append(torch.randn(2, 6))
        got = fast(torch.nested.nested_tensor(parts)).unbind()
        assert [len(member) for member in got] == [3, 4, 2]
