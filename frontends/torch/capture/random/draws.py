"""Random numbers that are drawn and not used: the random state has to move all the same."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.capture import costs, own

_DRAWS = re.compile(
    "dropout|rand|bernoulli|multinomial|normal|poisson|rrelu|exponential|uniform|geometric|cauchy|"
    "gumbel|gamma|binomial|dirichlet|scaled_dot_product|multi_head_attention|fractional_max_pool|lowrank|"
    "^(lstm|gru|rnn_tanh|rnn_relu)$"
)
"""Names of functions that draw, beside the operators that PyTorch says it of: many are made of several."""


def keep(gm: Any) -> int:
    """Makes unused results of random operators results of a Dynamo graph; returns how many.

    AOTAutograd leaves out what nobody reads, so later numbers would be others than the original's.
    """
    graph = gm.graph
    output = next(node for node in graph.nodes if node.op == "output")
    used = {output}
    for node in reversed(graph.nodes):
        if node in used:
            used.update(node.all_input_nodes)
    unused = [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method") and node not in used and _may_draw(gm, node)
    ]
    extra = [x for node in unused for x in _tensors_of(node)]
    if not extra:
        return 0
    with graph.inserting_before(output):
        # Detached, so that nobody asks for their gradients.
        extra = [graph.call_method("detach", (node,)) for node in extra]
    output.args = ((*output.args[0], *extra),)
    return len(extra)


_DROPOUTS = {
    torch.dropout: ("input", "p", "train"),
    torch.nn.functional.dropout: ("input", "p", "training", "inplace"),
}


def drop_all(gm: Any) -> None:
    """Writes dropout with a probability of 1 as the product with 0 that it is, which draws no numbers.

    PyTorch's traces have ``native_dropout`` there, which draws.
    """
    for part in [x for x in gm.modules() if isinstance(x, torch.fx.GraphModule)]:
        for node in part.graph.nodes:
            if node.op != "call_function" or (names := _DROPOUTS.get(node.target)) is None:
                continue
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            x, p, trains = given["input"], given.get("p", 0.5), given.get(names[2], True)
            if not isinstance(p, (int, float)) or p != 1 or trains is not True:
                continue
            with part.graph.inserting_before(node):
                zero = part.graph.call_method("new_zeros", (x, ()))
            node.op, node.kwargs = "call_method", {}
            node.target, node.args = "mul_" if given.get("inplace") else "mul", (x, zero)
        part.recompile()


def _may_draw(gm: Any, node: torch.fx.Node) -> bool:
    """Whether what a node calls may draw random numbers, in a graph of its own perhaps (a checkpoint)."""
    inner = [x for x in node.all_input_nodes if x.op == "get_attr"]
    for part in (getattr(gm, str(x.target), None) for x in inner):
        if isinstance(part, torch.fx.GraphModule):
            calls = [x for x in part.graph.nodes if x.op in ("call_function", "call_method")]
            if any(_may_draw(part, x) for x in calls):
                return True
    if isinstance(node.target, operators.Operator):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = str(getattr(node.target, "__name__", node.target))
    return _DRAWS.search(name) is not None or _is_tagged(name)


@functools.lru_cache(maxsize=1024)
def _is_tagged(name: str) -> bool:
    """Whether PyTorch says of an operator of this name that it draws."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, operators.Packet):
        return False
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in found)


def _tensors_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes of the tensors that a node gives, alone or in a tuple."""
    result = node.meta.get("example_value")
    if isinstance(result, torch.Tensor):
        return [node]
    if isinstance(result, (tuple, list)):
        places = [i for i, x in enumerate(result) if isinstance(x, torch.Tensor)]
        with node.graph.inserting_after(node):
            return [node.graph.call_function(operator.getitem, (node, i)) for i in places]
    # What stands in the place of a recurrent module has none.
    return [node] if result is None and node.target is torch.dropout else []


def without_last(fn: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
    """The function without its last ``count`` results."""

    def call(*args: Any) -> Sequence[Any]:
        return fn(*args)[:-count]

    return call


def draws_numbers(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that PyTorch tags as random draws.

    Attention does so only for its dropout, RReLU and ``native_dropout`` only in training.
    """
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0) != 0.0)
    if schema is not None and schema.name == "aten::native_dropout":
        return given.get("train") is not False  # None is True
    return not (schema is not None and "rrelu" in schema.name and given.get("training") is not True)


def may_draw(gm: Any) -> bool:
    """Whether a functional graph draws random numbers, or may do so by an operator of the user's."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return any(_may_draw(gm, x) or own.is_own(x.target) for x in calls)


class _SaveState:
    """The state of the CPU's generator, as a value: what a checkpoint keeps for its backward."""

    __name__ = "save_rng_state"
    tags = (torch.Tag.nondeterministic_seeded,)

    def __call__(self) -> torch.Tensor:
        return torch.get_rng_state()


class _WithState:
    """Runs an operator from a saved state; the generator stays as it was."""

    __name__ = "with_rng_state"
    tags = (torch.Tag.nondeterministic_seeded,)

    def __call__(
        self, state: torch.Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        current = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return op(*args, **kwargs)
        finally:
            torch.set_rng_state(current)


_save_state, _with_state = _SaveState(), _WithState()


def _known_size(state: torch.Tensor, draws: bool) -> torch.Tensor:
    """An example of a saved state: PyTorch takes its size for open, and regions compile for fixed sizes."""
    return state.new_empty([costs.hint(n) for n in state.shape] if draws else [0])


# The last one is what AOTAutograd writes on a GPU: the state is a generator among the arguments.
_SAVED = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


def lower_checkpoints(gm: Any) -> None:
    """Replaces what AOTAutograd writes for random operators under ``torch.utils.checkpoint``.

    It saves the generator's state before such an operator and puts it back where the backward runs it
    again. Saving becomes an operator of its own, which draws in its turn; attention without dropout,
    which is taken for random there, becomes plain attention. (Where XLA runs the graph, or nano-batches,
    ``aot.aot_backend`` keeps what was drawn, and there is nothing to replace.)

    Args:
        gm: A functional graph.

    Raises:
        UnsupportedError: an operator that draws on a GPU.
    """
    graph = gm.graph
    found = [node for node in graph.nodes if getattr(node.target, "__name__", "") in _SAVED]
    for node in found:
        name = node.target.__name__
        saves = name == "run_and_save_rng_state"
        state, op, *args = (None, *node.args) if name != "run_with_rng_state" else node.args
        kwargs = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
        draws = draws_numbers(op, args, kwargs)
        if isinstance(state, torch.fx.Node):
            state.meta = dict(state.meta, val=_known_size(state.meta["val"], draws))
        examples = torch.fx.node.map_arg((tuple(args), kwargs), lambda n: n.meta["val"])
        tensors = [x for x in pytree.tree_leaves(examples) if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        if draws and device.type != "cpu":
            raise UnsupportedError(
                f"{op} draws random numbers under torch.utils.checkpoint on a GPU, whose generator's state "
                "a plan does not put back. Schedule the module inside of the checkpoint, or set its dropout "
                "to 0, or use nano-batches, which keep what was drawn"
            )
        with graph.inserting_before(node):
            if saves and draws:
                saved = graph.call_function(_save_state)
            elif saves:
                options = {"dtype": torch.uint8, "device": device}
                saved = graph.call_function(torch.ops.aten.empty.memory_format, ([0],), options)
            target, before = (_with_state, (state, op)) if draws and not saves else (op, ())
            plain = graph.call_function(target, (*before, *args), kwargs)
        plain.meta = dict(node.meta, val=op(*examples[0], **examples[1]))
        if saves:
            for user in list(node.users):
                if user.args[1] == 0:
                    saved.meta = dict(user.meta, val=_known_size(user.meta["val"], draws))
                else:
                    plain.meta = dict(user.meta)
                user.replace_all_uses_with((saved, plain)[user.args[1]])
                graph.erase_node(user)
            if not saved.users:
                graph.erase_node(saved)
        else:
            node.replace_all_uses_with(plain)
        graph.erase_node(node)
    if found:
        gm.recompile()
