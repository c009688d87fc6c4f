"""The batch of a scheduled call: offered to the capture as an open size, found again in its graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla.errors import DynaflowError, PlanError, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import aot, dynamo_graphs
from dynaflow_xla.frontends.torch.backend import Backend
from dynaflow_xla.frontends.torch.batch import axes, mean_losses
from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.context import graph_name
from dynaflow_xla.frontends.torch.capture.sizes import expression, symbols_of
from dynaflow_xla.frontends.torch.signature.batched import BatchedGraph
from dynaflow_xla.strategies.base import Context, sizes_of


@dataclass
class _Offer:
    """A call's arguments, and what was found of the batch in them."""

    name: str
    in_axes: Any
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dims: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    error: DynaflowError | None = None


class _CurrentOffer(threading.local):
    offer: _Offer | None = None


_state = _CurrentOffer()


class offered:  # noqa: N801  (a context, used like a function)
    """Context of a call whose batch may be split."""

    __slots__ = ("offer", "saved")

    def __init__(self, name: str, in_axes: Any, function: Any, args: Any, kwargs: Any) -> None:
        self.offer = _Offer(name, in_axes, function, args, kwargs)

    def __enter__(self) -> None:
        self.saved, _state.offer = _state.offer, self.offer

    def __exit__(self, *error: object) -> None:
        _state.offer = self.saved


@contextmanager
def around() -> Iterator[None]:
    """While a capture lasts: the offered dimensions are open sizes, each a size of its own."""
    offer = _state.offer
    if offer is None:
        yield
        return
    try:
        offer.dims = axes.batch_dims(
            offer.name, offer.in_axes, offer.function, offer.args, offer.kwargs
        )
    except DynaflowError as error:
        offer.error = error  # told by the backend: nobody listens to an exception here
        offer.dims = []
    marks = axes.Marks(offer.dims)
    with dynamo_graphs.sizes_apart(tensor for tensor, _ in offer.dims):
        marks.open()
        try:
            yield
        finally:
            marks.close()


@dataclass(frozen=True)
class OfferedSize:
    """A size that was offered as the batch: of the ``number``-th offered tensor."""

    number: int
    size: Any
    what: str


def sizes_in(gm: Any) -> list[OfferedSize]:
    """The offered sizes among the inputs of a Dynamo graph.

    Raises:
        PlanError: ``in_axes`` does not fit the arguments.
    """
    offer = _state.offer
    if offer is None:
        return []
    if offer.error is not None:
        raise offer.error
    found = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        given = dynamo_graphs.given_tensor(node)
        for number, (tensor, dim) in enumerate(offer.dims):
            if tensor is given:
                size = node.meta["example_value"].shape[dim]
                what = f"{list(tensor.shape)} along axis {dim}"
                found.append(OfferedSize(number, size, what))
                break
    if offer.in_axes is None:
        found = [size for size in found if size.number == 0]
    return found


def _unnamed(in_axes: Any) -> Iterator[str]:
    """Arguments that have as many rows as the batch and are not named: what would name them."""
    offer = _state.offer
    if offer is None or in_axes is None or not offer.dims:
        return
    rows = offer.dims[0][0].shape[offer.dims[0][1]]
    named = {id(tensor) for tensor, _ in offer.dims}

    def axis_of(given: Any) -> int | None:
        if not isinstance(given, torch.Tensor) or id(given) in named or rows not in given.shape:
            return None
        return list(given.shape).index(rows)

    arguments: dict[Any, Any] = {**dict(enumerate(offer.args)), **offer.kwargs}
    found = {key: axis_of(given) for key, given in arguments.items()}
    places = {key: axis for key, axis in found.items() if axis is not None}
    if not places:
        return
    shapes = [
        f"argument {k} {list(offer.args[k].shape)}" if isinstance(k, int)
        else f"{k} {list(offer.kwargs[k].shape)}"
        for k in places
    ]  # fmt: skip
    wanted: Any = None
    if isinstance(in_axes, Mapping):
        wanted = {**in_axes, **{k: axis for k, axis in places.items() if isinstance(k, str)}}
    elif isinstance(in_axes, (tuple, list)) and len(in_axes) == len(offer.args):
        wanted = tuple(places.get(n, axis) for n, axis in enumerate(in_axes))
    asked = f": in_axes={wanted!r}" if wanted not in (None, in_axes) else " in in_axes"
    yield f"if {' and '.join(shapes)} have rows of the batch as well, name them, too{asked}"


def _tensors(gm: Any) -> list[torch.Tensor]:
    found = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _sizes_of_inputs(captured: Captured) -> set[Any]:
    """Symbols in the shapes of a graph's inputs, and its numbers."""
    given = [captured.examples[value] for value in captured.graph.inputs]
    sizes = [n for x in given for n in (x.shape if isinstance(x, torch.Tensor) else [x])]
    return {symbol for n in sizes for symbol in symbols_of(n)}


def graph_of(
    gm: Any,
    backend: Backend,
    kind: str,
    number: int,
    sizes: Sequence[OfferedSize],
    forward: Any,
    warn: Callable[[str], None],
    *,
    broken: bool,
) -> BatchedGraph | None:
    """A graph of AOTAutograd with its batch; None if it is not to be split.

    A batch of one row or none is no size to split, and a backward may be that of what has no rows.
    Results of a graph that is ``broken`` go to code of the user's behind a graph break.

    Raises:
        SeparabilityError: the function fixes the size of the batch.
    """
    options = backend.settings
    symbols = set()
    for size in sizes:
        expr = expression(size.size)
        if getattr(expr, "is_Symbol", False):
            symbols.add(expr)
            continue
        if isinstance(expr, int) or getattr(expr, "is_Integer", False):
            if int(expr) in (0, 1):
                shapes = tuple(tuple(t.shape) for t in _tensors(gm))
                context = Context(int(expr), shapes, "cpu", options.lanes, options.user)
                sizes_of(options.strategy, context)  # refuses more nano-batches than rows
                return None
            where = dynamo_graphs.where_fixed(size.size)
            tied = (
                f"fixes it to {int(expr)}{where}: something with {int(expr)} entries meets the rows"
            )
        else:
            tied = f"ties it to other sizes ({expr})"
        ways = [*_unnamed(options.in_axes), "name only arguments with a batch in in_axes"]
        ways.append("compute what depends on the size outside the scheduled function")
        raise SeparabilityError(
            f"{options.name!r} cannot be split into nano-batches: the batch of the argument "
            f"{size.what} must be a size of its own, and the function {tied}. Ways out: {'; '.join(ways)}"
        )
    captured = mean_losses.as_quotients(capture(gm, graph_name(options, kind, number)))
    if kind == "backward" and symbols.isdisjoint(_sizes_of_inputs(captured)):
        return None
    descriptions = aot.output_descriptions(gm)
    result = "passed" if broken else "result"
    if kind == "backward":
        roles = ["gradient"] * len(captured.outputs)
    elif len(descriptions) == len(captured.outputs):
        roles = [
            "saved" if aot.is_saved(d) else "updated" if aot.is_update(d) else result
            for d in descriptions
        ]
    elif kind == "inference":
        roles = [result] * len(captured.outputs)
    else:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} does not say which results its backward needs: nano-batches "
            "with gradients need another version"
        )
    if forward is not None and not isinstance(forward, BatchedGraph):
        raise PlanError(f"{captured.graph.name!r}: its forward is not split")
    made = BatchedGraph(
        captured=captured, backend=backend, kind=kind, batch_symbols=frozenset(symbols),
        roles=roles, warn=warn, forward=forward,
    )  # fmt: skip
    made.described = descriptions
    if forward is not None:
        results = [d for d in forward.described if not aot.is_saved(d)]
        for node in gm.graph.nodes:
            wanted = aot.tangent_of(node) if node.op == "placeholder" else None
            if wanted is not None and wanted in results:
                made.tangents[node.name] = results.index(wanted)
    return made
