"""The public functions: ``schedule`` and what inspects a scheduled callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeAlias, Unpack, overload

import msgspec

from dynaflow_xla import dispatch
from dynaflow_xla.advice import measuring
from dynaflow_xla.advice.report import Why, why as reasons
from dynaflow_xla.combined import Together
from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.dispatch import EitherFunction, serving
from dynaflow_xla.errors import PlanTypeError, UnsupportedError, bad_argument, checks
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.settings import checked
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.timelines.simulator import simulate as _simulate, where_it_runs
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.typed import M, Options, P, R, ScheduledCallable, Scheduling
from dynaflow_xla.verification import Report
from dynaflow_xla.watching.counters import Stats, stats as _stats

How: TypeAlias = str | Strategy | Mapping[str, str | Strategy]


@overload
def schedule(fn: M, strategy: How = "auto", **options: Unpack[Options]) -> M: ...
@overload
def schedule(
    fn: Callable[P, R], strategy: How = "auto", **options: Unpack[Options]
) -> ScheduledCallable[P, R]: ...
@overload
def schedule(fn: None = None, strategy: How = "auto", **options: Unpack[Options]) -> Scheduling: ...
@overload
def schedule(fn: Any, strategy: How = "auto", **options: Unpack[Options]) -> Any: ...
def schedule(
    fn: Any = None,
    strategy: How = "auto",
    *,
    in_axes: Any = None,
    out_axes: Any = 0,
    batch_size: int | None = None,
    backend: str = "auto",
    lanes: int | Lanes | None = None,
    rules: Sequence[Any] | None = None,
    context: Mapping[str, Any] | None = None,
    select: Any = None,
    target: str | None = None,
    compiler: str = "eager",
    compiler_options: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Any:
    """Returns a callable with the original's values whose regions run as ``strategy`` decides.

    Works as a decorator: ``@dfx.schedule`` or ``@dfx.schedule(strategy="branches")``.

    Args:
        fn: A JAX function or what ``jax.jit`` returns (static and donated arguments are kept); a
            ``torch.nn.Module``, a torch function or a ``torch.export.ExportedProgram``. Where both
            frameworks are loaded, the first call's arguments tell what a plain function is.
        strategy: ``"auto"``, ``"branches"``, ``"search"``, ``"sequential"``, ``"nano_batch"``,
            ``"dual_batch"`` or a ``Strategy``; or a mapping of names to these, see ``select``.
        in_axes: The batch axis of each argument; needed by strategies that split the batch. A mapping by
            parameter name (``{"input_ids": 0, "attention_mask": 0}``), which holds however an argument
            is passed, the others having no batch; or as for ``jax.vmap`` an axis, or a tuple with an entry
            for each positional argument (arguments by keyword along axis 0); or a pair of such a tuple
            and a mapping for arguments by keyword. An entry may be a tree that is the argument's prefix.
        out_axes: How each result of a split is put together: its batch axis, ``Sum()``, ``Mean()``
            (weighted by the nano-batches' sizes), or None where it does not depend on the batch; for
            a mapping or a dataclass also by name (``{"loss": dfx.Mean()}``, the others along axis 0).
        batch_size: Rows the batch must have, as a check.
        backend: ``"auto"``, ``"ffi"`` (XLA programs on lanes of this machine's cores), ``"xla"`` (one
            XLA program whose CUDA graph has the plan's order; on a CPU a plain program with the same
            values) or ``"torch"`` (PyTorch's own operators on lanes, what ``"auto"`` takes for torch).
            Torch models run on all of them. For JAX ``"auto"`` is ``"xla"`` where it computes on a GPU, else
            ``"ffi"``. With ``"ffi"`` on a GPU a compile on another thread while a call runs may block both
            for ever (seen on an H100 with jaxlib 0.11.2).
        lanes: Number of lanes; default: the cores of this process, at most 8; with ``"xla"``, and
            for PyTorch on a GPU: 8. On a GPU a ``Lanes`` gives them priorities and multiprocessors of their
            own; on a CPU more ``Lanes`` than cores are refused at the first call, which tells where it runs.
        rules: Where to cut; default: the strategy's rules, else automatic.
        context: The user's own data for the strategy, as ``s.context.user``.
        select: Chooses among several plans at each call, without compiling again: ``strategy`` is then a
            mapping of names to strategies (``"original"`` stands for the original), and ``select`` a
            function of the call (``call.args``, ``call.kwargs``, ``call.batch``: rows, if ``in_axes`` is
            given, ``call.context``: the mapping given as ``context`` itself) that returns a name, an
            index, or for two a truth value (False: the first). Inside a JAX program a traced index or
            truth value decides when the program runs.
        target: The GPU that ``compile`` and ``explain(deep=True)`` compile for, without one at hand:
            a name such as ``"nvidia-h200"`` or the path of an XLA target text. Implies ``"xla"``.
        compiler: How PyTorch regions run: ``"eager"`` (operator by operator), ``"inductor"``, ``"aoti"``
            (AOTInductor), or ``"auto"``, which measures. What follows on a lane is one program, kept on disk.
            Under ``Auto`` with a compiler, ``torch.compile`` of the whole is measured, too.
        compiler_options: JAX: passed to the compilation of every lane program; with ``"xla"`` they win
            over the options that the plan needs. PyTorch: ``dynamic`` and ``fullgraph`` as in
            ``torch.compile``, or Inductor's options.
        check: Where it could not be proved that a split keeps the values, compare on the first call.

    Returns:
        The scheduled callable; ``.original`` is the original. A plain function of JAX is treated as under
        ``jax.jit``, and ``.original`` is that: what it reads from outside of its arguments (globals,
        attributes, closures) is read when it is traced, until ``.clear_cache()``; ``verify`` looks again.

    Raises:
        PlanError: an argument of ``schedule`` is out of range.
        RuleError: ``rules`` holds something that is no rule.
        UnsupportedError: the framework is missing or outside the supported versions, or the request
            is outside this version.
    """
    arguments: dict[str, Any] = {
        "strategy": strategy, "in_axes": in_axes, "out_axes": out_axes, "batch_size": batch_size,
        "backend": backend, "lanes": lanes, "rules": rules, "context": context, "select": select,
        "target": target, "compiler": compiler, "compiler_options": compiler_options, "check": check,
    }  # fmt: skip
    if fn is None:
        return lambda function: schedule(function, **arguments)
    settings = checked(fn, **arguments)
    if target is not None:
        settings = replace(settings, target=dispatch.target(target))
    framework = dispatch.framework_of(fn, settings)
    if framework == "either":
        return EitherFunction(fn, settings)
    return dispatch.frontend(framework).schedule(dispatch.given(fn), settings)


def together(
    *functions: Any,
    strategy: How = "auto",
    names: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Together:
    """Several functions as one plan: prefill beside decode, teacher beside student, an ensemble.

    The strategy sees the regions of all and whose each is (``op.function``). A call has an entry for each
    function and returns a tuple of their results::

        both = dfx.together(prefill, decode, strategy="branches")
        out, token = both((params, prompt), {"params": params, "cache": cache})

    An entry is a tuple of positional arguments, a dictionary of arguments by keyword, or
    ``dfx.Arguments(...)`` of both; anything else is the only argument. The values are those of the
    functions called one after the other. Derivatives, transformations and the functions that inspect a
    scheduled one work as on any; modules keep their parameters, and their own train or eval mode.

    Args:
        *functions: Two or more, as ``schedule`` takes them, all of one framework.
        strategy: As for ``schedule``.
        names: What to call each; default: its own name, numbered where several have the same.
        **options: As for ``schedule``. ``in_axes`` and ``out_axes`` have an entry for each function (a
            tuple, or a mapping by name), None for one without a batch; ``select`` gets a call whose
            ``args`` are a ``dfx.Arguments`` for each function.

    Raises:
        PlanError: fewer than two functions, names that are the same, or an option out of range.
        UnsupportedError: functions of two frameworks.
    """
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise PlanTypeError(
            f"together has no option {unknown[0]!r}; it takes names and those of schedule: "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    arguments = {**_OF_SCHEDULE, **options, "strategy": strategy}
    settings = checked(functions, **arguments)
    if settings.target is not None:
        settings = replace(settings, target=dispatch.target(settings.target))
    return Together(functions, names, settings)


_OF_SCHEDULE = {
    name: parameter.default
    for name, parameter in inspect.signature(schedule).parameters.items()
    if name not in ("fn", "strategy")
}
_OPTIONS = frozenset(_OF_SCHEDULE)


def bucketed(
    fast: Any, sizes: Sequence[int], *, in_axes: Any, out_axes: Any = 0, check: bool = True
) -> Any:
    """A scheduled PyTorch function or module that is called at few sizes of its batch.

    A plan, and on a GPU its CUDA graph, is for one size. Each batch is padded to the next bucket by its
    last row repeated, and the rows that were added are cut from the results. That keeps the values only
    if rows do not depend on each other.

    Args:
        fast: What ``schedule`` returned for PyTorch.
        sizes: The buckets.
        in_axes: The batch axis of each positional argument, None where it has none; one for all tensors;
            by name of an argument; or a pair, of positional and of keyword arguments.
        out_axes: The same for the result, or for each element of a tuple.
        check: Compare the first padded call at each bucket with the original at the batch's own size.

    Returns:
        A callable with the arguments and values of ``fast``. An argument that is padded must not be written.

    Raises:
        PlanError: sizes or axes that cannot be.
        UnsupportedError: ``fast`` is no scheduled PyTorch function or module.
    """
    return dispatch.bucketed(fast, sizes, in_axes, out_axes, check)


def graph(fast: Any, /, *args: Any, **kwargs: Any) -> PartitionedGraph:
    """The partitioned graph for these arguments.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays, tensors or ``jax.ShapeDtypeStruct``; nothing runs.
        **kwargs: As ``args``.
    """
    return serving(fast, "graph", args, kwargs).planned(args, kwargs).pg


def plan(fast: Any, /, *args: Any, **kwargs: Any) -> Plan:
    """The validated plan for these arguments.

    Where ``Auto`` runs the original it is the plan of a candidate; a note of the plan says so.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays, tensors or ``jax.ShapeDtypeStruct``.
        **kwargs: As ``args``.
    """
    made = serving(fast, "plan", args, kwargs)
    found = made.planned(args, kwargs).plan
    if aside := made.beside_the_plan(args, kwargs):
        return msgspec.structs.replace(found, notes=(*found.notes, aside))
    return found


def _said(timeline: Timeline, aside: str) -> Timeline:
    """The timeline, with a note if the plan behind it is not what a call runs."""
    if not aside:
        return timeline
    notes = [*timeline.meta.get("notes", ()), aside]
    return msgspec.structs.replace(timeline, meta={**timeline.meta, "notes": notes})


def simulate(fast: Any, /, *args: Any, costs: Any = None, **kwargs: Any) -> Timeline:
    """The predicted timeline for these arguments, and what no plan could beat (``.bound``).

    Args:
        fast: What ``schedule`` returned.
        *args: Arrays or ``jax.ShapeDtypeStruct``; nothing runs.
        costs: Nanoseconds by region name or id, or a timeline that ``profile`` measured, of this plan or of
            another strategy's: regions are known by what they compute. Regions left out cost what is
            estimated. Default: what ``tune`` measured, else estimates.
        **kwargs: As ``args``; ``costs`` of the function itself in a ``functools.partial``.

    Raises:
        PlanError: a cost that is no time, or of a region that does not exist; a timeline that has none of
            the regions.
    """
    made = serving(fast, "simulate", args, kwargs)
    entry = made.planned(args, kwargs)
    if costs is None:
        costs = made.known_costs(args, kwargs)
    return _said(
        _simulate(
            entry.plan,
            entry.pg,
            costs,
            program_ns=entry.program_ns,
            caller_ns=entry.caller_ns,
            **where_it_runs(entry),
        ),  # fmt: skip
        made.beside_the_plan(args, kwargs),
    )


def explain(fast: Any, /, *args: Any, deep: bool = False, **kwargs: Any) -> str:
    """A readable account: regions, lanes, costs, sources, copies, notes, decisions.

    With ``select`` it begins with all plans and how often each ran; what follows is of the one that is
    chosen for these arguments.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays, tensors or ``jax.ShapeDtypeStruct``.
        deep: With backend ``"xla"`` it is followed by what ``compile`` reads back, or without a GPU and a
            target by what is in the program for this CPU.
        **kwargs: As ``args``; ``deep`` of the function itself in a ``functools.partial``.

    Raises:
        PlanError: ``deep`` is neither True nor False.
        UnsupportedError: ``deep`` of a function whose backend is not ``"xla"``.
    """
    deep = checks.flag("deep, which explain has itself,", deep)
    served = serving(fast, "explain", args, kwargs)
    try:
        return served.explain(args, kwargs, deep=deep)
    except UnsupportedError as error:
        if not deep:
            raise
        served.explain(args, kwargs, deep=False)  # raises, where it is not for ``deep``
        raise UnsupportedError(
            f"deep=True of explain asks for what compile reads back. {error} If deep is an argument of the "
            "function itself, bind it: dfx.explain(functools.partial(fast, deep=True), ...)"
        ) from error


def compile(fast: Any, /, *args: Any, target: Any = None, **kwargs: Any) -> Any:
    """Compiles for a GPU, in another process, and reads back what XLA made of the plan.

    Needs no GPU: the CUDA plugin compiles for the target. Arguments that are spread over n devices
    make it a program for n of these GPUs.

    Args:
        fast: What ``schedule`` returned, or a ``jax.jit`` function with that inside (under
            ``shard_map`` or ``grad``, in a training step).
        *args: Arrays or ``jax.ShapeDtypeStruct``.
        target: As for ``schedule``; default: the one given there, else the GPU of this machine.
        **kwargs: As ``args``; ``target`` of the function itself in a ``functools.partial``.

    Returns:
        A report: kernels, library calls and copies of each region beside the original program's,
        the order edges that the CUDA graph holds, those that it has beyond the plan, memory.
        ``str(report)`` and ``report.to_json()``.

    Raises:
        PlanError: no target is given and this machine has no known GPU.
        UnsupportedError: the CUDA plugin is missing, the backend is not ``"xla"``, or the program
            calls back into Python.
        EngineError: XLA refused the program or the target; with its message.
    """
    return dispatch.compiling(fast, args, kwargs).compile(args, kwargs, target)


def compiler_options(fast: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The XLA options under which the program of these arguments has its plan's order.

    A top-level call applies them on CUDA. Inside a ``jax.jit`` of your own, give them to it:
    ``jax.jit(step, compiler_options=dfx.compiler_options(fast, *args))``.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: As ``args``.
    """
    return serving(fast, "compiler_options", args, kwargs).compiler_options(args, kwargs)


def verify(fast: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Runs the original and the scheduled function on the same arguments and compares.

    A plain function of JAX is traced anew for it: what it reads from outside may have changed since a
    call traced it (what an inner ``jax.jit``, or a function of equinox's or flax's objects, read is not
    looked at).

    Elements may differ by ``r`` times their size and ``r`` times the root mean square of their output
    (elements that a mask filled in left out): ``r`` is 2e-5 for float32 and complex64, 1e-12 for float64
    and complex128, 2e-3 for float16, 2e-2 for bfloat16. NaNs, infinities and other types must be equal.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays or tensors; nothing of them is changed.
        **kwargs: As ``args``.

    Returns:
        A report, one line an output (``str(report)``).

    Raises:
        VerificationError: naming the first output that differs beyond its dtype's tolerance. There is no
            report of the others: its ``.report`` is None.
    """
    return serving(fast, "verify", args, kwargs).verify(args, kwargs)


def debug(fast: Any, /, *args: Any, rounds: int = 24, seed: int = 0, **kwargs: Any) -> DebugReport:
    """Runs the plan of these arguments many times in ways that hide nothing, and compares region by region.

    First the regions run one after another, in the plan's order; then the plan's memory is followed on
    paper, with each region that meets other lanes as early as it may run. Then each round runs them all in
    another way: one lane at a time in an order that the plan allows; on the engine's lanes, with random
    pauses; on other lanes in another order (a new plan of the same regions, which is proved first); and
    with the backend "ffi" the compiled lane programs, whose shared memory and results are full of NaN at
    first, with pauses. Memory that operators allocate and do not write holds poison. Each region's results
    must have the bits of the first run.

    A PyTorch call whose results can be differentiated is followed by its backward, which is looked at, too.

    Args:
        fast: What ``schedule`` returned. Under ``Auto`` the plan that it chose is looked at, or that of
            a candidate.
        *args: Arrays or tensors; nothing of them is changed.
        rounds: How many rounds.
        seed: Of all that is drawn at random. Threads run as they like, so that a round with pauses
            is not the same twice.
        **kwargs: As ``args``; ``rounds`` or ``seed`` of the function itself in a ``functools.partial``.

    Returns:
        A report (``str(report)``).

    Raises:
        VerificationError: with ``.report``, a ``DebugReport``; names the first region whose result changed,
            that read what was not written, or wrote when it had ended: its lane, operators, file and line.
        UnsupportedError: the function has effects, which must not happen so often. (Of a PyTorch function
            that breaks into several graphs, the code before the first one runs to find that out.)
        PlanError: ``rounds`` or ``seed`` are no counts.
    """
    return serving(fast, "debug", args, kwargs).debug(args, kwargs, rounds, seed)


def check_determinism(fast: Any, /, *args: Any, runs: int = 10, **kwargs: Any) -> DeterminismReport:
    """Calls ``fast`` several times on copies of the arguments; all results must have the same bits.

    Random states are put back before each call, so that what is drawn from them is the same.

    Args:
        fast: What ``schedule`` returned.
        *args: Arrays or tensors.
        runs: How many calls.
        **kwargs: As ``args``; ``runs`` of the function itself in a ``functools.partial``.

    Returns:
        A report (``str(report)``).

    Raises:
        VerificationError: with ``.report``, a ``DeterminismReport``; names the first output that differs, and
            the first region that does when the regions run one after another.
        UnsupportedError: the function has effects.
        PlanError: ``runs`` is no count.
    """
    return serving(fast, "check_determinism", args, kwargs).check_determinism(args, kwargs, runs)


def profile(fast: Any, /, *args: Any, **kwargs: Any) -> Timeline:
    """Runs with time stamps at region ends; returns the measured timeline.

    The stamped program is compiled for this purpose; stamps keep regions apart, so that sums can
    be a little longer than an ordinary call. Lane programs run a few times and the fastest run
    counts; outer regions, which may have effects, run once. Time between the two is left out.
    Where ``Auto`` runs the original, a candidate's plan is what is measured, and a note says so.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays or tensors; nothing of them is changed.
        **kwargs: As ``args``.
    """
    made = serving(fast, "profile", args, kwargs)
    return _said(made.profile(args, kwargs), made.beside_the_plan(args, kwargs))


def why(fast: Any, /, *args: Any, measure: bool = True, rounds: int = 15, **kwargs: Any) -> Why:
    """Says why a plan gains or does not, which pairs of regions do not overlap, and what decisions are worth.

    Regions are measured one after another on one core, and in the plan; calls of the original and of the
    plan are timed in turns, on copies of the arguments. From these follow, for each pair of long regions, the
    reason why they do not run side by side, and the bound that stands in the plan's way first. Then each
    lane, wait and move is taken away, and the plan simulated again with the measured times.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays or tensors; nothing of them is changed. Without ``measure`` also shapes.
        measure: False: nothing runs; all times are the cost model's.
        rounds: Calls of each that are timed.
        **kwargs: As ``args``; ``measure`` or ``rounds`` of the function itself in a ``functools.partial``.

    Returns:
        A report: ``str(report)`` is a table, ``report.to_dict()`` the same as data,
        ``report.timeline.to_html(path)`` a page with the reasons at the regions.

    Raises:
        PlanError: ``rounds`` is no count.
        UnsupportedError: calls have effects, so that they must not be repeated. With ``measure=False``
            nothing runs.
    """
    served = serving(fast, "why", args, kwargs)
    number = checks.integer(rounds)
    if number is None or number < 1:
        raise bad_argument(rounds, Integral, f"rounds must be an integer >= 1; got {rounds!r}")
    return reasons(measuring.given(served, args, kwargs, number if measure else None))


def stats(reset: bool = False) -> Stats:
    """Counts of this process: runs on lanes, plans, compilations, decisions, fallbacks, bytes copied.

    Args:
        reset: What is counted from now on begins at 0; what is returned does not.

    Returns:
        A dataclass of integers (``str(stats)``: a line each).

    Raises:
        PlanError: ``reset`` is neither True nor False.
    """
    return _stats(checks.flag("reset", reset))


def tune(fast: Any, /, *args: Any, budget_s: float = 30.0, **kwargs: Any) -> Any:
    """Measures Auto's candidates on these arguments now and keeps the decision.

    JAX: regions are profiled first; their times predict which candidates are worth measuring, and
    stay with the decision for ``simulate`` and ``explain``.

    Args:
        fast: What ``schedule`` or ``together`` returned.
        *args: Arrays or tensors; nothing of them is changed.
        budget_s: Seconds that it may take, compiling included.
        **kwargs: As ``args``; ``budget_s`` of the function itself in a ``functools.partial``.

    Raises:
        PlanError: the function has a fixed strategy, or the budget does not suffice.
        RuntimeError: other threads of this process ran meanwhile: such times are not trusted.
    """
    return serving(fast, "tune", args, kwargs).tune(args, kwargs, budget_s)
