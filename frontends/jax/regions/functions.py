"""Regions as traceable functions: as captured, replaced, or with a kernel in their place on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jcore

from dynaflow_xla.batch.expansion.specs import Cut
from dynaflow_xla.errors import DynaflowError, PlanError, UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.regions import lapack_guard, one_pass, order_gate
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.planning.instructions import Slice


@dataclass(frozen=True)
class Second:
    """What else a region is given for its gate (``gate_placement.Gate``), behind its inputs.

    Attributes:
        values: Inputs that are given a second time.
        readers: Operators that read the second one.
        between: Operators between a second input and those; the others read what they make of the
            first input.
        products: Operators whose results pass beside a gate of their own.
        deps: What those gates read, given behind the second inputs; as abstract values.
    """

    values: tuple[int, ...] = ()
    readers: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    deps: tuple[Any, ...] = ()


def region_function(
    captured: Captured, region: Region, second: Second | None = None
) -> Callable[..., list[Any]]:
    """The region as a traceable function from ``region.inputs`` to ``region.outputs``."""
    variables = captured.variables
    second = second or Second()
    other = {variables[v]: _compat.new_var(variables[v].aval) for v in second.values}
    deps = [_compat.new_var(aval) for aval in second.deps]
    inputs = [*(variables[v] for v in region.inputs), *other.values(), *deps]
    equations = []
    for index in region.ops:
        eqn = captured.equation(index)
        reads = [a if isinstance(a, jcore.Literal) else other.get(a, a) for a in eqn.invars]
        if index in second.readers:
            eqn = eqn.replace(invars=reads)
        elif index in second.between:
            fresh = [_compat.new_var(v.aval) for v in eqn.outvars]
            equations.append(eqn.replace(invars=reads, outvars=fresh))
            other.update(zip(eqn.outvars, fresh, strict=True))
        if index in second.products:
            equations.extend(order_gate.behind(eqn, deps))
        else:
            equations.append(eqn)
    outputs = [variables[v] for v in region.outputs]
    closed = _compat.make_jaxpr_of(equations, inputs, outputs, captured.jaxpr)
    return one_pass.chosen(closed, lapack_guard.ordered)


def replaced_function(
    fn: Callable[..., Any], captured: Captured, region: Region, where: str
) -> Callable[..., list[Any]]:
    """A user's replacement for a region, its result types checked.

    Raises:
        PlanError: the replacement returns other shapes or dtypes than the region.
    """
    avals = captured.avals
    specs = [jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for v in region.inputs]

    def flat(*args: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(fn(*args))

    try:
        got = jax.eval_shape(flat, *specs)
    except DynaflowError:
        raise  # a built-in error, too, but not one of those meant here
    except TypeError as error:
        raise PlanError(
            f"the replacement for region {region.name!r} ({where}) must take its {len(specs)} inputs "
            f"{[f'{s.dtype}{list(s.shape)}' for s in specs]}: {error}"
        ) from error
    want = [(tuple(avals[v].shape), avals[v].dtype) for v in region.outputs]
    have = [(tuple(s.shape), s.dtype) for s in got]
    if have != want:

        def show(types: Sequence[Any]) -> str:
            return "(" + ", ".join(f"{d}{list(s)}" for s, d in types) + ")"

        raise PlanError(
            f"the replacement for region {region.name!r} ({where}) must return {show(want)}, as the "
            f"region does; it returns {show(have)}."
        )
    return lapack_guard.ordered_function(flat)


@dataclass(frozen=True)
class KernelRegion:
    """A region with a CUDA kernel in its place; called, it is the region as it was written.

    Attributes:
        kernel: For lanes of a GPU.
        parameters: The kernel's, bound to the region's inputs and outputs.
        as_written: From the region's inputs to its outputs.
    """

    kernel: CudaKernel
    parameters: list[tuple[str, int] | bytes]
    as_written: Callable[..., list[Any]]

    def __call__(self, *args: Any) -> list[Any]:
        """The region as it was written."""
        return self.as_written(*args)


def kernel_function(kernel: CudaKernel, captured: Captured, region: Region) -> KernelRegion:
    """A region and the kernel that replaces it on a GPU.

    Raises:
        PlanError: the kernel's parameters do not fit the region.
    """
    parameters = kernel.bound(len(region.inputs), len(region.outputs), region.name)
    return KernelRegion(kernel, parameters, region_function(captured, region))


def no_kernel_for_parts(kernel: CudaKernel, region: Region) -> UnsupportedError:
    """The error for a kernel in the place of a nano-batch's region."""
    return UnsupportedError(
        f"kernel {kernel.name!r} cannot replace region {region.name!r} of a nano-batch: its sizes and "
        "where its values lie differ from part to part. Replace it by a function"
    )


def cut_rows(x: Any, cut: Slice | Cut) -> Any:
    """The rows that a plan or a split names."""
    return jax.lax.slice_in_dim(x, cut.start, cut.stop, axis=cut.axis)
