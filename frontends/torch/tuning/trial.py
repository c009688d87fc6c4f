"""Calls that are only tried: on copies of the arguments, with the backward pass where it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import SeparabilityError
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.tuning import autotune


class Trial:
    """A call on copies of the arguments, with the backward pass where gradients are wanted.

    Objects among the arguments are copied for each call: a cache that a call lets grow would be another
    one for the next.

    Attributes:
        objects: Whether there are such objects.
        wanted: Tensors to differentiate for: parameters, and copies of arguments.
        put_back: Called before each call, so that it starts where the first did.
    """

    put_back: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, core: Any, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = keeping.copies((args, kwargs))
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self.objects = any(map(keeping.is_object, leaves))
        self.wanted: list[torch.Tensor] = []
        if torch.is_grad_enabled() and not core.captured_ahead:
            if isinstance(core.original, torch.nn.Module):
                leaves += list(core.original.parameters())
            found = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            self.wanted = list({id(x): x for x in found}.values())

    def _given(self) -> Any:
        """Arguments of a call, which finds everything as the first one did."""
        self.put_back()
        given = self.args, self.kwargs
        return keeping.objects_copied(given) if self.objects else given

    def check(self, child: Any) -> None:
        """Whether a candidate that splits serves what is differentiated.

        Raises:
            SeparabilityError: it cannot be split, or the backward cannot be planned here.
        """
        if torch.is_grad_enabled() and not self.wanted:
            results = pytree.tree_leaves(child.call(*self._given()))
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in results):
                raise SeparabilityError("its gradients go to tensors that are no arguments of it")

    def of(self, call: Callable[..., Any]) -> autotune.Fresh:
        """The call and its backward; what it leaves behind the next call's arguments put back."""

        def run(given: Any) -> None:
            args, kwargs = given
            if not self.wanted:
                with torch.no_grad():
                    call(*args, **kwargs)
                return
            results = pytree.tree_leaves(call(*args, **kwargs))
            made = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            if made:  # ``backward`` would add to ``grad``
                ones = [torch.ones_like(x) for x in made]
                torch.autograd.grad(made, self.wanted, ones, allow_unused=True)

        return autotune.Fresh(self._given, run)
