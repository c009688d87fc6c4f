"""The public functions: ``schedule`` and what inspects a scheduled callable."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynaflow_xla import _optional
from dynaflow_xla.errors import PlanError, RuleError, UnsupportedError
from dynaflow_xla.ir import PartitionedGraph
from dynaflow_xla.plan import Plan
from dynaflow_xla.rules import Rule
from dynaflow_xla.simulate import simulate as _simulate
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.dual_batch import DualBatch
from dynaflow_xla.strategies.nano_batch import NanoBatch
from dynaflow_xla.strategies.sequential import Sequential

if TYPE_CHECKING:
    from dynaflow_xla.timeline import Timeline

_BY_NAME: dict[str, Callable[[], Strategy]] = {
    "auto": Auto,
    "branches": Branches,
    "dual_batch": DualBatch,
    "nano_batch": NanoBatch,
    "sequential": Sequential,
}


def schedule(
    fn: Any = None,
    strategy: str | Strategy = "auto",
    *,
    in_axes: Any = None,
    out_axes: Any = 0,
    batch_size: int | None = None,
    backend: str = "auto",
    lanes: int | None = None,
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
        fn: A JAX function or what ``jax.jit`` returns (static and donated arguments are kept).
        strategy: ``"auto"``, ``"branches"``, ``"sequential"``, ``"nano_batch"``, ``"dual_batch"`` or a
            :class:`Strategy`.
        in_axes: The batch axis of each argument, as for ``jax.vmap``; needed by strategies that split
            the batch.
        out_axes: How each result of a split is put together: its batch axis, ``Sum()``, ``Mean()``
            (weighted by the nano-batches' sizes), or None where it does not depend on the batch.
        batch_size: Rows the batch must have, as a check.
        backend: ``"auto"``, ``"ffi"`` (lanes of this machine's cores) or ``"xla"`` (one XLA program
            whose CUDA graph has the plan's order; on a CPU a plain program with the same values).
        lanes: Number of lanes; default: the cores of this process, at most 8; with ``"xla"``: 4.
        rules: Where to cut; default: the strategy's rules, else automatic.
        context: The user's own data for the strategy, as ``s.context.user``.
        select: For backends of other frameworks and devices.
        target: The GPU that ``compile`` and ``explain(deep=True)`` compile for, without one at hand:
            a name such as ``"nvidia-h200"`` or the path of an XLA target text. Implies ``"xla"``.
        compiler: For backends of other frameworks and devices.
        compiler_options: Passed to the compilation of every lane program; with ``"xla"``, they win
            over the options that the plan needs.
        check: Where it could not be proved that a split keeps the values, compare on the first call.

    Returns:
        The scheduled callable; ``.original`` is the original.

    Raises:
        PlanError: an argument of ``schedule`` is out of range.
        RuleError: ``rules`` holds something that is no rule.
        UnsupportedError: JAX is missing or too old, or the request is outside this version.
    """
    settings = {
        "strategy": strategy, "in_axes": in_axes, "out_axes": out_axes, "batch_size": batch_size,
        "backend": backend, "lanes": lanes, "rules": rules, "context": context, "select": select,
        "target": target, "compiler": compiler, "compiler_options": compiler_options, "check": check,
    }  # fmt: skip
    if fn is None:
        return lambda function: schedule(function, **settings)
    made = resolve_strategy(strategy)
    _refuse_unbuilt(backend, target, select, compiler)
    backend = "xla" if backend == "xla" or target is not None else "ffi"
    count = resolve_lanes(lanes, backend)
    _check_batch(in_axes, out_axes, batch_size)
    if not callable(fn):
        raise UnsupportedError(
            f"schedule takes a function, a jax.jit function or a model; got {type(fn).__name__}"
        )
    if _is_torch_module(fn):
        raise UnsupportedError(
            f"{type(fn).__name__} is a torch.nn.Module; this version schedules JAX functions only."
        )
    _optional.require("jax", "scheduling a JAX function", "jax")
    frontend = importlib.import_module("dynaflow_xla.frontends.jax.scheduled")
    entry = importlib.import_module("dynaflow_xla.frontends.jax.entry")
    if rules is not None:
        rules = _checked_rules(rules)
    options = entry.Options(
        name=getattr(fn, "__name__", type(fn).__name__),
        strategy=made,
        rules=None if rules is None else tuple(rules),
        lanes=count,
        user=dict(context or {}),
        in_axes=in_axes,
        out_axes=out_axes,
        batch_size=batch_size,
        compiler_options=dict(compiler_options) if compiler_options else None,
        backend=backend,
        target=None if target is None else _jax("targets").resolve(target),
    )
    return frontend.ScheduledFunction(fn, options, check=check)


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy object behind a name or object; PlanError if there is none."""
    if isinstance(strategy, Strategy):
        return strategy
    given: Any = strategy
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    if isinstance(given, type) and issubclass(given, Strategy):
        raise PlanError(f"pass an instance: strategy={given.__name__}(), not the class")
    raise PlanError(
        f"strategy must be one of {', '.join(sorted(_BY_NAME))} or a dynaflow_xla.Strategy; "
        f"got {strategy!r}"
    )


def resolve_lanes(lanes: int | None, backend: str = "ffi") -> int:
    """Checked lane count; PlanError if it is no count or more than the cores (one program: 64)."""
    if backend == "xla":
        limits = _jax("xla_backend")
        if lanes is None:
            return limits.DEFAULT_LANES  # type: ignore[no-any-return]
        if (
            isinstance(lanes, bool)
            or not isinstance(lanes, int)
            or not 0 < lanes <= limits.MAX_LANES
        ):
            raise PlanError(f"lanes must be an integer from 1 to {limits.MAX_LANES}; got {lanes!r}")
        return lanes
    cores = max(1, len(os.sched_getaffinity(0)))
    if lanes is None:
        return min(cores, 8)
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise PlanError(f"lanes must be an integer >= 1; got {lanes!r}")
    if lanes > cores:
        raise PlanError(
            f"lanes must not exceed the cores this process may use, {cores}; got {lanes}. More lanes "
            "than cores would wait for each other on one core; leave lanes=None for the default."
        )
    return lanes


def _check_batch(in_axes: Any, out_axes: Any, batch_size: Any) -> None:
    if batch_size is not None and (
        isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
    ):
        raise PlanError(f"batch_size must be a positive integer; got {batch_size!r}")
    if in_axes is None and (batch_size is not None or out_axes != 0):
        given = "batch_size" if batch_size is not None else "out_axes"
        raise PlanError(
            f"{given} is given without in_axes, so there is no batch: pass in_axes, too"
        )


def _refuse_unbuilt(backend: str, target: Any, select: Any, compiler: str) -> None:
    if backend not in ("auto", "ffi", "xla", "torch"):
        raise PlanError(f"backend must be auto, ffi, xla or torch; got {backend!r}")
    if backend == "torch":
        raise UnsupportedError("backend='torch' is not in this version; use 'auto', 'ffi' or 'xla'")
    if target is not None and backend == "ffi":
        raise PlanError(
            f"target={target!r} is for backend='xla'; backend='ffi' runs on this machine"
        )
    for name, value, default in (
        ("select", select, None),
        ("compiler", compiler, "eager"),
    ):
        if value != default:
            raise UnsupportedError(f"{name}={value!r} is not in this version; leave {name} out")


def _checked_rules(given: Any) -> tuple[Any, ...]:
    rules: tuple[Any, ...] = (given,) if isinstance(given, Rule) else tuple(given)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise RuleError(
                f"rules must hold dfx.Scope, Op, Call, Module, Seq or Where objects; got {rule!r}"
            )
    return rules


def _is_torch_module(fn: Any) -> bool:
    torch = sys.modules.get("torch")
    nn = getattr(torch, "nn", None)
    return nn is not None and isinstance(fn, nn.Module)


def _scheduled(fast: Any, caller: str) -> Any:
    if not (hasattr(fast, "planned") and hasattr(fast, "original")):
        raise UnsupportedError(
            f"{caller} takes what dynaflow_xla.schedule returned; got {type(fast).__name__}"
        )
    return fast


def graph(fast: Any, *args: Any, **kwargs: Any) -> PartitionedGraph:
    """The partitioned graph for these arguments (arrays or ``jax.ShapeDtypeStruct``)."""
    return _scheduled(fast, "graph").planned(args, kwargs).pg  # type: ignore[no-any-return]


def plan(fast: Any, *args: Any, **kwargs: Any) -> Plan:
    """The validated plan for these arguments."""
    return _scheduled(fast, "plan").planned(args, kwargs).plan  # type: ignore[no-any-return]


def simulate(fast: Any, *args: Any, costs: Any = None, **kwargs: Any) -> Timeline:
    """The predicted timeline for these arguments, and what no plan could beat (``.bound``).

    Args:
        fast: What ``schedule`` returned.
        *args: Arrays or ``jax.ShapeDtypeStruct``; nothing runs.
        costs: Nanoseconds by region name or id, or a timeline that ``profile`` measured; regions
            left out cost what is estimated.
        **kwargs: As ``args``.

    Raises:
        PlanError: a cost that is no time, or of a region that does not exist.
    """
    entry = _scheduled(fast, "simulate").planned(args, kwargs)
    return _simulate(entry.plan, entry.pg, costs)


def explain(fast: Any, *args: Any, deep: bool = False, **kwargs: Any) -> str:
    """A readable account: regions, lanes, costs, sources, copies, notes, decisions.

    With ``deep=True`` (backend ``"xla"``) it is followed by what ``compile`` reads back.
    """
    made = _scheduled(fast, "explain")
    text: str = _inspect().explain(made, args, kwargs)
    return f"{text}\n\n{compile(fast, *args, **kwargs)}" if deep else text


def compile(fast: Any, *args: Any, **kwargs: Any) -> Any:
    """Compiles for a GPU, in another process, and reads back what XLA made of the plan.

    Needs no GPU: the CUDA plugin compiles for the ``target`` given to ``schedule`` (without it, for the
    GPU of this machine). The arguments may be ``jax.ShapeDtypeStruct``.

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
    return _jax("deviceless").compile_report(_scheduled(fast, "compile"), args, kwargs)


def compiler_options(fast: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The XLA options under which the program of these arguments has its plan's order.

    A top-level call applies them on CUDA. Inside a ``jax.jit`` of your own, give them to it:
    ``jax.jit(step, compiler_options=dfx.compiler_options(fast, *args))``.
    """
    made = _scheduled(fast, "compiler_options")
    return made.compiler_options(args, kwargs)  # type: ignore[no-any-return]


def verify(fast: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the original and the scheduled function on the same arguments and compares.

    Returns:
        A report, one line an output (``str(report)``).

    Raises:
        VerificationError: naming the first output that differs beyond its dtype's tolerance.
    """
    return _inspect().verify(_scheduled(fast, "verify"), args, kwargs)


def profile(fast: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Runs with time stamps at region ends; returns the measured timeline.

    The stamped program is compiled for this purpose; stamps keep regions apart, so that sums can
    be a little longer than an ordinary call. Lane programs run a few times and the fastest run
    counts; outer regions, which may have effects, run once. Time between the two is left out.
    """
    module = importlib.import_module("dynaflow_xla.frontends.jax.profile")
    return module.profile(_scheduled(fast, "profile"), args, kwargs)  # type: ignore[no-any-return]


def tune(fast: Any, *args: Any, budget_s: float = 30.0, **kwargs: Any) -> Any:
    """Measures Auto's candidates on these arguments now and keeps the decision.

    Raises:
        PlanError: the function has a fixed strategy.
    """
    return _inspect().tune(_scheduled(fast, "tune"), args, kwargs, budget_s)


def _inspect() -> Any:
    return _jax("inspect")


def _jax(module: str) -> Any:
    _optional.require("jax", "scheduling a JAX function", "jax")
    return importlib.import_module(f"dynaflow_xla.frontends.jax.{module}")
