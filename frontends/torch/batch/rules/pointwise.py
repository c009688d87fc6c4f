"""Rules of operators that go element by element, with broadcasting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.batch.algebra import (
    chosen,
    homogeneous,
    linear,
    nonlinear,
    product,
    quotient,
)
from dynaflow_xla.batch.states import (
    POSITION,
    NoRule,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    unfilled,
)
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site
from dynaflow_xla.frontends.torch.capture.captured import Ref


def _operands(site: Site) -> list[State]:
    """States of tensors and of numbers that depend on sizes, lined up with the result."""
    made = []
    for arg in site.args.values():
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, Ref):
                made.append(site.aligned(item))
    return made


@rule("pointwise", "native_dropout", "native_dropout_backward")
def _pointwise(site: Site) -> State:
    return nonlinear(_operands(site))


@rule("clone", "alias", "alias_copy", "detach", "lift_fresh", "lift_fresh_copy", "positive", "real", "conj",
      "_conj", "_conj_physical", "contiguous", "resolve_conj", "resolve_neg", first=True)  # fmt: skip
def _identity(site: Site) -> State:
    tensors = site.tensors()
    if not tensors:
        return Same(0, _number_in(site.args["self"]))  # of a constant
    state = site.state(tensors[0])
    if dtype_of(site, tensors[0]).startswith("complex"):
        return linear([state])  # a known value is another one
    return state


def _number_in(constant: Any) -> int | float | None:
    """What a constant tensor of one element holds (``Normal(0.0, 1.0)`` makes two)."""
    if type(constant) is not torch.Tensor or constant.numel() != 1 or constant.device.type != "cpu":
        return None
    value = constant.item()
    return value if isinstance(value, int | float) else None


@rule("neg", "imag", "_neg_view")
def _negated(site: Site) -> State:
    return linear([site.state(site.args["self"])])


def dtype_of(site: Site, arg: Any) -> str:
    """Name of an operand's element type."""
    return site.walker.captured.graph.values[arg.value].dtype


def converted(state: State, before: str, after: str) -> State:
    """The state after a conversion between types, which rounds to integers or keeps totals.

    Integers wrap around, which a wider type or a float would show: counts of 32 bits and more are taken
    not to, narrow and unsigned ones may.
    """
    if before == after:
        return state
    if isinstance(state, Position):
        if after not in ("int32", "int64", "uint32", "uint64", "float32", "float64"):
            raise Refuse(POSITION)  # which counts no further than some batch
        return state
    inexact = ("float", "bfloat", "complex")
    if before.startswith(inexact):
        linear_in = after.startswith(inexact)
    else:
        linear_in = before in ("int32", "int64") and (after == "int64" or after.startswith(inexact))
    made = state if linear_in else nonlinear([state])
    fill = state.fill if isinstance(state, Same | Rows) else None
    # 0 and 1 keep their value in every type.
    if isinstance(made, Same | Rows):
        if fill in (0, 1):
            return replace(made, fill=fill)
        if linear_in and isinstance(fill, int | float) and not made.power:
            types = (getattr(torch, name) for name in (before, after))
            return replace(made, fill=_rounded(fill, *types))
    return unfilled(made)


def _rounded(number: float, before: torch.dtype, after: torch.dtype) -> Any:
    """A number that a tensor has, after a conversion; None if it is none then."""
    made = torch.tensor(number, dtype=before).to(after).item()
    return made if made == made else None


@rule("_to_copy", first=True)
def _convert(site: Site) -> State:
    given = site.args["self"]
    wanted = site.args.get("dtype")
    before = dtype_of(site, given)
    after = before if wanted is None else str(wanted).removeprefix("torch.")
    return converted(site.state(given), before, after)


@rule("add", "sub", "rsub")
def _add(site: Site) -> State:
    site.fixed(site.args.get("alpha", 1))
    return linear([site.aligned(site.args["self"]), site.aligned(site.args["other"])])


@rule("mul")
def _mul(site: Site) -> State:
    return product(site.aligned(site.args["self"]), site.aligned(site.args["other"]))


@rule("div", "true_divide")
def _div(site: Site) -> State:
    left, right = site.aligned(site.args["self"]), site.aligned(site.args["other"])
    if site.args.get("rounding_mode") is not None:
        return nonlinear([left, right])
    return quotient(left, right)


@rule("floor_divide")
def _floor_div(site: Site) -> State:
    return nonlinear([site.aligned(site.args["self"]), site.aligned(site.args["other"])])


@rule("relu", "abs", "maximum", "minimum", "leaky_relu", "fmax", "fmin")
def _homogeneous(site: Site) -> State:
    return homogeneous(_operands(site))


@rule("sgn", "sign", "isnan", "isinf")
def _degree_zero(site: Site) -> State:
    return homogeneous(_operands(site), 0)


@rule("where")
def _where(site: Site) -> State:
    if "self" not in site.args:
        raise NoRule("is the form that returns positions")
    condition = site.aligned(site.args["condition"])
    return chosen(condition, [site.aligned(site.args[name]) for name in ("self", "other")])


@rule("addcmul", "addcdiv")
def _add_product(site: Site) -> State:
    first, second = (site.aligned(site.args[name]) for name in ("tensor1", "tensor2"))
    made = product(first, second) if site.op.kind == "addcmul" else quotient(first, second)
    times = product(made, site.state(site.args.get("value", 1)))
    return linear([site.aligned(site.args["self"]), times])
