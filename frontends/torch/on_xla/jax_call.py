"""A scheduled torch callable that is called with JAX arrays: its graph becomes part of the JAX program.

Nothing calls back from XLA into Python or PyTorch, so nothing can deadlock and nothing is copied:
inside a scheduled JAX function the torch operators, with their scopes and marks, are operators of the
one plan. At top level the torch callable's own strategy schedules the call. Parameters are read where
they lie at top level; inside a JAX trace they are constants, copied when it is traced.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.tracing import capturing
from dynaflow_xla.frontends.jax.scheduled import ScheduledFunction
from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.frontends.torch.on_xla import to_jax, torchax_table
from dynaflow_xla.frontends.torch.on_xla.aten_lowering import DTYPES
from dynaflow_xla.frontends.torch.on_xla.entry import Way, jax_options
from dynaflow_xla.frontends.torch.on_xla.flat import Flat, state_of
from dynaflow_xla.strategies.base import Strategy

# An operator's line is that of the user's call; our own frames are hidden already.
_compat.hide_frames(torchax_table.folder())

_MAX_EXPORTED = 128
_TORCH_TYPES = {jax.numpy.dtype(v): k for k, v in DTYPES.items()}


class _Exported:
    """The export of one signature."""

    def __init__(self, original: Any, args: Any, kwargs: Any, way: Way) -> None:
        options = way.settings
        examples = pytree.tree_map_only(jax.Array, _example, (args, kwargs))
        flat = Flat(original, *examples)
        tensors = [x for x in pytree.tree_leaves(examples) if isinstance(x, torch.Tensor)]
        # Annotations, which marks are, reach the graph under preserve_node_meta only.
        with torch.no_grad(), torch.fx.traceback.preserve_node_meta(), warnings.catch_warnings():
            # PyTorch's own code warns of PyTorch's own deprecation.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            program = torch.export.export(flat, tuple(tensors), strict=False)
            program = program.run_decompositions({})
        kinds = torch.export.graph_signature
        for out in program.graph_signature.output_specs:
            if out.kind is not kinds.OutputKind.USER_OUTPUT:
                raise UnsupportedError(
                    f"{options.name!r} changes {out.target!r} in place, and a JAX program has no place "
                    "for that; put the module into eval mode, or return the new value"
                )
        self.out_tree = program.call_spec.out_spec
        self.function = to_jax.jax_function(capture(program.graph_module, options.name))
        if self.function.draws:
            raise UnsupportedError(
                f"{options.name!r} draws random numbers, which PyTorch would have to do inside of a "
                "JAX program; put the module into eval mode"
            )
        self.sources: list[tuple[str, Any]] = []
        position = 0
        state = state_of(original)
        for spec in program.graph_signature.input_specs:
            if spec.kind is kinds.InputKind.USER_INPUT:
                self.sources.append(("array", position))
                position += 1
            elif spec.target in state:
                self.sources.append(("state", spec.target))
            else:
                self.sources.append(("constant", program.constants[spec.target]))
        self.scheduled = ScheduledFunction(
            jax.jit(self._run), jax_options(way, self.function.captured.graph.name)
        )

    def _run(self, *flat: Any) -> list[Any]:
        """Every tensor of the graph as it lies in memory -> every result of the graph."""
        with jax.enable_x64(True):
            made = dict(zip(self.function.results, self.function(*flat, inline=True), strict=True))
        for value, layout in zip(self.function.results, self.function.result_layouts, strict=True):
            if not layout.plain:
                made[value] = jax.numpy.transpose(made[value], layout.inverse)
        graph = self.function.captured.graph
        known = dict(zip((graph.inputs[i] for i in self.function.tensors), flat, strict=True))
        for place, layout in zip(self.function.tensors, self.function.layouts, strict=True):
            value = graph.inputs[place]
            if not layout.plain:
                known[value] = jax.numpy.transpose(known[value], layout.inverse)
        return [
            made.get(out, known.get(out)) if isinstance(out, int) else None
            for out in self.function.captured.outputs
        ]

    def __call__(self, original: Any, arrays: list[Any]) -> Any:
        tracing = any(isinstance(x, jax.core.Tracer) for x in arrays) or capturing()
        state = state_of(original)
        have: dict[str, Any] = {"array": arrays, "state": state}
        flat = []
        for (kind, x), layout in zip(self.sources, self.function.layouts, strict=True):
            value = x if kind == "constant" else have[kind][x]
            if isinstance(value, torch.Tensor):
                value = _array(value, layout, copy=tracing)
            flat.append(value)
        with jax.enable_x64(True):
            outs = self.scheduled(*flat)
            if not tracing:
                outs = jax.block_until_ready(outs)  # parameters may be written after the call
        constants = self.function.captured.outputs
        results = [
            out if isinstance(c, int) else c[1] for out, c in zip(outs, constants, strict=True)
        ]
        return pytree.tree_unflatten(results, self.out_tree)


def _example(x: Any) -> torch.Tensor:
    if x.dtype not in _TORCH_TYPES:
        raise UnsupportedError(f"a JAX array of type {x.dtype}, which PyTorch does not have")
    return torch.zeros(x.shape, dtype=_TORCH_TYPES[x.dtype])


def _array(tensor: torch.Tensor, layout: to_jax.DimensionOrder, copy: bool) -> Any:
    tensor = tensor.detach().permute(layout.order).contiguous()
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(tensor.clone() if copy else tensor)


class JaxSide:
    """What a scheduled torch callable does with JAX arrays.

    Args:
        original: The module or function.
        way: As lane programs, or as one.
    """

    def __init__(self, original: Any, way: Way) -> None:
        self.original, self.way, self.options = original, way, way.settings
        self._made: Recent[Any, _Exported] = Recent(_MAX_EXPORTED)
        self._lock = threading.RLock()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Results are JAX arrays, in the original's structure.

        Raises:
            UnsupportedError: tensors beside arrays, writes in place, random numbers, gradients,
                a strategy with nano-batches.
        """
        if type(self.options.strategy).split is not Strategy.split:
            raise UnsupportedError(
                f"{self.options.name!r} got JAX arrays, and its strategy {self.options.strategy!r} splits "
                "the batch of tensors; schedule the JAX function that calls it, with in_axes"
            )
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if any(isinstance(x, torch.Tensor) for x in leaves):
            raise UnsupportedError(
                f"{self.options.name!r} got torch tensors and JAX arrays in one call; convert with "
                "torch.from_dlpack or jnp.from_dlpack before the call"
            )
        parts = tuple(
            (x.shape, str(x.dtype)) if isinstance(x, jax.Array) else (type(x), repr(x))
            for x in leaves
        )
        key = (str(tree), parts, getattr(self.original, "training", False))
        with self._lock:
            made = self._made.get(key)
            if made is None:
                made = self._made[key] = _Exported(self.original, args, kwargs, self.way)
        return made(self.original, [x for x in leaves if isinstance(x, jax.Array)])
