"""Rules of operators that go element by element, with broadcasting."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.algebra import homogeneous, linear, nonlinear, product, quotient
from dynaflow_xla.batch.states import NoRule, Rows, Same, State, is_plain_same
from dynaflow_xla.frontends.torch.batch_axis.walk import Site, rule


def _operands(site: Site) -> list[State]:
    """States of tensors and of numbers that depend on sizes, lined up with the result."""
    made = []
    for arg in site.args.values():
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            state = site.aligned(item)
            if not is_plain_same(state):
                made.append(state)
    return made or [Same()]


@rule("pointwise", "dropout_backward", "native_dropout_backward", "_softmax_backward_element")
def _pointwise(site: Site) -> State:
    return nonlinear(_operands(site))


@rule("clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "positive", "neg", "real",
      "imag", "_conj", "conj", "_conj_physical", "contiguous", "_neg_view", "resolve_conj",
      "resolve_neg", first=True)  # fmt: skip
def _identity(site: Site) -> State:
    if not site.tensors():
        return Same()  # of a constant
    state = site.state(site.tensors()[0])
    if site.op.kind in ("neg", "imag") and isinstance(state, Same | Rows):
        return linear([_unfilled(state)])
    return state


def _unfilled(state: Same | Rows) -> State:
    if isinstance(state, Same):
        return Same(state.power)
    return Rows(state.axis, state.outer, state.inner, state.power)


@rule("_to_copy")
def _convert(site: Site) -> State:
    state = site.state(site.args["self"])
    wanted = site.args.get("dtype")
    graph = site.walker.captured.graph
    dtype = graph.values[site.args["self"].value].dtype
    exact = wanted is None or wanted.is_floating_point or wanted.is_complex
    if exact or str(wanted).removeprefix("torch.") == dtype:
        return state  # conversions of rows by number keep the number
    return nonlinear([state])


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


@rule("relu", "abs", "maximum", "minimum", "leaky_relu", "fmax", "fmin")
def _homogeneous(site: Site) -> State:
    return homogeneous(_operands(site))


@rule("sgn", "sign", "isnan", "isinf")
def _degree_zero(site: Site) -> State:
    return homogeneous(_operands(site), 0)


@rule("where")
def _where(site: Site) -> State:
    if "self" not in site.args:
        raise NoRule  # the form that returns positions
    condition = site.aligned(site.args["condition"])
    values = [site.aligned(site.args["self"]), site.aligned(site.args["other"])]
    if is_plain_same(condition):
        return linear(values)
    return nonlinear([condition, *values])


@rule("addcmul", "addcdiv")
def _add_product(site: Site) -> State:
    states: list[Any] = [site.aligned(site.args[name]) for name in ("tensor1", "tensor2")]
    made = product(*states) if site.op.kind == "addcmul" else quotient(*states)
    scaled = product(made, site.state(site.args.get("value", 1)))
    return linear([site.aligned(site.args["self"]), scaled])
