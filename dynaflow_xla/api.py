"""The public functions: ``schedule`` and what inspects a scheduled callable."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import msgspec

from dynaflow_xla import _optional, checks, selection as _selection
from dynaflow_xla.errors import (
    PlanError,
    PlanTypeError,
    UnsupportedError,
    UnsupportedTypeError,
    bad_argument,
)
from dynaflow_xla.ir.graph import PartitionedGraph
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.kernels import Lanes, thread_lanes
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.dual_batch import DualBatch
from dynaflow_xla.strategies.nano_batch import NanoBatch
from dynaflow_xla.strategies.sequential import Sequential
from dynaflow_xla.timelines.simulator import simulate as _simulate
from dynaflow_xla.verification import Report

if TYPE_CHECKING:
    from dynaflow_xla.timelines.timeline import Timeline

_BY_NAME: dict[str, Callable[[], Strategy]] = {
    "auto": Auto,
    "branches": Branches,
    "dual_batch": DualBatch,
    "nano_batch": NanoBatch,
    "sequential": Sequential,
}


def schedule(
    fn: Any = None,
    strategy: str | Strategy | Mapping[str, str | Strategy] = "auto",
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
        strategy: ``"auto"``, ``"branches"``, ``"sequential"``, ``"nano_batch"``, ``"dual_batch"`` or a
            ``Strategy``; or a mapping of names to these, see ``select``.
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
            Torch models run on all of them.
        lanes: Number of lanes; default: the cores of this process, at most 8; with ``"xla"``: 4. On a
            GPU a ``Lanes`` gives them priorities and multiprocessors of their own.
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
        compiler: How PyTorch regions run: ``"eager"`` (operator by operator), ``"inductor"``, or
            ``"aoti"`` (AOTInductor: no interpreter inside a region). Compiled regions are kept on disk.
        compiler_options: JAX: passed to the compilation of every lane program; with ``"xla"`` they win
            over the options that the plan needs. PyTorch: ``dynamic`` and ``fullgraph`` as in
            ``torch.compile``, or Inductor's options.
        check: Where it could not be proved that a split keeps the values, compare on the first call.

    Returns:
        The scheduled callable; ``.original`` is the original.

    Raises:
        PlanError: an argument of ``schedule`` is out of range.
        RuleError: ``rules`` holds something that is no rule.
        UnsupportedError: the framework is missing or outside the supported versions, or the request
            is outside this version.
    """
    settings = {
        "strategy": strategy, "in_axes": in_axes, "out_axes": out_axes, "batch_size": batch_size,
        "backend": backend, "lanes": lanes, "rules": rules, "context": context, "select": select,
        "target": target, "compiler": compiler, "compiler_options": compiler_options, "check": check,
    }  # fmt: skip
    if fn is None:
        return lambda function: schedule(function, **settings)
    selection = _selection.recipe(strategy, select, context, resolve_strategy)
    given_strategy: Any = Sequential() if selection is not None else strategy
    made = resolve_strategy(given_strategy)
    _check_place(backend, target, compiler)
    if target is not None:
        backend, target = "xla", _jax("readback.targets").resolve(target)
    made_lanes = lanes if isinstance(lanes, Lanes) else None
    count = resolve_lanes(lanes, backend)
    if made_lanes is not None and made_lanes.special and backend == "xla":
        raise UnsupportedError(
            "one XLA program has no lanes to give priorities or multiprocessors to: use backend='ffi' or "
            "'torch', or give lanes a number"
        )
    rows = _check_batch(in_axes, out_axes, batch_size)
    given: Any = context
    if given is not None and not isinstance(given, Mapping):
        raise PlanTypeError(f"context must be a mapping for the strategy; got {given!r}")
    framework = _framework(fn, backend)
    if framework == "either" and compiler != "eager":
        framework = "torch"
    if not callable(fn) and framework != "torch":
        raise UnsupportedTypeError(
            f"schedule takes a function, a jax.jit function or a model; got {type(fn).__name__}"
        )
    options = {
        "name": getattr(fn, "__name__", type(fn).__name__),
        "strategy": made,
        "rules": None if rules is None else as_rules(rules),
        "lanes": count,
        "user": dict(context or {}),
        "compiler_options": dict(compiler_options) if compiler_options else None,
        "gpu": made_lanes,
    }
    batch = {"in_axes": in_axes, "out_axes": out_axes, "batch_size": rows}
    place = {"backend": "xla", "target": target} if backend == "xla" else {}
    makers: dict[str, Callable[[], Any]] = {  # no lambdas: what holds them can be pickled
        "jax": functools.partial(
            _schedule_jax,
            fn,
            {**options, "gpu_lanes": backend == "ffi"},
            {**batch, **place},
            compiler,
            check,
            selection,
        ),
        "torch": functools.partial(
            _schedule_torch,
            fn,
            {**options, "check": check, "selection": selection},
            {**batch, **place},
            compiler,
            backend,
        ),
    }
    if framework in makers:
        return makers[framework]()
    return importlib.import_module("dynaflow_xla.frontends.torch.either").EitherFunction(fn, makers)


def _schedule_jax(
    fn: Any,
    options: Mapping[str, Any],
    batch: Mapping[str, Any],
    compiler: str,
    check: bool,
    selection: _selection.Recipe | None,
) -> Any:
    _optional.require("jax", "scheduling a JAX function", "jax")
    if compiler != "eager":
        raise UnsupportedError(f"compiler={compiler!r} is for PyTorch; leave compiler out")
    given = importlib.import_module("dynaflow_xla.frontends.jax.given")
    settings = importlib.import_module("dynaflow_xla.frontends.jax.settings")

    def made(strategy: Strategy) -> Any:
        return given.schedule(
            fn, settings.Options(**{**options, **batch, "strategy": strategy}), check
        )

    base = made(options["strategy"])
    if selection is None:
        return base
    several = importlib.import_module("dynaflow_xla.frontends.jax.selected")
    members = {n: None if s is None else made(s) for n, s in selection.strategies.items()}
    return several.Selected(selection, members, base, batch["in_axes"])


def _schedule_torch(
    fn: Any, options: Mapping[str, Any], batch: Mapping[str, Any], compiler: str, backend: str
) -> Any:
    if _has_torch_xla():
        if batch["in_axes"] is not None:
            raise UnsupportedError(
                "nano-batches of a PyTorch model need torch >= 2.11, and torch-xla is for 2.9; leave "
                "in_axes out"
            )
        return _schedule_torch_xla(fn, options, compiler, backend)
    _optional.require("torch", "scheduling a PyTorch model", "torch")
    frontend = importlib.import_module("dynaflow_xla.frontends.torch.scheduled")
    entry = importlib.import_module("dynaflow_xla.frontends.torch.signature.entry")
    backend = "torch" if backend == "auto" else backend
    if backend != "torch":
        _optional.require("jax", "running a PyTorch model on XLA", "jax")
        if compiler != "eager":
            raise UnsupportedError(
                f"compiler={compiler!r} is for backend='torch'; XLA compiles the regions of "
                f"backend={backend!r}: leave compiler out"
            )
    given = {**options, **batch, "backend": backend}
    made = entry.Options(compiler=compiler, **given)
    return frontend.schedule(fn, made)


def _has_torch_xla() -> bool:
    """Whether the PyTorch at hand is the one that torch_xla works with, and that is installed."""
    torch = sys.modules.get("torch")
    version = str(getattr(torch, "__version__", ""))
    return version.startswith("2.9.") and _optional.available("torch_xla")


def _schedule_torch_xla(fn: Any, options: Mapping[str, Any], compiler: str, backend: str) -> Any:
    """With the one PyTorch that torch_xla works with, models go through torch_xla."""
    _optional.require("jax", "running a PyTorch model on XLA", "jax")
    if compiler != "eager" or backend not in ("auto", "ffi"):
        raise UnsupportedError(
            f"backend={backend!r} with compiler={compiler!r} needs torch >= 2.11; with torch-xla "
            "models run on backend='ffi', compiled by XLA"
        )
    frontend = importlib.import_module("dynaflow_xla.frontends.torch_xla")
    entry = importlib.import_module("dynaflow_xla.frontends.torch.signature.entry")
    return frontend.schedule(fn, entry.Options(backend="ffi", **options))


def _framework(fn: Any, backend: str) -> str:
    """Whose a function is; "either" for a plain function where both frameworks are loaded."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(fn, _torch_classes(torch))
    is_jax = _is_jax(fn) and not is_torch
    if backend == "torch":
        if is_jax:
            raise UnsupportedError("backend='torch' cannot run a jax.jit function; leave it out")
        return "torch"
    if is_torch:
        return "torch"
    if is_jax or torch is None:
        return "jax"
    return "either" if _optional.available("jax") else "torch"


def _is_jax(fn: Any) -> bool:
    """Whether something is made by JAX, or by a library on it: a jitted function, or a call bound to one."""
    if callable(fn) and hasattr(fn, "lower"):  # pmap's functions have no trace
        return True
    if isinstance(fn, functools.partial):
        return _is_jax(fn.func)
    inner = getattr(fn, "__func__", None)
    if inner is not None:
        return _is_jax(inner)
    return type(fn).__module__.partition(".")[0] in ("jax", "jaxlib", "flax", "equinox")


def _torch_classes(torch: Any) -> tuple[type, ...]:
    classes = [torch.nn.Module]
    export = sys.modules.get("torch.export")
    if export is not None:
        classes.append(export.ExportedProgram)
    return tuple(classes)


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy object behind a name or object; PlanError if there is none."""
    if isinstance(strategy, Strategy):
        return strategy
    given: Any = strategy
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    if isinstance(given, type) and issubclass(given, Strategy):
        raise PlanTypeError(f"pass an instance: strategy={given.__name__}(), not the class")
    raise bad_argument(
        given,
        str,
        f"strategy must be one of {', '.join(sorted(_BY_NAME))} or a dynaflow_xla.Strategy; "
        f"got {strategy!r}",
    )


def resolve_lanes(lanes: int | Lanes | None, backend: str = "ffi") -> int:
    """Checked lane count; PlanError if it is no count, or too many.

    One program: 64. Threads: one a core. ``Lanes`` are streams where there is a GPU; where there is
    none it is told when that is known.
    """
    if backend == "xla":
        limits = _jax("xla.xla_backend")
        if lanes is None:
            return limits.DEFAULT_LANES  # type: ignore[no-any-return]
        count = lanes.count if isinstance(lanes, Lanes) else checks.integer(lanes)
        if count is None or not 0 < count <= limits.MAX_LANES:
            raise bad_argument(
                lanes,
                Integral,
                f"lanes must be an integer from 1 to {limits.MAX_LANES}; got {lanes!r}",
            )
        return count
    if lanes is None:
        return min(max(1, len(os.sched_getaffinity(0))), 8)
    if isinstance(lanes, Lanes):
        return lanes.count
    count = checks.integer(lanes)
    if count is None or count < 1:
        raise bad_argument(
            lanes, Integral, f"lanes must be an integer >= 1 or dfx.Lanes(...); got {lanes!r}"
        )
    return thread_lanes(count)


def _check_batch(in_axes: Any, out_axes: Any, batch_size: Any) -> int | None:
    """The checked ``batch_size``."""
    rows = None if batch_size is None else checks.integer(batch_size)
    if batch_size is not None and (rows is None or rows < 1):
        raise bad_argument(
            batch_size, Integral, f"batch_size must be a positive integer; got {batch_size!r}"
        )
    if in_axes is None and (batch_size is not None or out_axes != 0):
        given = "batch_size" if batch_size is not None else "out_axes"
        raise PlanError(
            f"{given} is given without in_axes, so there is no batch: pass in_axes, too"
        )
    return rows


def _check_place(backend: str, target: Any, compiler: str) -> None:
    if backend not in ("auto", "ffi", "xla", "torch"):
        raise bad_argument(
            backend, str, f"backend must be auto, ffi, xla or torch; got {backend!r}"
        )
    if target is not None and backend not in ("auto", "xla"):
        raise PlanError(
            f"target={target!r} is for backend='xla'; backend={backend!r} runs on this machine"
        )
    if compiler not in ("eager", "inductor", "aoti"):
        raise bad_argument(
            compiler, str, f"compiler must be eager, inductor or aoti; got {compiler!r}"
        )


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
        in_axes: The batch axis of each positional argument, None where it has none; or one for all
            tensors.
        out_axes: The same for the result, or for each element of a tuple.
        check: Compare the first padded call at each bucket with the original at the batch's own size.

    Returns:
        A callable of positional arguments with the values of ``fast``.

    Raises:
        PlanError: sizes or axes that cannot be.
        UnsupportedError: ``fast`` is no scheduled PyTorch function or module.
    """
    if not hasattr(fast, "_dfx_core"):
        raise UnsupportedTypeError(
            f"bucketed takes what schedule returned for PyTorch; got {type(fast).__name__}"
        )
    buckets = importlib.import_module("dynaflow_xla.frontends.torch.batch.buckets")
    return buckets.Bucketed(fast, sizes, in_axes, out_axes, check)


def _scheduled(fast: Any, caller: str, args: Any = (), kwargs: Any = {}) -> Any:  # noqa: B006
    if (several := _several(fast, args, kwargs)) is not None:
        fast = several._dfx_resolve(args, kwargs)
    fast = _inner(fast, args, kwargs)
    if not (hasattr(fast, "planned") and hasattr(fast, "original")):
        raise UnsupportedTypeError(
            f"{caller} takes what dynaflow_xla.schedule returned; got {type(fast).__name__}"
        )
    return fast


def _inner(fast: Any, args: Any, kwargs: Any) -> Any:
    """What serves these arguments inside of a callable, up to one that chooses among several."""
    while not _chooses(fast):
        resolve = getattr(fast, "_dfx_resolve", None)
        found = fast if resolve is None else resolve(args, kwargs)
        found = getattr(found, "_dfx_core", found)  # a module keeps its own attribute names
        if found is fast:
            break
        fast = found
    return fast


def _chooses(fast: Any) -> bool:
    return hasattr(type(fast), "_dfx_resolve") and hasattr(fast, "_dfx_selection")


def _several(fast: Any, args: Any, kwargs: Any) -> Any:
    """What chooses among several plans inside of a callable; None if there is one plan."""
    found = _inner(fast, args, kwargs)
    return found if _chooses(found) else None


def graph(fast: Any, *args: Any, **kwargs: Any) -> PartitionedGraph:
    """The partitioned graph for these arguments (arrays or ``jax.ShapeDtypeStruct``)."""
    return _scheduled(fast, "graph", args, kwargs).planned(args, kwargs).pg  # type: ignore[no-any-return]


def plan(fast: Any, *args: Any, **kwargs: Any) -> Plan:
    """The validated plan for these arguments.

    Where ``Auto`` runs the original it is the plan of a candidate; a note of the plan says so.
    """
    made = _scheduled(fast, "plan", args, kwargs)
    found: Plan = made.planned(args, kwargs).plan
    if aside := _aside(made, args, kwargs):
        return msgspec.structs.replace(found, notes=(*found.notes, aside))
    return found


def _aside(made: Any, args: Any, kwargs: Any) -> str:
    """What to know of the plan of these arguments if it is not what a call runs, else ""."""
    found = getattr(made, "beside_the_plan", None)
    return "" if found is None else found(args, kwargs)


def _said(timeline: Timeline, made: Any, args: Any, kwargs: Any) -> Timeline:
    """The timeline; with a note if the plan behind it is not what a call runs."""
    if aside := _aside(made, args, kwargs):
        notes = [*timeline.meta.get("notes", ()), aside]
        return msgspec.structs.replace(timeline, meta={**timeline.meta, "notes": notes})
    return timeline


def simulate(fast: Any, *args: Any, costs: Any = None, **kwargs: Any) -> Timeline:
    """The predicted timeline for these arguments, and what no plan could beat (``.bound``).

    Args:
        fast: What ``schedule`` returned.
        *args: Arrays or ``jax.ShapeDtypeStruct``; nothing runs.
        costs: Nanoseconds by region name or id, or a timeline that ``profile`` measured, of this plan or of
            another strategy's: regions are known by what they compute. Regions left out cost what is
            estimated. Default: what ``tune`` measured, else estimates.
        **kwargs: As ``args``.

    Raises:
        PlanError: a cost that is no time, or of a region that does not exist; a timeline that has none of
            the regions.
    """
    made = _scheduled(fast, "simulate", args, kwargs)
    entry = made.planned(args, kwargs)
    if costs is None and hasattr(made, "known_costs"):
        costs = made.known_costs(args, kwargs)
    return _said(_simulate(entry.plan, entry.pg, costs), made, args, kwargs)


def explain(fast: Any, *args: Any, deep: bool = False, **kwargs: Any) -> str:
    """A readable account: regions, lanes, costs, sources, copies, notes, decisions.

    With ``deep=True`` (backend ``"xla"``) it is followed by what ``compile`` reads back, or without a
    GPU and a target by what is in the program for this CPU. With ``select`` it begins with all plans and
    how often each ran; what follows is of the one that is chosen for these arguments.
    """
    several = _several(fast, args, kwargs)
    if several is not None:
        name = several.chosen(args, kwargs)
        lines = "\n".join(several._dfx_selection.lines(name))
        if several.members[name] is None:
            return f"{lines}\nthe original runs: it has no plan"
        return f"{lines}\n{explain(several.members[name], *args, deep=deep, **kwargs)}"
    made = _scheduled(fast, "explain", args, kwargs)
    text: str = _inspect(made).explain(made, args, kwargs)
    return f"{text}\n\n{_deep(made, args, kwargs)}" if deep else text


def _deep(made: Any, args: Any, kwargs: Any) -> Any:
    """What became of the plan: read back from a GPU's program, or from this CPU's without a target."""
    no_target = getattr(getattr(made, "_options", None), "target", None) is None
    if getattr(made, "framework", "jax") == "jax" and no_target:
        entry = made.planned(args, kwargs)
        if entry.options.backend == "xla" and not _jax("readback.targets").has_gpu():
            return _jax("readback.cpu_text").text(made, args, kwargs)
    return compile(made, *args, **kwargs)


def compile(fast: Any, *args: Any, target: Any = None, **kwargs: Any) -> Any:
    """Compiles for a GPU, in another process, and reads back what XLA made of the plan.

    Needs no GPU: the CUDA plugin compiles for the target. Arguments that are spread over n devices
    make it a program for n of these GPUs.

    Args:
        fast: What ``schedule`` returned, or a ``jax.jit`` function with that inside (under
            ``shard_map`` or ``grad``, in a training step).
        *args: Arrays or ``jax.ShapeDtypeStruct``.
        target: As for ``schedule``; default: the one given there, else the GPU of this machine.
        **kwargs: As ``args``.

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
    # A jax.jit function around a scheduled one has its attributes, but not its methods.
    ours = hasattr(fast, "planned") or hasattr(fast, "_dfx_core")
    plain = hasattr(fast, "trace") and not ours
    made = fast if plain else _scheduled(fast, "compile", args, kwargs)
    if getattr(made, "framework", "jax") == "torch":
        return _torch_xla_program().compile_report(made, args, kwargs, target)
    return _jax("readback.deviceless").compile_report(made, args, kwargs, target)


def compiler_options(fast: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The XLA options under which the program of these arguments has its plan's order.

    A top-level call applies them on CUDA. Inside a ``jax.jit`` of your own, give them to it:
    ``jax.jit(step, compiler_options=dfx.compiler_options(fast, *args))``.
    """
    made = _scheduled(fast, "compiler_options", args, kwargs)
    if getattr(made, "framework", "jax") == "torch":
        return _torch_xla_program().compiler_options(made, args, kwargs)  # type: ignore[no-any-return]
    return made.compiler_options(args, kwargs)  # type: ignore[no-any-return]


def verify(fast: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the original and the scheduled function on the same arguments and compares.

    Returns:
        A report, one line an output (``str(report)``).

    Raises:
        VerificationError: naming the first output that differs beyond its dtype's tolerance.
    """
    several = _several(fast, args, kwargs)
    if several is not None and several.members[several.chosen(args, kwargs)] is None:
        return Report(())  # the original is chosen: nothing can differ
    made = _scheduled(fast, "verify", args, kwargs)
    return _inspect(made).verify(made, args, kwargs)


def profile(fast: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Runs with time stamps at region ends; returns the measured timeline.

    The stamped program is compiled for this purpose; stamps keep regions apart, so that sums can
    be a little longer than an ordinary call. Lane programs run a few times and the fastest run
    counts; outer regions, which may have effects, run once. Time between the two is left out.
    Where ``Auto`` runs the original, a candidate's plan is what is measured, and a note says so.
    """
    made = _scheduled(fast, "profile", args, kwargs)
    framework = getattr(made, "framework", "jax")
    module = importlib.import_module(f"dynaflow_xla.frontends.{framework}.profile")
    return _said(module.profile(made, args, kwargs), made, args, kwargs)


def tune(fast: Any, *args: Any, budget_s: float = 30.0, **kwargs: Any) -> Any:
    """Measures Auto's candidates on these arguments now and keeps the decision.

    JAX: regions are profiled first; their times predict which candidates are worth measuring, and
    stay with the decision for ``simulate`` and ``explain``.

    Raises:
        PlanError: the function has a fixed strategy, or the budget does not suffice.
        RuntimeError: other threads of this process ran meanwhile: such times are not trusted.
    """
    made = _scheduled(fast, "tune", args, kwargs)
    return _inspect(made).tune(made, args, kwargs, budget_s)


def _inspect(fast: Any) -> Any:
    framework = getattr(fast, "framework", "jax")
    return importlib.import_module(f"dynaflow_xla.frontends.{framework}.inspect")


def _torch_xla_program() -> Any:
    _optional.require("jax", "running a PyTorch model on XLA", "jax")
    return importlib.import_module("dynaflow_xla.frontends.torch.on_xla.xla_compile")


def _jax(module: str) -> Any:
    _optional.require("jax", "scheduling a JAX function", "jax")
    return importlib.import_module(f"dynaflow_xla.frontends.jax.{module}")
