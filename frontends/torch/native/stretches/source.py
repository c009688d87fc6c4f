"""Python code of operators: a straight-line function with a local variable for each value."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref, place
from dynaflow_xla.frontends.torch.native.memory import MergedResult
from dynaflow_xla.frontends.torch.native.stretches import calls
from dynaflow_xla.frontends.torch.native.stretches.interpreted import FxProgram

_SIMPLE = (bool, int, str, type(None), type(...))
_numbers = itertools.count()


@dataclass(frozen=True)
class Step:
    """What runs at once: an operator, or the function of a whole region.

    Attributes:
        region: Id of its region.
        payload: The operator; None for a function.
        function: Of a whole region, from values read to values made.
        reads: Values that it reads.
        writes: Values that it makes.
        op: Number of the operator in the graph; -1 for a region.
    """

    region: int
    payload: Payload | None
    function: Callable[..., Sequence[Any]] | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    op: int = -1


@dataclass(frozen=True)
class FusedOperators:
    """Operators that follow each other on a lane, compiled as one.

    Attributes:
        steps: The operators.
        function: From values read to values made.
        reads: Values that it reads.
        writes: Values that it makes which somebody else reads.
    """

    steps: tuple[Step, ...]
    function: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def region(self) -> int:
        """Of its first operator."""
        return self.steps[0].region


class Code:
    """A function that is written line by line.

    Attributes:
        regions: By code object of a function made here, the region of each of its lines.

    Args:
        captured: The graph.
        title: For tracebacks.
        exported: Values that are left in the environment as soon as they are made.
        taken: Values that are taken out of the environment when they are read.
        placed_results: Results that are put together in place.
    """

    def __init__(
        self,
        captured: Captured,
        title: str,
        exported: set[int],
        taken: set[int],
        placed_results: Sequence[MergedResult] = (),
    ) -> None:
        self.regions: dict[CodeType, tuple[int, ...]] = {}
        self._captured = captured
        self._title = title
        self._exported = exported
        self._taken = taken
        self._names: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._lines: list[str] = []
        self._line_regions: list[int] = []
        self._have: set[int] = set()
        # Part of a result -> places it is written to.
        self._slots: dict[int, list[tuple[int, MergedResult]]] = {}
        for placed in placed_results:
            for value, slot, _, _ in placed.parts:
                self._slots.setdefault(value, []).append((slot, placed))

    def wanted(self, value: int) -> bool:
        """Whether a value is needed as soon as it is made."""
        return value in self._exported or value in self._slots

    def step(self, step: Step) -> None:
        """Runs a step from Python."""
        self._load(step.reads, step.region)
        if step.payload is None:
            args = ", ".join(f"v{v}" for v in step.reads if not self._is_token(v))
            data = [v for v in step.writes if not self._is_token(v)]
            targets = ", ".join(f"v{v}" for v in data)
            call = f"{self._constant(step.function)}({args})"
            self._emit(f"[{targets}] = {call}" if data else call, step.region)
        else:
            self._operator(step.payload, step.region)
        self._made(step.writes, step.region)

    def interpreted(self, run: FxProgram, steps: Sequence[Step], results: Sequence[int]) -> None:
        """Runs steps without Python, for the values that are needed afterwards."""
        region = steps[0].region
        self._load(run.inputs, region)
        title = f"{self._title} #{next(_numbers)}"
        targets = "".join(f"v{v}, " for v in results)
        function = run.function(title, results)
        self._tried(title, function, f"{targets}held", run.inputs, steps)
        self._emit("del held", region)
        self._made(results, region)

    def program(self, program: FusedOperators) -> None:
        """Runs what was compiled."""
        self._load(program.reads, program.region)
        title = f"{self._title} #{next(_numbers)}"
        targets = ", ".join(f"v{v}" for v in program.writes)
        self._tried(title, program.function, f"[{targets}]", program.reads, program.steps)
        self._made(program.writes, program.region)

    def _tried(
        self,
        title: str,
        function: Callable[..., Any],
        targets: str,
        inputs: Sequence[int],
        steps: Sequence[Step],
    ) -> None:
        """Calls a function that stands for steps; if it fails they run one by one, for their own error."""
        region = steps[0].region
        again = self._constant(_Again(self._captured, title, inputs, steps, self.regions))
        args = ", ".join(f"v{v}" for v in inputs)
        call = f"{self._constant(function)}({args})"
        self._emit(f"try: {f'{targets} = {call}' if targets else call}", region)
        self._emit(f"except Exception as error: {again}(error, {args})", region)

    def drop(self, values: Iterable[int], region: int) -> None:
        """Nobody reads these values any more."""
        dead = [v for v in dict.fromkeys(values) if v in self._have and not self._is_token(v)]
        if dead:
            self._emit(f"del {', '.join(f'v{v}' for v in dead)}", region)
            self._have.difference_update(dead)

    def function(self, arguments: str) -> Callable[..., Any]:
        """What was written, as a function of these arguments; those that are values are known in it."""
        text = f"def run({arguments}):\n" + "\n".join(self._lines or ["    pass"]) + "\n"
        filename = f"<dynaflow_xla {self._title} #{next(_numbers)}>"
        scope: dict[str, Any] = dict(self._names)
        exec(compile(text, filename, "exec"), scope)  # the text is made of the names above alone
        linecache.cache.pop(filename, None)
        made: Any = scope["run"]
        first = self._line_regions[0] if self._line_regions else -1
        self.regions[made.__code__] = (first, *self._line_regions)
        return made  # type: ignore[no-any-return]

    def given(self, values: Iterable[int]) -> None:
        """Values that the function's arguments bring."""
        self._have.update(values)

    def _constant(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"c{len(self._known)}"
            self._names[name] = value
        return name

    def _expression(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return f"v{arg.value}"
        if isinstance(arg, _SIMPLE):
            return repr(arg)
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self._expression(item) for item in arg)
            if isinstance(arg, list):
                return f"[{inner}]"
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if isinstance(arg, dict):
            inner = ", ".join(f"{k!r}: {self._expression(v)}" for k, v in arg.items())
            return f"{{{inner}}}"
        if isinstance(arg, slice):
            parts = (self._expression(x) for x in (arg.start, arg.stop, arg.step))
            return f"slice({', '.join(parts)})"
        return self._constant(arg)

    def _emit(self, line: str, region: int) -> None:
        self._lines.append(f"    {line}")
        self._line_regions.append(region)

    def _load(self, values: Iterable[int], region: int) -> None:
        for value in values:
            if value in self._have or self._is_token(value):
                continue
            self._have.add(value)
            self._emit(f"v{value} = env[{value}]", region)
            if value in self._taken:
                self._emit(f"env[{value}] = None", region)

    def _is_token(self, value: int) -> bool:
        return self._captured.graph.values[value].dtype == "token"

    def _operator(self, payload: Payload, region: int) -> None:
        function, given, named = calls.call_of(payload, self._captured.examples)
        args = [self._expression(arg) for arg in given]
        args += [f"{k}={self._expression(v)}" for k, v in named.items()]
        call = f"{self._constant(function)}({', '.join(args)})"
        if payload.multiple:
            targets = ", ".join("_" if v is None else f"v{v}" for v in payload.outputs)
            call = f"[{targets}] = {call}" if targets else call
        elif payload.outputs:
            call = f"v{payload.outputs[0]} = {call}"
        self._emit(call, region)

    def _made(self, values: Iterable[int], region: int) -> None:
        for value in values:
            self._have.add(value)
            if value in self._exported and not self._is_token(value):
                self._emit(f"env[{value}] = v{value}", region)
            for slot, placed in self._slots.get(value, ()):
                part = f"v{value}"
                axis, runs = placed.axis, placed.layout.runs
                if runs > 1:
                    part += f".unflatten({axis}, ({runs}, {part}.shape[{axis}] // {runs}))"
                write = self._constant(place)
                shared = f", {placed.layout.shared}" if placed.layout.shared else ""
                self._emit(f"env[{slot}] = {write}(env[{slot}], {part}{shared})", region)


class _Again:
    """After a run or a program that failed: the same operators from Python, for the original's error.

    What is drawn at random on the way is drawn from a copy of the generator's state.
    """

    def __init__(
        self,
        captured: Captured,
        title: str,
        inputs: Sequence[int],
        steps: Sequence[Step],
        regions: dict[CodeType, tuple[int, ...]],
    ) -> None:
        self._captured = captured
        self._title = title
        self._inputs = inputs
        self._steps = steps
        self._regions = regions

    def __call__(self, error: Exception, *inputs: Any) -> None:
        code = Code(self._captured, self._title, set(), set())
        code.regions = self._regions
        code.given(self._inputs)
        for step in self._steps:
            code.step(step)
        run = code.function(", ".join(f"v{v}" for v in self._inputs))
        try:
            with torch.random.fork_rng(devices=[]):
                run(*inputs)
        except Exception as original:
            original.__context__ = None  # the interpreter's form of it, which says less
            raise
        raise error  # it did not happen again: no memory then, say
