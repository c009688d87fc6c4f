"""PyTorch's own samples of its modules (ModuleInfo, some 110 entries), each through ``dfx.schedule``.

``python -P tests/support/moduleinfo_sweep.py [--only REGEX] [--shard I/N] [--ways ...]`` prints a line for
each module, with its outcome (those of ``opinfo_sweep``). Each sample is called in training, in evaluation
and in training again, by one scheduled module: results, gradients of inputs and parameters, buffers and the
state of the generator are compared with those of the original.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import dynaflow_xla as dfx

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import opinfo_sweep as ops  # noqa: E402  (beside this file)

WAYS = ("alone", "beside", "halves", "inductor")
"""How a module is scheduled: alone, beside another branch, its rows in halves, compiled."""

_DTYPES = (torch.float32, torch.complex64)


class Beside(nn.Module):
    """A module, and a branch that has nothing to do with it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("other", torch.linspace(0, 7, 31).sin())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = self.module(*args, **kwargs)
        return made, torch.cumsum(torch.sort(self.other).values, 0)


def database() -> list[Any]:
    """All modules that PyTorch has samples for."""
    ops.without_expecttest()
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def samples(info: Any, most: int) -> Iterator[tuple[int, nn.Module, Any]]:
    """Some samples of a module (the first, the last, those between), with their arguments."""
    dtype = next((t for t in _DTYPES if t in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    made = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=True)
    made = [m for m in made if m.forward_input is not None]
    step = max((len(made) - 1) / max(most - 1, 1), 1)
    for number in dict.fromkeys(round(i * step) for i in range(most)):
        if number < len(made):
            given = made[number].constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(dtype)
            arguments = (tuple(made[number].forward_input.args), made[number].forward_input.kwargs)
            if info.is_lazy:
                with torch.no_grad():
                    module(*ops.fresh(arguments)[0])
            yield number, module, arguments


def results(function: Any, module: nn.Module, arguments: Any, modes: Sequence[bool]) -> list[Any]:
    """Flat results, gradients, buffers and draws of a call in each mode, from a fixed seed."""
    found: list[Any] = []
    torch.manual_seed(1)
    for training in modes:
        args, kwargs = ops.fresh(arguments)
        function.train(training)
        for parameter in module.parameters():
            parameter.grad = None
        with torch.set_grad_enabled(training):
            out = list(torch.utils._pytree.tree_leaves(function(*args, **kwargs)))
        found += out
        found.append(torch.rand(1))  # was as much drawn?
        wanted = [x for x in ops.tensors((args, kwargs)) if x.requires_grad]
        made = [x for x in out if ops.is_tensor(x) and x.requires_grad]
        if made:
            seeds = [torch.linspace(-1, 2, x.numel()).reshape(x.shape).to(x.dtype) for x in made]
            torch.autograd.backward(made, seeds)
            for x in (*wanted, *module.parameters()):
                found.append(torch.zeros_like(x) if x.grad is None else x.grad)
        found += [b.detach().clone() for b in module.buffers()]
        found += [x.detach() for x in ops.tensors((args, kwargs))]  # which may have been written
    return found


Maker = Callable[[], tuple[Any, nn.Module]]


def _schedules(module: nn.Module, arguments: Any, way: str) -> Iterator[Maker]:
    """Makers of a scheduled module and the original that it is of."""

    def made(of: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, nn.Module]:
        mine = copy.deepcopy(of)
        return dfx.schedule(mine, *args, backend="torch", **kwargs), mine

    if way == "alone":
        yield lambda: made(module, "branches")
    elif way == "beside":
        yield lambda: made(Beside(module), "branches", lanes=2)
    elif way == "inductor":
        yield lambda: made(Beside(module), "branches", lanes=2, compiler="inductor")
    else:
        call = ops.Call("", module, *arguments)
        for axes in ops.batched(call):
            yield lambda axes=axes: made(module, dfx.NanoBatch(2), in_axes=axes, out_axes=0)


def attempt(
    name: str, module: nn.Module, arguments: Any, way: str, modes: Sequence[bool]
) -> ops.Tried | None:
    """Runs a module scheduled and as it is; None where it does not lend itself to that."""
    wraps = way in ("beside", "inductor")
    plain = copy.deepcopy(Beside(module) if wraps else module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = results(plain, plain, arguments, modes)
        except Exception:
            return None
    worst: ops.Tried | None = None
    for make in _schedules(module, arguments, way):
        tried = _run(name, make, want, arguments, way, modes)
        if tried.outcome not in ops.GOOD:
            return tried
        if worst is None or ops.OUTCOMES.index(tried.outcome) > ops.OUTCOMES.index(worst.outcome):
            worst = tried
    return worst


def _run(
    name: str, make: Maker, want: list[Any], arguments: Any, way: str, modes: Sequence[bool]
) -> ops.Tried:
    done = ops.Tried(name, way, "equal")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            got = results(*make(), arguments, modes)
        except dfx.DynaflowError as error:
            return replace(done, outcome="refused", reason=ops.one_line(error))
        except Exception as error:
            return replace(
                done, outcome="raw", reason=f"{type(error).__name__}: {ops.one_line(error)}"
            )
    notes = [ops.one_line(w.message) for w in told if issubclass(w.category, dfx.FallbackWarning)]  # type: ignore[arg-type]
    different = ops.difference(got, want, True, way in ("halves", "inductor"))
    if different:
        return replace(done, outcome="wrong", reason=" | ".join((different, *notes)))
    if any("so the original runs" in note for note in notes):
        return replace(done, outcome="original", reason=notes[0])
    return replace(done, reason=" | ".join(notes))


def module(
    info: Any,
    *,
    ways: Sequence[str] = WAYS,
    modes: Sequence[bool] = (True, False, True),
    most: int = 3,
    told: Callable[[str], None] = lambda at: None,
) -> Iterator[ops.Tried]:
    """All that is tried of one module."""
    torch._dynamo.reset()
    for number, made, arguments in samples(info, most):
        for way in ways:
            told(f"sample {number}, {way}")
            tried = attempt(info.name, made, arguments, way, modes)
            if tried is not None:
                yield replace(tried, sample=number)


def main() -> None:
    """The command."""
    parser = ops.parser_of(__doc__ or "", WAYS)
    parser.add_argument("--of", default="module", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        table = database()
        ops.serve(table, [info.name for info in table], module)
        return
    ops.report(ops.Sweep(options.limit, "module", __file__), options)


if __name__ == "__main__":
    main()
