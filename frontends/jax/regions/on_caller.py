"""Programs that XLA's CPU client runs on the thread that calls them, and on no other.

The client hands every program of 1000 floating point operations or more to a thread of its own, and
inside the program loops to a pool. For small programs both cost more than they save: 30 us and more, where
the program itself may take 20. What runs a program where it is called:

- The client was made for that (``jax_cpu_enable_async_dispatch=False``, for the whole process).
- The program has host callbacks, which could otherwise wait for each other (XLA,
  ``pjrt_ifrt/pjrt_executable.cc``: "When using host callbacks on CPU, we need to use synchronous
  dispatch"). ``marked`` adds one that nothing calls; the program itself stays as it is.

Even then it waits on a thread of XLA's for arguments that are still being computed. And loops stay on the
caller's thread if XLA hands out none (``handed_out.OPTIONS``). JAX keeps no program with host
callbacks in its persistent compilation cache: each process compiles these anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.frontends.jax.regions import handed_out
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.plan import Plan

MAX_NS = 300_000.0
"""Longer programs stay on XLA's threads: they gain a few percent, and Python could go on meanwhile."""

WAITED_FOR_NS = 4_000_000.0
"""Up to so much on all cores it is measured whether a caller that waits has its results sooner where no other
thread begins the program: some take a fifth less, and do not vary from call to call."""

NAMES = {
    "caller": "original on the caller's thread",
    "waited": "original that its caller begins and waits for",
}
"""Forms of a program: all of it on that thread, or with loops and products shared out as ever."""

_on_caller_p = Primitive("dfx_on_caller")
_on_caller_p.def_impl(lambda x: x)
_on_caller_p.def_abstract_eval(lambda aval: aval)


def _lower(ctx: Any, x: Any) -> Any:
    if _compat.lowered_for_one_device(ctx):
        _compat.add_host_callback(ctx, _never_called)
    return [x]


def _never_called(*_: Any) -> Any:
    raise RuntimeError("nothing calls this")


mlir.register_lowering(_on_caller_p, _lower)
ad.deflinear2(_on_caller_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_on_caller_p)
interpreters.keys_left(_on_caller_p, passed_on=True)


def marked(results: Any, given: Any) -> Any:
    """Makes the program that is being traced one that runs on the thread that calls it.

    Args:
        results: The program's results.
        given: Its arguments. A result that is one of these stays what it is.
    """
    arguments = {id(leaf) for leaf in jax.tree_util.tree_leaves(given)}
    leaves, tree = jax.tree_util.tree_flatten(results)
    for place, leaf in enumerate(leaves):
        if id(leaf) not in arguments:
            leaves[place] = _on_caller_p.bind(leaf)
            break
    return jax.tree_util.tree_unflatten(tree, leaves)


def is_lane_zero(plan: Plan, pg: PartitionedGraph) -> bool:
    """Whether a program of the plan's regions on its caller's thread is the plan's only lane, lane 0.

    It is where all regions have that lane, and a lane has no better kernels for them. Then no program is
    needed beside the one around the lanes.
    """
    return all(launch.lane == 0 for launch in plan.launches) and pg.on_caller_ns() <= MAX_NS


def may_help(regions: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> str:
    """In which of ``NAMES``' forms a program may be faster; "" if in none.

    Args:
        regions: What it computes.
        args: What it is called with.
        kwargs: What it is called with.
        options: The user's compiler options.
    """
    if jax.default_backend() != "cpu" or not _compat.dispatches_asynchronously():
        return ""
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return ""  # leaked out of a trace: the call itself will say so
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    if any(len(x.sharding.device_set) > 1 for x in arrays):
        return ""
    if sum(region.flops for region in regions) < costs.HANDED_OVER_FLOPS:
        return ""
    if sum(region.cost_at(1, wide=True) for region in regions) <= MAX_NS:
        return "caller" if handed_out.options_are_free(options) else ""
    shared = sum(region.cost_at(machine.cores(), wide=True) for region in regions)
    return "waited" if shared <= WAITED_FOR_NS else ""
