"""Calls that are only tried: on copies of the arguments, with the backward pass where it is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.native.cuda import devices
from dynaflow_xla.frontends.torch.tuning import copying, gradients, keeping
from dynaflow_xla.tuning import autotune, quiet

_ORIGINAL, _CANDIDATE = (0, 1), (1,)
"""In which runs it is looked at what they write and draw. What the first one of a candidate compiles may take
seconds, in which other threads write and draw, too."""


class Trial:
    """A call on copies of the arguments, with the backward pass where gradients are wanted.

    Attributes:
        wanted: Tensors to differentiate for: parameters, and copies of arguments.
        runs: Is told of each run.

    Raises:
        UnsupportedError: an argument cannot be copied, or the backward would use up a graph of the caller's.
    """

    runs: keeping.OwnRuns

    def __init__(self, core: Any, args: Any, kwargs: Any) -> None:
        self._copies = copying.Copies((args, kwargs))
        self._copies.anew()  # or it is known that this cannot be
        self.wanted: list[torch.Tensor] = []
        self._changes = core.changes
        self._wait = devices.waiting(core.original, args, kwargs)
        if torch.is_grad_enabled() and not core.captured_ahead:
            self.wanted = self._copies.wanted
            if isinstance(core.original, torch.nn.Module):
                self.wanted += [p for p in core.original.parameters() if p.requires_grad]
            self.wanted = list({id(x): x for x in self.wanted}.values())
        held = gradients.held_by(core.original) if self.wanted else []
        self._retains = bool(held)
        if held and core.options.compiler != "eager":
            raise UnsupportedError(
                f"the module holds tensors with a graph of autograd's ({', '.join(held)}), which a backward "
                "of compiled code would use up"
            )

    def put_back(self) -> None:
        """Puts back what a call leaves behind beside its arguments, tensors left out."""
        self.runs.put_back()

    def _given(self, look: bool = False) -> keeping.GivenRun:
        """Arguments of a call, which finds everything as the first one did."""
        return self.runs.begin(self._copies.anew(), look=look)

    def check(self, child: Any) -> None:
        """Whether a candidate that splits serves what is differentiated.

        Raises:
            SeparabilityError: it cannot be split, or the backward cannot be planned here.
        """
        if torch.is_grad_enabled() and not self.wanted:
            given = self._given()
            results = pytree.tree_leaves(child.call(given.args, given.kwargs))
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in results):
                raise SeparabilityError("its gradients go to tensors that are no arguments of it")

    def of(self, call: Callable[..., Any], looked_at: Sequence[int] = _CANDIDATE) -> autotune.Fresh:
        """The call and its backward; what it leaves behind the next call's arguments put back.

        Args:
            call: What is called.
            looked_at: Numbers of runs of which is found out what they write and draw.
        """
        numbers = itertools.count()
        # What the caller's graph keeps is not freed; all ways to run keep their own alike then.
        retain_graph = True if self._retains else None

        def given() -> keeping.GivenRun:
            return self._given(next(numbers) in looked_at)

        def run(given: keeping.GivenRun) -> None:
            if not self.wanted:
                with torch.no_grad():
                    call(*given.args, **given.kwargs)
                return
            results = pytree.tree_leaves(call(*given.args, **given.kwargs))
            made = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            if made:  # ``backward`` would add to ``grad``
                ones = [torch.ones_like(x) for x in made]
                torch.autograd.grad(
                    made, self.wanted, ones, allow_unused=True, retain_graph=retain_graph
                )

        def in_a_row() -> bool:
            """Whether a call finds all as the one before it did: what it changes is put back between two."""
            return not (self._copies.written or self._changes.places)

        return autotune.Fresh(given, run, self._wait, in_a_row)

    def of_original(self, call: Callable[..., Any], *, strict: bool) -> autotune.Fresh:
        """As ``of``, of the original: what fails only here is no error of the caller's call.

        Args:
            call: The original.
            strict: Its errors pass through: the user asked for the measurement.
        """
        made = self.of(call, _ORIGINAL)
        if strict:
            return made

        def run(given: keeping.GivenRun) -> None:
            try:
                made.run(given)
            except Exception as error:
                if devices.out_of_memory(error):
                    raise  # nor will there be more memory later
                told = (str(error) or type(error).__name__).splitlines()[0]
                raise quiet.NotNow(
                    f"not measured: the original fails on copies of the arguments, or its backward ({told})"
                ) from error

        return replace(made, run=run)


def hooked(original: Any) -> str | None:
    """Path of a module with hooks, if there is one: they may have effects."""
    if operators.hooks_on_all_modules():
        return "every module"
    if isinstance(original, torch.nn.Module):
        for name, module in original.named_modules():
            if operators.has_hooks(module):
                return f"the module {name!r}" if name else "the module"
    return None
