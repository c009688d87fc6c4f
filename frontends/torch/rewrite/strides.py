"""Reshapes by values, where a captured graph speaks of memory.

PyTorch writes some reshapes by strides: pooling to one element, and its gradient. Strides speak of memory;
where they name all elements in their order, a reshape says the same of values, and rows can be followed.

A function's reshape is in its graph as a view where the strides that PyTorch expects allow one. It expects
others than some operators make (batch norm of a transposed tensor), and such a view fails when it runs.

A determinant factorizes the transposed matrices where these are contiguous, and its gradient was captured
with what the strides were then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

_aten = torch.ops.aten

_VIEWS = frozenset((_aten.view.default, _aten._unsafe_view.default))


def by_values(target: Any) -> Any:
    """What runs for an operator: for a view a reshape, which is that view wherever memory allows one."""
    return _aten.reshape.default if target in _VIEWS else target


_BY_FORMAT = {
    _aten.native_group_norm.default: 1,
    _aten.native_group_norm_backward.default: 2,
}
"""How many arguments at the front have to lie in the memory format that their strides suggest. A capture with
an open batch saw that they do; of one row the strides may suggest another one."""


def by_format(target: Any) -> int:
    """How many of an operator's arguments at the front have to be contiguous where they have one row."""
    return _BY_FORMAT.get(target, 0)


def in_format(target: Any) -> Any:
    """What runs for an operator: for those that go by the memory format, with contiguous single rows."""
    if not (count := by_format(target)):
        return target

    def run(*args: Any, **kwargs: Any) -> Any:
        if args[0].shape[0] == 1:
            x = _single_row(args[count - 1])
            others = (_lying_as(x, given) for given in args[: count - 1])
            args = (*others, x, *args[count:])
        return target(*args, **kwargs)

    return run


def _single_row(x: torch.Tensor) -> torch.Tensor:
    """One row as PyTorch's own function hands it to the operator.

    The step to a next row, which there is not, tells rows in channels-last from others.
    """
    return x if x.is_contiguous() or x.stride(0) == x.numel() else x.contiguous()


def _lying_as(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A gradient in the memory format of what it is the gradient by."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.is_contiguous() or last is None:
        return given.contiguous()
    return given.contiguous(memory_format=last)


def as_reshapes(gm: Any) -> None:
    """Rewrites an aten graph: what reads all of a contiguous tensor in order, and what writes all of it."""
    found = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten.as_strided.default:
            given, size, stride, *rest = node.args
            source = given
        elif node.target is _aten.as_strided_scatter.default:
            given, source, size, stride, *rest = node.args
        else:
            continue
        example, sizes = given.meta.get("val"), _values(size)
        if not isinstance(example, torch.Tensor) or (rest and not _same(_values(rest), [0])):
            continue
        if not _reads_in_order(example, sizes, _values(stride)):
            continue
        with gm.graph.inserting_before(node):
            if source is not given:
                copied = gm.graph.call_function(
                    _aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
                copied.meta = dict(node.args[1].meta)
                source, size = copied, _size(gm.graph, given)
            made = gm.graph.call_function(_aten.view.default, (source, list(size)))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        found = True
    if found:
        gm.recompile()


_BY_STRIDES = frozenset((_aten._linalg_det.default, _aten._linalg_slogdet.default))


def factors_as_captured(gm: Any) -> None:
    """Rewrites an aten graph: what factorizes contiguous matrices transposed finds what the capture saw.

    Of one matrix a tensor counts as contiguous whatever its strides along the batch are; in the capture,
    where the batch is an open size, it did not. Columns that lie in memory one after the other are not
    contiguous at any size.
    """
    found = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _BY_STRIDES:
            continue
        example = node.args[0].meta["val"]
        if all(isinstance(n, int) for n in example.shape) or example.is_contiguous():
            continue
        steps: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = [
            (_aten.transpose.int, (-2, -1), {}),
            (_aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (_aten.transpose.int, (-2, -1), {}),
        ]
        made = node.args[0]
        with gm.graph.inserting_before(node):
            for target, args, options in steps:
                example = target(example, *args, **options)
                made = gm.graph.call_function(target, (made, *args), options)
                made.meta = dict(node.meta, val=example)
        node.args = (made, *node.args[1:])
        found = True
    if found:
        gm.recompile()


def _size(graph: Any, given: Any) -> list[Any]:
    """The shape of a tensor: numbers, and operators that tell open ones."""
    made = []
    for dim, n in enumerate(given.meta["val"].shape):
        if not isinstance(n, int):
            asked = graph.call_function(_aten.sym_size.int, (given, dim))
            asked.meta["val"] = n
            n = asked
        made.append(n)
    return made


def _values(numbers: Sequence[Any]) -> list[Any]:
    return [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in numbers]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether numbers are equal at all sizes."""
    return len(some) == len(others) and all(
        statically_known_true(a == b) for a, b in zip(some, others, strict=True)
    )


def _reads_in_order(example: torch.Tensor, size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether these sizes and strides name each element of a tensor once, in row-major order."""
    if not statically_known_true(example.storage_offset() == 0):
        return False
    elements = 1
    for n in size:
        elements = elements * n
    if not statically_known_true(example.numel() == elements):
        return False
    return _in_order(example.shape, example.stride()) and _in_order(size, stride)


def _in_order(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    expected: Any = 1
    for n, step in reversed(list(zip(size, stride, strict=True))):
        if statically_known_true(n == 1):
            continue  # there is nothing to step to
        if not statically_known_true(step == expected):
            return False
        expected = expected * n
    return True
