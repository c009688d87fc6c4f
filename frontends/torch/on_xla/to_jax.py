"""A captured torch graph as a JAX function over flat arrays, and its places in the jaxpr.

Each aten operator is traced under a name scope that ends with its number; afterwards the operators of
the jaxpr get module path, classes, mark and source line of the aten operator they came from, so that
one rule means the same on every backend.

Random numbers are drawn by PyTorch, before the program, in the order of the graph: they are the
caller's, with the caller's generator. That serves operators whose draw depends on sizes only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.capture import marks as jax_marks, provenance
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.on_xla import aten_lowering
from dynaflow_xla.frontends.torch.on_xla.flat import strip

# Random operators of which only the sizes of tensor arguments matter.
_DRAWN = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli uniform normal_functional "
    "normal exponential geometric log_normal cauchy".split()
)
_TAKES_VALUES = frozenset({"bernoulli.default", "normal.Tensor_float", "normal.float_Tensor",
                           "normal.Tensor_Tensor", "bernoulli.Tensor"})  # fmt: skip


@dataclass(frozen=True)
class DimensionOrder:
    """How a tensor lies in memory: ``order`` permutes it into a contiguous array.

    Attributes:
        shape: Sizes of the tensor.
        dtype: Its torch dtype.
        order: Dimensions from the slowest to the fastest.
        inverse: The permutation back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    inverse: tuple[int, ...]

    @property
    def physical(self) -> tuple[int, ...]:
        """Shape of the contiguous array."""
        return tuple(self.shape[d] for d in self.order)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor over the contiguous array."""
        sizes = self.physical
        steps = {d: math.prod(sizes[n + 1 :]) for n, d in enumerate(self.order)}
        return tuple(steps[d] for d in range(len(steps)))

    @property
    def plain(self) -> bool:
        """Whether the tensor itself is contiguous."""
        return self.order == tuple(range(len(self.order)))


def layout_of(example: torch.Tensor) -> DimensionOrder:
    """The layout of a dense tensor; row-major for one with gaps or overlaps."""
    shape = tuple(int(n) for n in example.shape)
    strides = [int(n) for n in example.stride()]
    dims = range(len(shape))
    # Dimensions of size 1 lie anywhere: they keep their places among the others.
    moving = [d for d in dims if shape[d] != 1]
    by_stride = iter(sorted(moving, key=lambda d: -strides[d]))
    order = tuple(d if shape[d] == 1 else next(by_stride) for d in dims)
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != expected:
            order = tuple(dims)
            break
        expected *= shape[d]
    inverse = tuple(sorted(dims, key=order.__getitem__))
    return DimensionOrder(shape, example.dtype, order, inverse)


@dataclass(frozen=True)
class Draw:
    """Random numbers that PyTorch makes before the program runs.

    Attributes:
        make: Draws them with the caller's generator; returns tensors.
        examples: What they look like.
    """

    make: Callable[[], list[torch.Tensor]]
    examples: tuple[torch.Tensor, ...]


@dataclass
class JaxFunction:
    """A torch graph with fixed sizes as a JAX function.

    Attributes:
        captured: The graph.
        tensors: Positions of tensors among the graph's inputs.
        layouts: Memory layout of each of those, then of each drawn tensor.
        draws: What is drawn before a call.
        results: Value ids that the function returns, each once.
        result_layouts: Memory layout of each result.
        constants: Value id -> a result that is no tensor, known once the function was traced.
    """

    captured: Captured
    tensors: tuple[int, ...]
    layouts: list[DimensionOrder]
    draws: list[Draw]
    results: tuple[int, ...]
    result_layouts: list[DimensionOrder]
    constants: dict[int, Any] = field(default_factory=dict)

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each argument, as it lies in memory."""
        return [
            jax.ShapeDtypeStruct(
                layout.physical, aten_lowering.jax_dtype(layout.dtype, "an input of the graph")
            )
            for layout in self.layouts
        ]

    def __call__(self, *arrays: Any, inline: bool = False) -> list[Any]:
        """Arguments and results are arrays as they lie in memory.

        Args:
            *arrays: Tensors of the graph, then what was drawn.
            inline: Be part of somebody's JAX function: scopes and marks are what it would have
                written itself. Otherwise scopes number the operators, for ``places.settle``.
        """
        captured = self.captured
        env: dict[int, Any] = {}
        for value in captured.graph.inputs:
            env[value] = captured.examples[value]
        logical = [
            x if layout.plain else jnp.transpose(x, layout.inverse)
            for x, layout in zip(arrays, self.layouts, strict=True)
        ]
        for place, x in zip(self.tensors, logical, strict=False):
            env[captured.graph.inputs[place]] = x
        drawn = iter(logical[len(self.tensors) :])
        draws = iter(self.draws)
        keys: dict[Any, str] = {}
        for op in captured.graph.ops:
            with self._scope(op, inline, keys):
                self._run(op, env, draws, drawn)
        for value, example in captured.examples.items():
            if value in env and not isinstance(example, torch.Tensor):
                self.constants[value] = env[value]
        return [
            env[v] if layout.plain else jnp.transpose(env[v], layout.order)
            for v, layout in zip(self.results, self.result_layouts, strict=True)
        ]

    def _scope(self, op: Any, inline: bool, keys: dict[Any, str]) -> Any:
        if not inline:
            return provenance.scope(op.index, op.kind, op.scope)
        path = list(strip(list(op.scope)))
        if op.mark is not None:
            if op.mark not in keys:
                keys[op.mark] = jax_marks.new_key(op.mark)
            path.append(keys[op.mark])
        return jax.named_scope("/".join(path)) if path else contextlib.nullcontext()

    def _run(self, op: Any, env: dict[int, Any], draws: Any, drawn: Any) -> None:
        payload: Payload = op.payload
        args, kwargs = _arguments(self.captured, payload, env)
        if is_random(self.captured, op):
            given = [next(drawn) for _ in next(draws).examples]
            made = _from_drawn(op.kind, args, given)
        else:
            examples = _arguments(self.captured, payload, self.captured.examples)
            outs = [None if v is None else self.captured.examples[v] for v in payload.outputs]
            example = outs if payload.multiple else (outs[0] if outs else None)
            try:
                made = aten_lowering.lower(payload.target, args, kwargs, *examples, example)
            except UnsupportedError as error:
                raise UnsupportedError(f"{error} (at {op.source})") from error
            made = list(made) if payload.multiple else [made]
        for value, x in zip(payload.outputs, made, strict=False):
            if value is not None:
                env[value] = x


def _arguments(captured: Captured, payload: Payload, env: Any) -> tuple[Any, Any]:
    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return env[arg.value]
        if isinstance(arg, torch.fx.GraphModule):
            raise UnsupportedError(
                f"{payload.target} has a graph of its own as an argument (control flow); it does "
                "not run on XLA yet, use backend='torch'"
            )
        if isinstance(arg, torch.Tensor) and env is not captured.examples:
            return aten_lowering.constant(arg, f"a constant of {payload.target}")
        return arg

    read = torch.fx.node.map_aggregate((payload.args, payload.kwargs), value)
    return aten_lowering.plain(read)


def is_random(captured: Captured, op: Any) -> bool:
    """Whether an operator draws random numbers (it makes a token, or would with dropout)."""
    if not any(captured.graph.values[v].dtype == "token" for v in op.outputs):
        return False
    if not op.kind.startswith("_scaled_dot_product"):
        return True
    names = [argument.name for argument in op.payload.target._schema.arguments]
    given = {**dict(zip(names, op.payload.args, strict=False)), **op.payload.kwargs}
    return bool(given.get("dropout_p", 0.0))


def _draw(captured: Captured, op: Any) -> Draw:
    payload: Payload = op.payload
    args, kwargs = _arguments(captured, payload, captured.examples)
    if op.kind == "native_dropout":
        x, share, train = args
        if train is False or share == 0:
            return Draw(lambda: [], ())
        shape, strides = tuple(x.shape), tuple(x.stride())

        def mask() -> list[torch.Tensor]:
            fresh = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
            return [fresh.bernoulli_(1 - share) != 0]

        return Draw(mask, (captured.examples[payload.outputs[1] or 0],))
    name = str(payload.target).removeprefix("aten.")
    if op.kind not in _DRAWN or name in _TAKES_VALUES:
        raise UnsupportedError(
            f"{payload.target} (at {op.source}) draws random numbers whose distribution depends on "
            "values; on XLA only draws that depend on sizes are possible. Use backend='torch'."
        )
    metas = [
        (a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in args
    ]
    tensors = {i for i, a in enumerate(args) if isinstance(a, torch.Tensor)}

    def draw() -> list[torch.Tensor]:
        fresh = [
            torch.zeros(0, dtype=m[2], device=m[3]).new_empty_strided(m[0], m[1])
            if i in tensors
            else m
            for i, m in enumerate(metas)
        ]
        return [payload.target(*fresh, **kwargs)]

    return Draw(draw, (captured.examples[payload.outputs[0] or 0],))


def _from_drawn(kind: str, args: Any, given: list[Any]) -> list[Any]:
    if kind != "native_dropout":
        return given
    x, share = args[0], args[1]
    if not given:
        return [x, jnp.ones(x.shape, bool)]
    scale = 0.0 if share == 1 else 1.0 / (1.0 - share)
    return [x * given[0].astype(x.dtype) * jnp.asarray(scale, x.dtype), given[0]]


def jax_function(captured: Captured) -> JaxFunction:
    """Prepares a graph with fixed sizes.

    Raises:
        UnsupportedError: a random operator cannot be drawn ahead, a type has no counterpart.
    """
    graph, examples = captured.graph, captured.examples
    tensors = tuple(i for i, v in enumerate(graph.inputs) if isinstance(examples[v], torch.Tensor))
    layouts = [layout_of(examples[graph.inputs[i]]) for i in tensors]
    draws = [_draw(captured, op) for op in graph.ops if is_random(captured, op)]
    layouts += [layout_of(example) for draw in draws for example in draw.examples]
    wanted = [out for out in captured.outputs if isinstance(out, int)]
    wanted += [value for _, value in captured.epilogue]
    results = tuple(
        v
        for v in dict.fromkeys(wanted)
        if v not in graph.inputs and isinstance(examples[v], torch.Tensor)
    )
    result_layouts = [layout_of(examples[v]) for v in results]
    return JaxFunction(captured, tensors, layouts, draws, results, result_layouts)
