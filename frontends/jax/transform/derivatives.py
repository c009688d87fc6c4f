"""Derivatives of ``dfx_program`` as primitives, with their rules.

``dfx_jvp`` makes results and tangents in one scheduled program: forward mode. Where JAX takes the two apart
(it linearizes: the inputs are known, their tangents are not) it becomes a forward pass, which keeps
residuals, and ``dfx_linear``, which stands for the rest. That is evaluated by a tangent pass, transposed to
a backward pass: reverse mode. All passes are programs themselves, so higher derivatives of every kind
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax._compat import interpreters
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.transform.passes import inexact
from dynaflow_xla.frontends.jax.transform.primitive import (
    DerivativePasses,
    ScheduledProgram,
    batch,
    effects_of,
    program_p,
)
from dynaflow_xla.watching import telling

jvp_p = Primitive("dfx_jvp")
jvp_p.multiple_results = True

linear_p = Primitive("dfx_linear")
linear_p.multiple_results = True


# -- the function itself ---------------------------------------------------------------------------


def _zero_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, program: ScheduledProgram) -> Any:
    wanted = tuple(
        i
        for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        if type(t) is not ad.Zero and inexact(jax.typeof(x))
    )
    moving = program.moving(wanted)
    if not moving:
        outs = program.bind(*primals)
        return outs, [_zero_tangent(x) for x in outs]
    found = jvp_p.bind(*primals, *[tangents[i] for i in wanted], program=program, wanted=wanted)
    count = len(program.out_avals)
    outs, moved = found[:count], dict(zip(moving, found[count:], strict=True))
    return outs, [moved[i] if i in moved else _zero_tangent(x) for i, x in enumerate(outs)]


def _transpose(cotangents: Sequence[Any], *args: Any, program: ScheduledProgram) -> list[Any]:
    linear = tuple(i for i, x in enumerate(args) if ad.is_undefined_primal(x))
    given = tuple(i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    gradients: list[Any] = [None] * len(args)
    if given:
        known = [x for x in args if not ad.is_undefined_primal(x)]
        found = program.transposed(linear, given)(*known, *[cotangents[i] for i in given])
        for i, gradient in zip(linear, found, strict=True):
            gradients[i] = gradient
    return gradients


def _jet(
    primals: Sequence[Any], series: Sequence[Sequence[Any]], *, program: ScheduledProgram
) -> Any:
    order = len(series[0])
    terms = [t for x, ts in zip(primals, series, strict=True) if inexact(jax.typeof(x)) for t in ts]
    found = iter(program.taylor(order)(*primals, *terms))
    outs = [next(found) for _ in program.out_avals]
    return outs, [[next(found) for _ in range(order)] for _ in outs]


jet.jet_rules[program_p] = _jet


def _partial(trace: Any, *tracers: Any, program: ScheduledProgram) -> Any:
    """What depends on known inputs alone is known."""
    unknown = frozenset(i for i, t in enumerate(tracers) if not t.is_known())
    outputs = range(len(program.out_avals))
    late = program.late(unknown)
    early = tuple(i for i in outputs if i not in late)
    if not unknown or not early or not late or effects_of(program):
        return trace.default_process_primitive(program_p, tracers, {"program": program})
    made, read = program.only(early)
    found = dict(zip(early, made(*[tracers[i].pval.get_known() for i in read]), strict=True))
    made, read = program.only(late)
    operands = [*made.whole.consts, *(tracers[i] for i in read)]
    rest = trace.default_process_primitive(program_p, operands, {"program": made})
    found.update(zip(late, rest, strict=True))
    return [found[i] for i in outputs]


def _not_there(eqn: Any, there: Sequence[bool]) -> list[Any]:
    """Operands of an equation that the backward pass of a ``jax.checkpoint`` has to be given."""
    return [v for v, inst in zip(eqn.invars, there, strict=True) if _compat.is_var(v) and not inst]


def _equation_of(
    program: ScheduledProgram, like: Any, invars: Sequence[Any], outvars: Sequence[Any]
) -> Any:
    """An equation of a program: it cannot bind what that closes over, so arrays of its own are literals."""
    literals = map(_compat.literal, program.whole.consts)
    return like.replace(
        primitive=program_p,
        params={"program": program},
        invars=[*literals, *invars],
        outvars=list(outvars),
    )


def _partial_in_checkpoint(
    saveable: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any
) -> Any:
    """The same in ``jax.checkpoint``, which computes again in the backward pass what it does not keep."""
    program = eqn.params["program"]
    missing = _not_there(eqn, there)
    every = [True] * len(eqn.outvars)
    if not any(unknown):
        kept = bool(eqn.effects) or saveable(program_p, *(v.aval for v in eqn.invars), **eqn.params)
        known = [False] * len(every)
        return (eqn, None, known, known, []) if kept is True else (eqn, eqn, known, every, missing)
    behind = program.late(frozenset(i for i, is_unknown in enumerate(unknown) if is_unknown))
    late = [i in behind for i in range(len(every))]
    if all(late) or eqn.effects:
        return None, eqn, every, every, missing
    made, read = program.only(tuple(i for i, is_late in enumerate(late) if not is_late))
    early = [v for v, is_late in zip(eqn.outvars, late, strict=True) if not is_late]
    known = _equation_of(made, eqn, [eqn.invars[i] for i in read], early)
    return known, eqn, late, every, missing


pe.custom_partial_eval_rules[program_p] = _partial
pe.partial_eval_jaxpr_custom_rules[program_p] = _partial_in_checkpoint
ad.primitive_jvps[program_p] = _jvp
ad.primitive_transposes[program_p] = _transpose


# -- forward mode ----------------------------------------------------------------------------------


def _with_consts(
    program: ScheduledProgram, args: Sequence[Any], other: Any
) -> tuple[list[Any], list[Any]]:
    """The operands of a program of its own, and for its constants the same of another kind."""
    consts = program.whole.consts
    return [*consts, *args], [other(x) for x in consts]


def _batch_program(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], program: ScheduledProgram
) -> tuple[Any, Any]:
    values, none = _with_consts(program, args, lambda _: None)
    return batch(axis, values, [*none, *dims], program=program)  # type: ignore[no-any-return]


def _jvp_of_program(
    primals: Sequence[Any], tangents: Sequence[Any], program: ScheduledProgram
) -> Any:
    values, zeros = _with_consts(program, primals, _zero_tangent)
    return _jvp(values, [*zeros, *tangents], program=program)


@jvp_p.def_impl
def _jvp_impl(*args: Any, program: ScheduledProgram, wanted: tuple[int, ...]) -> list[Any]:
    return program.pair(wanted).jvp(*args)


@jvp_p.def_effectful_abstract_eval
def _jvp_abstract(
    *_: Any, program: ScheduledProgram, wanted: tuple[int, ...]
) -> tuple[Sequence[Any], set[Any]]:
    avals = [*program.out_avals, *program.pair(wanted).tangent_avals]
    return avals, effects_of(program)


def _jvp_batch(
    axis: Any, args: Any, dims: Any, *, program: ScheduledProgram, wanted: tuple[int, ...]
) -> Any:
    return _batch_program(axis, args, dims, program.pair(wanted).jvp)


def _jet_of_program(
    primals: Sequence[Any], series: Sequence[Sequence[Any]], program: ScheduledProgram
) -> Any:
    order = len(series[0])
    values, constant = _with_consts(program, primals, lambda x: [jax.numpy.zeros_like(x)] * order)
    return _jet(values, [*constant, *series], program=program)


def _jvp_jet(
    primals: Any, series: Any, *, program: ScheduledProgram, wanted: tuple[int, ...]
) -> Any:
    return _jet_of_program(primals, series, program.pair(wanted).jvp)


def _jvp_jvp(
    primals: Any, tangents: Any, *, program: ScheduledProgram, wanted: tuple[int, ...]
) -> Any:
    return _jvp_of_program(primals, tangents, program.pair(wanted).jvp)


def _jvp_transpose(
    cotangents: Sequence[Any], *args: Any, program: ScheduledProgram, wanted: tuple[int, ...]
) -> list[Any]:
    pair = program.pair(wanted)
    count, results = len(program.in_avals), len(program.out_avals)
    in_tangents = not any(map(ad.is_undefined_primal, args[:count]))
    if in_tangents and all(type(ct) is ad.Zero for ct in cotangents[:results]):
        residuals = pair.forward(*args[:count])[results:]
        gradients = _linear_transpose(
            cotangents[results:], *residuals, *args[count:], pair=pair, residuals=len(residuals)
        )
        return [None] * count + gradients[len(residuals) :]
    values, _ = _with_consts(pair.jvp, args, _zero_tangent)
    return _transpose(cotangents, *values, program=pair.jvp)[len(values) - len(args) :]


def _jvp_partial(
    trace: Any, *tracers: Any, program: ScheduledProgram, wanted: tuple[int, ...]
) -> Any:
    """Inputs that are known, and tangents that are not, part it."""
    count, results = len(program.in_avals), len(program.out_avals)
    primals, tangents = tracers[:count], tracers[count:]
    pair = program.pair(wanted)
    if not all(t.is_known() for t in primals) or all(t.is_known() for t in tangents):
        consts = map(trace.to_jaxpr_tracer, pair.jvp.whole.consts)
        return _partial(trace, *consts, *tracers, program=pair.jvp)
    outs = pair.forward(*[t.pval.get_known() for t in primals])
    residuals = outs[results:]
    moved = trace.default_process_primitive(
        linear_p, [*residuals, *tangents], {"pair": pair, "residuals": len(residuals)}
    )
    return [*outs[:results], *moved]


def _jvp_partial_in_checkpoint(
    saveable: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any
) -> Any:
    """The same in ``jax.checkpoint``, where residuals are kept only if its policy says so."""
    program, wanted = eqn.params["program"], eqn.params["wanted"]
    count, results = len(program.in_avals), len(program.out_avals)
    missing = _not_there(eqn, there)
    if any(unknown[:count]):
        every = [True] * len(eqn.outvars)
        return None, eqn, every, every, missing
    outs, tangents = eqn.outvars[:results], eqn.outvars[results:]
    primals = eqn.invars[:count]
    unknown_outs = [False] * results + [True] * len(tangents)
    avals = [v.aval for v in primals]
    pair = program.pair(wanted)
    if saveable(program_p, *avals, program=program) is True and not pair.forward.whole.consts:
        forward = pair.forward
        residuals = [_compat.new_var(aval) for aval in forward.out_avals[results:]]
        known = eqn.replace(
            primitive=program_p, params={"program": forward}, outvars=[*outs, *residuals]
        ).replace(invars=primals)
        staged = eqn.replace(
            primitive=linear_p,
            params={"pair": pair, "residuals": len(residuals)},
            invars=[*residuals, *eqn.invars[count:]],
            outvars=tangents,
            effects=set(),
        )
        missing = [*residuals, *(v for v in missing if v in eqn.invars[count:])]
        return known, staged, unknown_outs, unknown_outs, missing
    if (parted := _parted(saveable, eqn)) is not None:
        known, staged, unknown_outs, there_outs, residuals = parted
        return known, staged, unknown_outs, there_outs, [*missing, *residuals]
    known = _results_alone(eqn)
    return known, eqn, unknown_outs, [True] * len(eqn.outvars), missing


def _parted(saveable: Any, eqn: Any) -> Any:
    """Two equations of what a policy has kept of the function, and of what it has computed again.

    None where it has all computed again, and where parts cannot be told apart: of a function that is split,
    or that does more than to compute.
    """
    program, wanted = eqn.params["program"], eqn.params["wanted"]
    if program.is_split or eqn.effects:
        return None
    count = len(program.in_avals)
    closed = program.moved(wanted)
    unknown = [i >= count for i in range(len(eqn.invars))]
    try:
        parted = interpreters.by_policy(closed, unknown, saveable)
    except interpreters.Offloads:
        telling.fallback(
            f"a jax.checkpoint around {program!r} has a policy that keeps values in another memory, which a "
            "plan does not do: they are computed again in the backward pass. Put the checkpoint inside of "
            "the scheduled function"
        )
        return None
    if not parted.kept:
        return None
    known = program.part(parted.known, "kept")
    staged = program.part(parted.staged, "again")
    residuals = [_compat.new_var(v.aval) for v in parted.staged.jaxpr.invars[: parted.kept]]
    outs = [v for v, late in zip(eqn.outvars, parted.unknown, strict=True) if not late]
    again = [v for v, there in zip(eqn.outvars, parted.there, strict=True) if there]

    first = _equation_of(known, eqn, eqn.invars[:count], [*outs, *residuals])
    second = _equation_of(staged, eqn, [*residuals, *eqn.invars], again)
    return first, second, parted.unknown, parted.there, residuals


def _results_alone(eqn: Any) -> Any:
    """The equation of the results alone, to be differentiated as they are with their tangents.

    A rule of the function's own makes results, too, and these have derivatives of their own.
    """
    program = eqn.params["program"]
    count, results = len(program.in_avals), len(program.out_avals)
    operands, outs = eqn.invars[:count], eqn.outvars[:results]
    if not capture.has_own_rules(program.whole.jaxpr):
        # Its constants are among the operands already.
        return eqn.replace(
            primitive=program_p, params={"program": program}, invars=operands, outvars=outs
        )
    return _equation_of(program.pair(eqn.params["wanted"]).results, eqn, operands, outs)


def _program_without(used: Sequence[bool], *live_and_equation: Any) -> Any:
    """Without results that nobody reads, and inputs that no operator reads, as ``jax.jit`` leaves them out.

    Where all results are read the plan stays: it is not given such inputs anyway, so what stands for them
    here is never made.
    """
    eqn = live_and_equation[-1]  # as below
    program = eqn.params["program"]
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if (found := program.without(frozenset(i for i, u in enumerate(used) if not u))) is not None:
        made, read = found
        needed = [i in read for i in range(len(eqn.invars))]
        return needed, eqn.replace(
            params={"program": made},
            invars=[*map(_compat.literal, made.whole.consts), *(eqn.invars[i] for i in read)],
            outvars=[v for v, u in zip(eqn.outvars, used, strict=True) if u],
        )
    needed = [True] * len(eqn.invars)
    invars = list(eqn.invars)
    for i in program.unread():
        aval = eqn.invars[i].aval
        if type(aval) is not jax.core.ShapedArray or not isinstance(aval.dtype, np.dtype):
            continue  # references and keys have no literals
        stands = _compat.literal(np.broadcast_to(np.zeros((), aval.dtype), aval.shape))
        if stands.aval == aval.strip_weak_type():  # on a mesh, types say more
            needed[i], invars[i] = False, stands
    return needed, eqn.replace(invars=invars)


def _jvp_without(used: Sequence[bool], *live_and_equation: Any) -> Any:
    """Without what nobody reads: where it is all tangents, the function itself is enough."""
    eqn = live_and_equation[-1]  # from JAX 0.12 on, which inputs are live stands in front of it
    program = eqn.params["program"]
    count, results = len(program.in_avals), len(program.out_avals)
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if any(used[results:]):
        return [True] * len(eqn.invars), eqn
    return [True] * count + [False] * (len(eqn.invars) - count), _results_alone(eqn)


mlir.register_lowering(jvp_p, mlir.lower_fun(_jvp_impl, multiple_results=True))
batching.fancy_primitive_batchers[jvp_p] = _jvp_batch
ad.primitive_jvps[jvp_p] = _jvp_jvp
ad.primitive_transposes[jvp_p] = _jvp_transpose
pe.custom_partial_eval_rules[jvp_p] = _jvp_partial
pe.partial_eval_jaxpr_custom_rules[jvp_p] = _jvp_partial_in_checkpoint
pe.dce_rules[program_p] = _program_without
pe.dce_rules[jvp_p] = _jvp_without
jet.jet_rules[jvp_p] = _jvp_jet


# -- what is linear --------------------------------------------------------------------------------


@linear_p.def_impl
def _linear_impl(*args: Any, pair: DerivativePasses, residuals: int) -> list[Any]:
    return pair.tangent(*args)


@linear_p.def_abstract_eval
def _linear_abstract(*_: Any, pair: DerivativePasses, residuals: int) -> Sequence[Any]:
    return pair.tangent_avals


def _linear_batch(
    axis: Any, args: Any, dims: Any, *, pair: DerivativePasses, residuals: int
) -> Any:
    return _batch_program(axis, args, dims, pair.tangent)


def _linear_jvp(primals: Any, tangents: Any, *, pair: DerivativePasses, residuals: int) -> Any:
    if any(type(t) is not ad.Zero for t in tangents[:residuals]):
        return _jvp_of_program(primals, tangents, pair.tangent)
    moved = [ad.instantiate_zeros(t) for t in tangents[residuals:]]
    given = {"pair": pair, "residuals": residuals}
    outs = linear_p.bind(*primals, **given)
    return outs, linear_p.bind(*primals[:residuals], *moved, **given)


def _linear_jet(primals: Any, series: Any, *, pair: DerivativePasses, residuals: int) -> Any:
    return _jet_of_program(primals, series, pair.tangent)


def _linear_transpose(
    cotangents: Sequence[Any], *args: Any, pair: DerivativePasses, residuals: int
) -> list[Any]:
    given = [
        (i, ct) for i, ct in zip(pair.moving, cotangents, strict=True) if type(ct) is not ad.Zero
    ]
    if not given:
        return [None] * len(args)
    backward = pair.backward(tuple(i for i, _ in given))
    found = backward(*args[:residuals], *[ct for _, ct in given])
    return [None] * residuals + list(found)


mlir.register_lowering(linear_p, mlir.lower_fun(_linear_impl, multiple_results=True))
batching.fancy_primitive_batchers[linear_p] = _linear_batch
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
jet.jet_rules[linear_p] = _linear_jet
