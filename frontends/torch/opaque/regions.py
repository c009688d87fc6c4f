"""The operator that makes a call as it is, and its gradient.

It runs Python of the user's, once for a batch, on whichever thread its region runs. Where gradients are
wanted, autograd records it as in the original. That record belongs to a tensor, the *ticket*: it is kept as
long as a backward may still ask for it, since what a forward saves for its backward are tensors. Each call
also takes the ticket of the one before: calls keep their order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch._compat.inlining import (
    CannotKeep,
    SizeIn,
    TensorIn,
    autograd_again,
)
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.leaves import leaves_of
from dynaflow_xla.frontends.torch.opaque.calls import call_with, flat, shares_memory
from dynaflow_xla.frontends.torch.opaque.shapes import SizeProduct
from dynaflow_xla.watching import telling

KINDS = ("dynaflow_xla.opaque", "dynaflow_xla.opaque_backward")


@dataclass(eq=False)
class CallSite:
    """A place in a captured function where a call is made as it is.

    Attributes:
        name: Of the function.
        where: Its file and line.
        why: Why it cannot be captured, and where.
        function: What is called.
        given: Its arguments by name, with ``TensorIn`` and ``SizeIn``.
        count: How many tensors are given.
        modules: Those among the arguments, whose parameters are given behind.
        paths: For each of them the scheduled module, and its name in it.
        thread: As in the capture, see ``thread_state``.
        needs: Which tensors that are given want gradients.
        sizes: Of each result.
        dtypes: Of the results.
        results: How they make up what the call returns.
        zeros_told: Whether it was told that a parameter got zeros where the original leaves None.
    """

    name: str
    where: str
    why: str
    function: Any
    given: Mapping[str, Any]
    count: int
    modules: tuple[torch.nn.Module, ...]
    paths: tuple[tuple[torch.nn.Module, str], ...]
    thread: tuple[Any, ...]
    needs: tuple[bool, ...]
    sizes: tuple[tuple[SizeProduct, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    results: Any
    zeros_told: bool = False

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _sites[self.number] = self

    def told(self) -> str:
        """Why rows meet here."""
        return f"calls {self.name} ({self.where}) as it is, because of {self.why}"

    def owned(self) -> list[torch.Tensor]:
        """Parameters and buffers that the call may read."""
        return [t for m in self.modules for t in (*m.parameters(), *m.buffers())]


_numbers = itertools.count()
_sites: weakref.WeakValueDictionary[int, CallSite] = weakref.WeakValueDictionary()
"""Who captured a graph owns its sites."""


class _TicketMemory(bytearray):
    """The memory of a ticket; it owns what autograd recorded."""

    tape: tuple[CallSite, list[torch.Tensor], list[torch.Tensor]]


_held: weakref.WeakValueDictionary[int, _TicketMemory] = weakref.WeakValueDictionary()
_tickets = itertools.count(1)


def site(number: int) -> CallSite:
    """The site with this number."""
    return _sites[number]


def tickets(captured: Captured) -> frozenset[int]:
    """The values of a graph that are tickets: their numbers say nothing of the call."""
    made = (op.payload for op in captured.graph.ops if op.kind == KINDS[0] and op.payload)
    return frozenset(v for payload in made for v in payload.outputs[-1:] if v is not None)


def _given(spec: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    if isinstance(spec, TensorIn):
        return tensors[spec.number]
    if isinstance(spec, SizeIn):
        return sizes[spec.number]
    if isinstance(spec, list | tuple):
        return type(spec)(_given(x, tensors, sizes) for x in spec)
    if isinstance(spec, dict):
        return {k: _given(v, tensors, sizes) for k, v in spec.items()}
    return spec


def _inside(site: CallSite, grad: bool) -> ExitStack:
    """The state of the thread that the call expects."""
    stack = ExitStack()
    stack.enter_context(marks.ignore())
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), site.thread[:2], strict=True):
        if enabled or torch.is_autocast_enabled(kind):
            cache = site.thread[2]
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache))
    stack.enter_context(autograd_again())
    stack.enter_context(torch.set_grad_enabled(grad))
    stack.enter_context(modes.unseen_by_saved_hooks())
    return stack


def _opaque(
    number: int, before: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int], grad: bool
) -> list[torch.Tensor]:
    at = _sites[number]
    for module, (root, path) in zip(at.modules, at.paths, strict=True):
        if root.get_submodule(path) is not module:
            raise UnsupportedError(
                f"{at.name} ({at.where}) is called as it is, and {path!r} is another module now than "
                "when the function around it was captured. Schedule the module anew after such a change"
            )
    given, owned = tensors[: at.count], at.owned()
    for now, then in zip(owned, tensors[at.count :], strict=True):
        if now.data_ptr() != then.data_ptr():
            raise UnsupportedError(
                f"{at.name} ({at.where}) is called as it is and reads a parameter or buffer that the "
                "function around it writes in the same call. Write it behind the call, or pass it as an "
                "argument"
            )
    versions = [(t, t._version) for t in (*given, *owned) if not t.is_inference()]
    with torch.no_grad():
        fresh = [t.detach() for t in given]
    if grad:
        fresh = [t.requires_grad_(n) for t, n in zip(fresh, at.needs, strict=True)]
    recording = bool(
        at.thread[-1]
    )  # what the call expects, and what shows gradients that nobody asked for
    with _inside(at, recording):
        result = _call(at, _given(at.given, fresh, sizes))
    made: list[torch.Tensor] = []
    try:
        spec = flat(result, made)
    except CannotKeep as error:
        raise _unlike(at, str(error)) from None
    _check(at, [tuple(t.shape) for t in given], spec, made)
    if any(t._version != version for t, version in versions):
        raise _unlike(at, "writes into a tensor that it is given, or into a parameter or buffer")
    if not grad and any(t.requires_grad for t in made):
        raise _unlike(at, "uses a tensor that wants gradients and is no argument")
    held = _TicketMemory(8)
    ticket = torch.frombuffer(held, dtype=torch.int64, count=1)[0]
    if grad:
        leaves = [*fresh, *owned]
        _check_leaves(at, made, leaves)
        mine = next(_tickets)
        held.tape, _held[mine] = (at, leaves, made), held
        ticket.fill_(mine)
    if shares_memory(made, [*fresh, *owned]):
        raise _unlike(
            at, "returns a tensor that shares memory with an argument or with another result"
        )
    return [*(t.detach().contiguous() for t in made), ticket]


@torch.compiler.disable
def _call(at: CallSite, given: Mapping[str, Any]) -> Any:
    return call_with(at.function, given)


def _unlike(at: CallSite, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{at.name} ({at.where}) is called as it is inside of a split function, so it must do what it "
        f"did when it was watched, and now it {what}. Call the original, or schedule what comes before "
        "and after apart"
    )


def _check(at: CallSite, shapes: Any, spec: Any, made: Sequence[torch.Tensor]) -> None:
    if spec != at.results:
        raise _unlike(at, "returns another structure")
    for number, (tensor, sizes, dtype) in enumerate(zip(made, at.sizes, at.dtypes, strict=True)):
        wanted = [size.at(shapes) for size in sizes]
        if list(tensor.shape) != wanted or tensor.dtype != dtype:
            raise _unlike(
                at,
                f"returns as tensor {number} a {tensor.dtype} of shape {list(tensor.shape)} where a {dtype} "
                f"of shape {wanted} was expected",
            )


def _check_leaves(
    at: CallSite, made: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> None:
    """Gradients go to what the operator is given; others would be lost."""
    for leaf in leaves_of(made, leaves):
        raise _unlike(
            at,
            f"uses a tensor of shape {list(leaf.shape)} that wants gradients and is neither an argument nor "
            "a parameter of a module that it is given",
        )
    if any(t._backward_hooks for t in leaves if t.requires_grad):
        raise _unlike(at, "uses a parameter with a gradient hook, which would run twice")


def _backward(
    number: int,
    ticket: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    needed: Sequence[int],
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    held = _held.get(int(ticket))
    if held is None:
        raise UnsupportedError(
            "the backward of a function that is called as it is came after what it needs was freed, as it is "
            "where hooks on saved tensors copy what they are given (save_on_cpu): open them inside of it, or "
            "split with joins=False"
        )
    at, leaves, made = held.tape
    pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
    wanted = [leaves[n] for n in needed]
    found: Sequence[Any] = [None] * len(wanted)
    if pairs:
        with autograd_again(), torch.enable_grad():
            found = torch.autograd.grad(
                [t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True,
                retain_graph=True,
            )  # fmt: skip
    _tell_zeros(at, [n for n, g in zip(needed, found, strict=True) if g is None])
    return [
        torch.zeros_like(t)
        if g is None
        else g.detach().clone(memory_format=torch.contiguous_format)
        for t, g in zip(like, found, strict=True)
    ]


def _tell_zeros(at: CallSite, untouched: Sequence[int]) -> None:
    """Optimizers skip a parameter without a gradient, and go on with one whose gradient is zero."""
    parameters = [n - at.count for n in untouched if n >= at.count]
    if not parameters or at.zeros_told:
        return
    at.zeros_told = True
    names = {id(t): name for m in at.modules for name, t in m.named_parameters()}
    name = names.get(id(at.owned()[parameters[0]]), "one")
    telling.fallback(
        f"{at.name} ({at.where}), which is called as it is, did not use all of its parameters in this call "
        f"({name!r} among them): their gradients are zeros here, and None in the original. An optimizer with "
        "momentum or weight decay moves them nevertheless; NanoBatch(2, joins=False) leaves the call out"
    )


def _fake(number: int, before: Any, tensors: Any, sizes: Any, grad: bool) -> list[torch.Tensor]:
    at = _sites[number]
    shapes = [t.shape for t in tensors[: at.count]]
    like = tensors[0]
    made = [
        like.new_empty([size.at(shapes) for size in each], dtype=dtype)
        for each, dtype in zip(at.sizes, at.dtypes, strict=True)
    ]
    return [*made, torch.empty((), dtype=torch.int64, device="cpu")]


def _fake_backward(number: int, ticket: Any, grads: Any, needed: Any, like: Any) -> Any:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]


_library = torch.library.Library("dynaflow_xla", "FRAGMENT")
_library.define(
    "opaque(int number, Tensor[] before, Tensor[] tensors, SymInt[] sizes, bool grad) -> Tensor[]"
)
_library.define(
    "opaque_backward(int number, Tensor ticket, Tensor?[] grads, int[] needed, Tensor[] like) -> Tensor[]"
)
_library.impl("opaque", _opaque, "CompositeExplicitAutograd")
_library.impl("opaque_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow_xla::opaque", _fake, lib=_library)
torch.library.register_fake("dynaflow_xla::opaque_backward", _fake_backward, lib=_library)
for _name in ("opaque", "opaque_backward"):
    torch.fx.node.has_side_effect(getattr(torch.ops.dynaflow_xla, _name).default)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    number, before, tensors, sizes, _ = inputs
    ctx.number, ctx.before = number, len(before)
    ctx.sizes = None if sizes else []  # PyTorch takes an empty list for one of tensors
    needed = [n for n, t in enumerate(tensors) if t.requires_grad]
    ctx.needed, ctx.count = needed, len(tensors)
    ctx.save_for_backward(output[-1], *(tensors[n] for n in needed))


def _gradient(ctx: Any, grads: Any) -> Any:
    ticket, *like = ctx.saved_tensors
    made = torch.ops.dynaflow_xla.opaque_backward(
        ctx.number, ticket, list(grads[:-1]), ctx.needed, like
    )
    found: list[Any] = [None] * ctx.count
    for number, gradient in zip(ctx.needed, made, strict=True):
        found[number] = gradient
    return None, [None] * ctx.before, found, ctx.sizes, None


torch.library.register_autograd(
    "dynaflow_xla::opaque", _gradient, setup_context=_setup, lib=_library
)


def stand_in(number: int, before: Any, tensors: Any, sizes: Any, modules: Any) -> Any:
    """What Dynamo follows in the place of a call: the operator, with all that it reads."""
    owned = []
    for module in modules:
        owned.extend(module.parameters())
        owned.extend(module.buffers())
        for inside in module.modules():
            inside.training  # noqa: B018  (another mode is another capture)
    given = [*tensors, *owned]
    grad = torch.is_grad_enabled() and any([t.requires_grad for t in given])
    return torch.ops.dynaflow_xla.opaque(number, list(before), given, list(sizes), grad)
