"""Arrays that a call gives away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from dynaflow_xla.errors import PlanError
from dynaflow_xla.strategies.base import user_line


def given_twice(
    function: str, jit_options: Mapping[str, Any], args: Any, kwargs: Any
) -> PlanError | None:
    """The error for an array that is donated and given a second time, if there is one.

    Args:
        function: Its name.
        jit_options: What it was jitted with.
        args: Of the call.
        kwargs: Of the call.
    """
    nums = {n % len(args) if n < 0 else n for n in jit_options["donate_argnums"] if args}
    names = set(jit_options["donate_argnames"])
    donated, first = set[int](), dict[int, str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        where = path[1].idx if path[0].idx == 0 else path[1].key
        name = f"argument {where!r}{jax.tree_util.keystr(path[2:])}"
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
