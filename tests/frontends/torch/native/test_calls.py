"""What lanes call for operators: the same operator with the same arguments, by the shortest way."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dynaflow_xla.frontends.torch.capture.captured import Payload, Ref  # noqa: E402
from dynaflow_xla.frontends.torch.native.stretches import calls  # noqa: E402

aten = torch.ops.aten
X, Y, ONE, IDS = torch.randn(4, 6), torch.randn(4, 6), torch.tensor(2.0), torch.tensor([2, 0])
X0, Y0, N0, I0 = Ref(0), Ref(1), Ref(2), Ref(3)
EXAMPLES = {0: X, 1: Y, 2: ONE, 3: IDS}

CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "view": (aten.view.default, (X0, [6, -1]), {}),
    "view to another type": (aten.view.dtype, (X0, torch.int32), {}),
    "view to no dimension": (aten.sum.dim_IntList, (X0, [], True), {}),
    "sum": (aten.sum.dim_IntList, (X0, [0], True), {"dtype": torch.float64}),
    "sum of all": (aten.sum.default, (X0,), {}),
    "transpose": (aten.transpose.int, (X0, 0, 1), {}),
    "expand": (aten.expand.default, (X0, [2, -1, -1]), {}),
    "add": (aten.add.Tensor, (X0, Y0), {"alpha": 3}),
    "add a number": (aten.add.Tensor, (X0, 2), {}),
    "add a number by the other overload": (aten.add.Scalar, (X0, 2), {}),
    "multiply by a tensor without dimensions": (aten.mul.Tensor, (X0, N0), {}),
    "multiply by a number": (aten.mul.Scalar, (X0, 0.5), {}),
    "divide": (aten.div.Tensor_mode, (X0, Y0), {"rounding_mode": "floor"}),
    "power": (aten.pow.Tensor_Scalar, (X0, 2), {}),
    "power of a number": (aten.pow.Scalar, (2.0, X0), {}),
    "cat": (aten.cat.default, ([X0, Y0], 1), {}),
    "index": (aten.index.Tensor, (X0, [None, I0]), {}),
    "put": (aten.index_put.default, (X0, [I0], N0), {}),
    "select rows": (aten.index_select.default, (X0, 0, I0), {}),
    "norm": (aten.native_layer_norm.default, (X0, [6], None, None, 1e-5), {}),
    "gelu": (aten.gelu.default, (X0,), {"approximate": "tanh"}),
    "its gradient": (aten.gelu_backward.default, (X0, Y0), {}),
    "clone": (aten.clone.default, (X0,), {"memory_format": torch.contiguous_format}),
    "to": (aten._to_copy.default, (X0,), {"dtype": torch.float64}),
    "zeros like": (aten.zeros_like.default, (X0,), {"pin_memory": False}),
    "full": (aten.full.default, ([2, 3], 1.5), {"pin_memory": False}),
    "top": (aten.topk.default, (X0, 2), {}),
    "max": (aten.max.dim, (X0, 1), {}),
    "where": (aten.where.self, (I0, I0, I0), {}),
    "slice": (aten.slice.Tensor, (X0, 0, 1, 3), {}),
    "split": (aten.split_with_sizes.default, (X0, [1, 3]), {}),
    "clamp": (aten.clamp.default, (X0, None, 0.5), {}),
}


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, str(args), str(kwargs or {})))
        return func(*args, **(kwargs or {}))


def run(call: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    given = Payload(call, args, kwargs, (), False).mapped(lambda ref: EXAMPLES[ref.value])
    with torch.no_grad(), _Record() as record:
        return call(*given[0], **given[1]), record.calls


@pytest.mark.parametrize("name", CASES)
def test_the_same_operator_with_the_same_arguments(name: str) -> None:
    target, args, kwargs = CASES[name]
    if name == "where":
        EXAMPLES[4] = IDS > 0
        args = (Ref(4), I0, I0)
    call = calls.call_of(Payload(target, args, kwargs, (0,), False), EXAMPLES)
    want, asked = run(target, args, kwargs)
    got, called = run(*call)
    assert called == asked and asked[0][0] is target
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_costs_more_than_the_operator_is_left_out() -> None:
    def made(name: str) -> Any:
        target, args, kwargs = CASES[name]
        return calls.call_of(Payload(target, args, kwargs, (0,), False), EXAMPLES)[0]

    methods = ["view", "transpose", "expand", "add", "multiply by a tensor without dimensions"]
    assert [made(name).__name__ for name in methods] == [
        "reshape",
        "transpose",
        "expand",
        "add",
        "mul",
    ]
    assert not any(
        isinstance(made(name), torch._ops.OpOverload) for name in CASES if name != "where"
    )


def test_a_number_is_no_tensor_of_the_same_name() -> None:
    """``mul`` of a tensor and a number is another overload for Python code than the graph's."""
    target, args, kwargs = CASES["multiply by a number"]
    call = calls.call_of(Payload(target, args, kwargs, (0,), False), EXAMPLES)
    assert call[0] is not torch.Tensor.mul
    assert run(*call)[1][0][0] is target


def test_a_device_that_a_mode_puts_in_changes_nothing() -> None:
    target, args, kwargs = CASES["full"]
    call, given, named = calls.call_of(Payload(target, args, kwargs, (0,), False), EXAMPLES)
    with torch.device("meta"):
        assert call(*given, **named).device == target(*args, **kwargs).device


def test_views_among_results_can_be_written() -> None:
    """What a call returns is autograd's own, whatever the lanes noted of the views that they made."""

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return h.t(), (h * 2)[:, :2]

    given, weight = torch.randn(6, 4), torch.randn(4, 4)
    results = []
    for call in (f, dfx.schedule(f, dfx.Sequential())):
        x, w = given.clone().requires_grad_(), weight.clone().requires_grad_()
        a, b = call(x, w)
        a.mul_(2)
        b.add_(1)
        (a.square().sum() + b.square().sum()).backward()
        results.append((x.grad, w.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("train", [False, True])
def test_a_view_of_what_lies_otherwise_in_memory_than_pytorch_expects(train: bool) -> None:
    """Batch norm of a transposed tensor: the graph has a view where the function says ``reshape``."""
    x, results = torch.randn(3, 5, 4), []
    for scheduled in (False, True):
        torch.manual_seed(0)
        norm, linear = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

        def f(x: Any, norm: Any = norm, linear: Any = linear) -> Any:
            h = norm(x.transpose(1, 2)).transpose(1, 2)
            return linear(h), h.reshape(-1, 4).sin()

        norm.train(train)
        with torch.set_grad_enabled(train):
            results.append((dfx.schedule(f, dfx.Branches(wide=False)) if scheduled else f)(x))
        if train:
            results[-1][0].square().sum().backward()
            results[-1] += (linear.weight.grad, norm.weight.grad)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
