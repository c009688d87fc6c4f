"""PyTorch's interpreter of graphs: operators one after another, without Python between them.

It is TorchScript's, used for what it does at run time only: nothing is scripted or traced, a graph is
written operator by operator. It calls the operators that ``torch.ops`` calls, with the same
kernels, and gives the interpreter lock back while it runs. All of it is private to PyTorch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_made = threading.Lock()

_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""c10::MemoryFormat; the interpreter's form of it is its number."""


_NAMES = (
    "Graph", "TensorType", "IntType", "TupleType", "parse_schema", "_create_function_from_graph",
    "_jit_set_profiling_mode", "_get_graph_executor_optimize", "_set_graph_executor_optimize",
)  # fmt: skip


def is_value(arg: Any) -> bool:
    """Whether something is a value of a graph that is written."""
    return isinstance(arg, torch._C.Value)


class Unwritable(Exception):
    """An operator or argument that cannot stand in a graph of the interpreter."""


def interpreter_exists() -> bool:
    """Whether this PyTorch has an interpreter with the names used here."""
    return all(hasattr(torch._C, name) for name in _NAMES)


class Writer:
    """A graph that is written operator by operator.

    A value of it is what ``input`` and ``operator`` return.
    """

    def __init__(self) -> None:
        self._graph = torch._C.Graph()
        self._tensor = torch._C.TensorType.get()
        self._taken: list[Any] = []

    def input(self, name: str, example: Any) -> Any:
        """One more argument, a tensor or an int as the example is.

        Raises:
            Unwritable: it is something else.
        """
        if not isinstance(example, torch.Tensor | torch.SymInt | int) or isinstance(example, bool):
            raise Unwritable(f"an argument {type(example).__name__}")
        value = self._graph.addInput(name)
        is_tensor = isinstance(example, torch.Tensor)
        value.setType(self._tensor if is_tensor else torch._C.IntType.get())
        if is_tensor:
            self._taken.append(value)
        return value

    def operator(
        self, target: Any, args: Sequence[Any], kwargs: Any, value_of: Any, count: int
    ) -> list[Any]:
        """Calls an operator that returns tensors, or one list of tensors.

        Args:
            target: An ``OpOverload``.
            args: Its arguments.
            kwargs: Its keyword arguments.
            value_of: From an argument to the value that it stands for, or None if it is a constant.
            count: How many tensors it returns.

        Returns:
            A value for each tensor.

        Raises:
            Unwritable: it cannot be written; the graph is as before, constants that nobody reads aside.
        """
        schema = target._schema
        if schema.is_mutable:
            raise Unwritable("it writes into its arguments")
        kinds = [r.type for r in schema.returns]
        names = [kind.kind() for kind in kinds]
        one_list = names == ["ListType"] and kinds[0].getElementType().kind() == "TensorType"
        if not count or not (one_list or names == ["TensorType"] * count):
            raise Unwritable("its results are no tensors")
        inputs = []
        for position, formal in enumerate(schema.arguments):
            if position < len(args) and not formal.kwarg_only:
                given = args[position]
            elif formal.name in kwargs:
                given = kwargs[formal.name]
            elif formal.has_default_value():
                given = formal.default_value
            else:
                raise Unwritable(f"{formal.name} is missing")
            inputs.append(self._argument(given, formal.type, value_of))
        node = self._graph.create(schema.name, inputs, len(kinds))
        self._graph.insertNode(node)
        try:
            found = torch._C.parse_schema(node.schema())
            if found != schema and not _same_but_for_numbers(found, schema):
                raise Unwritable(f"the interpreter would call {found}")
        except (RuntimeError, Unwritable) as error:
            node.destroy()
            raise Unwritable(str(error)) from None
        outputs = list(node.outputs())
        for output, kind in zip(outputs, kinds, strict=True):
            output.setType(kind)
        return self._unpack(outputs[0], count) if one_list else outputs

    def function(self, name: str, results: Sequence[Any]) -> Callable[..., Any]:
        """The graph as a function of its inputs: a tuple of results, and last a list of its tensor inputs.

        Whoever lets go of the last reference but Python's to a tensor takes the interpreter lock for it
        (``decref_pyobject`` of ``c10/util/intrusive_ptr.h``): the graph would at each weight's only reader,
        and a lane that sleeps for the lock at each weight is slower than none. A result is let go of by
        the caller, who has the lock.
        """
        held = self._node("prim::ListConstruct", self._taken, torch._C.ListType(self._tensor))
        results = [*results, held]
        kind = torch._C.TupleType([r.type() for r in results])
        self._graph.registerOutput(self._node("prim::TupleConstruct", results, kind))
        return _function(name, self._graph)

    def _node(self, kind: str, inputs: Sequence[Any], made: Any) -> Any:
        node = self._graph.create(kind, list(inputs), 1)
        self._graph.insertNode(node)
        node.output().setType(made)
        return node.output()

    def _unpack(self, tensors: Any, count: int) -> list[Any]:
        node = self._graph.create("prim::ListUnpack", [tensors], count)
        self._graph.insertNode(node)
        outputs = list(node.outputs())
        for output in outputs:
            output.setType(self._tensor)
        return outputs

    def _argument(self, given: Any, kind: Any, value_of: Any) -> Any:
        if kind.kind() == "OptionalType":
            if given is None:
                return self._graph.insertConstant(None)
            kind = kind.getElementType()
        name = kind.kind()
        value = value_of(given)
        if value is not None:
            mine = value.type().kind()
            if name != mine and not (name == "NumberType" and mine == "IntType"):
                raise Unwritable(f"{mine} for {kind}")
            return value
        if name == "ListType":
            return self._list(given, kind, value_of)
        if isinstance(given, torch.Tensor):
            if type(given) is not torch.Tensor or given.requires_grad:
                raise Unwritable("a tensor that is no plain constant")
            return self._graph.insertConstant(given)
        return self._graph.insertConstant(_constant(given, name))

    def _list(self, given: Any, kind: Any, value_of: Any) -> Any:
        if not isinstance(given, list | tuple):
            raise Unwritable(f"{given!r} for {kind}")
        element = kind.getElementType()
        if given and element.kind() in _NUMBERS and all(value_of(x) is None for x in given):
            return self._graph.insertConstant([_constant(x, element.kind()) for x in given])
        items = [self._argument(x, element, value_of) for x in given]
        return self._node("prim::ListConstruct", items, kind)


_NUMBERS = {"IntType": int, "FloatType": float, "BoolType": bool, "ComplexType": complex}


def _constant(given: Any, kind: str) -> Any:
    if isinstance(given, torch.memory_format):
        given = _FORMATS[given]
    if kind == "IntType" and isinstance(given, torch.dtype | torch.layout):
        return given
    if kind in ("NumberType", "TensorType"):
        if type(given) in (int, float, bool, complex):
            return given
    elif kind in _NUMBERS:
        wanted = _NUMBERS[kind]
        exact = type(given) is wanted or (wanted is float and type(given) is int)
        if exact:
            return wanted(given)
    elif kind == "StringType" and isinstance(given, str):
        return given
    elif kind == "DeviceObjType" and isinstance(given, torch.device | str):
        return torch.device(given)
    raise Unwritable(f"{given!r} for {kind}")


_TAKE_NUMBERS = frozenset(f"aten::{name}" for name in ("add", "sub", "mul", "div"))


def _same_but_for_numbers(found: Any, wanted: Any) -> bool:
    """Whether the overload for numbers was found, where a number was given for a tensor.

    Of these operators it makes a tensor of the number and calls the other overload.
    """
    overload = wanted.overload_name.replace("Tensor", "Scalar")
    return bool(found.name == wanted.name in _TAKE_NUMBERS and found.overload_name == overload)


def _function(name: str, graph: Any) -> Callable[..., Any]:
    made: Any = torch._C._create_function_from_graph(name, graph)
    # The executor is made at the first look. With these settings it is the one that runs a graph as it was
    # written; the other would profile, join and reorder operators, and so change roundings.
    with _made:
        optimizes = torch._C._get_graph_executor_optimize()
        profiles = torch._C._jit_set_profiling_mode(False)
        torch._C._set_graph_executor_optimize(False)
        try:
            with contextlib.suppress(RuntimeError):  # it has nothing to tell before it has run
                made.get_debug_state()
        finally:
            torch._C._set_graph_executor_optimize(optimizes)
            torch._C._jit_set_profiling_mode(profiles)
    return made  # type: ignore[no-any-return]
