"""What JAX's other interpreters of programs are told of our primitives, and of its own that say little.

``checkify``, ``sparsify``, ``jax.debug_key_reuse`` and ``jax.checkpoint`` have no public names for rules.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import partial_eval as pe
from jax.extend import core as jcore

from dynaflow_xla.caches.recent import Recent


def check_as(primitive: Any, plain: Callable[..., Callable[..., list[Any]]]) -> None:
    """Has ``checkify`` look into what a primitive stands for; otherwise it finds nothing, silently.

    Args:
        primitive: Bound with many results.
        plain: Of its parameters, what it computes.
    """
    from jax._src import checkify

    # Since JAX 0.12 a context comes first.
    first = 1 if next(iter(inspect.signature(checkify.checkify_jaxpr).parameters)) == "ctx" else 0

    def rule(*given: Any, **parameters: Any) -> Any:
        error, enabled_errors, *values = given[first:]
        closed = jax.make_jaxpr(plain(**parameters))(*values)
        return checkify.checkify_jaxpr(*given[:first], closed, enabled_errors, error, *values)

    checkify.error_checks[primitive] = rule


_SPARSE = ("bcoo", "bcsr", "coo", "csr")
_written_out: Recent[Any, Any] = Recent(64)


def sparse_jaxpr(eqn: Any) -> Any:
    """What an operator of ``jax.experimental.sparse`` is lowered to, as a jaxpr; None for other operators.

    Their primitives have no jaxpr among their parameters; the Python function of ``p`` is called ``_p_impl``.
    """
    name = eqn.primitive.name
    family = name.partition("_")[0]
    module = sys.modules.get(f"jax.experimental.sparse.{family}") if family in _SPARSE else None
    function = getattr(module, f"_{name}_impl", None)
    if function is None:
        return None
    avals = tuple(v.aval for v in eqn.invars)
    key = (name, avals, tuple(sorted((k, str(v)) for k, v in eqn.params.items())))
    made = _written_out.get(key)
    if made is None:
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        made = jax.make_jaxpr(functools.partial(function, **eqn.params))(*given).jaxpr
        _written_out[key] = made
    return made


def sparse_as(primitive: Any, plain: Callable[..., Callable[..., list[Any]]]) -> None:
    """The same for ``sparsify``, which knows an operator or refuses it."""
    from jax.experimental.sparse import transform

    def rule(spenv: Any, *values: Any, **parameters: Any) -> Any:
        return transform.sparsify_raw(plain(**parameters))(spenv, *values)[0]

    transform.sparse_rules_bcoo[primitive] = rule
    transform.sparse_rules_bcsr[primitive] = rule


def keys_as(primitive: Any, plain: Callable[..., tuple[Callable[..., Any], Sequence[Any]]]) -> None:
    """The same for ``jax.debug_key_reuse``, for which an unknown operator uses up all keys it is given.

    Args:
        primitive: The operator.
        plain: Of its parameters, what it does with keys, and the types of the operands for that, its first.
    """
    from jax.experimental.key_reuse import _core as key_reuse

    def rule(eqn: Any) -> Any:
        computed, avals = plain(**eqn.params)
        found = key_reuse.jaxpr_type_signature(jax.make_jaxpr(computed)(*avals).jaxpr)
        count = len(avals)  # what is closed over comes after that
        return key_reuse.KeyReuseSignature(
            *found.sources,
            *(sink for sink in found.sinks if sink.idx < count),
            *(forward for forward in found.forwards if forward.in_idx < count),
        )

    key_reuse.key_reuse_signatures[primitive] = key_reuse.dynamic_key_reuse_signature(rule)


def keys_left(primitive: Any, *, passed_on: bool) -> None:
    """Has an operator use up no key; its one result may be its operand."""
    from jax.experimental.key_reuse import _core as key_reuse

    forwards = [key_reuse.Forward(0, 0)] if passed_on else []
    key_reuse.key_reuse_signatures[primitive] = key_reuse.KeyReuseSignature(*forwards)


def checks_keys() -> bool:
    """Whether a key may be used once only (``jax.debug_key_reuse``)."""
    return bool(jax.config.values.get("jax_debug_key_reuse", False))


class Parted(NamedTuple):
    """A function in two, as ``jax.checkpoint`` has it: what runs at once, and what runs in the backward pass.

    Attributes:
        known: The known inputs to the known results, and to what is kept.
        staged: What is kept, and all inputs, to the results that are ``there``.
        kept: How many values are kept.
        unknown: Which results depend on unknown inputs.
        there: Which results the second one has.
    """

    known: jcore.ClosedJaxpr
    staged: jcore.ClosedJaxpr
    kept: int
    unknown: list[bool]
    there: list[bool]


class Offloads(Exception):
    """A policy has something kept in another memory."""


def by_policy(closed: Any, unknown: Sequence[bool], saveable: Callable[..., Any]) -> Parted:
    """Parts a function by a policy of ``jax.checkpoint``, which is asked for each of its operators.

    Args:
        closed: The function.
        unknown: Which of its inputs are unknown.
        saveable: The policy.

    Raises:
        Offloads: it has something kept in another memory.
    """

    def asked(*given: Any, **params: Any) -> Any:
        answer = pe.ensure_enum(saveable(*given, **params))
        if isinstance(answer, pe.Offloadable):
            raise Offloads
        return answer

    known, staged, unknown_outs, there, kept = pe.partial_eval_jaxpr_custom(
        closed.jaxpr, list(unknown), True, False, False, asked
    )
    first, second = (jcore.ClosedJaxpr(part, closed.consts) for part in (known, staged))
    return Parted(first, second, kept, list(unknown_outs), list(there))
