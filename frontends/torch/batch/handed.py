"""What the forward of nano-batches keeps for their backward: handed over in parts, never put together.

Autograd keeps one tensor for each value that a backward reads. For a value of nano-batches that tensor is
the first one's part, and the others hang on it, so they live as long as it does: until autograd lets go
of it, however often the backward runs and whatever runs in between. Whoever asks autograd for what it
keeps (hooks on saved tensors, among them ``torch.utils.checkpoint``; compiled autograd) gets the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.batch.expansion.specs import OutSpec
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch.batch import totals
from dynaflow_xla.frontends.torch.capture.captured import Captured, overlapping, place, rows_of
from dynaflow_xla.frontends.torch.capture.sizes import StridedLayout

_NAME = "_dynaflow_xla_parts"


@dataclass(frozen=True)
class Joined:
    """How parts of a value lie in the whole.

    Attributes:
        layout: Of the whole.
        axis: Along which the parts lie.
        runs: How many runs of the batch lie there one after the other; a part has its rows of each.
        shared: Dimensions of a part along which the memory is the same.
        own: They are no parts of a whole: each nano-batch has rows in an order of its own.
    """

    layout: StridedLayout
    axis: int
    runs: int
    shared: tuple[int, ...]
    own: bool = False

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts, put together.

        Raises:
            UnsupportedError: they are no parts of a whole.
        """
        if self.own:
            raise UnsupportedError(
                "the forward of nano-batches sorted rows, each nano-batch its own, and keeps them for its "
                "backward: they cannot be put together for hooks on saved tensors (torch.utils.checkpoint "
                "and torch.autograd.graph.saved_tensors_hooks among them), nor for a backward that is not "
                "split in the same way. Leave the hooks away, or schedule the function without a split"
            )
        out, start = self.layout.of_type(parts[0].dtype).empty(), 0
        for part in parts:
            rows = part.shape[self.axis]
            if self.runs > 1:
                part = part.unflatten(self.axis, (self.runs, rows // self.runs))
            place(rows_of(out, self.axis, start, rows, self.runs), part, self.shared)
            start += rows
        return out


@dataclass(frozen=True)
class _Others:
    parts: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    how: Joined


def keep(parts: Sequence[torch.Tensor], sizes: tuple[int, ...], how: Joined) -> torch.Tensor:
    """What autograd keeps for a value of nano-batches of these sizes."""
    if modes.saved_is_read():
        return how.whole(parts)
    first = parts[0]
    # Autograd itself keeps no view, but another tensor of the same memory. A value that does not depend
    # on the batch may be one tensor for all; it must not hold itself.
    if first._is_view() or any(first is other for other in parts[1:]):
        first = first.detach()
    setattr(first, _NAME, _Others(tuple(parts[1:]), sizes, how))
    return first


def whole(x: Any) -> Any:
    """What autograd kept, put together; whatever else is as it is."""
    others = getattr(x, _NAME, None) if isinstance(x, torch.Tensor) else None
    return x if others is None else others.how.whole((x, *others.parts))


def size(x: Any, dim: int) -> int:
    """A size of the whole of what autograd kept."""
    others = getattr(x, _NAME, None)
    return int(x.shape[dim] if others is None else others.how.layout.shape[dim])


@dataclass(frozen=True)
class Taken:
    """How the backward takes a value that its forward kept.

    Attributes:
        name: Of the value.
        how: How its parts lie in the whole.
        layouts: Of each part.
    """

    name: str
    how: Joined
    layouts: tuple[StridedLayout, ...]

    def parts(self, x: torch.Tensor, sizes: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """The parts of nano-batches of these sizes.

        Raises:
            UnsupportedError: hooks that were put on autograd's node have lost parts.
        """
        others = getattr(x, _NAME, None)
        if others is not None:
            if others.sizes == sizes:
                return (x, *others.parts)
            x = whole(x)  # the forward was split in another way
        elif self.how.own:
            self.how.whole((x,))
        axis = self.how.axis
        if x.shape[axis] != self.how.layout.shape[axis]:
            raise UnsupportedError(
                f"the backward of nano-batches got a part of {self.name!r} ({list(x.shape)} of "
                f"{list(self.how.layout.shape)}): hooks on the saved tensors of a node of autograd see one "
                "nano-batch's part. Open torch.autograd.graph.saved_tensors_hooks around the forward instead"
            )
        made, start = [], 0
        for layout in self.layouts:
            rows = layout.shape[axis]
            runs = self.how.runs
            made.append(lying(rows_of(x, axis, start, rows, runs), layout, axis, runs))
            start += rows
        return made


def lying(rows: torch.Tensor, layout: StridedLayout, axis: int, runs: int = 1) -> torch.Tensor:
    """Rows of a whole, of each run of its batch, as operators expect them, which count on strides."""
    lies = runs == 1 and all(
        a == b for a, b, n in zip(rows.stride(), layout.strides, layout.shape, strict=True) if n > 1
    )
    if lies:
        return rows
    made = layout.of_type(rows.dtype).empty()
    slot = rows_of(made, axis, 0, layout.shape[axis], runs)
    place(slot, rows, overlapping(slot))
    return made


def watch() -> Callable[[Any], None] | None:
    """What is to be called before the backward of the forward that just ran; None if that kept no parts."""
    return None if modes.saved_is_read() else _refuse_compiled_autograd


def _refuse_compiled_autograd(_: Any) -> None:
    """Compiled autograd that came after the forward would take parts for values."""
    if modes.in_compiled_autograd():
        raise UnsupportedError(
            "the forward of nano-batches ran before compiled autograd was enabled, so that what it kept is "
            "in parts. Enable compiled autograd around the forward, too"
        )


Packer = Callable[[list[Any]], list[Any]]


def packer(hows: Sequence[Joined | None], sizes: tuple[int, ...]) -> Packer | None:
    """From the results of the split graph, in parts where there is a ``Joined``, to those of a call."""
    if not any(hows):
        return None

    def run(results: list[Any]) -> list[Any]:
        made, position = [], 0
        for how in hows:
            if how is None:
                made.append(results[position])
                position += 1
            else:
                made.append(keep(results[position : position + len(sizes)], sizes, how))
                position += len(sizes)
        return made

    return run


@dataclass(frozen=True)
class Handed:
    """Values of a graph that go from a forward to its backward without being put together.

    Attributes:
        parts: Outputs of a forward that stay in parts.
        same: Outputs for the backward that are a result under another name (autograd's ``detach``):
            that result. Who writes into it must be told by the backward, as in the original.
        taken: Inputs of a backward that may come in parts, and their names.
    """

    parts: frozenset[int] = frozenset()
    same: Mapping[int, int] = field(default_factory=dict)
    taken: Mapping[int, str] = field(default_factory=dict)


def _only_saved(captured: Captured, roles: Sequence[str]) -> set[int]:
    """Values that a forward computes for its backward alone."""
    given = list(zip(captured.outputs, roles, strict=True))
    found = {v for v, role in given if role == "saved" and isinstance(v, int)}
    found -= {v for v, role in given if role != "saved"}
    found -= {v for _, v in captured.epilogue}
    return {v for v in found if captured.graph.values[v].producer >= 0}


def names_of_saved(captured: Captured, roles: Sequence[str]) -> set[str]:
    """Names of what a forward computes for its backward alone."""
    saved = _only_saved(captured, roles)
    return {node.name for node, value in captured.ids.items() if value in saved}


def named(captured: Captured, names: set[str]) -> dict[int, str]:
    """Inputs of a backward with these names."""
    given = zip(captured.graph.inputs, captured.graph.input_names, strict=True)
    return {value: name for value, name in given if name in names}


def of_forward(
    captured: Captured,
    roles: Sequence[str],
    slim: Captured,
    out_specs: Mapping[int, OutSpec],
    tail: totals.Tail | None,
) -> Handed:
    """What a forward hands over.

    Args:
        captured: The graph.
        roles: Of its outputs, see ``proof.Question``.
        slim: The part of it that is split, with random numbers among its inputs.
        out_specs: How its outputs are put together.
        tail: What runs behind it.
    """
    saved = _only_saved(captured, roles)
    results = {
        v for v, role in zip(captured.outputs, roles, strict=True) if role in ("result", "passed")
    }
    behind = {v for op in tail.ops for v in op.inputs} if tail is not None else set()
    parts, same = set(), {}
    for value in saved:
        producer = slim.graph.values[value].producer
        if producer < 0 or value in behind or not isinstance(out_specs.get(value), int):
            continue
        op = slim.graph.ops[producer]
        source = op.inputs[0] if op.kind in ("detach", "alias") else -1
        if source in results and out_specs.get(source) == out_specs[value]:
            same[value] = source
        else:
            parts.add(value)
    return Handed(frozenset(parts), same)
