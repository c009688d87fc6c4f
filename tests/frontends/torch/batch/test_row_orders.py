"""Rows in an order that data gives, in PyTorch: what the proof accepts is run in parts, the rest refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402

BATCH, PARTS = 7, [4, 2, 1]
K, EXPERTS, D = 2, 4, 8
torch.manual_seed(3)
ROUTER = torch.randn(D, EXPERTS)
WEIGHTS = torch.randn(EXPERTS, D, D)
X = torch.randn(BATCH, D)


def route(x: Any) -> tuple[Any, Any, Any]:
    """(weights, experts as they are, experts sorted, the order that sorts them), ``[B * K]`` each."""
    weights, experts = torch.topk(torch.softmax(x @ ROUTER, -1), K)
    flat = experts.reshape(-1)
    return weights.reshape(-1), flat, *torch.sort(flat)


def ends(experts: Any) -> Any:
    counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def grouped(x: Any, offsets: Any) -> Any:
    return torch._grouped_mm(x.bfloat16(), WEIGHTS.bfloat16(), offs=offsets).float()


def by_inverse(x: Any) -> Any:
    w, _, e, order = route(x)
    y = grouped(x[order // K], ends(e)) * w[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return y[inverse].view(-1, K, D).sum(1)


def by_sorted_inverse(x: Any) -> Any:
    w, e, _, order = route(x)
    y = grouped(x[order // K], ends(e))
    return (y[torch.argsort(order)] * w[:, None]).view(-1, K, D).sum(1)


def by_two_maxima(x: Any) -> Any:
    """The best expert and the best of the others, each as the place of a maximum."""
    scores = torch.softmax(x @ ROUTER, -1)
    first, one = scores.max(-1, keepdim=True)
    second, other = scores.masked_fill(scores == first, -1.0).max(dim=-1, keepdim=True)
    w, (e, order) = torch.cat([first, second], 1), torch.sort(torch.cat([one, other], 1).view(-1))
    y = grouped(x[order // K], ends(e)) * w.view(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // K, y)


def by_index_add(x: Any) -> Any:
    w, _, e, order = route(x)
    tokens = torch.div(order, K, rounding_mode="floor")
    y = grouped(x.index_select(0, tokens), ends(e)) * w.index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, tokens, y)


def by_token_and_slot(x: Any) -> Any:
    w, _, e, order = route(x)
    counts = torch.zeros(EXPERTS, dtype=torch.int32).scatter_add(
        0, e, torch.ones_like(e, dtype=torch.int32)
    )
    y = grouped(x[order // K], torch.cumsum(counts, 0, dtype=torch.int32))
    y = torch.nn.functional.silu(y) * w.view(-1, K)[order // K, order % K][:, None]
    return torch.zeros_like(x).index_add_(0, order // K, y)


def with_bias(x: Any) -> Any:
    w, _, e, order = route(x)
    y = grouped(x.repeat_interleave(K, 0)[order], ends(e)) + WEIGHTS[:, 0][e]
    out = torch.zeros_like(y)
    out[order] = y
    return (out.view(-1, K, D) * w.view(-1, K, 1)).sum(1)


ACCEPTED = [
    by_inverse,
    by_sorted_inverse,
    by_two_maxima,
    by_index_add,
    by_token_and_slot,
    with_bias,
]


@pytest.mark.parametrize("fn", ACCEPTED, ids=lambda f: f.__name__)
def test_rows_that_come_back(fn: Callable[[Any], Any]) -> None:
    split = dfx.schedule(fn, dfx.NanoBatch(PARTS), in_axes=0, check=False)
    with torch.no_grad():
        torch.testing.assert_close(split(X), fn(X), rtol=1e-2, atol=1e-2)


def _refused() -> dict[str, Callable[[Any], Any]]:
    def back(x: Any, order: Any, y: Any) -> Any:
        return torch.zeros_like(x).index_add(0, order // K, y)

    def f(body: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda x: body(x, *route(x))

    return {
        "rows as sorted": f(lambda x, w, u, e, o: x[o // K]),
        "the order": f(lambda x, w, u, e, o: o),
        "number of the row as a value": f(lambda x, w, u, e, o: back(x, o, x[o // K] * o[:, None])),
        "place as a value": f(lambda x, w, u, e, o: x * torch.argsort(o).view(-1, K)[:, :1]),
        "sizes of other groups": f(
            lambda x, w, u, e, o: back(x, o, grouped(x[o // K], ends((e + 1) % EXPERTS)))
        ),
        "sizes of another choice": f(
            lambda x, w, u, e, o: back(
                x, o, grouped(x[o // K], ends((x @ ROUTER).argmin(-1)) * K)
            )
        ),
        "fewer bins than experts": f(
            lambda x, w, u, e, o: back(
                x, o, grouped(x[o // K], torch.cumsum(
                    torch.histc(e.float(), bins=EXPERTS, min=0, max=EXPERTS), 0, dtype=torch.int32
                ))
            )
        ),
        "sorted the other way": lambda x: (
            lambda e, o: back(x, o, grouped(x[o // K], ends(e)))
        )(*torch.sort(route(x)[1], descending=True)),
        "in order plus as it was": f(
            lambda x, w, u, e, o: back(x, o, x[o // K] + x.repeat_interleave(K, 0))
        ),
        "the order twice": f(lambda x, w, u, e, o: x[o // K][o].view(-1, K, D).sum(1)),
        "regrouped while sorted": f(lambda x, w, u, e, o: x[o // K].view(-1, K, D).sum(1)),
        "accumulated while sorted": f(
            lambda x, w, u, e, o: back(x, o, torch.cumsum(x[o // K], 0))
        ),
        "rolled while sorted": f(lambda x, w, u, e, o: back(x, o, x[o // K].roll(1, 0))),
        "softmax while sorted": f(lambda x, w, u, e, o: back(x, o, x[o // K].softmax(0))),
        "the first places only": f(
            lambda x, w, u, e, o: back(
                x, o, x[o // K] * (torch.arange(o.shape[0]) < 4)[:, None].float()
            )
        ),
        "capacity": f(
            lambda x, w, u, e, o: x * (
                (torch.cumsum(torch.nn.functional.one_hot(u, EXPERTS), 0) <= 2).float().mean(-1)
            ).view(-1, K).sum(-1, keepdim=True)
        ),
        "the first of the order": f(lambda x, w, u, e, o: x + x[o // K][0]),
    }  # fmt: skip


@pytest.mark.parametrize("name", _refused())
def test_rows_that_do_not_come_back(name: str) -> None:
    fn = _refused()[name]
    split = dfx.schedule(fn, dfx.NanoBatch(PARTS, joins=False), in_axes=0, check=False)
    with torch.no_grad(), pytest.raises(dfx.SeparabilityError):
        split(X)


def _moe(x: Any, router: Any, weights: Any) -> Any:
    w, e = torch.topk(torch.softmax(x @ router, -1), K)
    e, order = torch.sort(e.reshape(-1))
    y = torch._grouped_mm(x[order // K].bfloat16(), weights, offs=ends(e)).float()
    return torch.zeros_like(x).index_add(0, order // K, y * w.reshape(-1)[order][:, None])


def _gradients(fn: Callable[..., Any]) -> list[Any]:
    given = [X.clone(), ROUTER.clone(), WEIGHTS.bfloat16()]
    for tensor in given:
        tensor.requires_grad_()
    (fn(*given) ** 2).mean().backward()
    return [tensor.grad for tensor in given]


def test_gradients_go_back_in_each_nano_batch_own_order() -> None:
    split = dfx.schedule(_moe, dfx.NanoBatch(PARTS), in_axes=(0, None, None))
    for got, want in zip(_gradients(split), _gradients(_moe), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_what_is_sorted_is_not_put_together_for_hooks() -> None:
    split = dfx.schedule(_moe, dfx.NanoBatch(PARTS), in_axes=(0, None, None))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with pytest.raises(dfx.UnsupportedError, match="sorted rows, each nano-batch its own"):
            _gradients(split)
