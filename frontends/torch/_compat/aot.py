"""What AOTAutograd makes of a graph, and what it knows of its inputs and outputs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch


def aot_backend(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    draws: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """A Dynamo backend that hands functional aten graphs to the three compilers.

    The public way to it is a ``torch.compile`` backend, but AOTAutograd itself has only this name.
    The default partitioner keeps every forward value that the backward reads: nothing is computed
    again but what ``torch.utils.checkpoint`` asks for, so gradients have the original's bits.

    Args:
        forward: Compiles it.
        backward: The same.
        inference: What runs without gradients.
        draws: Whether an operator with these arguments draws random numbers. If given, what such
            operators made in a checkpoint is kept for the backward; else the generator's state is, and
            the backward draws again.
    """
    _keep_checks()
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    def partition(joint: Any, *given: Any, **told: Any) -> tuple[Any, Any]:
        _save_what_reads_written(joint)
        if draws is not None:
            _save_drawn(joint, draws)
        made: tuple[Any, Any] = default_partition(joint, *given, **told)
        for part in made:
            for node in part.graph.nodes:
                if isinstance(node.target, _DrawsNothing):
                    node.target = node.target.operator
            part.recompile()
        return made

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions={},
    )


class _DrawsNothing:
    """An operator that is tagged as random and is not with its arguments: without the tag."""

    def __init__(self, target: Any) -> None:
        self.operator = target
        self.__name__ = target.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


def _save_what_reads_written(joint: Any) -> None:
    """Of a checkpoint, what is made of inputs that the call writes is for the forward to save.

    To make it again (a batch norm, say, which reads its statistics) would be from what is there after
    the call, which autograd refuses.
    """
    from torch._functorch.partitioners import must_recompute

    (output,) = joint.graph.find_nodes(op="output")
    written = [d.mutated_input for d in output.meta.get("desc") or () if is_update(d)]
    inputs = joint.graph.find_nodes(op="placeholder")
    found = [node for node in inputs if written and node.meta.get("desc") in written]
    while found:
        for user in found.pop().users:
            if getattr(user.target, "is_view", False):
                found.append(user)
            elif must_recompute(user):
                _save(user)


def _save(node: Any) -> None:
    """A node in a checkpoint, and its parts, are kept for the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    parts = [user for user in node.users if user.target is operator.getitem]
    for kept in (node, *parts):
        kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _save_drawn(joint: Any, draws: Callable[..., bool]) -> None:
    """Of a checkpoint in a joint graph, what was drawn is for the forward to save."""
    from torch._functorch.partitioners import must_recompute

    for node in joint.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not random or not must_recompute(node):
            continue
        if not draws(node.target, node.args, node.kwargs):
            node.target = _DrawsNothing(node.target)
            continue
        _save(node)


def _keep_checks() -> None:
    """Has checks kept in graphs that PyTorch drops there, as nothing reads a result of theirs.

    Of ``torch.linalg`` torch 2.11 drops those by which ``solve`` and ``inv`` raise on singular matrices;
    newer versions register the operator so by themselves. Assertions on a tensor without a message are
    dropped by all, those with one by none. The registrations hold for the whole process.
    """
    from torch._higher_order_ops import effects

    operator = "aten::_linalg_check_errors"
    if effects._get_effect(operator) is None:
        effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a compiled function as one that takes a list it may empty, so that inputs die early."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def allow_second_backward() -> None:
    """Called while a backward is compiled: nobody writes into what its forward saved.

    AOTAutograd otherwise refuses ``backward(retain_graph=True)``, for the sake of compilers that do.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def node_of_graph(node: Any) -> Any:
    """The node of a compiled graph, for one of its results or of a view of that; None if there is none."""
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        behind = node.next_functions
        node = behind[0][0] if len(behind) == 1 else None
    return node if type(node).__name__ == "CompiledFunctionBackward" else None


def freed(node: Any) -> RuntimeError | None:
    """What autograd says if what a compiled forward saved for its node is gone; None if it is there."""
    try:
        node._raw_saved_tensors  # unpacks nothing, so no hook is called  # noqa: B018
    except RuntimeError as error:
        return error
    return None


def writes_inputs() -> bool:
    """Called while a forward is compiled: whether it changes the data of an input."""
    infos = _input_infos()
    return infos is None or any(info.mutates_data for info in infos)


def _input_infos() -> Any:
    """Called while a forward is compiled: what AOTAutograd knows of each input; None: it is not known."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return None
    return context.fw_metadata.input_info


def written_inputs(memory: Sequence[Any]) -> list[int]:
    """Called while a forward is compiled: which inputs of Dynamo's graph it changes the data of.

    Args:
        memory: Of ``storage_of`` for each input. Where inputs that share memory became one, each of these
            counts as written.
    """
    infos = _input_infos() or ()
    if len(infos) == len(memory):
        return [n for n, info in enumerate(infos) if info.mutates_data]
    if not any(info.mutates_data for info in infos):
        return []
    return [n for n, one in enumerate(memory) if one is not None and memory.count(one) > 1]


def uncounted_writes(gm: Any, inputs: int) -> list[int]:
    """Called while a forward is compiled: the inputs that it writes, which autograd is not to know.

    Batch norm writes its statistics so, and ``x.data.copy_``: a backward of an earlier call, which saved
    them and does not read their values, is still to run.

    Args:
        gm: Of AOTAutograd.
        inputs: So many has Dynamo's graph. Where some of these became one none are told.
    """
    infos = _input_infos() or ()
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    if len(infos) != inputs or len(placeholders) != inputs:
        return []
    (output,) = gm.graph.find_nodes(op="output")
    return [
        n
        for n, number in updates_of(gm)
        if not infos[n].requires_grad
        and (
            infos[n].mutations_hidden_from_autograd
            or _is_statistic(output.args[0][number], placeholders[n])
        )
    ]


def _is_statistic(node: Any, before: Any) -> bool:
    """Whether a value is what batch norm, or several after one another, make of these statistics."""
    while node is not before:
        if not isinstance(node, torch.fx.Node) or node.target is not operator.getitem:
            return False
        norm, number = node.args
        schema = getattr(norm.target, "_schema", None)
        if schema is None or "batch_norm" not in schema.name:
            return False
        read = schema.returns[number].name.removesuffix("_out")
        places = [n for n, argument in enumerate(schema.arguments) if argument.name == read]
        if not places or places[0] >= len(norm.args):
            return False
        node = norm.args[places[0]]
    return True


class Uncounted:
    """A graph that writes inputs, which autograd is not to know.

    Args:
        run: The graph; AOTAutograd writes by an operator, which counts.
        written: Numbers of these inputs.
    """

    def __init__(self, run: Callable[..., Any], written: Sequence[int]) -> None:
        self._run, self._written = run, written

    def __call__(self, *inputs: Any) -> Any:
        """Runs it."""
        with _uncounted([inputs[n] for n in self._written]):
            return self._run(*inputs)


def _uncounted(tensors: Iterable[torch.Tensor]) -> Any:
    counting = tuple(x for x in tensors if not x.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counting)


def updates_of(gm: Any) -> list[tuple[int, int]]:
    """Which inputs of AOTAutograd's graph are to hold which of its outputs after the call, by number."""
    described = [node.meta.get("desc") for node in gm.graph.find_nodes(op="placeholder")]
    found = []
    for number, description in enumerate(output_descriptions(gm)):
        if is_update(description) and description.mutated_input in described:
            found.append((described.index(description.mutated_input), number))
    return found


def early_updates(gm: Any) -> list[tuple[int, int]]:
    """Those that the original has made when its last operator saves what the backward needs.

    What recomputes for a checkpoint ends there. Batch norm writes before it saves. Of what is both a
    result and written nobody knows when it is written: late, it is taken for.
    """
    if not (found := updates_of(gm)):
        return []
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    (output,) = gm.graph.find_nodes(op="output")
    made = output.args[0]
    described = list(zip(made, output_descriptions(gm), strict=True))
    saved = {node for node, what in described if is_saved(what) and isinstance(node, torch.fx.Node)}
    waiting = [node for node, what in described if not is_saved(what) and not is_update(what)]
    needed: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.fx.Node) and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    last = max(
        (
            places[node]
            for node in needed
            if node.op == "call_function"
            and node.target is not operator.getitem
            and not saved.isdisjoint((node, *node.all_input_nodes, *_parts(node)))
        ),
        default=-1,
    )

    def is_early(number: int, result: int) -> bool:
        value = made[result]
        if _is_statistic(value, placeholders[number]):
            return value is not placeholders[number] and places[value.args[0]] <= last
        return set(value.users) == {output} and places[value] < last

    return [pair for pair in found if is_early(*pair)]


def _parts(node: Any) -> list[Any]:
    return [user for user in node.users if user.target is operator.getitem]


def write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes what AOTAutograd will write, which then counts for autograd."""
    with torch.no_grad(), _uncounted(targets):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def storage_of(node: Any) -> Any:
    """What is equal for two inputs of Dynamo's graph that share memory; None for what has none."""
    return _storage(node.meta.get("example_value"))


def memory_of(node: Any) -> Any:
    """The same for two values of AOTAutograd's graph."""
    return _storage(node.meta.get("val"))


def _storage(example: Any) -> Any:
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    return example.untyped_storage()._cdata


def adds_where_arguments_begin() -> bool:
    """Whether AOTAutograd itself adds where an argument begins to the offset of a view of it (since 2.14)."""
    from torch._functorch._aot_autograd import functional_utils

    made = getattr(functional_utils, "gen_alias_from_base", None)
    return "_cdata" in getattr(getattr(made, "__code__", None), "co_names", ())


def input_nodes(gm: Any) -> list[Any]:
    """Inputs of AOTAutograd's graph as its ``fw_metadata`` counts them: without tokens, which come first."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [n for n in nodes if "Token" not in type(n.meta.get("desc")).__name__]


def _views_of_merged(gm: Any) -> Iterator[tuple[list[Any], int, Any]]:
    """Called while a forward is compiled: results that are views of arguments which share memory.

    Where one of such arguments is written, the graph gets their common base in their place. Gives what
    AOTAutograd knows of all results, which of them it is, and its example.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return
    inputs = input_nodes(gm)
    (output,) = gm.graph.find_nodes(op="output")
    told = zip(output_descriptions(gm), output.args[0], strict=False)
    results = {
        d.idx: node.meta.get("val")
        for d, node in told
        # A size among the results may be a number, which no node makes.
        if type(d).__name__ == "PlainAOTOutput" and isinstance(node, torch.fx.Node)
    }
    infos = context.fw_metadata.output_info
    for number, info in enumerate(infos):
        base = None if info.base_idx is None or number not in results else inputs[info.base_idx]
        if base is None or type(base.meta.get("desc")).__name__ not in _MERGED:
            continue
        if _place(results[number]) != _place(base.meta["val"]):
            yield infos, number, results[number]


_MERGED = ("ViewBaseAOTInput", "SyntheticBaseAOTInput")


def _place(x: Any) -> Any:
    return x.shape, x.stride(), x.storage_offset()


def mend_views_of_merged(gm: Any) -> None:
    """A written argument that is returned comes back as the view it is.

    AOTAutograd before torch 2.13 gives back the base, if it has the argument's number among inputs.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    for infos, number, _ in _views_of_merged(gm):
        if infos[number].output_type is OutputType.is_input:
            infos[number] = dataclasses.replace(
                infos[number], output_type=OutputType.alias_of_input
            )


def needs_places(gm: Any) -> bool:
    """Whether a result must lie as in the original: AOTAutograd makes a view of an argument like it."""
    return any(x.storage_offset() or not x.is_contiguous() for _, _, x in _views_of_merged(gm))


LABELS = "dynaflow_xla_labels"
"""Key of a graph's ``meta``: what the user calls each input of the Dynamo graph it was made of."""

PART = "dynaflow_xla_part"
"""Key of a graph's ``meta``: whether it is one of several, so that rules may match in others."""


def input_labels(gm: Any) -> dict[str, str]:
    """Name of an input of AOTAutograd's graph -> what the user calls it, as far as is known."""
    labels = gm.meta.get(LABELS, ())
    found = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        number = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(number, int) and number < len(labels) and labels[number]:
            if type(node.meta["desc"]).__name__ == "PlainAOTInput":
                found[node.name] = labels[number]
    return found


def output_descriptions(gm: Any) -> list[Any]:
    """What each output of AOTAutograd's graph is, as it says itself."""
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    return list(output.meta.get("desc") or ())


def updated_inputs(gm: Any) -> dict[int, str]:
    """Number of an output of AOTAutograd's graph -> the input that is to hold it, as the user calls it."""
    labels = gm.meta.get(LABELS, ())
    found = {}
    for number, description in enumerate(output_descriptions(gm)):
        place = getattr(getattr(description, "mutated_input", None), "idx", None)
        if isinstance(place, int) and place < len(labels):
            found[number] = labels[place]
    return found


def is_saved(description: Any) -> bool:
    """Whether an output of a forward is kept for the backward."""
    return type(description).__name__.startswith("SavedForBackwards")


def is_update(description: Any) -> bool:
    """Whether an output is what an argument or a buffer is to hold after the call."""
    return type(description).__name__ == "InputMutationAOTOutput"


def tangent_of(node: Any) -> Any:
    """The description of the forward's output whose gradient an input of a backward is."""
    return getattr(node.meta.get("desc"), "output", None)
