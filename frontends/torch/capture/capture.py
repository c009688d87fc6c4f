"""From a functional aten graph (AOTAutograd's, or an exported program's) to the graph IR.

``getitem`` of a multi-output operator is not an operator here: the operator has several values. An
operator that draws random numbers reads and makes a token, a value without data, so that such
operators keep their order whatever lanes they run on.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import aot
from dynaflow_xla.frontends.torch.capture import costs, functions, marks
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.capture.names import path_parts, source_of, without_counts
from dynaflow_xla.frontends.torch.capture.random.draws import draws_numbers
from dynaflow_xla.ir import told
from dynaflow_xla.ir.graph import Graph, Operator, OpMark, OuterKind, OuterReason, Value

OPEN_SIZES = "sizes that may change are shown as they were at the first call"

CAPTURE_OPTIONS = frozenset({"dynamic", "fullgraph"})
"""Compiler options that go to ``torch.compile``."""


def _is_random(node: Any, modules: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return draws_numbers(node.target, node.args, node.kwargs)
    return any(
        _is_random(inner, dict(gm.named_modules()))
        for gm in _graphs((node.args, node.kwargs), modules)
        for inner in gm.graph.nodes
        if inner.op == "call_function"
    )


def _graphs(args: Any, modules: dict[str, Any]) -> list[Any]:
    found = [modules.get(str(a.target)) for a in _nodes(args) if a.op == "get_attr"]
    return [gm for gm in found if isinstance(gm, torch.fx.GraphModule)]


def _nodes(arg: Any) -> list[Any]:
    nodes: list[Any] = []

    def note(node: Any) -> Any:
        nodes.append(node)
        return node

    torch.fx.node.map_arg(arg, note)
    return nodes


def _kind(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        namespace, _, name = str(packet).partition(".")
        return name if namespace == "aten" else f"{namespace}.{name}"
    name = getattr(target, "__name__", None) or str(target)
    return name.strip("_") if target in vars(operator).values() else name


class Finished:
    """A collective and the wait for its result, as one operator: a lane blocks, others go on."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._schema, self.overloadpacket = target._schema, target.overloadpacket
        self.tags, self.namespace = target.tags, target.namespace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The collective's result, once it is there."""
        return torch.ops._c10d_functional.wait_tensor(self.target(*args, **kwargs))

    def __str__(self) -> str:
        return f"{self.target}, finished"


def _has_effect(target: Any) -> bool:
    """Whether an operator has an effect (it raises, say): PyTorch wraps these to keep their order."""
    return str(target) == "with_effects"


def _outer_reason(target: Any) -> OuterReason | None:
    namespace = getattr(target, "namespace", "")
    if namespace in ("_c10d_functional", "c10d_functional", "c10d", "symm_mem"):
        return OuterReason("communicates between devices", OuterKind.NETWORK)
    return None


class _Builder:
    def __init__(self, gm: Any) -> None:
        self.gm = gm
        self.values: list[Value] = []
        self.examples: dict[int, Any] = {}
        self.ops: list[Operator] = []
        self.ids: dict[Any, int] = {}
        self.constants: dict[Any, Any] = {}
        self.parts: dict[Any, tuple[int | None, ...]] = {}
        self.epilogue: list[tuple[int, int]] = []
        self.token: int | None = None
        self.modules = dict(gm.named_modules())
        self.calls: dict[Any, str] = {}
        self.call_counts: Counter[str] = Counter()
        self.marks: dict[int, int] = {}
        self.symbolic = False
        self.made_by: dict[int, int] = {}  # value of a collective -> its operator

    def value(self, example: Any, producer: int) -> int:
        number = len(self.values)
        if isinstance(example, torch.Tensor):
            shape, dtype = costs.shape_of(example), str(example.dtype).removeprefix("torch.")
            size = costs.tensor_bytes(example)
            self.symbolic |= any(isinstance(n, torch.SymInt) for n in example.shape)
        elif isinstance(example, (bool, torch.SymBool)):
            shape, dtype, size = (), "bool", 1
        elif isinstance(example, (float, torch.SymFloat)):
            shape, dtype, size = (), "float64", 8
        elif isinstance(example, (int, torch.SymInt)):
            shape, dtype, size = (), "int64", 8
        else:
            shape, dtype, size = (), "object" if example is not _TOKEN else "token", 0
        self.values.append(Value(number, shape, dtype, size, producer))
        self.examples[number] = example
        return number

    # -- where a node comes from ----------------------------------------------------------------

    def _stack(self, node: Any) -> list[tuple[str, str, str]]:
        """(key, module path, class name), outermost first; a backward node has its forward's."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        result = []
        for key, (path, cls) in stack.items():
            name = cls.rsplit(".", 1)[-1] if isinstance(cls, str) else cls.__name__
            result.append((str(key), str(path), name))
        return result

    def place(self, node: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """(scope, classes, call path) of a node."""
        stack = self._stack(node)
        scope: list[str] = []
        classes: list[str] = []
        calls = []
        for key, path, cls in stack:
            parts = path_parts(path)
            _, at, repeat = key.partition("@")
            if at and parts:
                parts[-1] = f"{parts[-1]}@{repeat}"
            if len(parts) < len(scope) or without_counts(parts[: len(scope)]) != without_counts(
                scope
            ):
                scope, classes = [], []
            parts[: len(scope)] = scope
            classes += [""] * (len(parts) - len(classes))
            if parts:
                classes[len(parts) - 1] = cls
            scope = parts
            label = self.calls.get(key)
            if label is None:
                label = self.calls[key] = f"{cls}#{self.call_counts[cls]}"
                self.call_counts[cls] += 1
            calls.append(label)
        return tuple(scope), tuple(classes), tuple(calls)

    def mark(self, node: Any) -> OpMark | None:
        mark = marks.mark_of(node.meta)
        if mark is None:
            return None
        instance = self.marks.setdefault(mark.instance, len(self.marks))
        return OpMark(mark.name, instance, mark.resource, mark.tags)

    # -- nodes ----------------------------------------------------------------------------------

    def call(self, node: Any) -> None:
        if node.target is operator.getitem and node.args[0] in self.parts:
            part = self.parts[node.args[0]][node.args[1]]
            if part is None:
                self.constants[node] = None
            else:
                self.ids[node] = part
            return
        target = node.target
        if self._is_wait(node):
            started = self.made_by[self.ids[node.args[0]]]
            op = self.ops[started]
            payload = replace(op.payload, target=Finished(op.payload.target))
            self.ops[started] = replace(op, payload=payload)
            self.ids[node] = self.ids[node.args[0]]
            return
        schema = getattr(target, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._mutation(node)
            return
        index = len(self.ops)
        example = node.meta.get("val")
        multiple = isinstance(example, (list, tuple))
        outputs: tuple[int | None, ...]
        if multiple:
            outputs = tuple(None if part is None else self.value(part, index) for part in example)
            self.parts[node] = outputs
        elif example is None:
            outputs = ()
            self.constants[node] = None
        else:
            number = self.value(example, index)
            outputs = (number,)
            self.ids[node] = number
        random = _is_random(node, self.modules)
        inputs = list(dict.fromkeys(self._inputs(node)))
        made = [n for n in outputs if n is not None]
        if random:
            if self.token is not None:
                inputs.append(self.token)
            self.token = self.value(_TOKEN, index)
            made.append(self.token)
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._read)
        examples = (self._example(node.args), self._example(node.kwargs))
        flops, moved, cost, spread = costs.estimate(target, *examples, example)
        scope, classes, calls = self.place(node)
        reason = _outer_reason(target)
        if reason:
            self.made_by.update((n, index) for n in made)
        self.ops.append(
            Operator(
                index=index,
                kind=_kind(target),
                inputs=tuple(inputs),
                outputs=tuple(made),
                scope=scope,
                call_path=calls,
                classes=classes,
                flops=flops,
                bytes_moved=moved,
                cost_ns=cost,
                spread=spread,
                outer=bool(reason),
                outer_reason=reason,
                once=random or not made or node.is_impure(False) or _has_effect(target),
                mark=self.mark(node),
                function=functions.function_of(node.meta),
                source=source_of(node),
                params=_params_text(node, self.constants),
                payload=Payload(target, tuple(args), dict(kwargs), outputs, multiple),
            )
        )

    def _is_wait(self, node: Any) -> bool:
        """Whether a node waits for a collective whose result nobody else reads."""
        if str(node.target) != "_c10d_functional.wait_tensor.default":
            return False
        (given,) = node.args
        started = given in self.ids and self.ids[given] in self.made_by and len(given.users) == 1
        return started and isinstance(given.meta.get("val"), torch.Tensor)

    def _read(self, node: Any) -> Any:
        return self.constants[node] if node in self.constants else Ref(self.ids[node])

    def _example(self, arg: Any) -> Any:
        return torch.fx.node.map_arg(
            arg, lambda n: self.constants[n] if n in self.constants else n.meta.get("val")
        )

    def _inputs(self, node: Any) -> list[int]:
        found: list[int] = []
        for source in node.all_input_nodes:
            if source in self.ids:
                found.append(self.ids[source])
            elif source in self.parts:
                found += [n for n in self.parts[source] if n is not None]
        return found

    def _mutation(self, node: Any) -> None:
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            written, value = node.args[0], self.ids[node.args[1]]
            later = list(node.graph.nodes)
            later = later[later.index(node) + 1 :]
            if not any(written in n.all_input_nodes for n in later if n.op != "output"):
                self.epilogue.append((self.ids[written], value))
                self.ids[node] = self.ids[written]
                return
        raise UnsupportedError(
            f"{node.target} at {source_of(node)} writes into its argument in the middle of the captured "
            "graph; lanes would see it at different times. Use the out-of-place form, or run the original."
        )


class _Token:
    """Example value of a token."""


_TOKEN = _Token()


def _params_text(node: Any, constants: Mapping[Any, Any]) -> str:
    """What it does besides its inputs: see ``told.in_words``."""
    shown, further = [], []
    named = [*((str(i), arg) for i, arg in enumerate(node.args)), *sorted(node.kwargs.items())]
    for name, value in named:
        inside = _nodes(value)
        if not inside:
            shown.append((name, value))
        elif not isinstance(value, torch.fx.Node):
            further.append((name, torch.fx.node.map_arg(value, lambda _: _TOKEN)))
        bodies = [constants[n] for n in inside if n in constants]
        further += [(name, *_body(b)) for b in bodies if isinstance(b, torch.fx.GraphModule)]
    return told.in_words(shown, further)


def _body(gm: Any) -> Iterator[Any]:
    """All that a graph inside of an operator computes, without names."""
    known: dict[Any, str] = {}
    for node in gm.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        target = ""
        if node.op == "get_attr":
            inner = _attribute(gm, str(node.target))
            target = str(list(_body(inner)) if isinstance(inner, torch.fx.GraphModule) else "")
        elif node.op != "placeholder":
            target = str(node.target)
        known[node] = f"%{len(known)}"
        yield node.op, target, args, kwargs


def capture(gm: Any, name: str) -> Captured:
    """Builds the graph of a functional aten graph.

    Args:
        gm: A ``torch.fx.GraphModule`` whose nodes carry example values in ``meta["val"]``.
        name: Name of the function.

    Raises:
        UnsupportedError: an operator writes into its arguments in a way that cannot be put last.
    """
    builder = _Builder(gm)
    inputs: list[int] = []
    names: list[str] = []
    outputs: list[Any] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            builder.ids[node] = builder.value(node.meta.get("val"), -1)
            inputs.append(builder.ids[node])
            names.append(node.name)
        elif node.op == "get_attr":
            builder.constants[node] = _attribute(gm, str(node.target))
        elif node.op == "call_function":
            builder.call(node)
        elif node.op == "output":
            results = node.args[0]  # of a function inside of a graph it may be the one
            for result in [results] if isinstance(results, torch.fx.Node) else results:
                if isinstance(result, torch.fx.Node) and result in builder.ids:
                    outputs.append(builder.ids[result])
                else:
                    constant = builder.constants.get(result) if result is not None else None
                    is_node = isinstance(result, torch.fx.Node)
                    outputs.append(("const", constant if is_node else result))
        else:
            raise UnsupportedError(f"a captured graph holds a {node.op} node, {node.format_node()}")
    device = _check_devices(builder, name)
    graph_outputs = [out for out in outputs if isinstance(out, int)]
    graph_outputs += [value for _, value in builder.epilogue]
    graph = Graph(
        name=name,
        values=tuple(builder.values),
        ops=tuple(_inherit(builder.ops)),
        inputs=tuple(inputs),
        outputs=tuple(graph_outputs),
        input_names=tuple(names),
        part=gm.meta.get(aot.PART, False),
    )
    captured = Captured(
        graph, builder.ids, builder.examples, outputs, builder.epilogue, gm, device=device
    )
    captured.labels = aot.input_labels(gm)
    if builder.symbolic:
        captured.symbolic = True
        captured.notes.append(OPEN_SIZES)
    return captured


def _check_devices(builder: _Builder, name: str) -> torch.device:
    """The device of all values.

    Raises:
        UnsupportedError: they are on several, or on one that is neither the CPU nor CUDA.
    """
    tensors = {n: x for n, x in builder.examples.items() if isinstance(x, torch.Tensor)}
    found = [x.device for x in tensors.values() if x.device.type == "cuda"]
    device = found[0] if found else torch.device("cpu")
    for number, example in tensors.items():
        at_home = example.device == device
        if at_home or (example.device.type == "cpu" and example.dim() == 0):
            continue
        producer = builder.values[number].producer
        what = "an argument" if producer < 0 else f"what {builder.ops[producer].kind} makes"
        readers = [op for op in builder.ops if number in op.inputs]
        at = builder.ops[producer] if producer >= 0 else (readers[0] if readers else None)
        source = None if at is None else at.source  # PyTorch's own operators have no line
        where = (
            "" if source is None else f" (used at {source})" if producer < 0 else f" at {source}"
        )
        raise UnsupportedError(
            f"a schedule runs on one device, the CPU or a CUDA device (here {device}), and in {name!r} "
            f"{what}{where} is on {example.device}. Move the model and all arguments to one device, "
            "or call the original."
        )
    return device


def _attribute(gm: Any, path: str) -> Any:
    value = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _inherit(ops: list[Operator]) -> list[Operator]:
    """Gives operators without a module (some of the backward) that of what they read."""
    made = {v: i for i, op in enumerate(ops) for v in op.outputs}
    for i, op in enumerate(ops):
        if op.scope or op.call_path:
            continue
        near = [ops[made[v]] for v in op.inputs if v in made and ops[made[v]].call_path]
        if near and all(o.call_path == near[0].call_path for o in near):
            ops[i] = replace(
                op, scope=near[0].scope, classes=near[0].classes, call_path=near[0].call_path
            )
    return ops
