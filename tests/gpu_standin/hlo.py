"""What the kernels of a compiled GPU program compute, as programs that XLA's CPU backend runs.

Read from the text of the optimised module: a kernel has its fusion's name; its arguments are the fusion's
operands and then its results.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "pred": np.bool_, "c64": np.complex64, "c128": np.complex128,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)[^}]*\})?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \((.*?)\) -> .*? \{\n(.*?)^\}", re.S | re.M)
_LINE = re.compile(r"^  (ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.M)
_NAMED = re.compile(
    r"(?:calls|to_apply|condition|body|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
# Attributes that mean nothing to another backend; some hold braces in braces.
_NOISE = re.compile(
    r", (?:metadata|backend_config|frontend_attributes|sharding)=\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)


@dataclass(frozen=True)
class Array:
    """A type with its layout: dimensions from the slowest to the fastest in memory."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.dims, dtype=np.int64)) * np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def in_memory(self) -> tuple[int, ...]:
        return tuple(self.dims[i] for i in self.order)

    @property
    def plain(self) -> bool:
        return self.order == tuple(range(len(self.dims)))


def arrays(text: str) -> list[Array]:
    """The types in a text."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        shape = tuple(int(d) for d in dims.split(",") if d)
        minor = [int(d) for d in layout.split(",") if d] if layout else []
        order = tuple(reversed(minor)) if len(minor) == len(shape) else tuple(range(len(shape)))
        found.append(Array(dtype, shape, order))
    return found


@dataclass(frozen=True)
class Kernel:
    """What one launch does."""

    name: str
    text: str  # of a module with one computation, and those that it names
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    regions: tuple[str, ...]  # op_name metadata: which of the user's lines it comes from
    flops: float = 0.0  # of its products


def anonymous(text: str) -> str:
    """The text of a module with numbers in the place of its names: equal for kernels that do the same."""
    numbers: dict[str, str] = {}
    text = re.sub(
        r"^(ENTRY )?(%[\w.\-]+) \(.*\) -> ", r"\1\2 -> ", text, flags=re.M
    )  # names, again
    return re.sub(r"%[\w.\-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)


def kernel_name(instruction: str) -> str:
    """What XLA calls the kernel of an instruction."""
    return re.sub(r"[.\-]", "_", instruction)


def products(body: str) -> float:
    """Multiplications and additions of the products and convolutions in a computation."""
    types = {m.group(2): arrays(m.group(3)) for m in _LINE.finditer(body)}
    total = 0.0
    for line in _LINE.finditer(body):
        _, _, result, op, rest = line.groups()
        operands = re.findall(r"%([\w.\-]+)", rest)
        if op == "dot" and (cut := re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)):
            (left, *_) = types[operands[0]]
            inner = math.prod(left.dims[int(d)] for d in cut.group(1).split(",") if d)
        elif op == "convolution":
            (kernel, *_) = types[operands[1]]
            inner = math.prod(kernel.dims) // max(1, arrays(result)[0].dims[1])
        else:
            continue
        total += 2.0 * math.prod(arrays(result)[0].dims) * inner
    return total


class Module:
    """A compiled module's kernels by their names."""

    def __init__(self, text: str) -> None:
        self._bodies = {m.group(1): m for m in _COMPUTATION.finditer(text)}
        self.kernels: dict[str, Kernel] = {}
        for body in self._bodies.values():
            for line in _LINE.finditer(body.group(3)):
                _, name, result, op, rest = line.groups()
                if op == "fusion" and (called := re.search(r"calls=%([\w.\-]+)", rest)):
                    self._add(name, called.group(1), result, line.group(0))

    def _add(self, name: str, called: str, result: str, line: str) -> None:
        body = self._bodies[called].group(3)
        lines = [m.groups() for m in _LINE.finditer(body)]
        operands = sorted(
            (int(rest.split(")")[0]), type_)
            for _, _, type_, op, rest in lines if op == "parameter"
        )  # fmt: skip
        regions = re.findall(r'op_name="([^"]*)"', line + body)
        kernel = Kernel(
            name, self._module(called), tuple(arrays(t)[0] for _, t in operands),
            tuple(arrays(result)), tuple(dict.fromkeys(regions)), products(body),
        )  # fmt: skip
        self.kernels.setdefault(kernel_name(name), kernel)
        for root, inner, _, op, _ in lines:
            if op == "sort" or root:  # some emitters name a kernel after the hero
                self.kernels.setdefault(kernel_name(inner), kernel)

    def _module(self, called: str) -> str:
        order: list[str] = []

        def visit(name: str) -> None:
            for group in _NAMED.findall(self._bodies[name].group(3)):
                for other in re.findall(r"%([\w.\-]+)", group):
                    if other not in order:
                        visit(other)
            order.append(name)

        visit(called)
        parts = [_computation(self._bodies[n].group(0), n == called) for n in dict.fromkeys(order)]
        return "HloModule fused\n\n" + "\n\n".join(parts) + "\n"


def _computation(text: str, entry: bool) -> str:
    """The computation's text without what only a GPU backend knows."""
    text = _NOISE.sub("", text).removeprefix("ENTRY ")
    types = {m.group(2): arrays(m.group(3)) for m in _LINE.finditer(text)}
    lines = []
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is not None and match.group(4) == "bitcast":
            lines += _bitcast(match, types)
        else:
            lines.append(line)
    return ("ENTRY " if entry else "") + "\n".join(lines)


def _bitcast(match: re.Match[str], types: dict[str, list[Array]]) -> list[str]:
    """The same bytes under another type: what that means in terms of elements."""
    root, name, _, _, rest = match.groups()
    source = re.findall(r"%([\w.\-]+)", rest)[0]
    (was,), (now,) = types[source], types[name]
    lines, step = [], 0

    def add(result: str, op: str, operand: str, last: bool) -> str:
        nonlocal step
        step += 1
        made = name if last else f"{name}.step{step}"
        lines.append(f"  {root or '' if last else ''}%{made} = {result} {op.format(f'%{operand}')}")
        return made

    def shape(dtype: str, dims: tuple[int, ...]) -> str:
        return f"{dtype}[{','.join(map(str, dims))}]"

    def joined(order: tuple[int, ...]) -> str:
        return ",".join(map(str, order))

    value = source
    if not was.plain:
        value = add(
            shape(was.dtype, was.in_memory),
            f"transpose({{}}), dimensions={{{{{joined(was.order)}}}}}",
            value,
            False,
        )
    if was.dtype != now.dtype:
        value = add(shape(now.dtype, was.in_memory), "bitcast-convert({})", value, False)
    value = add(shape(now.dtype, now.in_memory), "reshape({})", value, now.plain)
    if not now.plain:
        back = tuple(now.order.index(i) for i in range(len(now.order)))
        add(
            shape(now.dtype, now.dims),
            f"transpose({{}}), dimensions={{{{{joined(back)}}}}}",
            value,
            True,
        )
    return lines
