"""Published strategies: the same object on a JAX and a PyTorch model, with values and gradients of each."""

from __future__ import annotations

import ast
import functools
import heapq
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ir.graph import Graph, Operator, Region, Value
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.strategies.base import record

jax = pytest.importorskip("jax")
models = pytest.importorskip("published_models")
published = dfx.published

SPLIT = {
    "nanoflow": published.NanoFlow(2),
    "two_batch": published.TwoBatchOverlap(),
    "token_weave": published.TokenWeave(models.norm, first=2),
}
WHOLE = {
    "single_batch": published.SingleBatchOverlap(),
    "opara": published.Opara(),
    "nimble": published.Nimble(),
    "ios": published.IOS(),
    "fused": published.Fused(models.norm),
    "by_resource": published.LanesByResource(),
    "optimizer": published.OptimizerBesideBackward(),
}
STRATEGIES = {**SPLIT, **WHOLE}


class Framework:
    """What differs between the two: arrays, gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.xp: Any = jax.numpy if name == "jax" else pytest.importorskip("torch")

    def array(self, x: Any, grad: bool = False) -> Any:
        if self.name == "jax":
            return jax.numpy.asarray(x)
        return self.xp.tensor(x, requires_grad=grad)

    def tree(self, p: Any, grad: bool = False) -> Any:
        return {k: self.array(v, grad) for k, v in p.items()}

    def schedule(self, fn: Callable[..., Any], strategy: Any, **options: Any) -> Any:
        model = functools.partial(fn, self.xp)
        model.__name__ = fn.__name__  # type: ignore[attr-defined]
        if self.name == "torch":

            def model(*args: Any) -> Any:
                return fn(self.xp, *args)

        return dfx.schedule(model, strategy, lanes=2, **options)

    def gradients(self, call: Callable[..., Any], p: Any, *rest: Any) -> list[Any]:
        """Of the sum of squares, with respect to the weights."""
        if self.name == "jax":
            loss = lambda q: (call(q, *rest) ** 2).sum()  # noqa: E731
            made = jax.grad(loss)(p)
            return [np.asarray(made[k]) for k in sorted(p)]
        given = {k: v.detach().clone().requires_grad_() for k, v in p.items()}
        (call(given, *rest) ** 2).sum().backward()
        return [given[k].grad.numpy() for k in sorted(p)]


@pytest.fixture(params=["jax", "torch"])
def framework(request: Any) -> Framework:
    return Framework(request.param)


def _numpy(x: Any) -> Any:
    return np.asarray(x.detach() if hasattr(x, "detach") else x)


def _launches(fast: Any, *args: Any) -> list[tuple[str, Any, Any]]:
    """(name, launch, region) in the plan's order."""
    plan, pg = dfx.plan(fast, *args), dfx.graph(fast, *args)
    found = [i for i in plan.instructions if isinstance(i, Launch)]
    return [(pg.regions[i.region].name, i, pg.regions[i.region]) for i in found]


@pytest.mark.parametrize("name", STRATEGIES)
def test_values(name: str, framework: Framework) -> None:
    strategy = STRATEGIES[name]
    batch = {"in_axes": (None, 0)} if name in SPLIT else {}
    p = framework.tree(models.parameters())
    x = framework.array(np.random.default_rng(1).normal(size=(6, 5, 16)).astype(np.float32))
    fast = framework.schedule(models.block, strategy, **batch)
    want = models.block(framework.xp, p, x)
    for _ in range(2):
        np.testing.assert_allclose(_numpy(fast(p, x)), _numpy(want), rtol=2e-5, atol=2e-5)
    lanes = {i.lane for _, i, _ in _launches(fast, p, x)}
    assert lanes == {0, 1}, dfx.explain(fast, p, x)
    if name in SPLIT:
        assert {r.nano for _, _, r in _launches(fast, p, x)} >= {0, 1}


_QUICK = ("nanoflow", "token_weave", "fused", "nimble")


@pytest.mark.parametrize(
    "name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STRATEGIES]
)
def test_gradients(name: str, framework: Framework) -> None:
    batch = {"in_axes": (None, 0)} if name in SPLIT else {}
    p = framework.tree(models.parameters())
    x = framework.array(np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32))
    fast = framework.schedule(models.block, STRATEGIES[name], **batch)
    original = functools.partial(models.block, framework.xp)
    for got, wanted in zip(
        framework.gradients(fast, p, x), framework.gradients(original, p, x), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_network_regions_have_a_lane_beside_the_other_half(framework: Framework) -> None:
    p = framework.tree(models.parameters())
    x = framework.array(np.ones((6, 5, 16), np.float32))
    fast = framework.schedule(models.block, published.TwoBatchOverlap(), in_axes=(None, 0))
    found = [
        (r.name.split("@")[0], r.nano, i.lane) for _, i, r in _launches(fast, p, x) if not r.merge
    ]
    talks = [one for one in found if one[0] in ("dispatch", "combine")]
    assert {lane for *_, lane in talks} == {1}
    assert {lane for n, _, lane in found if n not in ("dispatch", "combine")} == {0}
    for first, second in zip(talks, talks[1:], strict=False):
        between = found[found.index(first) + 1 : found.index(second)]
        assert first[1] == second[1] or any(nano != first[1] for _, nano, _ in between), found
    small = framework.schedule(models.block, published.TwoBatchOverlap(rows=7), in_axes=(None, 0))
    assert {r.nano for _, _, r in _launches(small, p, x)} == {0}


def test_shared_experts_run_beside_the_dispatch(framework: Framework) -> None:
    p = framework.tree(models.parameters())
    x = framework.array(np.ones((6, 16), np.float32))
    fast = framework.schedule(models.block, published.SingleBatchOverlap())
    names = [name for name, *_ in _launches(fast, p, x)]
    lanes = {name: i.lane for name, i, _ in _launches(fast, p, x)}
    assert names.index("dispatch") < names.index("shared") and lanes["dispatch"] == lanes["combine"]
    assert lanes["shared"] == lanes["experts"] != lanes["dispatch"]


def test_branches_get_lanes_of_their_own(framework: Framework) -> None:
    """The papers about streams: no branch waits for another one while there are lanes."""
    p = framework.tree(models.parameters())
    x = framework.array(np.ones((6, 16), np.float32))
    for strategy in (published.Opara(), published.Nimble(), published.IOS()):
        fast = framework.schedule(models.branches, strategy)
        want = models.branches(framework.xp, p, x)
        np.testing.assert_allclose(_numpy(fast(p, x)), _numpy(want), rtol=1e-5, atol=1e-5)
        pg = dfx.graph(fast, p, x)
        made = record(strategy, pg, dfx.Context(None, (), "cpu", 4))
        firsts = [d.lane for d in made.decisions if pg.regions[d.region].name.startswith("first")]
        assert len(set(firsts)) >= (3 if isinstance(strategy, published.IOS) else 4), (
            strategy,
            made,
        )


def test_prefill_beside_decode(framework: Framework) -> None:
    p = framework.tree(models.parameters())
    rng = np.random.default_rng(2)
    x = framework.array(rng.normal(size=(6, 16)).astype(np.float32))
    cache = framework.array(rng.normal(size=(6, 64, 16)).astype(np.float32))

    def prefill(p: Any, x: Any) -> Any:
        return models.block(framework.xp, p, x)

    def decode(p: Any, x: Any, cache: Any) -> Any:
        return models.decode(framework.xp, p, x, cache)

    both = dfx.together(prefill, decode, strategy=published.PODAttention(), lanes=2)
    calls = ((p, x), (p, x, cache))
    for got, want in zip(both(*calls), both.original(*calls), strict=True):
        np.testing.assert_allclose(_numpy(got), _numpy(want), rtol=2e-5, atol=2e-5)
    assert {(r.function, i.lane) for _, i, r in _launches(both, *calls)} == {
        ("prefill", 0),
        ("decode", 1),
    }


def test_updates_start_before_the_last_gradient(framework: Framework) -> None:
    p = framework.tree(models.parameters())
    x = framework.array(np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32))
    grad = jax.grad if framework.name == "jax" else framework.xp.func.grad

    def step(p: Any, x: Any) -> Any:
        return models.step(framework.xp, grad, p, x)

    fast = dfx.schedule(step, published.OptimizerBesideBackward(), lanes=2)
    want = step(p, x)
    for name, got in fast(p, x).items():
        np.testing.assert_allclose(_numpy(got), _numpy(want[name]), rtol=2e-5, atol=2e-5)
    order = _launches(fast, p, x)
    ends = [not any(set(r.outputs) & set(o.inputs) for _, _, o in order) for _, _, r in order]
    assert 1 in {i.lane for _, i, _ in order}
    assert ends.index(True) < len(ends) - ends[::-1].index(False) - 1, [n for n, *_ in order]


def test_a_kernel_stands_in_for_what_is_marked(framework: Framework) -> None:
    p = framework.tree(models.parameters())
    x = framework.array(np.ones((6, 16), np.float32))
    fast = framework.schedule(models.block, published.Fused(models.norm))
    assert "norm (replaced by norm)" in dfx.explain(fast, p, x)
    assert "runs as it was written" not in dfx.explain(fast, p, x)


def _lines_of_strategy(cls: type) -> int:
    """Lines of a class without its docstrings, comments and blank lines."""
    tree = ast.parse(inspect.getsource(cls))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                del body[0]
    source = inspect.getsource(cls).splitlines()
    used = {
        n
        for node in ast.walk(tree)
        if hasattr(node, "lineno")
        for n in range(node.lineno, node.lineno + 1)
    }
    return len([n for n in used if source[n - 1].strip()])


def test_each_is_short_and_public_and_names_its_source() -> None:
    found = {name: cls for name, cls in vars(published).items() if isinstance(cls, type)}
    assert len(found) >= 11
    for name, cls in found.items():
        path = Path(inspect.getsourcefile(cls) or "")
        text = path.read_text()
        assert _lines_of_strategy(cls) <= 20, name
        module = ast.parse(text)
        assert "arXiv:" in (ast.get_docstring(module) or "") and "Not taken" in text, name
        imports = [n for n in ast.walk(module) if isinstance(n, ast.Import | ast.ImportFrom)]
        ours = [ast.unparse(n) for n in imports if "dynaflow_xla" in ast.unparse(n)]
        assert ours == ["import dynaflow_xla as dfx"], name
        used = {
            n.attr
            for n in ast.walk(module)
            if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "dfx"
        }
        assert used <= set(dir(dfx)), name
        assert cls() == cls() if name not in ("Fused",) else cls(len) == cls(len)


def _parallel(count: int) -> dfx.PartitionedGraph:
    """Regions that need nothing of each other."""
    shape = (1024,), "float32", 4096
    values = [Value(0, *shape, -1), *(Value(n + 1, *shape, n) for n in range(count))]
    costs = [1e4 + 100 * n for n in range(count)]
    ops = [Operator(n, "op", (0,), (n + 1,), cost_ns=c) for n, c in enumerate(costs)]
    regions = [Region(n, f"r{n}", (n,), (0,), (n + 1,), cost_ns=c) for n, c in enumerate(costs)]
    outputs = tuple(range(1, count + 1))
    graph = Graph("parallel", tuple(values), tuple(ops), (0,), outputs, ("x",))
    return dfx.PartitionedGraph(graph, tuple(regions))


def test_ios_looks_at_no_more_stages_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []
    module = inspect.getmodule(published.IOS)

    def push(heap: list[Any], entry: Any) -> None:
        pushed.append(entry)
        assert len(pushed) <= 2 * 500 + 64
        heapq.heappush(heap, entry)

    monkeypatch.setattr(module, "heappush", push)
    for lanes in (4, 16):
        pushed.clear()
        made = record(published.IOS(500), _parallel(64), dfx.Context(None, (), "cpu", lanes))
        assert len(made.decisions) == 64
        assert {d.lane for d in made.decisions} == set(range(lanes))


@pytest.mark.parametrize("name", SPLIT)
def test_splits_say_that_they_need_a_batch(name: str, framework: Framework) -> None:
    fast = framework.schedule(models.branches, SPLIT[name])
    p, x = framework.tree(models.parameters()), framework.array(np.ones((6, 16), np.float32))
    told: Any = pytest.raises(dfx.PlanError, match="asks for 2 nano-batches.* pass in_axes")
    if framework.name == "torch":  # as for NanoBatch: the call runs whole
        told = pytest.warns(
            dfx.FallbackWarning, match="no argument with a batch, so it is not split"
        )
    with told:
        fast(p, x)


@pytest.mark.parametrize("strategy", [*SPLIT.values(), published.TokenWeave(first=9)])
def test_one_row_stays_whole(strategy: dfx.Strategy) -> None:
    assert strategy.split(dfx.Context(1, (), "cpu", 2)) == dfx.Split.none()


def test_prefill_has_to_be_one_of_the_functions(framework: Framework) -> None:
    def fill(x: Any) -> Any:
        return framework.xp.tanh(x) @ x

    def decode(x: Any) -> Any:
        return framework.xp.sin(x) @ x

    x = framework.array(np.ones((4, 4), np.float32))
    both = dfx.together(fill, decode, strategy=published.PODAttention(), lanes=2)
    with pytest.raises(
        dfx.PlanError, match=r"'prefill'.*\['decode', 'fill'\].*PODAttention\(prefill="
    ):
        both(x, x)
    alone = framework.schedule(lambda xp, x: xp.tanh(x) @ x, published.PODAttention())
    np.testing.assert_allclose(_numpy(alone(x)), _numpy(fill(x)), rtol=2e-5, atol=2e-5)
    assert "no function 'prefill' among []" in dfx.explain(alone, x)
    named = dfx.together(fill, decode, strategy=published.PODAttention("fill"), lanes=2)
    for got, want in zip(named(x, x), named.original(x, x), strict=True):
        np.testing.assert_allclose(_numpy(got), _numpy(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: published.NanoFlow(0), dfx.PlanError, "n must be an integer >= 1; got 0"),
        (lambda: published.NanoFlow("a"), TypeError, "n must be an integer >= 1; got 'a'"),  # type: ignore[arg-type]
        (lambda: published.TwoBatchOverlap(-1), dfx.PlanError, "rows must be an integer >= 0"),
        (lambda: published.IOS(math.nan), TypeError, "most must be an integer >= 0; got nan"),  # type: ignore[arg-type]
        (lambda: published.LanesByResource(-1), dfx.PlanError, "compute must be an integer >= 0"),
        (lambda: published.PODAttention(3), TypeError, "prefill must be the name"),  # type: ignore[arg-type]
        (lambda: published.TokenWeave(first=-1), dfx.PlanError, "first must be an integer >= 0"),
        (lambda: published.TokenWeave(3), TypeError, "kernel must be a function"),  # type: ignore[arg-type]
        (lambda: published.Fused(3), TypeError, "Fused: kernel must be a function"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_cannot_be(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(dfx.PlanError, match=words) as caught:
        make()
    assert isinstance(caught.value, TypeError) == (kind is TypeError)
