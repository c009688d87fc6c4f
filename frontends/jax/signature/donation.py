"""Arrays that a call gives away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.jax.capture.mutation import in_place
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.strategies.base import user_line
from dynaflow_xla.watching import telling

_WARN_BYTES = 1 << 20


def copied(made: Planned, traced: Any, *, warn: bool) -> None:
    """Notes which donated arrays do not become results: lanes make these, in memory of their own.

    Args:
        made: The plan.
        traced: The original's trace.
        warn: Say it at once, where it is much.
    """
    given = Counter(
        (leaf.shape, leaf.dtype)
        for leaf in jax.tree_util.tree_leaves(traced.args_info)
        if leaf.donated
    )
    graph = made.captured.graph
    launches = (i for i in made.plan.instructions if isinstance(i, Launch) and i.lane >= 0)
    on_lanes = {v for launch in launches for v in made.pg.regions[launch.region].outputs}
    on_lanes.update(join.value for join in graph.joins)
    lanes, others = Counter[Any](), Counter[Any]()
    for value in graph.outputs:
        aval = made.captured.avals[value]
        (lanes if value in on_lanes else others)[aval.shape, aval.dtype] += 1
    parts, lost = [], 0
    for (shape, dtype), count in given.items():
        arrays = min(count - others[shape, dtype], lanes[shape, dtype])
        size = getattr(dtype, "itemsize", 16)
        for n in shape:
            size *= n
        if arrays > 0 and arrays * size >= in_place.MIN_BYTES:
            parts.append(f"{arrays} x {dtype}{list(shape)}")
            lost += arrays * size
    if not parts:
        return
    text = (
        f"{made.options.name}: lanes make what could lie in donated arguments ({', '.join(parts)}); "
        f"{lost / 1e6:.1f} MB are copied into them in each call. Let the operator that makes the result be "
        "an update in place (x.at[i].set, dynamic_update_slice), or call fast.original"
    )
    made.notes.append(text)
    if warn and lost >= _WARN_BYTES:
        telling.fallback(text)


def given_twice(
    function: str,
    jit_options: Mapping[str, Any],
    args: Any,
    kwargs: Any,
    places: Sequence[str] = (),
) -> PlanError | None:
    """The error for an array that is donated and given a second time, if there is one.

    Args:
        function: Its name.
        jit_options: What it was jitted with.
        args: Of the call.
        kwargs: Of the call.
        places: What the user calls the positional arguments, if not by their numbers.
    """
    nums = {n % len(args) if n < 0 else n for n in jit_options["donate_argnums"] if args}
    names = set(jit_options["donate_argnames"])
    donated, first = set[int](), dict[int, str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        where = path[1].idx if path[0].idx == 0 else path[1].key
        known = isinstance(where, int) and where < len(places)
        called = places[where] if known else f"argument {where!r}"
        name = called + jax.tree_util.keystr(path[2:])
        gives = where in nums or where in names
        if id(leaf) in first and (gives or id(leaf) in donated):
            return PlanError(
                f"{function}: a donated array may be given once; {first[id(leaf)]} and "
                f"{name} are the same {leaf.aval.str_short()} array ({user_line()}). Pass a copy "
                "(x.copy()), or do not donate it."
            )
        first[id(leaf)] = name
        if gives:
            donated.add(id(leaf))
    return None
