"""Random functions: what is called separable is, and what mixes rows is never called that."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import SeparabilityError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
_rows = torch.arange

# Steps from [B, 4] to [B, 4]; the batch has 5 rows. The second half mixes rows, or may.
STEPS = {
    "tanh": lambda x: torch.tanh(x),
    "product": lambda x: x @ W,
    "softmax": lambda x: torch.softmax(x, -1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "sorted": lambda x: torch.sort(x, -1).values,
    "flatten": lambda x: x.reshape(-1, 2).sin().reshape(x.shape[0], 4),
    "turned": lambda x: x.t().exp().clamp(max=3).t(),
    "runs": lambda x: sum(torch.cat([x, x + 1]).cos().chunk(2)),
    "chosen": lambda x: x * x.gather(1, x.argsort(1)),
    "own": lambda x: x + x[_rows(x.shape[0]), x.argmax(1)][:, None],
    "scaled": lambda x: x * x.shape[0] / x.shape[0],
    "square": lambda x: torch.einsum("bi,bj->bij", x, x).sum(1),
    "shifted": lambda x: torch.where(x > 0, x, W[0]),
    "batch mean": lambda x: x - x.mean(0),
    "batch softmax": lambda x: torch.softmax(x, 0),
    "batch size": lambda x: x * x.shape[0],
    "batch sum": lambda x: x + (x * 0.1).sum(),
    "neighbours": lambda x: x + x.roll(1, 0),
    "interleaved": lambda x: x.reshape(4, -1).t(),
    "gram": lambda x: (x @ x.t()) @ x,
    "row number": lambda x: x + _rows(x.shape[0])[:, None],
    "first": lambda x: x + x[:1],
    "batch cumsum": lambda x: x.cumsum(0),
    "picked": lambda x: x[_rows(x.shape[0]).flip(0)],
    "transposed sort": lambda x: x.t().sort(-1).values.t(),
    "maximum": lambda x: x / x.abs().amax(),
}  # fmt: skip


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    sizes=st.sampled_from([(3, 2), (1, 4), (2, 2, 1)]),
)
def test_what_is_proved_holds(names: list[str], sizes: tuple[int, ...]) -> None:
    def f(x: Any) -> Any:
        for name in names:
            x = STEPS[name](x)
        return x

    torch._dynamo.reset()
    strategy = dfx.NanoBatch(sizes, joins=False)
    fast = dfx.schedule(f, strategy, in_axes=0, backend="torch", check=False)
    x = torch.randn(5, 4)
    want = f(x)
    separable = torch.allclose(torch.cat([f(part) for part in x.split(sizes)]), want, atol=1e-4)
    try:
        got = fast(x)
    except SeparabilityError as error:
        assert "Ways out" in str(error)
        return
    assert separable, f"{names} was called separable"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tanh", "runs", "own", "square", "scaled"])
def test_separable_steps_are_proved(name: str) -> None:
    fast = dfx.schedule(STEPS[name], dfx.NanoBatch([2, 3]), in_axes=0, backend="torch", check=False)
    x = torch.randn(5, 4)
    torch.testing.assert_close(fast(x), STEPS[name](x))
