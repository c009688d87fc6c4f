"""Operators that name devices: a lane has a device of its own, so it cannot run them as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend import core as jcore

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.ir.graph import placed

REASON = "names devices"
"""Why such an operator stays in the outer program."""


def named(eqn: Any) -> Iterator[Any]:
    """The shardings and devices among the parameters of an equation.

    Args:
        eqn: Of a jaxpr.
    """
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jax.sharding.Sharding | jax.Device):
                yield part


def names_devices(eqn: Any) -> bool:
    """Whether an equation can run on the devices that it names only.

    Inside ``shard_map`` results have types with a mesh of no devices, which fit any.
    """
    if eqn.primitive.name == "sharding_constraint":
        return True
    return any(
        not isinstance(getattr(place, "mesh", None), jax.sharding.AbstractMesh)
        for place in named(eqn)
    )


def widest(eqns: Iterable[Any]) -> tuple[int, Any]:
    """The most devices that an operator places values on, and that operator (None: none names any).

    Args:
        eqns: Looked into with what they call; what ``shard_map`` maps is the map's own.
    """
    most: tuple[int, Any] = (0, None)
    for eqn in eqns:
        for place in named(eqn):
            if not isinstance(place, jax.sharding.Sharding):
                continue
            if not isinstance(getattr(place, "mesh", None), jax.sharding.AbstractMesh):
                most = max(most, (place.num_devices, eqn), key=lambda found: found[0])
        if eqn.primitive.name == "shard_map":
            continue
        for inner in jcore.jaxprs_in_params(eqn.params):
            most = max(most, widest(inner.eqns), key=lambda found: found[0])
    return most


def too_wide(eqn: Any, count: int, name: str) -> str:
    """Why lanes cannot run a function of which an operator places values on several devices, and what can."""
    return (
        f"{eqn.primitive.name}{placed(_compat.user_source(eqn))} inside the scheduled function {name} places "
        f"values on {count} devices, but lanes belong to one. Call the scheduled function inside "
        "jax.shard_map (each device runs its plan), place the results outside of it, use backend='xla', or "
        "call fast.original."
    )


def changes_nothing(eqn: Any) -> bool:
    """Whether an equation only says that values lie where everything lies: on the one default device."""
    if eqn.primitive.name not in ("sharding_constraint", "device_put"):
        return False
    if eqn.params.get("layout") is not None:
        return False
    asked = [*given(eqn), *(place for place in eqn.params.get("srcs", ()) if place is not None)]
    places = list(named(eqn))  # a format, which is more than a place, is none of them
    return len(places) == len(asked) and all(map(_is_default, places))


def without_default(eqn: Any) -> Any:
    """The equation, its results on the one default device anyway, without saying so; in bodies, too."""
    if eqn.primitive.name in _WITH_BODIES:
        return _with_inner(eqn)
    given = [key for key in ("sharding", "out_sharding") if eqn.params.get(key) is not None]
    if not given or eqn.primitive.name == "sharding_constraint":
        return eqn
    if not all(_is_default(eqn.params[key]) for key in given):
        return eqn
    return eqn.replace(params={**eqn.params, **dict.fromkeys(given)})


_WITH_BODIES = frozenset({"scan", "while", "cond"})


def _with_inner(eqn: Any) -> Any:
    """The equation with programs in it that do not place values where everything lies."""
    if eqn.primitive.name == "device_put":
        if not changes_nothing(eqn) or not any(named(eqn)):
            return eqn
        nowhere = (None,) * len(eqn.invars)
        return eqn.replace(params={**eqn.params, "devices": nowhere, "srcs": nowhere})
    params = {key: _compat.with_inner(value, _unplaced) for key, value in eqn.params.items()}
    changed = any(params[key] is not value for key, value in eqn.params.items())
    return eqn.replace(params=params) if changed else eqn


def _unplaced(jaxpr: Any) -> Any:
    eqns = [*map(_with_inner, jaxpr.eqns)]
    same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def given(eqn: Any) -> Any:
    """What says where to: the parameter, with an entry for each operand."""
    devices = eqn.params.get("devices", (eqn.params.get("sharding"),))
    return [place for place in devices if place is not None]


def _is_default(place: Any) -> bool:
    default = jax.devices()[0]
    if isinstance(place, jax.Device):
        return place == default
    if not isinstance(place, jax.sharding.Sharding):
        return False
    if place.num_devices != 1:
        return False
    if place.memory_kind not in (None, default.default_memory().kind):
        return False
    mesh = getattr(place, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return True
    return place.device_set == {default}
