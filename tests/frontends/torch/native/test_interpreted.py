"""Operators that run without Python between them: the same values, errors, draws, and memory."""

from __future__ import annotations

import gc
import re
import threading
import traceback
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.library import custom_op  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.torch.native.stretches import interpreted, regions  # noqa: E402
from dynaflow_xla.frontends.torch.rewrite import recurrent  # noqa: E402


def counted(fast: Any, *args: Any) -> tuple[int, int]:
    """Operators that run without Python, and all operators, of the last plan that ``explain`` shows."""
    found = re.findall(r"(\d+) of (\d+) operators run without Python", dfx.explain(fast, *args))
    return int(found[-1][0]), int(found[-1][1])


def chain(x: Any, w: Any) -> Any:
    a, b = torch.split(torch.tanh(x @ w) * 2.0, 2, dim=1)
    y = torch.where(a > 0, a, b.sum(dim=1, keepdim=True)) / 3 + 1
    z, at = y.topk(2, dim=1)
    return z.to(torch.float64), at, y[:, ::2].t().reshape(-1), torch.cat([a, b[:, :1]], dim=1)


@pytest.mark.parametrize("strategy", [dfx.Sequential(), dfx.Branches()], ids=repr)
def test_values_are_those_of_python(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(6, 5), torch.randn(5, 4)
    fast = dfx.schedule(chain, strategy, lanes=2)
    got = fast(x, w)
    assert counted(fast, x, w)[0] >= 10
    monkeypatch.setattr(interpreted, "_EXISTS", False)
    plain = dfx.schedule(chain, strategy, lanes=2)
    from_python = plain(x, w)
    assert counted(plain, x, w)[0] == 0
    for a, b, c in zip(got, from_python, chain(x, w), strict=True):
        assert a.dtype == b.dtype == c.dtype and a.stride() == b.stride() == c.stride()
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_last_reference_to_an_input_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The graph would have to take the interpreter lock to let go of it.
    held: list[list[Any]] = []
    made = interpreted.FxProgram.function

    def function(program: Any, name: str, results: Any) -> Any:
        run = made(program, name, results)

        def observed(*args: Any) -> Any:
            *values, last = run(*args)
            assert len(values) == len(results)
            held.append([a is b for a, b in zip(last, args, strict=True)])
            return (*values, last)

        return observed

    monkeypatch.setattr(interpreted.FxProgram, "function", function)
    x, w = torch.randn(6, 5), torch.randn(5, 4)
    fast = dfx.schedule(chain, dfx.Branches(wide=False), lanes=2)
    fast(x, w)
    assert held and all(same and all(same) for same in held)
    alive = weakref.ref(x)
    del x, fast
    gc.collect()
    assert alive() is None


def test_training_in_two_parts_runs_without_python() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    x = torch.randn(6, 8)
    fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=0, lanes=2)
    fast(x).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-5, atol=1e-5)
    lines = re.findall(r"(\d+) of (\d+) operators run without Python", dfx.explain(fast, x))
    assert lines
    for without, every in lines:
        assert int(without) >= 0.75 * int(every) > 0


def test_random_operators_draw_what_the_original_draws() -> None:
    def f(x: Any) -> Any:
        y = nn.functional.dropout(x.sin(), 0.5, training=True)
        return y, torch.rand_like(y) + y.cos()

    x = torch.randn(16, 16)
    fast = dfx.schedule(f, dfx.Sequential())
    for seed in range(3):
        torch.manual_seed(seed)
        want = f(x)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        got = fast(x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
    assert counted(fast, x)[0] >= 3


def test_a_draw_that_nobody_reads_is_drawn() -> None:
    def f(x: Any) -> Any:
        y = x.sin().cos()
        torch.rand(3)
        nn.functional.dropout(y, 0.5, training=True)
        return y.tan() + torch.rand_like(y).exp()

    x = torch.randn(4)
    fast = dfx.schedule(f, dfx.Sequential())
    torch.manual_seed(0)
    want = f(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(fast(x), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_results_that_are_lists() -> None:
    def f(x: Any) -> Any:
        a, b, c = torch.split(x.sin(), [1, 2, 1])
        rows = torch.unbind(x.cos().tan())
        norms = torch._foreach_norm([a, b, c])
        return a, b.exp(), rows[1], norms, torch.var_mean(x.neg(), 0)

    x = torch.randn(4, 3)
    fast = dfx.schedule(f, dfx.Sequential())
    flat = torch.utils._pytree.tree_leaves
    for a, b in zip(flat(fast(x)), flat(f(x)), strict=True):
        assert torch.equal(a, b)


def test_an_error_is_the_originals_and_names_its_region() -> None:
    def f(x: Any, at: Any) -> Any:
        with dfx.mark("first"):
            y = x.sin().cos().tan()
        with dfx.mark("second"):
            y = torch.rand_like(y) + y
            z = y.index_select(0, at).exp().neg()
        return z.abs()

    x = torch.randn(5, 3)
    fast = dfx.schedule(f, dfx.Sequential())
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 9])
    torch.manual_seed(0)
    fast(x, good)
    assert counted(fast, x, good)[0] >= 6
    with pytest.raises(IndexError) as original:
        f(x, bad)
    torch.manual_seed(1)
    torch.rand_like(x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with pytest.raises(dfx.EngineError, match=r"region 'second'.*IndexError") as failed:
        fast(x, bad)
    assert str(original.value) in str(failed.value)
    assert isinstance(failed.value.__cause__, IndexError)
    assert "TorchScript" not in "".join(traceback.format_exception(failed.value))
    assert torch.equal(torch.get_rng_state(), state)  # drawn once, though looked at twice
    torch.manual_seed(2)
    got = fast(x, good)  # nothing is left behind
    torch.manual_seed(2)
    assert torch.equal(got, f(x, good))


def test_an_error_that_does_not_come_again_is_told() -> None:
    class Fails:
        def __call__(self, *args: Any) -> Any:
            raise RuntimeError("no memory, this once")

    def f(x: Any) -> Any:
        return x.sin().cos().tan().exp()

    patched = pytest.MonkeyPatch()
    patched.setattr(interpreted.FxProgram, "function", lambda *_: Fails())
    try:
        fast = dfx.schedule(f, dfx.Sequential())
        with pytest.raises(dfx.EngineError, match="no memory, this once"):
            fast(torch.randn(3))
    finally:
        patched.undo()


def test_operators_that_write_or_are_python_stay_outside() -> None:
    @custom_op("dfx_test_interpreted::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Any) -> Any:
        return torch.empty_like(x)

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.seen.add_(x.sin().sum(0))
            return twice(x.cos().tan()).exp().neg() + self.seen

    one, two = Buffered(), Buffered()
    fast = dfx.schedule(one, dfx.Sequential())
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.equal(fast(x), two(x))
    assert torch.equal(one.seen, two.seen)


def test_threads_share_what_was_written() -> None:
    fast = dfx.schedule(chain, dfx.Branches(), lanes=2)
    w = torch.randn(5, 4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        torch.set_num_threads(1)
        made = torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = torch.randn(6, 5, generator=made)
            for a, b in zip(fast(x, w), chain(x, w), strict=True):
                if not torch.equal(a, b):
                    wrong.append(seed)

    fast(torch.randn(6, 5), w)
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not wrong


def test_sizes_that_are_open_are_written_too() -> None:
    def f(x: Any) -> Any:
        return (x.sin().reshape(-1) * x.shape[0]).cos().unflatten(0, (x.shape[0], x.shape[1])).tan()

    fast = dfx.schedule(f, dfx.Sequential(), compiler_options={"dynamic": True})
    for rows in (3, 5, 2, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(fast(x), f(x))
    assert counted(fast, x)[0] >= 3


def test_many_inputs_are_not_held_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends early where it holds much, so that what only it reads can go."""
    sizes: list[int] = []
    groups = regions._groups

    def watched(*args: Any) -> Any:
        made = groups(*args)
        sizes.extend(len(steps) for steps, run in made if run is not None)
        return made

    monkeypatch.setattr(regions, "_groups", watched)

    def f(xs: Any) -> Any:
        y = torch.zeros(256, 200)
        for x in xs:
            y = (y + x).sin()
        return y

    xs = [torch.randn(256, 200) for _ in range(60)]
    fast = dfx.schedule(f, dfx.Sequential())
    assert torch.equal(fast(xs), f(xs))
    assert sum(sizes) >= 120 and max(sizes) <= interpreted._HELD_OPERATORS


def test_nothing_is_kept_of_a_call_or_of_a_function() -> None:
    def f(x: Any) -> Any:
        return x.sin().cos().tan().exp()

    fast = dfx.schedule(f, dfx.Sequential())
    x = torch.randn(4)
    result = fast(x)
    held = weakref.ref(x), weakref.ref(result)
    del x, result
    gc.collect()
    assert held[0]() is None and held[1]() is None


_UNARY = ["sin", "cos", "tanh", "neg", "abs", "relu", "sigmoid", "exp2", "sign", "square"]
_BINARY = ["add", "sub", "mul", "maximum", "minimum", "atan2", "hypot"]


@settings(max_examples=12)
@given(st.data())
def test_random_programs(data: Any) -> None:
    """Numbers for tensors, several types, views, and results that are inputs."""
    steps = data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=14))
    picks = [
        (
            data.draw(st.sampled_from(_UNARY)),
            data.draw(st.sampled_from(_BINARY)),
            data.draw(st.integers(0, 99)),
            data.draw(st.sampled_from([2, -1, 0.5, 3])),
        )
        for _ in steps
    ]

    def f(x: Any, y: Any) -> Any:
        have = [x, y]
        for kind, (unary, binary, at, number) in zip(steps, picks, strict=True):
            a, b = have[at % len(have)], have[(at // 3) % len(have)]
            made = {
                0: lambda a=a, unary=unary: getattr(torch, unary)(a),
                1: lambda a=a, b=b, binary=binary: getattr(torch, binary)(a, b),
                2: lambda a=a, number=number: a * number - number,
                3: lambda a=a: a.t(),
                4: lambda a=a, b=b: torch.where(a > b, a, b.float()).to(a.dtype),
                5: lambda a=a, number=number: (a.double() + number).clamp(-9, 9),
            }[kind]()
            have.append(made)
        return tuple(have[2:])

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for got, want in zip(dfx.schedule(f, dfx.Sequential())(x, y), f(x, y), strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride()
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_large_values_are_left_to_python() -> None:
    """Their memory is not taken between the interpreter's own small pieces."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    fast = dfx.schedule(model, dfx.Sequential())
    small, large = torch.randn(8, 64), torch.randn(2048, 64)
    with torch.no_grad():
        assert counted(fast, small)[0] >= 12
        without, every = counted(fast, large)
        assert (without, every >= 12) == (0, True)
        assert torch.equal(fast(large), model(large))


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent_layers_run_without_python(
    kind: Any, dtype: Any, bias: bool, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recurrent, "_layer", lambda *_: pytest.fail("a layer was called from Python")
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(6, 8, num_layers=2, bias=bias, bidirectional=both)

        def forward(self, x: Any, state: Any) -> Any:
            return self.layers(x, state)

    model = Model().to(dtype).eval()
    fast = dfx.schedule(model, dfx.Branches(wide=False), lanes=2)
    # The reversed direction multiplies the same rows in another order. On AMD's processors the library's
    # product of float64 rounds a row by its place.
    places = both and dtype is torch.float64
    exact = {"rtol": 1e-11, "atol": 1e-14} if places else {"rtol": 0.0, "atol": 0.0}
    with torch.no_grad():
        for steps, rows in ((5, 3), (2, 4)):  # the second has open sizes
            x = torch.randn(steps, rows, 6, dtype=dtype)
            states = [torch.randn(4 if both else 2, rows, 8, dtype=dtype) for _ in range(2)]
            state = tuple(states) if kind is nn.LSTM else states[0]
            torch.testing.assert_close(fast(x, state), model(x, state), **exact)


def test_recurrent_layers_with_gradients_or_much_memory_stay_in_python() -> None:
    model = nn.Sequential(nn.Tanh(), nn.LSTM(6, 8))
    fast = dfx.schedule(model, dfx.Branches(wide=False), lanes=2)
    x = torch.randn(5, 3, 6)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    assert counted(fast, x)[0] < counted(fast, x)[1]
    large = torch.randn(700, 400, 6)  # 6.7 MB
    with torch.no_grad():
        torch.testing.assert_close(fast(large), model(large), rtol=1e-5, atol=1e-6)
        lines = dfx.explain(fast, large)
    found = re.findall(r"(\d+) of (\d+) operators run without Python", lines)
    assert int(found[0][0]) < int(found[0][1])
