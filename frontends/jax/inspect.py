"""``explain``, ``verify``, ``profile`` and ``tune`` for scheduled JAX functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dynaflow_xla import machine, verification
from dynaflow_xla.errors import UnsupportedError, VerificationError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters.lifted import Lifted, looks_inside
from dynaflow_xla.frontends.jax.adapters.wrapper import array_copies, same
from dynaflow_xla.frontends.jax.backend import Refused
from dynaflow_xla.frontends.jax.planned import refuse_shapes
from dynaflow_xla.frontends.jax.signature import backends
from dynaflow_xla.frontends.jax.tuning import auto
from dynaflow_xla.planning.table import region_table, time_to_make, widths
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.timelines.simulator import simulate
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.tuning import choice as choosing, quiet
from dynaflow_xla.verification import Report


@looks_inside
def explain(fast: Any, args: Any, kwargs: Any) -> str:
    """The text that ``dynaflow_xla.explain`` returns for a JAX function."""
    try:
        made = fast.planned(args, kwargs)
    except Refused as error:
        if not isinstance(fast._options.strategy, Auto):
            raise
        # It keeps the original of what no strategy may plan, and says so once it has decided.
        lines = _what_runs(fast, args, kwargs)
        return "\n".join(lines if str(error) in lines[-1] else [*lines, f"no plan: {error}"])
    lines = _what_runs(fast, args, kwargs)
    if aside := fast.beside_the_plan(args, kwargs):
        lines.append(f"{aside}:")
    lines.append(f"{fast._options.name}: strategy {made.plan.strategy}, backend {made.where()}")
    if fast._given.backend != made.options.backend:
        lines.append(backends.ON_A_GPU)
    lines += region_table(made.plan, made.pg)
    lines += made.account()
    lines += [f"width: {line}" for line in widths(made.plan, made.pg, machine.cores())]
    known = fast.known_costs(args, kwargs)
    summary = simulate(
        made.plan, made.pg, known, program_ns=made.program_ns, caller_ns=made.caller_ns
    ).summary()
    lines.append(summary + ("" if known is None else "; from measured costs of regions"))
    lines.append(time_to_make(made.seconds))
    lines += made.ran()
    inner = {i for region in made.pg.regions if not region.outer for i in region.ops}
    for op in made.captured.graph.ops:
        if op.outer and op.index not in inner:
            lines.append(f"outer: {op.kind} stays in the outer program: it {op.outer_reason}")
    lines += [f"note: {note}" for note in made.region_notes()]
    return "\n".join(lines)


def _what_runs(fast: Any, args: Any, kwargs: Any) -> list[str]:
    """What a call runs, and why, if that is not the plan of a fixed strategy."""
    name = fast._options.name
    if fast._fallback:
        return [f"{name}: the original runs", f"fallback: {fast._fallback}"]
    if not isinstance(fast._options.strategy, Auto):
        return []
    choice = fast.decision(args, kwargs)
    why = fast.decisions.why_undecided(fast._signature(args, kwargs))
    lines = choosing.what_runs(name, choice, why or "a top-level call decides")
    if choice is not None and (back := fast.stepped_back()):
        lines.append(f"auto: another Python thread is busy; the original runs for {back} calls")
    return lines


def first_difference(want: Any, got: Any) -> str:
    """What differs first, or ""."""
    try:
        compare_trees(want, got)
    except VerificationError as error:
        return str(error)
    return ""


def verify(fast: Any, args: Any, kwargs: Any) -> Report:
    """The report of ``dynaflow_xla.verify``. What the calls did to their arguments is compared, too."""
    refuse_shapes("verify", args, kwargs)
    copies: Callable[[Any], Any] = array_copies
    values: Callable[[Any], Any] = same
    target = fast
    if isinstance(fast, Lifted):
        if not fast.wrapper.compares:
            return fast.inside(verify, args, kwargs)
        copies, values = fast.wrapper.copies, fast.wrapper.values
    elif isinstance(fast._options.strategy, Auto):
        choice = fast.decision(args, kwargs)
        if choice is not None and choice.child is not None:
            target = choice.child

    def run(call: Any) -> tuple[Any, Any]:
        a, k = copies((args, kwargs))
        result = call(*a, **k)
        return values(result), values((a, k))

    original, notes = (
        (fast.original, ()) if isinstance(fast, Lifted) else _as_it_is_now(fast, args, kwargs)
    )
    try:
        want, given = run(original)
    except TypeError as error:
        raise error if isinstance(fast, Lifted) else fast.with_way_out(error, args, kwargs)  # noqa: B904
    got, taken = run(target)
    try:
        rows = _rows("result", want, got)
    except VerificationError as error:
        if original is fast.original or first_difference(run(fast.original)[0], got):
            raise
        raise VerificationError(
            f"{error}. {fast._options.name!r} has the values of its first trace: what it reads from outside "
            "of its arguments (a global, an attribute, a closure, a random number) is read then, as under "
            "jax.jit, and is another one now. Make it an argument, or call clear_cache() of what schedule "
            "returned"
        ) from None
    before = {path: leaf for path, leaf in _leaves("argument", values((args, kwargs)))}
    changed = {
        path for path, leaf in _leaves("argument", given) if not _same_value(before.get(path), leaf)
    }
    rows += [row for row in _rows("argument", given, taken) if row[0] in changed]
    return Report(tuple(rows), notes)


def _as_it_is_now(fast: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[str, ...]]:
    """(the original, notes); with a new trace if that differs from the one that calls have."""
    original, anew = fast.original, fast.jitted_anew()
    if anew is original:
        return original, ()
    try:
        first = original.trace(*args, **kwargs)
    except Exception:  # a call raises the same
        return original, ()
    try:
        second = anew.trace(*args, **kwargs)
    except Exception as error:
        told = (str(error).splitlines() or [""])[0]
        return original, (
            f"compared with the first trace of {fast._options.name!r}: a new one raised "
            f"{type(error).__name__}: {told}{_compat.raised_at(error)}",
        )
    return original if _compat.same_traces(first, second) else anew, ()


def _leaves(what: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves by name; of arguments, positional ones by number and the others by name."""
    skip = 1 if what == "argument" else 0
    return [
        (what + jax.tree_util.keystr(path[skip:]), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _same_value(before: Any, after: Any) -> bool:
    """Whether an argument is as it was."""
    if not isinstance(before, jax.Array) or not isinstance(after, jax.Array):
        return before is after
    if after.is_deleted() or before.is_deleted():
        return True
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return np.asarray(_plain(before)).tobytes() == np.asarray(_plain(after)).tobytes()


def _plain(x: Any) -> Any:
    """The words of a PRNG key, anything else as it is."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def compare_trees(want: Any, got: Any) -> Report:
    """Compares results leaf by leaf; VerificationError at the first that differs too much."""
    return Report(tuple(_rows("result", want, got)))


def _rows(what: str, want: Any, got: Any) -> list[verification.Row]:
    want_leaves, got_leaves = _leaves(what, want), _leaves(what, got)
    want_tree, got_tree = map(jax.tree_util.tree_structure, (want, got))
    if want_tree != got_tree:
        raise VerificationError(f"the {what}'s structure must be {want_tree}; got {got_tree}")
    rows = []
    for (name, w), (_, g) in zip(want_leaves, got_leaves, strict=True):
        if not isinstance(w, jax.Array) or not isinstance(g, jax.Array):
            if not _equal_constants(w, g):
                raise VerificationError(f"{name} must be {w!r}; got {g!r}")
        elif not (w.is_deleted() or g.is_deleted()):  # it was donated
            rows.append(compare(name, w, g))
    return rows


def _equal_constants(want: Any, got: Any) -> bool:
    """Whether two leaves that are no JAX arrays are the same."""
    if want is got:
        return True
    return type(want) is type(got) and bool(np.all(want == got))


def _weak(x: Any) -> bool:
    """Whether a value takes the type of what it meets; a PRNG key cannot."""
    return bool(getattr(x.aval, "weak_type", False))


def compare(name: str, want: Any, got: Any) -> verification.Row:
    """One row of a report; VerificationError if the values differ too much."""
    kind = f"{want.dtype}{list(want.shape)}"
    if (want.dtype, want.shape, _weak(want)) != (got.dtype, got.shape, _weak(got)):
        raise VerificationError(
            f"{name} must be {want.aval}; the scheduled function returned {got.aval}"
        )
    w, g = np.asarray(_plain(want)), np.asarray(_plain(got))
    return verification.compare(name, kind, str(w.dtype), w, g)


@looks_inside
def profile(fast: Any, args: Any, kwargs: Any) -> Timeline:
    """The timeline of ``dynaflow_xla.profile``, measured by the backend of the plan."""
    target = fast.planning(args, kwargs)
    return target.planned(args, kwargs).measured(  # type: ignore[no-any-return]
        target.flat_inputs(args, kwargs), fast._options.name
    )


def timed(fast: Any, args: Any, kwargs: Any, rounds: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of calls on copies, in turns: of the original and of the plan."""
    copies: Callable[[Any], Any] = array_copies
    values: Callable[[Any], Any] = same
    target = fast
    if isinstance(fast, Lifted):
        if not fast.wrapper.compares:
            return fast.inside(lambda f, a, k: timed(f, a, k, rounds), args, kwargs)
        copies, values = fast.wrapper.copies, fast.wrapper.values
    else:
        target = fast.planning(args, kwargs)

    def once(call: Any) -> int:
        a, k = jax.block_until_ready(copies((args, kwargs)))
        start = time.perf_counter_ns()
        jax.block_until_ready(values(call(*a, **k)))
        return time.perf_counter_ns() - start

    calls = (fast.original, target)
    for call in calls:  # they compile
        once(call), once(call)
    each = [tuple(once(call) for call in calls) for _ in range(rounds)]
    return [ns for ns, _ in each], [ns for _, ns in each]


@looks_inside
def tune(fast: Any, args: Any, kwargs: Any, budget_s: float) -> auto.Choice:
    """Decides as ``dynaflow_xla.tune`` says, within the given seconds; returns what was chosen."""
    refuse_shapes("tune", args, kwargs)
    if fast.spans_too_much(args, kwargs):
        raise UnsupportedError(
            f"tune measures lanes, which belong to one device; the arguments of {fast._options.name!r} span "
            "several, or these are the mesh of jax.set_mesh. Tune with arguments on one device"
        )

    def choose(watch: quiet.ActivityWatch) -> auto.Choice:
        signature = fast._signature(args, kwargs)
        made = auto.choose(fast, args, kwargs, watch, budget_s=budget_s)
        before = fast.decisions.measured(signature)  # now: a call may have changed it meanwhile
        choice = choosing.instead_of(before, made, fast._options.name)
        if choice is fast.decisions.decided(signature):
            return choice
        return fast.decide(signature, choice)  # type: ignore[no-any-return]

    return choosing.tuned(fast._options.strategy, budget_s, choose)
