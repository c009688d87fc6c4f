"""The batch of a scheduled call: offered to the capture as an open size, found again in its graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import DynaflowError, PlanError, SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import aot, dynamo_graphs
from dynaflow_xla.frontends.torch._compat.modes import with_data
from dynaflow_xla.frontends.torch.backend import Backend
from dynaflow_xla.frontends.torch.batch import axes, mean_losses
from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.context import graph_name
from dynaflow_xla.frontends.torch.capture.names import leaves_with_paths, user_name
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
    found, names = [], _names(offer)
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        given = dynamo_graphs.given_tensor(node)
        for number, (tensor, dim) in enumerate(offer.dims):
            if tensor is given:
                size = node.meta["example_value"].shape[dim]
                what = (
                    f"{names.get(id(tensor), 'the argument')} {list(tensor.shape)} along axis {dim}"
                )
                found.append(OfferedSize(number, size, what))
                break
    if offer.in_axes is None:
        found = [size for size in found if size.number == 0]
    return found


def _names(offer: _Offer) -> dict[int, str]:
    """What the user calls each tensor among the arguments, by ``id``."""
    made: dict[int, str] = {}
    for path, x in leaves_with_paths((list(offer.args), dict(offer.kwargs))):
        if isinstance(x, torch.Tensor):
            where = "kwargs" if path[0].idx else "args"
            source = f"L['{where}']{pytree.keystr(path[1:2])}"
            made.setdefault(id(x), user_name(offer.function, source) + pytree.keystr(path[2:]))
    return made


_MOST_NAMED = 6


def without_batch(name: str, gm: Any, *, behind_break: bool) -> str:
    """That a Dynamo graph takes no argument with a batch: what it takes, what was expected, the way out.

    Args:
        name: Of the function.
        gm: The graph.
        behind_break: Whether other graphs of the function come before it.
    """
    told = f"a graph of {name!r} takes no argument with a batch, so it is not split"
    if (offer := _state.offer) is None:
        return told
    names = _names(offer)

    def listed(tensors: Iterable[tuple[torch.Tensor, str]]) -> str:
        each = [f"{names.get(id(x), 'a tensor')} {list(x.shape)}{end}" for x, end in tensors]
        more = len(each) - _MOST_NAMED
        return ", ".join(each[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    given = map(dynamo_graphs.given_tensor, gm.graph.find_nodes(op="placeholder"))
    taken = [(x, "") for x in given if id(x) in names]
    dims = offer.dims[:1] if offer.in_axes is None else offer.dims
    expected = listed((x, f" along axis {dim}") for x, dim in dims)
    why = (
        f": it takes {listed(taken) or 'no tensor of the arguments'}, and the batch is expected in "
    )
    why += expected or "none, as no tensor among them has an axis"
    if taken:
        way = (
            "name every argument with rows of the batch in in_axes, by its parameter's name ({'x': 0}) or by "
            "place (a tuple, None for what has no batch)"
        )
    elif behind_break:
        way = (
            "rows that code of yours between two graphs hands on are not followed: mend the graph break, or "
            "schedule what comes before and after it each"
        )
    else:
        way = "if it needs no rows, compute it outside, or do not split this function"
    return f"{told}{why}. Way out: {way}"


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
        names = _names(offer)
        leaves = [x for x in pytree.tree_leaves(list(arguments.values())) if id(x) in names]
        inside = [f"{names[id(x)]} {list(x.shape)}" for x in leaves if axis_of(x) is not None]
        if inside:
            yield f"if {' and '.join(inside)} have rows of the batch as well, name them, too, in in_axes"
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


def _buffers_with_rows() -> Iterator[str]:
    """Buffers as long as the batch, whose sizes PyTorch's compiler takes for fixed."""
    offer = _state.offer
    if offer is None or not offer.dims or not isinstance(offer.function, torch.nn.Module):
        return
    rows = offer.dims[0][0].shape[offer.dims[0][1]]
    found = [
        f"{name} {list(x.shape)}" for name, x in offer.function.named_buffers() if rows in x.shape
    ]
    if found:
        yield (
            f"if the registered buffer {' or '.join(found[:_MOST_NAMED])} holds rows of the batch, keep it "
            "as a plain attribute, or pass and return it: the sizes of buffers are fixed"
        )


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

    A batch of one row or none is no size to split, nor is one of which a strategy wants no parts. A backward
    may be that of what has no rows.
    Results of a graph that is ``broken`` go to code of the user's behind a graph break. One that goes on
    behind a break is not split where the batch has no size of its own in it, as what the code between returns
    may fix it: graphs in front have run, and may have written something.

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
            shapes = tuple(tuple(t.shape) for t in _tensors(gm))
            context = Context(int(expr), shapes, "cpu", options.lanes, options.user)
            with with_data():  # it refuses more nano-batches than rows
                parts, _ = sizes_of(options.strategy, context)
            if int(expr) in (0, 1) or not parts:
                return None
            where = dynamo_graphs.where_fixed(size.size)
            there = f"has the fixed size {int(expr)} there{where}"
            tied = (
                f"fixes it to {int(expr)}{where}: something with {int(expr)} entries meets the rows"
            )
        else:
            there = f"is tied to other sizes there ({expr})"
            tied = f"ties it to other sizes ({expr})"
        if behind := dynamo_graphs.resumed_at(gm):
            if kind != "backward":
                warn(
                    f"{options.name!r}: the graph behind the break at {behind} is not split: the batch of "
                    f"{size.what} {there}, perhaps as what the code between the graphs returns has no open "
                    "size"
                )
            return None
        ways = [*_unnamed(options.in_axes), *_buffers_with_rows()]
        ways.append("name only arguments with a batch in in_axes")
        ways.append("compute what depends on the size outside the scheduled function")
        raise SeparabilityError(
            f"{options.name!r} cannot be split into nano-batches: the batch of "
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
