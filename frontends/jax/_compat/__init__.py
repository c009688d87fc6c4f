"""The private JAX names that the frontend uses, each with the reason, in one place."""

from __future__ import annotations

import functools
import itertools
import math
import os
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import array, core, effects, source_info_util, util
from jax._src.interpreters import mlir
from jax.extend import core as jcore

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ir.graph import Source

T = TypeVar("T")


ARRAY: type[Any] = array.ArrayImpl
"""The class of arrays that have values: asking for it is quicker than ``isinstance`` of ``jax.Array``."""


def weak_parameter(cls: type[T]) -> type[T]:
    """Makes JAX's caches hold equation parameters of a class weakly, as they hold jaxprs.

    They would keep a dropped schedule's compiled programs until ``jax.clear_caches``.
    """
    util.weakref_cache_key_types.add(cls)
    return cls


def trace(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``jitted.trace``, also inside of another trace where arguments have arrays for static fields.

    JAX compares these with those that it knows; in a trace the comparison is a tracer, neither true nor not.
    """
    try:
        return jitted.trace(*args, **kwargs)
    except ValueError as error:
        if "checking equality of metadata" not in str(error):
            raise
    with core.eval_context():  # type: ignore[no-untyped-call]
        return jitted.trace(*args, **kwargs)


def traced_consts(traced: Any) -> list[Any]:
    """Closed-over values that ``jitted.trace`` put in front of the arguments (no public name)."""
    return list(traced._consts) + list(traced.jaxpr.consts)


def is_jitted(fn: Any) -> bool:
    """Whether ``fn`` is what ``jax.jit`` returns (no public class exists).

    A bound method has what its function has, which would be called without the object.
    """
    if isinstance(fn, types.MethodType):
        return False
    return hasattr(fn, "_jit_info") and hasattr(fn, "trace") and hasattr(fn, "lower")


def _name(jitted: Any) -> str:
    return repr(getattr(jitted, "__name__", "the function"))


def jit_options(jitted: Any) -> dict[str, Any]:
    """The static and donated arguments a jitted function was made with.

    Raises:
        UnsupportedError: it was made with explicit shardings or for a device.
    """
    info = jitted._jit_info
    if info.user_specified_in_shardings or any(
        leaf is not None and type(leaf).__name__ != "UnspecifiedValue"
        for leaf in info.out_shardings_leaves
    ):
        raise UnsupportedError(
            f"{_name(jitted)}, a jax.jit function with in_shardings/out_shardings, spans devices that a "
            "schedule does not know; schedule the function inside shard_map, or jit it without shardings."
        )
    if getattr(info, "device", None) is not None or getattr(info, "backend", None) is not None:
        raise UnsupportedError(
            f"{_name(jitted)}, a jax.jit function with device= or backend=, runs there, wherever its "
            "arguments are, and a schedule runs where these are; jit it without, and put the arguments there "
            "(jax.device_put)."
        )
    return {
        "static_argnums": tuple(info.static_argnums),
        "static_argnames": tuple(info.static_argnames),
        "donate_argnums": tuple(info.donate_argnums),
        "donate_argnames": tuple(info.donate_argnames),
        "keep_unused": info.keep_unused,
        "inline": info.inline,
    }


def needs_devices(primitive: Any) -> None:
    """Has JAX tell a primitive's lowering for which devices it is, as what it stands for may ask."""
    from jax._src import dispatch

    known = getattr(dispatch, "prim_requires_devices_during_lowering", None)
    if known is not None:
        known.add(primitive)


def look_again(jitted: Any) -> None:
    """Has each signature's next call look in Python for what was traced and compiled, which stays.

    JAX runs in Python, for ever, what a jitted function raised for when it was first called with it.
    """
    jitted._clear_cache()


def wrapped_function(jitted: Any) -> Callable[..., Any]:
    """The Python function inside a jitted function."""
    return jitted.__wrapped__  # type: ignore[no-any-return]


def user_source(eqn: Any) -> Source | None:
    """The user's file and line of an equation (``user_frame`` has no public name)."""
    try:
        frame = source_info_util.user_frame(eqn.source_info.traceback)
    except (AttributeError, TypeError):
        frame = source_info_util.user_frame(eqn.source_info)
    if frame is None:
        return None
    return Source(frame.file_name, frame.start_line, frame.function_name)


def make_jaxpr_of(
    eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any
) -> Any:
    """A closed jaxpr over some equations of another one."""
    jaxpr = like.replace(
        constvars=[],
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=set(),
        debug_info=like.debug_info.with_unknown_names(),
    )
    return jcore.ClosedJaxpr(jaxpr, ())


def with_inner(param: Any, change: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with every jaxpr in it changed, or itself if none is another one.

    Since JAX 0.12 a closed jaxpr is a jaxpr, and what it says it encloses is itself.
    """
    if isinstance(param, jcore.Jaxpr):
        return change(param)
    if isinstance(param, jcore.ClosedJaxpr):
        inner = change(param.jaxpr)
        return param if inner is param.jaxpr else param.replace(jaxpr=inner)
    if type(param) in (tuple, list):
        made = [with_inner(each, change) for each in param]
        return param if all(a is b for a, b in zip(made, param, strict=True)) else type(param)(made)
    return param


def new_var(aval: Any) -> Any:
    """A fresh jaxpr variable."""
    return jcore.Var(aval)


def literal(value: Any) -> Any:
    """A concrete array as an operand of an equation."""
    return jcore.Literal(value, jax.typeof(value))


def is_var(atom: Any) -> bool:
    """Whether an operand of an equation is a variable, not a literal."""
    return isinstance(atom, jcore.Var)


def is_of_a_reference(effect: Any) -> bool:
    """Whether an effect is one on memory that an equation is given, or that is made around it."""
    return isinstance(effect, effects.JaxprInputEffect)


def struct_like(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """What to trace with for an abstract value, or for one of another shape.

    Inside shard_map a value has a type that says over which mesh axes it varies; without that, a trace
    has other operators.
    """
    kind = getattr(aval, "manual_axis_type", None)
    more = (
        {} if kind is None or kind.empty else {"manual_axis_type": kind, "sharding": aval.sharding}
    )
    return jax.ShapeDtypeStruct(
        aval.shape if shape is None else tuple(shape),
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
        **more,
    )


def in_host_memory(aval: Any) -> bool:
    """Whether a value lies in the host's memory, where it is said so (``jax.memory.Space.Host``)."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def in_device_memory(aval: Any) -> Any:
    """The type of the same value in the device's memory."""
    return aval.update(memory_space=jax.memory.Space.Device) if in_host_memory(aval) else aval


def to_memory(x: Any, host: bool) -> Any:
    """A value in the host's memory, or in the device's."""
    return jax.device_put(x, jax.memory.Space.Host if host else jax.memory.Space.Device)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan; JAX 0.12 keeps them as trees."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def device_count(lowering_context: Any) -> int:
    """Devices that the program under lowering is for: inside shard_map those along axes it leaves out."""
    axis_context = lowering_context.module_context.axis_context
    if type(axis_context).__name__ == "SPMDAxisContext":
        manual, sizes = axis_context.manual_axes, axis_context.mesh.shape
        return math.prod(size for axis, size in sizes.items() if axis not in manual)
    return int(getattr(axis_context, "num_devices", 1))


def spans_devices(given: Any) -> bool:
    """Whether a call with these arguments is a program for several devices."""
    if jax.sharding.get_abstract_mesh().size > 1:  # that of jax.set_mesh
        return True
    return any(
        len(x.sharding.device_set) > 1
        for x in jax.tree_util.tree_leaves(given)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    )


def exporting(lowering_context: Any) -> bool:
    """Whether the program under lowering is for ``jax.export``, to be run by any process."""
    parameters = lowering_context.module_context.lowering_parameters
    return bool(getattr(parameters, "for_export", False))


def under_disable_jit() -> bool:
    """Whether jax.disable_jit is in force."""
    return bool(jax.config.jax_disable_jit)


def names_culprits() -> bool:
    """Whether JAX evaluates a program that gave a NaN again, operator by operator, to name the one.

    A schedule must be its plain operators then: as one program it would give the NaN once more, and be
    evaluated again, for ever.
    """
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)


def operator_by_operator() -> bool:
    """Whether a call now runs each operator by itself: the original is what the user wants to see."""
    return under_disable_jit() or (names_culprits() and not tracing())


def tracing() -> bool:
    """Whether this thread is inside somebody's trace: then even calls on arrays give tracers."""
    return not at_top_level()


at_top_level: Callable[[], bool] = core.trace_state_clean
"""Whether this thread is inside nobody's trace."""


def key_impl(dtype: Any) -> Any:
    """The PRNG implementation's name behind a key dtype (``jax.random.key_impl`` takes arrays only)."""
    return dtype._impl.name


def const_args(lowered: Any) -> list[Any]:
    """Arrays that lowering hoisted out of a program; its executable takes them first."""
    return list(getattr(lowered._lowering, "const_args", ()))


_with_callbacks = itertools.count()


def text_of(lowered: Any) -> str:
    """The text of a lowered program; two are equal only if the programs do the same.

    Functions that a program calls back are not in its text, which holds their numbers.
    """
    text: str = lowered.as_text()
    if getattr(lowered._lowering, "compile_args", {}).get("host_callbacks"):
        return f"{text}\n// {next(_with_callbacks)} of those that call back\n"
    return text


def expanded(eqn: Any) -> Any:
    """The closed jaxpr that a call of a high-level primitive stands for (``jax._src.hijax``)."""
    call = functools.partial(eqn.primitive.to_lojax, **eqn.params)
    return jax.make_jaxpr(call)(*[v.aval for v in eqn.invars])


def registered_primitives() -> frozenset[str]:
    """Names of the primitives that this JAX can lower (there is no public list)."""
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    return frozenset(primitive.name for table in tables for primitive in table)


def primitive(name: str) -> Any:
    """The primitive of a name, of those that this JAX can lower.

    Raises:
        LookupError: this JAX has none of this name.
    """
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    for table in tables:
        for found in table:
            if found.name == name:
                return found
    raise LookupError(f"this JAX has no primitive {name!r}")


def same_traces(one: Any, other: Any) -> bool:
    """Whether two traces of a function are seen to be the same program with the same closed-over values.

    An array of NumPy's may have been written into since the first one.
    """
    if str(one.jaxpr) != str(other.jaxpr):
        return False
    values = [[_bytes_of(x) for x in traced_consts(traced)] for traced in (one, other)]
    return None not in values[0] and values[0] == values[1]


def _bytes_of(value: Any) -> tuple[Any, ...] | None:
    """Type, shape and bytes of an array of JAX's; None for anything else."""
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def raised_at(error: BaseException) -> str:
    """Where in the user's program an exception was raised, to follow its text; "" if in none of it."""
    known = getattr(source_info_util, "is_user_filename", lambda name: not name.startswith("<"))
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(f.f_code.co_filename, line) for f, line in frames if known(f.f_code.co_filename)]
    return f", at {lines[-1][0]}:{lines[-1][1]}" if lines else ""


def hide_frames(folder: str) -> None:
    """Keeps the files of a folder from being taken for the user's (no public name)."""
    source_info_util.register_exclusion(os.path.join(folder, ""))


def mlir_ir() -> Any:
    """MLIR's Python bindings (JAX exports no public name for them)."""
    from jax._src.lib.mlir import ir

    return ir


def func_dialect() -> Any:
    """Functions in MLIR."""
    from jax._src.lib.mlir.dialects import func

    return func


def stablehlo_dialect() -> Any:
    """StableHLO's attributes."""
    from jax._src.lib.mlir.dialects import hlo

    return hlo


def parse_stablehlo(code: bytes, context: Any) -> Any:
    """A module from a portable artifact, whose operators have versions, or from MLIR itself."""
    if code.startswith(b"ML\xefR") and b"StableHLO_v" in code[:64]:
        return stablehlo_dialect().deserialize_portable_artifact(context, code)
    return mlir_ir().Module.parse(code, context)


def add_host_callback(lowering_context: Any, callback: Callable[..., Any]) -> None:
    """Adds a host callback to the program that is being lowered (``ModuleContext`` is private)."""
    lowering_context.module_context.add_host_callback(callback)


def lowered_for_one_device(lowering_context: Any) -> bool:
    """Whether the program that is being lowered has one device (``ModuleContext`` is private)."""
    around = lowering_context.module_context.axis_context
    devices = getattr(around, "num_devices", None)
    if devices is None:
        devices = getattr(getattr(around, "mesh", None), "size", 1)
    return bool(devices == 1)


def dispatches_asynchronously() -> bool:
    """Whether the CPU client runs programs on a thread of its own, and a host callback changes that."""
    flag = jax.config.values.get("jax_cpu_enable_async_dispatch", True)
    return bool(flag) and hasattr(mlir.ModuleContext, "add_host_callback")


def leaves_out_passes() -> bool:
    """Whether JAX itself asks XLA to leave out passes (``jax_compiler_enable_remat_pass``)."""
    return not jax.config.values.get("jax_compiler_enable_remat_pass", True)


def compiler_options(jitted: Any) -> dict[str, Any]:
    """The compiler options that a jitted function was made with."""
    return dict(getattr(jitted._jit_info, "compiler_options_kvs", ()))
