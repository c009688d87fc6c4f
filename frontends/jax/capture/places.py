"""Where the results of a function lie, which JAX looks for in its operators, and not inside of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core as jcore

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import sharding
from dynaflow_xla.frontends.jax.capture.capture import INLINE

Place = Callable[[Any], Any]
"""Puts a result where the original says that it lies."""


def called(program: Callable[..., Sequence[Any]], jaxpr: Any, ins: Sequence[Any]) -> list[Any]:
    """A flat program of a function, its arguments in the device's memory, its results where they belong."""
    there = [_compat.to_memory(x, host=False) if _lies_in_host(x) else x for x in ins]
    places = of_results(jaxpr)
    if places and not any(places) and (where := _named_within(jaxpr)) is not None:
        places[0] = where
    placed = zip(places, program(*there), strict=True)
    return [out if place is None else place(out) for place, out in placed]


def _lies_in_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and _compat.in_host_memory(jax.typeof(x))


def of_results(jaxpr: Any) -> list[Place | None]:
    """What the function itself puts each result by; None: nothing.

    A sharding over one device changes no value, but is what ``result.sharding`` says; and memory of the host
    is another one.

    Args:
        jaxpr: Of the function.
    """
    made_by = {var: (eqn, n) for eqn in jaxpr.eqns for n, var in enumerate(eqn.outvars)}
    inside: dict[int, list[Place | None]] = {}  # of each call once: they nest

    def place(atom: Any) -> Place | None:
        if _compat.in_host_memory(atom.aval):
            return lambda x: _compat.to_memory(x, host=True)
        if not _compat.is_var(atom) or atom not in made_by:
            return None
        eqn, number = made_by[atom]
        inner = eqn.params.get(INLINE.get(eqn.primitive.name, ""))
        if inner is None:
            return _of_operator(eqn, number)
        if id(eqn) not in inside:
            inside[id(eqn)] = of_results(getattr(inner, "jaxpr", inner))
        return inside[id(eqn)][number]

    return list(map(place, jaxpr.outvars))


def _named_within(jaxpr: Any) -> Place | None:
    """What puts any result where all lie, if an operator inside names that; None: none does.

    JAX then takes the function for one of that device, or of that mesh, whoever reads the operator's result.
    """
    found = list(_places_within(jaxpr))
    for where in sorted(found, key=lambda where: isinstance(where, jax.Device)):
        mesh = getattr(where, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size == 1:
            where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        elif mesh is not None:
            continue
        return partial(jax.device_put, device=where)
    return None


def _places_within(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if sharding.changes_nothing(eqn):
            yield from sharding.given(eqn)
        elif eqn.primitive.name == "shard_map":
            yield jax.sharding.NamedSharding(eqn.params["mesh"], jax.sharding.PartitionSpec())
        for inner in jcore.jaxprs_in_params(eqn.params):
            yield from _places_within(inner)


def _of_operator(eqn: Any, number: int) -> Place | None:
    """The same of one result of an operator."""
    name, params = eqn.primitive.name, eqn.params
    if name == "device_put" and sharding.changes_nothing(eqn):
        target = sharding.given(eqn)[number : number + 1]
        return (lambda x: jax.device_put(x, target[0])) if target else None
    if name == "shard_map" and isinstance(params["mesh"], jax.sharding.Mesh):
        where = jax.sharding.NamedSharding(params["mesh"], params["out_specs"][number])
    elif name == "sharding_constraint":
        where = params["sharding"]
    else:
        return None
    abstract = isinstance(getattr(where, "mesh", None), jax.sharding.AbstractMesh)
    if abstract or not isinstance(where, jax.sharding.Sharding) or where.num_devices > 1:
        return None
    return lambda x: jax.lax.with_sharding_constraint(x, where)
