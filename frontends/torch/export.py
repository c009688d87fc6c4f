"""Scheduling a ``torch.export.ExportedProgram``: captured ahead of time, for inference."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.entry import Entry, Options, build_entry


class ScheduledExport:
    """An exported program that runs under a schedule; called like ``program.module()``.

    Attributes:
        original: ``program.module()``, which shares parameters and buffers with the program.
        program: The program as given to ``schedule``.
    """

    def __init__(self, program: torch.export.ExportedProgram, options: Options) -> None:
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

    def __init__(self, program: torch.export.ExportedProgram, options: Options) -> None:
        self._module: torch.nn.Module = program.module()
        super().__init__(self._module, options)
        self.program = program
        self._entry: Entry | None = None
        self._once = threading.Lock()
        # Functional: exported graphs keep in-place operators until they are decomposed.
        self._functional = program.run_decompositions({})

    def entry(self) -> Entry:
        """The planned graph; made once."""
        with self._once:
            if self._entry is None:
                self._entry = build_entry(
                    self._functional.graph_module, self.options, "inference", 0
                )
                self.entries.append(self._entry)
            return self._entry

    def all_planned(self, args: Any, kwargs: Any) -> list[Entry]:
        """See ``Core``; shapes do not matter, the program has one graph."""
        return [self.target(args, kwargs).entry()]  # type: ignore[attr-defined]

    def with_strategy(self, strategy: Any) -> Core:
        """See ``Core``."""
        key = repr(strategy)
        if key not in self.children:
            self.children[key] = _ExportCore(self.program, replace(self.options, strategy=strategy))
        return self.children[key]

    def _invoke(self, args: Any, kwargs: Any) -> Any:
        entry = self.entry()
        inputs, signature = self._inputs(args, kwargs), self._functional.graph_signature
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in inputs
        ):
            raise UnsupportedError(
                "a scheduled exported program has no backward; call it under torch.no_grad(), or "
                "schedule the module itself"
            )
        by_name = dict(zip((spec.arg.name for spec in signature.input_specs), inputs, strict=True))
        observed = self.observed(entry)
        if observed is not None:
            outputs = observed[1](inputs)
        else:
            self.note_run(entry)
            outputs = entry(inputs)
        results = []
        named = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target}
        kind = torch.export.graph_signature.OutputKind
        for spec, value in zip(signature.output_specs, outputs, strict=True):
            if spec.kind == kind.USER_OUTPUT:
                results.append(value)
            elif spec.kind == kind.USER_INPUT_MUTATION:
                by_name[spec.target].copy_(value)
            elif spec.kind == kind.BUFFER_MUTATION:
                by_name[named[spec.target]].copy_(value)
            else:
                raise UnsupportedError(
                    f"an exported program with an output of kind {spec.kind.name}"
                )
        return pytree.tree_unflatten(results, self.program.call_spec.out_spec)

    def _inputs(self, args: Any, kwargs: Any) -> list[Any]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        expected = self.program.call_spec.in_spec
        if tree != expected:
            raise UnsupportedError(f"the program was exported for arguments {expected}; got {tree}")
        remaining = iter(leaves)
        program, module = self._functional, self._module
        kind = torch.export.graph_signature.InputKind
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        inputs = []
        for spec in program.graph_signature.input_specs:
            if spec.kind == kind.USER_INPUT:
                value = next(remaining)
                _check(spec, placeholders[spec.arg.name].meta.get("val"), value)
            elif spec.target in state:
                value = state[spec.target]
            else:
                value = program.constants[spec.target]
            inputs.append(value)
        return inputs


def _check(spec: Any, example: Any, value: Any) -> None:
    """Raises UnsupportedError if an argument is not what the program was exported for."""
    name = spec.arg.name
    if not isinstance(example, torch.Tensor):
        wanted = getattr(spec.arg, "value", None)
        if not isinstance(example, torch.SymInt) and wanted is not None and wanted != value:
            raise UnsupportedError(f"argument {name} was exported as {wanted!r}; got {value!r}")
        return
    fixed = [n if isinstance(n, int) else None for n in example.shape]
    ok = (
        isinstance(value, torch.Tensor)
        and value.dtype == example.dtype
        and value.ndim == len(fixed)
        and all(n is None or n == m for n, m in zip(fixed, value.shape, strict=True))
    )
    if not ok:
        got = (
            f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        )
        shape = ["?" if n is None else n for n in fixed]
        raise UnsupportedError(f"argument {name} was exported as {example.dtype}{shape}; got {got}")
