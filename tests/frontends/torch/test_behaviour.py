"""What callers do with modules and tensors: a scheduled callable does what the original does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


def net() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@pytest.fixture(params=["branches", "nano"])
def schedule(request: pytest.FixtureRequest) -> Any:
    if request.param == "nano":
        return lambda fn, **o: dfx.schedule(
            fn, dfx.NanoBatch(2), in_axes=0, lanes=2, backend="torch", **o
        )
    return lambda fn, **o: dfx.schedule(fn, dfx.Branches(), lanes=2, backend="torch", **o)


def grads(model: Any, loss: Any) -> list[Any]:
    model.zero_grad()
    loss()
    return [p.grad.clone() for p in model.parameters()]


def test_a_backward_that_keeps_the_graph_from_the_first(schedule: Any) -> None:
    model, x = net(), torch.randn(4, 8)

    def run(call: Any) -> None:
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    fast = schedule(model)
    torch.testing.assert_close(grads(model, lambda: run(fast)), grads(model, lambda: run(model)))


@pytest.mark.parametrize("train", [False, True])
def test_batches_without_rows(schedule: Any, train: bool) -> None:
    model = net()
    fast = schedule(model)
    for rows in (0, 4, 0, 1, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), model(x))
        if train:
            got = grads(model, lambda x=x: fast(x).square().sum().backward())
            want = grads(model, lambda x=x: model(x).square().sum().backward())
            torch.testing.assert_close(got, want)


def test_backward_twice_and_interleaved(schedule: Any) -> None:
    model = net()
    fast = schedule(model)
    x, y = torch.randn(4, 8), torch.randn(6, 8)

    def twice(call: Any) -> None:
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def interleaved(call: Any) -> None:
        first, second = call(x).square().sum(), call(y).square().sum()
        second.backward()
        first.backward()

    for run in (interleaved, twice, interleaved):
        got = grads(model, functools.partial(run, fast))
        torch.testing.assert_close(got, grads(model, functools.partial(run, model)))


def write_both(x: Any, y: Any) -> Any:
    x.add_(1)
    y.mul_(2)
    return x * 2


SHARING = {
    "apart": lambda t: (t[:4].clone(), t[:4].clone()),
    "same": lambda t: (t[:4],) * 2,
    "view": lambda t: (t[:4], t[:4].view(4, 10)),
    "shifted": lambda t: (t[:4], t[1:5]),
    "shifted more": lambda t: (t[:4], t[2:6]),
    "other rows": lambda t: (t[:4], t[4:]),
    "other columns": lambda t: (t[:4, ::2], t[4:, 1::2]),
}


@pytest.mark.parametrize("first", ["apart", "view", "shifted", "same"])
def test_arguments_that_share_what_is_written(first: str) -> None:
    fast = dfx.schedule(write_both, dfx.Branches(), lanes=2, backend="torch")
    for name in (first, *SHARING, first):
        given, other = torch.randn(8, 10), None
        other = given.clone()
        got, want = fast(*SHARING[name](given)), write_both(*SHARING[name](other))
        assert torch.equal(got, want) and torch.equal(given, other), name


@pytest.mark.parametrize("backend", ["torch", "ffi"])
@pytest.mark.parametrize("first", ["shifted", "view", "other rows"])
def test_results_that_are_views_of_shared_arguments(first: str, backend: str) -> None:
    if backend == "ffi":
        pytest.importorskip("jax", reason="JAX is not installed")

    def f(x: Any, y: Any) -> Any:
        return x.add_(1), y.mul_(2), x * y.reshape(4, 10)

    fast = dfx.schedule(f, dfx.Branches(), lanes=2, backend=backend)
    given = torch.randn(8, 10)
    other = given.clone()
    if backend == "ffi" and first == "shifted":
        with pytest.raises(UnsupportedError, match="share memory, and returns a view"):
            fast(*SHARING[first](given))
        return
    got, want = fast(*SHARING[first](given)), f(*SHARING[first](other))
    for results in (got, want):
        results[0].mul_(3)  # whoever shares memory in the original shares it here
    for g, w in zip((*got, given), (*want, other), strict=True):
        assert torch.equal(g, w) and g.stride() == w.stride()


def test_transforms_of_several_arguments() -> None:
    fast = dfx.schedule(lambda x, y: x * y.sin(), dfx.Branches(), lanes=2, backend="torch")
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.warns(dfx.FallbackWarning):
        got = torch.vmap(fast)(x, y)
    assert torch.equal(got, fast.original(x, y))


def test_ever_other_shared_memory_runs_the_original() -> None:
    fast = dfx.schedule(write_both, dfx.Branches(), lanes=2, backend="torch")
    x, y = torch.randn(40, 3), torch.empty(40, 3)
    y.copy_(x)
    with pytest.warns(dfx.FallbackWarning, match="share memory in a way"):
        for start in (20, *range(1, 20)):
            got, want = (
                fast(x[:20], x[start : start + 20]),
                write_both(y[:20], y[start : start + 20]),
            )
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(x, y)


def test_structured_results(schedule: Any) -> None:
    @dataclasses.dataclass
    class Out:
        y: Any
        rows: int
        text: str = "x"

    fast = schedule(lambda x: Out(torch.sin(x), x.shape[0]))
    for rows in (4, 6, 8):
        x = torch.randn(rows, 3)
        out = fast(x)
        assert type(out) is Out and out.rows == rows and torch.equal(out.y, torch.sin(x))


def test_tied_weights_and_counters(schedule: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.out.weight = self.embed.weight
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, ids: Any) -> Any:
            self.calls += 1
            return self.out(torch.tanh(self.embed(ids))) * self.calls

    model = Tied()
    other = copy.deepcopy(model)
    fast = schedule(model)
    for _ in range(2):
        ids = torch.randint(0, 11, (4, 3))
        got = grads(model, lambda ids=ids: fast(ids).square().mean().backward())
        want = grads(other, lambda ids=ids: other(ids).square().mean().backward())
        assert len(got) == 1
        torch.testing.assert_close(got, want)
        assert model.calls == other.calls
    again = copy.deepcopy(fast)
    assert again.out.weight is again.embed.weight


def test_layouts_of_inputs(schedule: Any) -> None:
    model = net()
    fast = schedule(model)
    for x in (
        torch.randn(8, 4).T, torch.randn(4, 16)[:, ::2], torch.randn(1, 8).expand(4, 8),
        torch.randn(8, 8)[::2], torch.randn(40)[3:35].view(4, 8),
    ):  # fmt: skip
        got, want = fast(x), model(x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_writes_of_constants_into_rows(schedule: Any) -> None:
    model = nn.Linear(8, 8)

    def f(x: Any) -> Any:
        y = model(x)
        y.mul_(2)
        y[:, 0] = 0
        return y.relu_()

    fast = schedule(f)
    x = torch.randn(4, 8)
    torch.testing.assert_close(fast(x), f(x))
    got = grads(model, lambda: fast(x).square().sum().backward())
    torch.testing.assert_close(got, grads(model, lambda: f(x).square().sum().backward()))


def test_sparse_gradients(schedule: Any) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    fast = schedule(model)
    ids = torch.randint(0, 10, (4, 3))
    if "NanoBatch" in repr(fast):
        with pytest.warns(dfx.FallbackWarning, match="not proved"):
            (got,) = grads(model, lambda: fast(ids).square().sum().backward())
    else:
        (got,) = grads(model, lambda: fast(ids).square().sum().backward())
    (want,) = grads(model, lambda: model(ids).square().sum().backward())
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("backend", ["torch", "ffi"])
def test_numbers_that_change(backend: str) -> None:
    def f(x: Any, n: Any, scale: float = 1.0) -> Any:
        return x * n * scale

    if backend == "ffi":
        pytest.importorskip("jax", reason="JAX is not installed")
    fast = dfx.schedule(f, dfx.Branches(), lanes=2, backend=backend)
    x = torch.randn(4, 3)
    for args in ((2,), (3,), (2, 0.5), (2, 0.7), (2, 0.9), (True,)):
        torch.testing.assert_close(fast(x, *args), f(x, *args))


def _checkpointed(dropout: float) -> Any:
    from torch.utils.checkpoint import checkpoint

    def attend(x: Any) -> Any:
        h = torch.tanh(x)[:, None]
        h = nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=dropout)[:, 0]
        return nn.functional.dropout(h, dropout)

    def f(x: Any) -> Any:
        y = checkpoint(attend, checkpoint(attend, x, use_reentrant=False), use_reentrant=False)
        return nn.functional.dropout(y, dropout)

    return f


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_attention(dropout: float) -> None:
    """AOTAutograd saves the generator's state for it; the backward draws the same numbers again."""
    f = _checkpointed(dropout)
    fast = dfx.schedule(f, dfx.Branches(), lanes=2, backend="torch")
    x = torch.randn(2, 5, 8, requires_grad=True)
    results = []
    for seed in (1, 1, 2):
        for run in (fast, f):
            x.grad = None
            torch.manual_seed(seed)
            run(x).square().sum().backward()
            results.append((x.grad, torch.rand(3)))
    for mine, theirs in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(results[0][0], results[2][0])
    assert not dropout or not torch.equal(results[0][0], results[4][0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("options", [{"backend": "ffi"}, {"in_axes": 0, "strategy": "nano_batch"}])
def test_checkpointed_dropout_elsewhere(options: dict[str, Any], dropout: float) -> None:
    """What was drawn is kept for the backward there; the rest is made again."""
    if options.get("backend") == "ffi":
        pytest.importorskip("jax", reason="JAX is not installed")
    f = _checkpointed(dropout)
    fast = dfx.schedule(f, **({"backend": "torch", "lanes": 2} | options))
    x = torch.randn(4, 5, 8, requires_grad=True)
    for seed in (1, 2):
        results = []
        for run in (fast, f):
            torch.manual_seed(seed)
            y = run(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            results.append((y, grad, torch.rand(3)))
        torch.testing.assert_close(*results)


def test_dropout_that_is_not_in_training(schedule: Any) -> None:
    """It draws nothing, and drops nothing."""

    def f(x: Any) -> Any:
        return torch.native_dropout(x, 0.5, False)[0] + x

    fast = schedule(f)
    x = torch.randn(6, 5, requires_grad=True)
    results = []
    for run in (fast, f):
        torch.manual_seed(1)
        y = run(x)
        results.append((y, torch.autograd.grad(y.square().sum(), x), torch.rand(2)))
    torch.testing.assert_close(*results)


def test_several_gradients_at_once() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    x = torch.randn(6, 5, requires_grad=True)

    def gradients(run: Any) -> Any:
        y = run(x)
        wanted = torch.stack([torch.ones_like(y), y.detach()])
        return torch.autograd.grad(y, x, wanted, is_grads_batched=True)

    fast = dfx.schedule(model, dfx.Branches(), lanes=2)
    torch.testing.assert_close(gradients(fast), gradients(model))
    nano = dfx.schedule(model, dfx.NanoBatch(2), lanes=2)
    with pytest.raises(UnsupportedError, match="one after another"):
        gradients(nano)
    torch.testing.assert_close(nano(x), model(x))


def test_a_generator_that_a_checkpoint_does_not_need() -> None:
    """What AOTAutograd writes on a GPU: the state is an argument."""
    from torch._prims.rng_prims import graphsafe_run_with_rng_state as run
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dynaflow_xla.frontends.torch.capture.random import draws

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for dropout in (0.0, 0.5):
        graph = torch.fx.Graph()
        q, state = graph.placeholder("q"), graph.placeholder("rng_state")
        with FakeTensorMode() as mode:
            q.meta["val"] = torch.empty(1, 1, 4, 8, device="meta" if dropout else "cpu")
        state.meta["val"] = torch.Generator()
        both = graph.call_function(run, (attention, q, q, q, dropout), {"rng_state": state})
        graph.output((graph.call_function(operator.getitem, (both, 0)),))
        gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        with mode:
            if dropout:
                with pytest.raises(UnsupportedError, match="draws random numbers under"):
                    draws.lower_checkpoints(gm)
                continue
            draws.lower_checkpoints(gm)
        assert run not in {node.target for node in gm.graph.nodes}
        x = torch.randn(1, 1, 4, 8)
        torch.testing.assert_close(
            gm(x, None)[0], nn.functional.scaled_dot_product_attention(x, x, x)
        )


def test_looking_for_shared_memory_runs_no_operators() -> None:
    """It is done at each call of a function that writes its arguments, whatever the size of these."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from dynaflow_xla.frontends.torch.capture.mutation import overlap

    class Count(TorchDispatchMode):
        ran: list[str]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ran.append(str(func))
            return func(*args, **(kwargs or {}))

    base, count = torch.zeros(40, 24), Count()
    views, count.ran = [base[:, n : n + 2] for n in range(23)], []
    with count:
        found = overlap.pattern(views, {})
    assert not count.ran
    assert [(i, j) for i, j, *_ in found.views] == [(n, n + 1) for n in range(22)]


def test_memory_of_numpy_that_is_shared_and_written_is_refused() -> None:
    import numpy as np

    memory = np.zeros(12, np.float32)
    x, y = torch.from_numpy(memory[:8]), torch.from_numpy(memory[4:])
    reads = dfx.schedule(lambda x, y: x * 2 + y, dfx.Branches(), lanes=2, backend="torch")
    assert torch.equal(reads(x, y), x * 2 + y)
    writes = dfx.schedule(lambda x, y: x.add_(1) + y, dfx.Branches(), lanes=2, backend="torch")
    with pytest.raises(UnsupportedError, match="takes for apart"):
        writes(x, y)
    assert not memory.any()
    z = torch.from_numpy(np.zeros(8, np.float32))
    assert torch.equal(writes(z, torch.ones(8)), torch.full((8,), 2.0))


@pytest.mark.parametrize("times", [1, 2])
def test_a_checkpoint_of_what_updates_buffers(schedule: Any, times: int) -> None:
    from torch.utils.checkpoint import checkpoint

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

        def forward(self, x: Any) -> Any:
            for _ in range(times):
                x = checkpoint(self.block, x, use_reentrant=False)
            return x

    model, x = Blocks(), torch.randn(6, 8)
    other = copy.deepcopy(model)
    fast = schedule(model)
    for _ in range(2):
        mine = grads(model, lambda: fast(x).square().sum().backward())
        theirs = grads(other, lambda: other(x).square().sum().backward())
        torch.testing.assert_close(mine, theirs)
    assert model.block[1].num_batches_tracked == 2 * times


def test_sizes_among_results() -> None:
    def f(x: Any) -> Any:
        return x.sin(), x.shape[0], range(x.shape[0])

    fast = dfx.schedule(f, dfx.Sequential(), backend="torch", rules=[dfx.Op("*")])
    for rows in (6, 4, 9):
        y, count, numbers = fast(torch.ones(rows, 8))
        assert len(y) == count == rows and numbers == range(rows)


class _Padded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, **options), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.out(self.encoder(x * 2, src_key_padding_mask=padding))
        return result


PADDING = torch.arange(4) >= torch.tensor([[3], [2], [4]])


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch(2), dfx.Auto()])
def test_an_encoder_that_leaves_padding_out_is_the_originals(strategy: dfx.Strategy) -> None:
    model, x = _Padded().eval(), torch.randn(3, 4, 16)
    fast = dfx.schedule(model, strategy, backend="torch")
    with torch.no_grad():
        want = model(x, PADDING)
        with pytest.warns(dfx.FallbackWarning, match="'_Padded'.*padding mask.*original") as told:
            for _ in range(3):
                assert torch.equal(fast(x, PADDING), want)
        assert len(told) == 1
        assert "padding mask" in dfx.explain(fast, x, PADDING)
        assert "padding mask" not in dfx.explain(fast, x)
    assert "padding mask" not in dfx.explain(fast, x, PADDING)  # with gradients nothing is left out
    torch.testing.assert_close(fast(x, PADDING), model(x, PADDING), rtol=1e-6, atol=1e-6)


def test_an_encoder_without_nested_tensors_is_scheduled() -> None:
    model, x = _Padded(enable_nested_tensor=False).eval(), torch.randn(3, 4, 16)
    fast = dfx.schedule(model, dfx.Branches(), backend="torch")
    with torch.no_grad():
        assert dfx.plan(fast, x, PADDING).instructions
        assert torch.equal(fast(x, PADDING), model(x, PADDING))
