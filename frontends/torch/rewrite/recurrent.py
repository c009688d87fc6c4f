"""Recurrent modules as opaque operators, one for each layer and direction, and cells as one each.

AOTAutograd would unroll ``nn.GRU`` and ``nn.RNN`` into an operator a time step, with other rounding
than the module has, and cannot train ``nn.LSTM`` on CPU. Here each layer and direction is one
operator that calls PyTorch's own implementation without the interpreter lock; the directions of a
bidirectional module are independent. The backward computes the layer's forward again.

A cell would become some twenty operators, each of which takes the interpreter lock: on two lanes they
wait for each other. Where no gradients are wanted it stays the one call that it is in the original.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import modes, operators

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
    with torch.enable_grad(), modes.unseen_by_saved_hooks():
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
    whole = kind == "lstm" and has_biases and len(params) == 4  # no projection
    if reverse and whole and operators.lstm_is_onednn((x, *hx, *params)):
        return operators.reversed_lstm(x, hx, params, train)  # as the original: without two copies
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
    with torch.enable_grad(), modes.unseen_by_saved_hooks():
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


def is_by_aten(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call is of a recurrent layer that ``by_aten`` can write: no gradients are wanted."""
    return target is torch.ops.dynaflow_xla.rnn_layer.default and not args[-1]


def by_aten(call: Callable[..., Any], args: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """A layer by calls of PyTorch's own operators, as ``_layer`` makes them without gradients.

    Args:
        call: Takes an operator and its arguments, gives its result, or all of several.
        args: Of the layer's operator, see ``_ARGS``.
        examples: The same with example tensors.
    """
    aten = torch.ops.aten
    kind, x, hx, params, has_biases, train, reverse, _ = args
    example_x, example_hx, example_params = examples[1:4]
    whole = kind == "lstm" and has_biases and len(params) == 4
    if reverse and whole and operators.lstm_is_onednn((example_x, *example_hx, *example_params)):
        states = [call(aten.select.int, state, 0, 0) for state in hx]
        y, h, c, _ = call(
            aten.mkldnn_rnn_layer.default, call(aten.contiguous.default, x), *params, *states, True, [],
            2, example_hx[0].shape[-1], 1, True, True, False, train,
        )  # fmt: skip
        return [y, call(aten.view_as.default, h, hx[0]), call(aten.view_as.default, c, hx[1])]
    if reverse:
        x = call(aten.flip.default, x, [0])
    state = hx if kind == "lstm" else hx[0]
    made = call(
        getattr(aten, kind).input, x, state, params, has_biases, 1, 0.0, train, False, False
    )
    y = call(aten.flip.default, made[0], [0]) if reverse else made[0]
    last = made[2] if kind == "lstm" else call(aten.new_empty.default, y, [0])
    return [y, made[1], last]


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

    Calls on packed sequences stay as they are.
    """
    if cells and not grad:
        _keep_cells(gm)
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _KINDS:
            continue
        args = [_number(arg) for arg in node.args]
        if node.target is getattr(torch, name) and _fits(name, args):
            _rewrite(gm, node, args, name, grad)


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


def stacked(
    kind: str, grad: bool, x: Any, hx: Any, params: Sequence[Any], has_biases: bool, layers: int,
    dropout: float, train: bool, both: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """``torch.lstm`` and its kin by our operators, on tensors or on nodes of a graph (``fx.Proxy``).

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        grad: Whether gradients are wanted.
        x: [T, B, I], or with ``batch_first`` [B, T, I].
        hx: The state, for an LSTM the two states.
        params: Of each layer and direction the weights, then the biases, then what projects.
        has_biases: Whether there are biases.
        layers: How many layers.
        dropout: Its probability between layers, in training.
        train: Whether this is training.
        both: Both directions.
        batch_first: The input and the result are [B, T, I].
    """
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    directions = 2 if both else 1
    each = len(params) // (layers * directions)
    finals: list[list[Any]] = [[] for _ in states]
    if batch_first:
        x = torch.transpose(x, 0, 1)
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            unit = layer * directions + direction
            made = torch.ops.dynaflow_xla.rnn_layer.default(
                kind, x, [torch.narrow(s, 0, unit, 1) for s in states],
                list(params[unit * each : (unit + 1) * each]), has_biases, train, direction == 1, grad,
            )  # fmt: skip
            outs.append(made[0])
            for number, final in enumerate(finals):
                final.append(made[1 + number])
        x = outs[0] if directions == 1 else torch.cat(outs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    if batch_first:
        x = torch.transpose(x, 0, 1)
    return (x, *(final[0] if len(final) == 1 else torch.cat(final, 0) for final in finals))


def _number(arg: Any) -> Any:
    """What is no tensor as a number: where all sizes are open, the number of layers is, too."""
    value = arg.meta.get("example_value") if isinstance(arg, torch.fx.Node) else arg
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else arg


def _fits(kind: str, given: Sequence[Any]) -> bool:
    """Whether a call is one of ``stacked``: not of a packed sequence, and with all its parameters."""
    if len(given) != 9:
        return False
    _, hx, params, has_biases, layers, _, _, both, _ = given
    if not isinstance(has_biases, bool) or not isinstance(params, list | tuple):
        return False
    if kind == "lstm" and not isinstance(hx, list | tuple):
        return False
    units = layers * (2 if both else 1)
    each = 4 if has_biases else 2
    return len(params) in (units * each, units * (each + 1) if kind == "lstm" else -1)


class _Capturing(threading.local):
    now = False


_capturing = _Capturing()


@contextlib.contextmanager
def lengths_open() -> Iterator[None]:
    """While a capture of ours lasts: recurrent calls do not fix the length of a sequence.

    To learn the shapes of its results Dynamo runs a call's decomposition, one time step after the
    other, which takes time for each step and makes the length a number.
    """
    before, _capturing.now = _capturing.now, True
    try:
        yield
    finally:
        _capturing.now = before


def _in_place_of_steps(kind: str, composite: bool, given: Sequence[Any]) -> Any:
    """What a recurrent call is while we capture, see ``operators.ask_first``."""
    numbers = [_number(arg) for arg in given] if _capturing.now else ()
    if not _fits(kind, numbers):
        return operators.GO_ON
    return stacked(kind, torch.is_grad_enabled(), *numbers)


for _kind in _KINDS:
    operators.ask_first(
        getattr(torch.ops.aten, _kind).input, partial(_in_place_of_steps, _kind), shapes=True
    )


def in_exported(cells: bool) -> dict[Any, Callable[..., Any]]:
    """What recurrent calls are, for ``ExportedProgram.run_decompositions``.

    Args:
        cells: Whether cells stay whole, too.
    """

    def asking(kind: str, steps: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lengths_open():
                made = _in_place_of_steps(kind, True, args)
            return steps(*args) if made is operators.GO_ON else made

        return call

    own = operators.composites()
    layers = {getattr(torch.ops.aten, kind).input: kind for kind in _KINDS}
    whole = {
        getattr(torch.ops.aten, name).default: getattr(torch.ops.dynaflow_xla, name).default
        for name in (_CELLS if cells else ())
    }
    return {target: asking(kind, own[target]) for target, kind in layers.items()} | whole


def _rewrite(gm: Any, node: Any, args: Sequence[Any], kind: str, grad: bool) -> None:
    """Puts our operators in the place of a call."""
    graph = gm.graph
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    before = set(graph.nodes)
    given = torch.fx.node.map_arg(tuple(args), lambda n: torch.fx.Proxy(n, tracer))
    with graph.inserting_before(node):
        results = [made.node for made in stacked(kind, grad, *given)]
    for made in graph.nodes:
        if made not in before:
            for key in ("nn_module_stack", "stack_trace", "custom", "source_fn_stack"):
                if key in node.meta:
                    made.meta[key] = node.meta[key]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if node.users:
        with graph.inserting_before(node):
            whole = graph.call_function(_pack, tuple(results))
        node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _pack(*values: Any) -> tuple[Any, ...]:
    return values
