"""Cumulative operators of lanes in one pass over memory, where XLA:CPU takes several.

Lanes' programs call a kernel of the engine (``ffi/module/custom_calls/cumulative.h``) for cumulative sums,
maxima and minima, and for products of integers. (It carries in float64, in which products come back from
where the original's over- or underflow for good.) Users' equations, derivatives, ``vmap``, wide regions and
the original are as they were: an operator is replaced where a region is traced for a lane of a CPU
(``on_lane``), the last thing that happens to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jcore
from jax.extend.core import Primitive
from jax.interpreters import mlir

from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.ir.graph import Outside, Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.work import spread_over

KINDS = {"cumsum": 0, "cumprod": 1, "cummax": 2, "cummin": 3}
"""Primitives, with the engine's numbers of them."""

_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_TYPES = frozenset(f"{_INTEGERS} bfloat16 float16 float32 float64".split())

MIN_ELEMENTS = 256
"""Smaller ones stay XLA's, which may fuse what is around them. (From 64 elements on the kernel alone is no
slower, from 1,024 on 1 to 4 times as fast, from a million on 3 to 40 times: one core, all types.)"""

_state = threading.local()


@dataclass
class Place:
    """A lane whose program is traced, and what was made in one pass there.

    Attributes:
        lane: Its number.
        made: By ``id`` of a result: the result, the operand, and the parameters.
    """

    lane: int
    made: dict[int, tuple[Any, Any, dict[str, Any]]] = field(default_factory=dict)

    def written_to(self, x: Any, buffer: int) -> Any:
        """The same operator once more, written to a buffer of the engine; ``x`` itself is then not needed.

        Args:
            x: What a region made.
            buffer: The engine's number of memory of that size, which nobody reads before the lane ends.

        Returns:
            A value that is there once the buffer is written; None: ``x`` was not made in one pass.
        """
        if id(x) not in self.made:
            return None
        _, operand, params = self.made[id(x)]
        return cumulative_p.bind(operand, **params | {"lane": self.lane, "buffer": buffer})


class _Cumulative(Primitive):  # type: ignore[misc]
    def bind(self, *args: Any, **params: Any) -> Any:
        made = super().bind(*args, **params)
        if (place := getattr(_state, "place", None)) is not None:
            place.made[id(made)] = made, args[0], params
        return made


cumulative_p = _Cumulative("dfx_cumulative")


@cumulative_p.def_impl
def _impl(x: Any, **params: Any) -> Any:
    return jax.jit(lambda x: cumulative_p.bind(x, **params))(x)


@cumulative_p.def_abstract_eval
def _abstract(x: Any, *, buffer: int, **_: Any) -> Any:
    return x if buffer < 0 else jax.core.ShapedArray((1,), np.uint8)


def _lower(ctx: Any, x: Any, *, kind: str, axis: int, reverse: bool, lane: int, buffer: int) -> Any:
    rule = jax.ffi.ffi_lowering(xla.CUMULATIVE_TARGET, has_side_effect=buffer >= 0)
    return rule(
        ctx, x, kind=np.int64(KINDS[kind]), axis=np.int64(axis), reverse=np.bool_(reverse),
        lane=np.int64(lane), buffer=np.int64(buffer),
    )  # fmt: skip


mlir.register_lowering(cumulative_p, _lower, platform="cpu")


@contextlib.contextmanager
def on_lane(place: Place | None) -> Iterator[None]:
    """A block in which functions made by ``chosen`` are those of a lane; None: as they were written."""
    outer = getattr(_state, "place", None)
    _state.place = place
    try:
        yield
    finally:
        _state.place = outer


def chosen(
    closed: Any, function: Callable[[Any], Callable[..., list[Any]]]
) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function, which on a lane has its cumulative operators in one pass.

    Args:
        closed: The jaxpr.
        function: Makes a function of one.
    """
    plain = function(closed)
    if not any(map(_holds_any, closed.jaxpr.eqns)):
        return plain
    inner = _rewritten(closed.jaxpr)
    one_pass = function(closed.replace(jaxpr=inner))

    def run(*args: Any) -> list[Any]:
        return (plain if getattr(_state, "place", None) is None else one_pass)(*args)

    return run


def fits(eqn: Any) -> bool:
    """Whether the engine has a kernel for an equation, and it is long enough."""
    if eqn.primitive.name not in KINDS:
        return False
    aval = eqn.invars[0].aval
    name = str(aval.dtype)
    if name not in (_INTEGERS.split() if eqn.primitive.name == "cumprod" else _TYPES):
        return False
    return bool(np.prod(aval.shape, dtype=np.int64) >= MIN_ELEMENTS)


def _holds_any(eqn: Any) -> bool:
    inside = jcore.jaxprs_in_params(eqn.params)
    return fits(eqn) or any(_holds_any(e) for jaxpr in inside for e in jaxpr.eqns)


def _rewritten(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=[_replaced(eqn) if _holds_any(eqn) else eqn for eqn in jaxpr.eqns])


def _replaced(eqn: Any) -> Any:
    if fits(eqn):
        params = {
            "kind": eqn.primitive.name, "axis": eqn.params["axis"], "reverse": eqn.params["reverse"],
            "lane": -1, "buffer": -1,
        }  # fmt: skip
        return eqn.replace(primitive=cumulative_p, params=params)
    params = {key: _compat.with_inner(param, _rewritten) for key, param in eqn.params.items()}
    return eqn.replace(params=params)


def priced(pg: PartitionedGraph) -> PartitionedGraph:
    """The same regions with what they cost where lanes run these operators: on all cores they are XLA's."""
    regions = tuple(r if r.outer else _priced(r, pg) for r in pg.regions)
    return pg if regions == pg.regions else replace(pg, regions=regions)


def _priced(region: Region, pg: PartitionedGraph) -> Region:
    ops = [pg.graph.ops[i] for i in region.ops]
    ours = [op for op in ops if op.payload is not None and fits(op.payload)]
    if not ours:
        return region
    before = sum(op.cost_ns for op in ours)
    now = sum(costs.one_pass_ns(op.payload) for op in ours)
    if before <= now:
        return region
    return replace(
        region,
        cost_ns=max(0.0, region.cost_ns - before) + now,
        spread=spread_over(op.spread for op in ops if op not in ours),
        outside=Outside(before - now, spread_over(op.spread for op in ours)),
    )


def told(pg: PartitionedGraph, launched: Sequence[tuple[int, int]], lanes: int) -> list[str]:
    """Lines for explain: what runs in one pass.

    Args:
        pg: The regions.
        launched: Regions on lanes, each with its lane.
        lanes: How many lanes there are.
    """
    lines = []
    for number, lane in launched:
        ops = [pg.graph.ops[i] for i in pg.regions[number].ops]
        found = [op.payload for op in ops if op.payload is not None and fits(op.payload)]
        for eqn in found:
            aval = eqn.invars[0].aval
            shape = ",".join(map(str, aval.shape))
            lines.append(
                f"one pass: {eqn.primitive.name} of {aval.dtype}[{shape}] along axis {eqn.params['axis']}, "
                f"in region {pg.regions[number].name!r} on lane {lane}"
            )
    if lines:
        lines.append(
            "one pass: XLA takes several; sums are carried in float64, so that last bits may "
            f"differ from the original's. lanes=dfx.Lanes({lanes}, one_pass=False) leaves them to XLA"
        )
    return lines
