"""A StableHLO module as a JAX function: every operator becomes one equation of a jaxpr.

The equation carries the operator as a small MLIR text and is lowered by putting that text back, so
nothing is translated and nothing can be translated wrongly; what scheduling needs (shapes, kind, work)
is read from it. Calls of the module's own functions are inlined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import provenance

_ir = _compat.mlir_ir()

# StableHLO's name -> JAX's, so that rules and estimates know the operator.
_NAMES = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "maximum": "max", "minimum": "min",
    "negate": "neg", "exponential": "exp", "log": "log", "log_plus_one": "log1p", "power": "pow",
    "exponential_minus_one": "expm1", "cosine": "cos", "sine": "sin", "select": "select_n",
    "convert": "convert_element_type", "convolution": "conv_general_dilated", "reverse": "rev",
    "remainder": "rem", "absolute": "abs", "while": "stablehlo.while", "case": "stablehlo.case",
    "if": "stablehlo.if", "fft": "stablehlo.fft", "clamp": "clamp", "rsqrt": "rsqrt",
}  # fmt: skip

_TYPES = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "ui8": "uint8",
    "ui16": "uint16", "ui32": "uint32", "ui64": "uint64", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f64": "float64", "complex<f32>": "complex64", "complex<f64>": "complex128",
}  # fmt: skip


class ConvolutionNumbers(NamedTuple):
    """What the estimate of a convolution reads.

    Dimensions of the kernel (results, inputs, then places) and of the result (batch, features, places).
    """

    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


@functools.cache
def _primitive(name: str) -> Any:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def abstract(*_: Any, outs: Any, **__: Any) -> list[Any]:
        return [ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in outs]

    @primitive.def_impl
    def impl(*args: Any, **params: Any) -> Any:
        return jax.jit(lambda *xs: primitive.bind(*xs, **params))(*args)

    def lower(ctx: Any, *operands: Any, text: str, **_: Any) -> list[Any]:
        module = _ir.Module.parse(text, ctx.module_context.context)
        block = module.body.operations[0].regions[0].blocks[0]
        inner = block.operations[0].operation
        made = inner.clone(ip=_ir.InsertionPoint.current)
        _replace(inner, made, dict(zip(block.arguments, operands, strict=True)))
        return list(made.results)

    mlir.register_lowering(primitive, lower)
    return primitive


def _replace(original: Any, made: Any, values: dict[Any, Any]) -> None:
    """Gives a clone other values for those of ``values``, in its regions too."""
    for i, operand in enumerate(original.operands):
        if operand in values:
            made.operands[i] = values[operand]
    for old_region, new_region in zip(original.regions, made.regions, strict=True):
        for old_block, new_block in zip(old_region.blocks, new_region.blocks, strict=True):
            for old, new in zip(old_block.operations, new_block.operations, strict=True):
                _replace(old.operation, new.operation, values)


def _type(type_: Any) -> tuple[tuple[int, ...], str]:
    try:
        ranked = _ir.RankedTensorType(type_)
    except (ValueError, TypeError) as error:
        raise UnsupportedError(f"a StableHLO value of type {type_} (tensors only)") from error
    element = str(ranked.element_type)
    if not ranked.has_static_shape or element not in _TYPES:
        raise UnsupportedError(
            f"a StableHLO value of type {type_}: sizes must be fixed and elements one of "
            f"{', '.join(_TYPES)}"
        )
    return tuple(ranked.shape), _TYPES[element]


def _captured(op: Any, outer: Sequence[Any]) -> list[Any]:
    """Values from outside of an operator that its regions read."""
    inside: set[Any] = set()
    found: list[Any] = []

    def walk(operation: Any) -> None:
        for region in operation.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for child in block.operations:
                    for operand in child.operation.operands:
                        if operand not in inside and operand not in found:
                            found.append(operand)
                    walk(child.operation)
                    inside.update(child.operation.results)

    walk(op)
    return [value for value in found if value not in outer]


def _names_inside(op: Any) -> set[str]:
    found = set()
    for region in op.regions:
        for block in region.blocks:
            for child in block.operations:
                found |= {child.operation.name} | _names_inside(child.operation)
    return found


def _as_text(op: Any, operands: Sequence[Any]) -> str:
    """A module whose one function holds the operator, from its operands to its results."""
    types = [v.type for v in operands]
    with op.context, _ir.Location.unknown():
        module = _ir.Module.create()
        with _ir.InsertionPoint(module.body):
            results = [r.type for r in op.results]
            function = _compat.func_dialect().FuncOp("op", (types, results))
            entry = function.add_entry_block()
        made = op.clone(ip=_ir.InsertionPoint(entry))
        _replace(op, made, dict(zip(operands, entry.arguments, strict=True)))
        with _ir.InsertionPoint(entry):
            _compat.func_dialect().ReturnOp(list(made.results))
        return str(module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))


def _hints(op: Any, name: str) -> dict[str, Any]:
    """Parameters that the estimates of work read."""
    if name == "dot_general":
        numbers = _compat.stablehlo_dialect().DotDimensionNumbers(
            op.attributes["dot_dimension_numbers"]
        )
        return {
            "dimension_numbers": (
                (
                    tuple(numbers.lhs_contracting_dimensions),
                    tuple(numbers.rhs_contracting_dimensions),
                ),
                (tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions)),
            )
        }
    if name == "triangular_solve":
        return {"left_side": _ir.BoolAttr(op.attributes["left_side"]).value}
    if name == "sort":
        return {"dimension": int(_ir.IntegerAttr(op.attributes["dimension"]).value)}
    if name == "conv_general_dilated":
        numbers = _compat.stablehlo_dialect().ConvDimensionNumbers(
            op.attributes["dimension_numbers"]
        )
        return {
            "dimension_numbers": ConvolutionNumbers(
                (
                    int(numbers.kernel_output_feature_dimension),
                    int(numbers.kernel_input_feature_dimension),
                    *map(int, numbers.kernel_spatial_dimensions),
                ),
                (
                    int(numbers.output_batch_dimension),
                    int(numbers.output_feature_dimension),
                    *map(int, numbers.output_spatial_dimensions),
                ),
            ),
            "feature_group_count": _ir.IntegerAttr(op.attributes["feature_group_count"]).value,
            "batch_group_count": _ir.IntegerAttr(op.attributes["batch_group_count"]).value,
            "lhs_dilation": _dilation(op, "lhs_dilation"),
            "rhs_dilation": _dilation(op, "rhs_dilation"),
        }
    return {}


def _dilation(op: Any, name: str) -> tuple[int, ...]:
    """A convolution's; () where the operator leaves out that it is 1."""
    if name not in op.attributes:
        return ()
    return tuple(_ir.DenseI64ArrayAttr(op.attributes[name]))


@dataclass(frozen=True)
class _Operation:
    """One operator: ``bind`` makes its results from its operands' values."""

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    bind: Callable[..., Sequence[Any]]


class StableHLOFunction:
    """The main function of a module, callable with JAX arrays inside any trace.

    Where the module has 64-bit values, trace it under ``jax.enable_x64``.

    Attributes:
        specs: Shape and dtype of each argument.
        out_specs: Shape and dtype of each result.
        locations: For each operator where it came from.
    """

    def __init__(self, code: bytes, locate: Callable[[str], provenance.Location | None]) -> None:
        """Reads a module.

        Args:
            code: A portable artifact, or MLIR text or bytecode.
            locate: From the name in an operator's location to a place; None where it says nothing.

        Raises:
            UnsupportedError: a value is no tensor of fixed size, or an operator has side effects.
        """
        self._steps: list[_Operation] = []
        self._numbers: dict[Any, int] = {}
        self._found: list[provenance.Location | None] = []
        self._kept: list[Any] = []  # whose values are keys of the numbers
        self._locate = locate
        context = mlir.make_ir_context()
        with context:
            module = _compat.parse_stablehlo(code, context)
            self._functions = {
                _ir.StringAttr(op.attributes["sym_name"]).value: op
                for op in module.body.operations
                if op.operation.name == "func.func"
            }
            main = self._functions.get("main")
            if main is None:
                raise UnsupportedError("a StableHLO module without a function called main")
            arguments = list(main.regions[0].blocks[0].arguments)
            self._inputs = [self._number(a) for a in arguments]
            self._outputs = self._read(main)
            self.specs = [jax.ShapeDtypeStruct(*_spec(a.type)) for a in arguments]
        self.out_specs = self._out_specs
        self.locations = self._inherited()
        del self._functions, self._numbers, self._kept  # they hold the MLIR context

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _read(self, function: Any) -> list[int]:
        for op in function.regions[0].blocks[0].operations:
            operation = op.operation
            name = operation.name.removeprefix("stablehlo.")
            if name == "func.return":
                self._out_specs = [jax.ShapeDtypeStruct(*_spec(v.type)) for v in operation.operands]
                return [self._number(v) for v in operation.operands]
            if name in ("func.call", "composite"):
                key = "callee" if name == "func.call" else "decomposition"
                self._call(operation, _ir.FlatSymbolRefAttr(operation.attributes[key]).value)
            else:
                self._operator(operation, name)
        raise UnsupportedError("a StableHLO function without a return")

    def _call(self, operation: Any, name: str) -> None:
        # Operators of the callee are met anew at each call, so they are read from a copy.
        callee = self._functions[name].operation.clone()
        self._kept.append(callee)
        for inner, given in zip(
            callee.regions[0].blocks[0].arguments, operation.operands, strict=True
        ):
            self._numbers[inner] = self._number(given)
        for result, number in zip(operation.results, self._read(callee), strict=True):
            self._numbers[result] = number

    def _operator(self, operation: Any, name: str) -> None:
        kind = _NAMES.get(name, name)
        if "func.call" in _names_inside(operation):
            raise UnsupportedError(f"stablehlo.{name} calls a function from inside of its regions")
        if name in ("infeed", "outfeed", "send", "recv", "after_all", "create_token") or (
            name == "custom_call" and "has_side_effect" in operation.attributes
            and _ir.BoolAttr(operation.attributes["has_side_effect"]).value
        ):  # fmt: skip
            raise UnsupportedError(f"stablehlo.{name} has side effects; it cannot be scheduled")
        outs = tuple(_type(r.type) for r in operation.results)
        operands = list(operation.operands)  # one that is read twice is there twice, as in JAX
        operands += _captured(operation, operands)
        numbers = tuple(self._number(v) for v in operands)
        results = tuple(self._number(r) for r in operation.results)
        constant = _constant(operation, outs[0]) if name == "constant" else None
        if constant is not None:
            bind: Callable[..., Sequence[Any]] = constant
        else:
            bind = functools.partial(
                _primitive(kind).bind,
                text=_as_text(operation, operands),
                outs=outs,
                **_hints(operation, kind),
            )
        self._steps.append(_Operation(kind, numbers, results, bind))
        location = operation.location
        self._found.append(self._locate(getattr(location, "name_str", None) or str(location)))

    def _inherited(self) -> list[provenance.Location]:
        """Operators without a location get that of a producer, else of the first reader."""
        found = list(self._found)
        by_value = {v: i for i, step in enumerate(self._steps) for v in step.results}
        for i, step in enumerate(self._steps):
            for value in step.operands:
                if found[i] is None and value in by_value and step.kind != "constant":
                    found[i] = found[by_value[value]]
        for i in reversed(range(len(found))):
            for value in self._steps[i].operands:
                if value in by_value and found[by_value[value]] is None:
                    found[by_value[value]] = found[i]
        return [location or provenance.Location() for location in found]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Evaluates on flat arguments; returns flat results."""
        env: dict[int, Any] = dict(zip(self._inputs, arrays, strict=True))
        for number, (step, at) in enumerate(zip(self._steps, self.locations, strict=True)):
            with provenance.scope(number, step.kind, at.scope):
                made = step.bind(*[env[v] for v in step.operands])
            env.update(zip(step.results, made, strict=True))
        return [env[v] for v in self._outputs]


def _spec(type_: Any) -> tuple[tuple[int, ...], Any]:
    shape, dtype = _type(type_)
    return shape, jnp.dtype(dtype)


def _constant(operation: Any, out: tuple[tuple[int, ...], str]) -> Callable[..., Any] | None:
    """A constant as an array: a filled one costs nothing, and every region makes its own."""
    shape, dtype = out
    attribute = _ir.DenseElementsAttr(operation.attributes["value"])
    if dtype.startswith(("bfloat", "float16", "complex")):
        return None
    if attribute.is_splat:
        value = np.asarray(attribute).reshape(-1)[0]
        return lambda: [jnp.full(shape, value, dtype)]
    array = np.array(attribute, copy=True).reshape(shape).astype(dtype)
    return lambda: [jnp.asarray(array)]
