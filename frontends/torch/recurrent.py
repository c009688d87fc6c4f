"""Recurrent modules as opaque operators, one for each layer and direction, and cells as one each.

AOTAutograd would unroll ``nn.GRU`` and ``nn.RNN`` into an operator a time step, with other rounding
than the module has, and cannot train ``nn.LSTM`` on CPU. Here each layer and direction is one
operator that calls PyTorch's own implementation without the interpreter lock; the directions of a
bidirectional module are independent. The backward computes the layer's forward again.

A cell would become some twenty operators, each of which takes the interpreter lock: on two lanes they
wait for each other. Where no gradients are wanted it stays the one call that it is in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch import _compat

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_library = torch.library.Library("dynaflow_xla", "DEF")
_ARGS = (
    "str kind, Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, bool train, bool reverse, "
    "bool grad"
)
_library.define(f"rnn_layer({_ARGS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"rnn_layer_backward(Tensor?[] grads, bool[] needed, {_ARGS}) -> Tensor[]")


def _forward(
    kind: str,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    train: bool,
    reverse: bool,
    grad: bool,
) -> tuple[torch.Tensor, ...]:
    """Runs a layer; ``grad``: with the kernels that PyTorch takes when gradients are wanted."""
    if not grad:
        return _layer(kind, x, hx, params, has_biases, train, reverse)
    leaves = [t.detach().requires_grad_() for t in (x, *hx, *params)]
    n = 1 + len(hx)
    with torch.enable_grad():
        outs = _layer(kind, leaves[0], leaves[1:n], leaves[n:], has_biases, train, reverse)
    return tuple(out.detach() for out in outs)


def _layer(
    kind: str,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    train: bool,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, B, I] -> [T, B, H], and the last state (for other kinds than LSTM the third is empty)."""
    if reverse and kind == "lstm" and has_biases and _compat.lstm_is_onednn((x, *hx, *params)):
        return _compat.reversed_lstm(x, hx, params, train)  # as the original: without two copies
    if reverse:
        x = x.flip(0)
    state: Any = list(hx) if kind == "lstm" else hx[0]
    out = getattr(torch, kind)(x, state, list(params), has_biases, 1, 0.0, train, False, False)
    y = out[0].flip(0) if reverse else out[0]
    return y, out[1], out[2] if kind == "lstm" else y.new_empty(0)


def _layer_backward(
    grads: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    kind: str,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    *rest: bool,
) -> list[torch.Tensor]:
    """Gradients of those of (input, states, parameters) that are needed, zeros for the others."""
    leaves = [x, *hx, *params]
    with torch.enable_grad():
        fresh = [
            t.detach().requires_grad_(wanted) for t, wanted in zip(leaves, needed, strict=True)
        ]
        n = len(hx)
        outs = _layer(kind, fresh[0], fresh[1 : 1 + n], fresh[1 + n :], *rest[:-1])
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.numel()]
        wanted = [t for t in fresh if t.requires_grad]
        made = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        )
    result = []
    for leaf, tensor in zip(leaves, fresh, strict=True):
        gradient = next(made) if tensor.requires_grad else None
        result.append(torch.zeros_like(leaf) if gradient is None else gradient.clone())
    return result


def _fake_backward(
    grads: Any, needed: Any, kind: Any, x: Any, hx: Any, params: Any, *_: Any
) -> Any:
    return [torch.empty_like(t) for t in (x, *hx, *params)]


def _fake_layer(kind: Any, x: Any, hx: Any, params: Any, *_: Any) -> Any:
    steps, batch, _ = x.shape
    size = hx[0].shape[-1]
    cell = torch.empty_like(hx[1]) if kind == "lstm" else x.new_empty(0)
    return x.new_empty(steps, batch, size), torch.empty_like(hx[0]), cell


_library.impl("rnn_layer", _forward, "CompositeExplicitAutograd")
_library.impl("rnn_layer_backward", _layer_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow_xla::rnn_layer", _fake_layer, lib=_library)
torch.library.register_fake("dynaflow_xla::rnn_layer_backward", _fake_backward, lib=_library)


_CELLS = {
    "gru_cell": "Tensor", "rnn_tanh_cell": "Tensor", "rnn_relu_cell": "Tensor",
    "lstm_cell": "(Tensor, Tensor)",
}  # fmt: skip
for _name, _result in _CELLS.items():
    _state = "Tensor[]" if _name == "lstm_cell" else "Tensor"
    _library.define(
        f"{_name}(Tensor input, {_state} hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih=None, "
        f"Tensor? b_hh=None) -> {_result}"
    )
    _library.impl(_name, getattr(torch, _name), "CompositeExplicitAutograd")


def _fake_cell(x: Any, hx: Any, *_: Any) -> Any:
    return torch.empty_like(hx)


def _fake_lstm_cell(x: Any, hx: Any, *_: Any) -> Any:
    return torch.empty_like(hx[0]), torch.empty_like(hx[1])


for _name in _CELLS:
    torch.library.register_fake(
        f"dynaflow_xla::{_name}",
        _fake_lstm_cell if _name == "lstm_cell" else _fake_cell,
        lib=_library,
    )

_DIRECT = {
    torch.ops.dynaflow_xla.rnn_layer.default: _forward,
    torch.ops.dynaflow_xla.rnn_layer_backward.default: _layer_backward,
    **{getattr(torch.ops.dynaflow_xla, name).default: getattr(torch, name) for name in _CELLS},
}


def direct(target: Any) -> Any:
    """What a lane calls for an operator: of ours the Python function, without the dispatcher."""
    return _DIRECT.get(target, target)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    kind, x, hx, params, *rest = inputs
    ctx.kind, ctx.n, ctx.rest = kind, len(hx), rest
    ctx.save_for_backward(x, *hx, *params)


def _backward(ctx: Any, *grads: Any) -> Any:
    x, *others = ctx.saved_tensors
    hx, params = others[: ctx.n], others[ctx.n :]
    needed = [bool(t.requires_grad) for t in (x, *hx, *params)]
    made = torch.ops.dynaflow_xla.rnn_layer_backward(
        list(grads), needed, ctx.kind, x, hx, params, *ctx.rest
    )
    gradients = [g if wanted else None for g, wanted in zip(made, needed, strict=True)]
    n = ctx.n
    return None, gradients[0], gradients[1 : 1 + n], gradients[1 + n :], None, None, None, None


torch.library.register_autograd(
    "dynaflow_xla::rnn_layer", _backward, setup_context=_setup, lib=_library
)


def keep_whole(gm: Any, grad: bool, cells: bool) -> None:
    """Rewrites the recurrent calls of a Dynamo graph into our operators.

    Args:
        gm: The graph.
        grad: Whether gradients are wanted.
        cells: Whether cells stay whole too; a compiler fuses more if they do not.

    Calls on packed sequences, and those with projections, stay as they are.
    """
    if cells and not grad:
        _keep_cells(gm)
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _KINDS:
            continue
        if node.target is not getattr(torch, name) or len(node.args) != 9:
            continue
        x, hx, params, has_biases, layers, dropout, train, both, batch_first = node.args
        if not isinstance(has_biases, bool) or not isinstance(params, (list, tuple)):
            continue
        directions = 2 if both else 1
        each = 4 if has_biases else 2
        if len(params) != layers * directions * each:
            continue
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        _Rewriter(gm.graph, node, name, grad).run(
            x, states, list(params), has_biases, layers, dropout, train, directions, batch_first
        )


def _keep_cells(gm: Any) -> None:
    """Turns calls of cells into our operators; under autocast they have operators of their own."""
    nodes = list(gm.graph.nodes)
    if torch.is_autocast_enabled("cpu") or any(
        "autocast" in getattr(node.target, "__name__", "") for node in nodes
    ):
        return
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in _CELLS and node.target is getattr(torch, name):
            node.target = getattr(torch.ops.dynaflow_xla, name).default


class _Rewriter:
    def __init__(self, graph: Any, node: Any, kind: str, grad: bool) -> None:
        self.graph, self.node, self.kind, self.grad = graph, node, kind, grad

    def call(self, target: Any, *args: Any) -> Any:
        made = self.graph.call_function(target, args)
        for key in ("nn_module_stack", "stack_trace", "custom", "source_fn_stack"):
            if key in self.node.meta:
                made.meta[key] = self.node.meta[key]
        return made

    def run(
        self, x: Any, states: list[Any], params: list[Any], has_biases: bool, layers: int,
        dropout: float, train: bool, directions: int, batch_first: bool,
    ) -> None:  # fmt: skip
        from operator import getitem

        each = 4 if has_biases else 2
        finals: list[list[Any]] = [[] for _ in states]
        with self.graph.inserting_before(self.node):
            if batch_first:
                x = self.call(torch.transpose, x, 0, 1)
            for layer in range(layers):
                outs = []
                for direction in range(directions):
                    unit = layer * directions + direction
                    hx = [self.call(torch.narrow, s, 0, unit, 1) for s in states]
                    weights = params[unit * each : (unit + 1) * each]
                    made = self.call(
                        torch.ops.dynaflow_xla.rnn_layer.default,
                        self.kind, x, hx, weights, has_biases, train, direction == 1,
                        self.grad,
                    )  # fmt: skip
                    outs.append(self.call(getitem, made, 0))
                    for number, final in enumerate(finals):
                        final.append(self.call(getitem, made, 1 + number))
                x = outs[0] if directions == 1 else self.call(torch.cat, outs, -1)
                if dropout and train and layer < layers - 1:
                    x = self.call(torch.dropout, x, dropout, True)
            if batch_first:
                x = self.call(torch.transpose, x, 0, 1)
            results = [x] + [f[0] if len(f) == 1 else self.call(torch.cat, f, 0) for f in finals]
        for user in list(self.node.users):
            if user.target is getitem:
                user.replace_all_uses_with(results[user.args[1]])
                self.graph.erase_node(user)
        if self.node.users:
            with self.graph.inserting_before(self.node):
                whole = self.call(_pack, *results)
            self.node.replace_all_uses_with(whole)
        self.graph.erase_node(self.node)


def _pack(*values: Any) -> tuple[Any, ...]:
    return values
