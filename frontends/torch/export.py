"""Scheduling a ``torch.export.ExportedProgram``: captured ahead of time, for inference."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError, checks
from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.backend import Entry
from dynaflow_xla.frontends.torch.capture import sizes
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.rewrite import recurrent
from dynaflow_xla.frontends.torch.tuning.deciding import options_for
from dynaflow_xla.settings import Settings

_CHECK = torch.ops.aten._assert_tensor_metadata.default
_CASTING = ("cpu", "cuda")
"""Devices of plans, for each of which autocast is enabled or not."""


class ScheduledExport:
    """An exported program that runs under a schedule; called like ``program.module()``.

    Attributes:
        original: ``program.module()``, which shares parameters and buffers with the program.
        program: The program as given to ``schedule``.
    """

    def __init__(self, program: torch.export.ExportedProgram, options: Settings) -> None:
        self.program = program
        self._dfx_core = _ExportCore(program, options)
        self.original = self._dfx_core.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original.

        Raises:
            UnsupportedError: gradients are wanted, or the arguments are not those exported for.
            EngineError: a region failed while it ran.
        """
        return self._dfx_core.call(args, kwargs)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a scheduled exported program cannot be pickled; save the program with torch.export.save "
            "and schedule it again"
        )

    def __repr__(self) -> str:
        options = self._dfx_core.options
        return f"<scheduled exported program with {options.strategy!r}>"


class _ExportCore(Core):
    """A core with one graph, captured already."""

    captured_ahead = True

    def __init__(self, program: torch.export.ExportedProgram, options: Settings) -> None:
        self._module: torch.nn.Module = program.module()
        super().__init__(self._module, options)
        if self.splits:
            raise UnsupportedError(
                f"{options.strategy!r} may split the batch, which an exported program has no open size for "
                "that is known as one; schedule the module itself"
            )
        self.program = program
        self._entry: Entry | None = None
        self._once = threading.Lock()
        # Functional, and of the operators that a capture has: costs and regions know those alone.
        self._functional = program.run_decompositions(
            {**operators.composites(), **recurrent.in_exported(self.backend.whole_cells)}
        )
        _without_checks(self._functional.graph_module)
        self._read_signature()

    def entry(self) -> Entry:
        """The planned graph; made once."""
        with self._once:
            if self._entry is None:
                self._entry = self.backend.whole(
                    self._functional.graph_module, "inference", self.options.name
                )
                self.entries.append(self._entry)
            return self._entry

    def current(self) -> Core:
        """This: a program has no class that anybody writes for."""
        return self

    def why_as_written(self) -> str:
        """As its base class; and autocast, which changes the types of operators only as they are called."""
        if not (why := super().why_as_written()) and any(map(torch.is_autocast_enabled, _CASTING)):
            why = (
                f"{self.options.name!r} is an exported program that is called under torch.autocast, and its "
                "plan is for the types that it was exported with, so the original runs. Export the program "
                "under autocast and call it without, or schedule the module itself"
            )
        return why

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Raises UnsupportedError if arguments are not those that the program was exported for."""
        self._inputs(args, kwargs)

    def all_planned(self, args: Any, kwargs: Any, *, front: bool = True) -> list[Entry]:
        """The program's one graph, whatever the shapes."""
        return [self.target(args, kwargs).entry()]  # type: ignore[attr-defined]

    def made_for(self, strategy: Any, compiler: str) -> Core:
        """The same program under another strategy, with another compiler."""
        return _ExportCore(self.program, options_for(self.options, strategy, compiler))

    def _invoke(self, args: Any, kwargs: Any) -> Any:
        entry = self.entry()
        inputs = self._inputs(args, kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in inputs
        ):
            raise UnsupportedError(
                "a scheduled exported program has no backward; call it under torch.no_grad(), or "
                "schedule the module itself"
            )
        written = [(number, inputs[where]) for number, where in self._written]
        observer = running.observer(entry)
        if observer is not None:
            outputs = observer(inputs)
        else:
            running.note_run(entry)
            outputs = entry(inputs)
        for number, target in written:
            target.copy_(outputs[number])
        results = [outputs[number] for number in self._results]
        if self._one_result:
            return results[0]
        return pytree.tree_unflatten(results, self.program.call_spec.out_spec)

    def _read_signature(self) -> None:
        """Works out once where each input of the graph comes from and each output goes to."""
        signature, module = self._functional.graph_signature, self._module
        kind = torch.export.graph_signature.InputKind
        placeholders = {n.name: n for n in self._functional.graph.nodes if n.op == "placeholder"}
        self._sources: list[tuple[Any, Any]] = []  # (checked specification or None, where to read)
        number = 0
        for spec in signature.input_specs:
            if spec.kind == kind.USER_INPUT:
                wanted = _Wanted(spec, placeholders[spec.arg.name].meta.get("val"))
                self._sources.append((wanted, number))
                number += 1
                continue
            path, _, name = str(spec.target).rpartition(".")
            owner = _submodule(module, path)
            for state in (owner._parameters, owner._buffers) if owner is not None else ():
                if name in state:
                    # Looked up at each call: `to` and the like put other tensors there.
                    self._sources.append((None, (state, name)))
                    break
            else:
                self._sources.append((None, (self._functional.constants, spec.target)))
        self._open = _OpenSizes(
            [(w, where) for w, where in self._sources if isinstance(w, _Wanted)],
            self._functional.range_constraints,
        )
        positions = {spec.arg.name: i for i, spec in enumerate(signature.input_specs)}
        targets = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target}
        out_kind = torch.export.graph_signature.OutputKind
        self._results: list[int] = []
        self._written: list[tuple[int, int]] = []
        for i, out in enumerate(signature.output_specs):
            if out.kind == out_kind.USER_OUTPUT:
                self._results.append(i)
            elif out.kind == out_kind.USER_INPUT_MUTATION:
                self._written.append((i, positions[out.target]))
            elif out.kind == out_kind.BUFFER_MUTATION:
                self._written.append((i, positions[targets[out.target]]))
            else:
                raise UnsupportedError(
                    f"an exported program with an output of kind {out.kind.name}"
                )
        call_spec = self.program.call_spec
        self._one_result = _is_leaf(call_spec.out_spec)
        positional, named = call_spec.in_spec.children()
        self._arity = len(positional.children())
        # Positional tensors alone need no flattening.
        self._flat = not named.num_nodes > 1 and all(map(_is_leaf, positional.children()))

    def _inputs(self, args: Any, kwargs: Any) -> list[Any]:
        if self._flat and not kwargs and len(args) == self._arity:
            leaves = args
        else:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            expected = self.program.call_spec.in_spec
            if tree != expected:
                raise UnsupportedError(
                    f"the program was exported for arguments {expected}; got {tree}"
                )
        inputs = []
        for wanted, where in self._sources:
            if wanted is None:
                inputs.append(where[0][where[1]])
            else:
                value = leaves[where]
                wanted.check(value)
                inputs.append(value)
        self._open.check(leaves)
        return inputs


def _is_leaf(spec: Any) -> bool:
    return bool(spec.num_nodes == 1 and spec.num_leaves == 1)


def _submodule(module: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        module = getattr(module, part, None)
    return module


class _Wanted:
    """What an argument of an exported program has to be."""

    def __init__(self, spec: Any, example: Any) -> None:
        self.spec = spec
        self.example = example
        self.is_tensor = isinstance(example, torch.Tensor)
        if self.is_tensor:
            self.dtype = example.dtype
            self.shape = [n if isinstance(n, int) else None for n in example.shape]
            self.fixed = None if None in self.shape else torch.Size(self.shape)

    def check(self, value: Any) -> None:
        """Raises UnsupportedError if an argument is not what the program was exported for."""
        name = self.spec.arg.name
        if isinstance(self.example, torch.SymInt) and checks.integer(value) is None:
            raise UnsupportedError(f"argument {name} was exported as an integer; got {value!r}")
        if not self.is_tensor:
            wanted = getattr(self.spec.arg, "value", None)
            if (
                not isinstance(self.example, torch.SymInt)
                and wanted is not None
                and wanted != value
            ):
                raise UnsupportedError(f"argument {name} was exported as {wanted!r}; got {value!r}")
            return
        if isinstance(value, torch.Tensor) and value.dtype == self.dtype:
            if self.fixed is not None:
                if value.shape == self.fixed:
                    return
            elif value.ndim == len(self.shape) and all(
                n is None or n == m for n, m in zip(self.shape, value.shape, strict=True)
            ):
                return
        is_tensor = isinstance(value, torch.Tensor)
        got = f"{value.dtype}{list(value.shape)}" if is_tensor else repr(value)
        shape = ["?" if n is None else n for n in self.shape]
        raise UnsupportedError(f"argument {name} was exported as {self.dtype}{shape}; got {got}")


_MAX_SIZES = 64


class _OpenSizes:
    """What the open sizes of an exported program have to be: within their ranges, and equal where they were.

    PyTorch leaves these checks to code of its own around the graph, which does not run here.

    Args:
        wanted: The user's arguments, each with its place among the leaves of a call.
        ranges: Of the program, by symbol or by what is computed of one.
    """

    def __init__(self, wanted: Sequence[tuple[_Wanted, int]], ranges: Mapping[Any, Any]) -> None:
        self._ranges = ranges
        self._dims: list[tuple[str, Any, int, int]] = []
        self._numbers: list[tuple[str, Any, int]] = []
        for each, where in wanted:
            name = each.spec.arg.name
            if each.is_tensor:
                for dim, size in enumerate(each.example.shape):
                    if isinstance(size, torch.SymInt):
                        what = f"dimension {dim} of argument {name}"
                        self._dims.append((what, sizes.expression(size), where, dim))
            elif isinstance(each.example, torch.SymInt):
                what = f"argument {name}"
                self._numbers.append((what, sizes.expression(each.example), where))
        # Sizes that fitted, so that a server's calls of few sizes are looked up.
        self._known: Recent[tuple[int, ...], bool] = Recent(_MAX_SIZES)

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises UnsupportedError if sizes are not those that the program was exported for."""
        if not self._dims and not self._numbers:
            return
        given = tuple(
            [leaves[where].shape[dim] for _, _, where, dim in self._dims]
            + [int(leaves[where]) for _, _, where in self._numbers]
        )
        if self._known.get(given):
            return
        named: list[tuple[str, Any]] = [(what, expr) for what, expr, _, _ in self._dims]
        named += [(what, expr) for what, expr, _ in self._numbers]
        found: dict[Any, tuple[str, int]] = {}  # symbol -> who gives its value
        for (what, expr), size in zip(named, given, strict=True):
            if expr.is_Symbol:
                found.setdefault(expr, (what, size))
        for (what, expr), size in zip(named, given, strict=True):
            self._check_range(what, expr, size)
            if not expr.free_symbols <= set(found):
                self._solve(what, expr, size, found)
            elif (must := int(expr.subs({s: found[s][1] for s in expr.free_symbols}))) != size:
                others = " and ".join(
                    f"{whose} is {value}"
                    for s, (whose, value) in found.items()
                    if s in expr.free_symbols
                )
                raise UnsupportedError(
                    f"the program was exported for {what} to follow from other sizes: where {others}, it "
                    f"must be {must}; got {size}"
                )
        self._known[given] = True

    def _check_range(self, what: str, expr: Any, size: int) -> None:
        if (within := self._ranges.get(expr)) is None:
            return
        # As in PyTorch, which takes sizes of 0 and 1 where a program is for 2 and more.
        if size < within.lower and within.lower > 2:
            raise UnsupportedError(
                f"the program was exported for {what} of at least {within.lower}; got {size}"
            )
        if size > within.upper:
            raise UnsupportedError(
                f"the program was exported for {what} of at most {within.upper}; got {size}"
            )

    def _solve(self, what: str, expr: Any, size: int, found: dict[Any, tuple[str, int]]) -> None:
        """Notes the value of a symbol that no size is by itself, as in ``2 * Dim("half")``."""
        unknown = expr.free_symbols - set(found)
        if len(unknown) > 1:
            return
        (symbol,) = unknown
        put = expr.subs({s: found[s][1] for s in expr.free_symbols & set(found)})
        by, rest = put.coeff(symbol, 1), put.coeff(symbol, 0)
        if (by * symbol + rest - put).expand() != 0 or not by.is_Integer or by == 0:
            return  # of no dimension that can be declared
        if (size - int(rest)) % int(by):
            raise UnsupportedError(
                f"the program was exported for {what} of the form {put}; got {size}"
            )
        value = (size - int(rest)) // int(by)
        found[symbol] = f"what {what} is computed of", value


def _without_checks(gm: Any) -> None:
    """Takes out checks of types and devices that the program's own examples meet, as all inputs do.

    An export puts one before each conversion. They are effects, and would keep what is around them apart.
    """
    for node in list(gm.graph.find_nodes(op="call_function", target=_CHECK)):
        told = dict(zip(("a", "size", "stride", "dtype"), node.args, strict=False)) | node.kwargs
        value = told.pop("a").meta.get("val")
        told = {name: wanted for name, wanted in told.items() if wanted is not None}
        if told.keys() <= {"dtype", "device", "layout"} and all(
            getattr(value, name, None) == wanted for name, wanted in told.items()
        ):
            gm.graph.erase_node(node)
    gm.recompile()
