"""Aten operators as JAX functions: the own table first, then torchax's, then PyTorch's decompositions.

Every result is held against the example that PyTorch computed when it captured the graph: a shape
that differs, or a type that would have to gain precision afterwards, is an error and no answer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import DynaflowError, UnsupportedError
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch._compat.modes import FakeTensor, FakeTensorMode
from dynaflow_xla.frontends.torch.on_xla import aten_table, torchax_table

DTYPES = {
    torch.bool: jnp.bool_, torch.uint8: jnp.uint8, torch.int8: jnp.int8, torch.int16: jnp.int16,
    torch.int32: jnp.int32, torch.int64: jnp.int64, torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32, torch.uint64: jnp.uint64, torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32, torch.float64: jnp.float64,
    torch.complex64: jnp.complex64, torch.complex128: jnp.complex128,
}  # fmt: skip
"""torch dtype -> JAX dtype, for what the two have in common."""

_MAX_DEPTH = 12
_SYMBOLIC_MATH = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.pow, operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
    operator.ge, operator.and_, operator.or_, operator.getitem, operator.not_, max, min, abs,
}  # fmt: skip


def jax_dtype(dtype: torch.dtype, what: str) -> Any:
    """The JAX dtype of a torch dtype.

    Raises:
        UnsupportedError: JAX has no such type.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(f"{what} is {dtype}, which has no counterpart on XLA here")
    return jnp.dtype(DTYPES[dtype])


@functools.cache
def _find(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    own = aten_table.TABLE
    for key in (target, packet):
        if key in own:
            return own[key]
    if target in aten_table.DECOMPOSE or packet in aten_table.DECOMPOSE:
        return None
    known = torchax_table.table()
    for key in (target, packet):
        if key in known:
            return known[key]
    return None


def lower(
    target: Any,
    args: Any,
    kwargs: Any,
    example_args: Any,
    example_kwargs: Any,
    example: Any,
    depth: int = 0,
) -> Any:
    """The operator's result on JAX values.

    Args:
        target: Operator overload, or a function over sizes.
        args: Positional arguments with JAX arrays in place of tensors.
        kwargs: Keyword arguments, likewise.
        example_args: ``args`` with fake tensors in place of arrays.
        example_kwargs: ``kwargs``, likewise.
        example: The fake result.
        depth: How many decompositions are around it.

    Raises:
        UnsupportedError: the operator has no lowering, or its lowering disagrees with PyTorch.
    """
    if not isinstance(example, torch.Tensor | list | tuple) and target in _SYMBOLIC_MATH:
        return target(*args, **kwargs)
    fn = _find(target)
    if fn is not None:
        try:
            result = fn(*args, **kwargs)
        except DynaflowError:
            raise  # a built-in error, too, but not one of those meant here
        except (TypeError, NotImplementedError, AssertionError, KeyError, IndexError) as error:
            if not _has_decomposition(target):
                raise UnsupportedError(
                    f"{target} has no lowering to XLA for these arguments ({error}); use "
                    "backend='torch', or move the operator out of the scheduled function"
                ) from error
        else:
            return settle(target, result, example)
    return settle(
        target, _decomposed(target, args, kwargs, example_args, example_kwargs, depth), example
    )


def _has_decomposition(target: Any) -> bool:
    return _decomposition(target) is not None


def _decomposition(target: Any) -> Callable[..., Any] | None:
    found = operators.decompositions().get(target)
    if found is None and getattr(target, "namespace", "") == "prims":
        found = getattr(target, "impl_aten", None)
    return target.decompose if found is None and operators.is_composite(target) else found


def _decomposed(
    target: Any, args: Any, kwargs: Any, example_args: Any, example_kwargs: Any, depth: int
) -> Any:
    fn = _decomposition(target)
    if fn is None or depth > _MAX_DEPTH:
        raise UnsupportedError(
            f"{target} has no lowering to XLA; use backend='torch', or move the operator out of the "
            "scheduled function"
        )
    examples, tree = pytree.tree_flatten((example_args, example_kwargs))
    values = pytree.tree_leaves((args, kwargs))
    places = [i for i, x in enumerate(examples) if isinstance(x, torch.Tensor)]

    def flat(*tensors: Any) -> Any:
        leaves = list(examples)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        again_args, again_kwargs = pytree.tree_unflatten(leaves, tree)
        return fn(*again_args, **again_kwargs)

    tensors = [examples[i] for i in places]
    mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), FakeTensorMode())
    tensors = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in tensors]
    try:
        with torch.no_grad(), mode:
            gm = make_fx(torch.func.functionalize(flat))(*tensors)
    except DynaflowError:
        raise  # a built-in error, too, but not one of those meant here
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        raise UnsupportedError(
            f"{target} has no lowering to XLA, and its decomposition fails ({error}); use "
            "backend='torch', or move the operator out of the scheduled function"
        ) from error
    return run(gm, [values[i] for i in places], depth + 1)


def run(gm: Any, inputs: Sequence[Any], depth: int = 0) -> Any:
    """Evaluates an fx graph of aten operators on JAX values."""
    env: dict[Any, Any] = {}
    feed = iter(inputs)
    example_of = functools.partial(_example_of, gm)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = constant(getattr(gm, node.target), str(node.target))
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], env.__getitem__)
        else:
            args, kwargs = plain(torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__))
            examples = plain(torch.fx.node.map_arg((node.args, node.kwargs), example_of))
            if node.target is operator.getitem:
                env[node] = args[0][args[1]]
            elif isinstance(node.target, type) and issubclass(node.target, tuple):
                env[node] = args[0] if len(args) == 1 else args  # a named tuple around results
            elif node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
                env[node] = env[node.args[0]] = args[1]
            else:
                example = node.meta.get("val")
                env[node] = lower(
                    node.target, args, kwargs, examples[0], examples[1], example, depth
                )
    raise UnsupportedError("a decomposition has no result")


def plain(tree: Any) -> Any:
    """Fx's immutable lists and dictionaries as ordinary ones, which lowerings may change."""
    if isinstance(tree, tuple):
        return tuple(plain(x) for x in tree)
    if isinstance(tree, list):
        return [plain(x) for x in tree]
    if isinstance(tree, dict):
        return {k: plain(x) for k, x in tree.items()}
    return tree


def _example_of(gm: Any, node: Any) -> Any:
    return getattr(gm, node.target) if node.op == "get_attr" else node.meta.get("val")


def constant(value: Any, name: str) -> Any:
    """A tensor that is part of a graph, as a JAX constant; other objects as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = jax_dtype(value.dtype, f"the constant {name}")
    if isinstance(value, FakeTensor):
        raise UnsupportedError(
            f"the constant {name} of the graph has no values; use backend='torch'"
        )
    with modes.apart():
        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:  # NumPy has no such type by itself
            return jnp.asarray(tensor.view(torch.uint16).numpy().view(dtype))
        return jnp.asarray(tensor.numpy(), dtype)


def settle(target: Any, result: Any, example: Any) -> Any:
    """``result`` with the types of ``example``.

    Raises:
        UnsupportedError: a shape differs, or a type is narrower than it must be.
    """
    if isinstance(example, list | tuple):
        results = result if isinstance(result, list | tuple) else [result]
        if len(results) < len(example):
            raise UnsupportedError(
                f"the lowering of {target} must make {len(example)} results; it made {len(results)}"
            )
        return [
            None if e is None else settle(target, r, e)
            for r, e in zip(results, example, strict=False)
        ]
    if not isinstance(example, torch.Tensor):
        return result
    wanted = jax_dtype(example.dtype, f"a result of {target}")
    array = result if isinstance(result, jax.Array) else jnp.asarray(result)
    shape = tuple(int(n) for n in example.shape)
    if array.shape != shape:
        raise UnsupportedError(
            f"the lowering of {target} must return {wanted}{list(shape)}; it returned "
            f"{array.dtype}{list(array.shape)}"
        )
    if array.dtype != wanted:
        if _narrower(array.dtype, wanted):
            raise UnsupportedError(
                f"the lowering of {target} must return {wanted}; it computed in {array.dtype}, which "
                "would lose digits"
            )
        array = array.astype(wanted)
    if getattr(array.aval, "weak_type", False):
        array = jax.lax.convert_element_type(array, wanted)
    return array


def _narrower(have: Any, wanted: Any) -> bool:
    """Whether values computed in ``have`` lack digits that ``wanted`` holds."""
    inexact = jnp.issubdtype(wanted, jnp.inexact)
    if inexact != jnp.issubdtype(have, jnp.inexact):
        return False
    if inexact:
        return bool(jnp.finfo(have).nmant < jnp.finfo(wanted).nmant)
    if wanted == jnp.bool_ or have == jnp.bool_:
        return False
    return bool(jnp.iinfo(have).bits < jnp.iinfo(wanted).bits)
