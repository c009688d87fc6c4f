"""A plain function where JAX and PyTorch are both loaded: its arguments tell which it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError


class EitherFunction:
    """Scheduled by the framework of the arguments it is called with.

    Attributes:
        original: What the calls so far were compared with (for JAX, the jitted function); before any
            call, the function as given to ``schedule``.
    """

    def __init__(self, fn: Any, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._given = fn
        self._makers = makers
        self._made: dict[str, Any] = {}
        functools.update_wrapper(self, fn, updated=())

    @property
    def original(self) -> Any:
        """The framework's original once a call told which it is; until then the function as given."""
        made = list(self._made.values())
        return made[0].original if len(made) == 1 else self._given

    def __repr__(self) -> str:
        made = list(self._made.values())
        return repr(made[0]) if len(made) == 1 else f"<scheduled {self._given!r}>"

    def _dfx_resolve(self, args: Any, kwargs: Any) -> Any:
        """The scheduled function of the framework that these arguments belong to."""
        jax = sys.modules.get("jax")
        array: Any = () if jax is None else jax.Array
        has_tensor = has_array = False
        for leaf in pytree.tree_leaves((args, kwargs)):
            has_tensor |= isinstance(leaf, torch.Tensor | torch.nn.Module)
            has_array |= isinstance(leaf, array)
        if has_tensor and has_array:
            raise UnsupportedError(
                f"{getattr(self, '__name__', 'the function')} got torch tensors and JAX arrays in one "
                "call; a schedule runs one framework. Convert with torch.from_dlpack or jnp.from_dlpack "
                "before the call."
            )
        made = self._get("torch" if has_tensor else "jax")
        inner = getattr(made, "_dfx_resolve", None)
        return made if inner is None else inner(args, kwargs)

    def _get(self, framework: str) -> Any:
        if framework not in self._made:
            self._made[framework] = self._makers[framework]()
        return self._made[framework]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original."""
        if torch.compiler.is_compiling():
            return self._given(*args, **kwargs)  # inlined into somebody's graph
        return self._dfx_resolve(args, kwargs)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds like a function, so that methods can be scheduled."""
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._get("jax"), name)  # lower, trace: only JAX's has more than a call
