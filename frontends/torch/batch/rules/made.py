"""Rules of operators that make tensors from nothing, or of one number."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.batch.states import Counted, NoRule, Position, Refuse, Rows, Same, State, scaled
from dynaflow_xla.frontends.torch.batch.rules.pointwise import converted, dtype_of
from dynaflow_xla.frontends.torch.batch.rules.shapes import out_shapes, out_value
from dynaflow_xla.frontends.torch.batch.walking.probes import PROBES, rows_by_shape, varying
from dynaflow_xla.frontends.torch.batch.walking.registry import rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site
from dynaflow_xla.frontends.torch.capture.captured import Ref


def _filled(site: Site, fill: Any) -> State:
    """A tensor of equal elements, of any shape."""
    shapes = out_shapes(site)
    if not varying(shapes):
        return Same(0, fill)
    rows = rows_by_shape(shapes)
    if rows is None:
        raise Refuse("makes a tensor whose size is no multiple of the batch size")
    return Rows(rows.axis, 1, rows.inner, 0, fill)


@rule("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones", "empty", "empty_like",
      "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", first=True,
      sizes=("size", "stride"))  # fmt: skip
def _constant(site: Site) -> State:
    kind = site.op.kind
    return _filled(site, 0 if "zero" in kind else 1 if "ones" in kind else None)


@rule("full", "full_like", "new_full", "fill", first=True, sizes=("size",))
def _full(site: Site) -> State:
    value = site.args.get("fill_value", site.args.get("value"))
    into = site.walker.captured.graph.values[out_value(site)].dtype
    state = converted(site.state(value), _number_type(site, value), into)
    if not isinstance(state, Same):
        raise NoRule("is filled with something that is not the same for all")
    made = _filled(site, state.fill)
    return scaled(made, state.power) if state.power else made


def _number_type(site: Site, value: Any) -> str:
    """The element type of a number or of a tensor."""
    if isinstance(value, Ref):
        return dtype_of(site, value)
    for kind, name in ((bool, "bool"), (int, "int64"), (float, "float64")):
        if isinstance(value, kind):
            return name
    return "complex128"


@rule("scalar_tensor", first=True)
def _scalar(site: Site) -> State:
    value = site.args["s"]
    into = site.walker.captured.graph.values[out_value(site)].dtype
    return converted(site.state(value), _number_type(site, value), into)


@rule("arange", first=True)
def _arange(site: Site) -> State:
    shapes = out_shapes(site)
    if not varying(shapes):
        site.fixed([site.args.get(name, 0) for name in ("start", "end", "step")])
        return Same()
    start, step = (site.fixed(site.args.get(*at)) for at in (("start", 0), ("step", 1)))
    site.pair(site.args["end"])
    dtype = site.walker.captured.graph.values[out_value(site)].dtype
    if start == 0 and shapes[0][0] == PROBES[0]:
        return converted(Position(0), "int64", dtype) if step == 1 else Counted(0, step)
    raise Refuse("counts the rows of the batch")


@rule("eye", "linspace", "logspace", "tril_indices", "triu_indices", first=True)
def _numbered(site: Site) -> State:
    if varying(out_shapes(site)):
        raise Refuse("makes a tensor whose values depend on the batch size")
    return Same()
