"""CUDA kernels in the place of regions, and how lanes of a GPU are made."""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from dynaflow_xla import machine
from dynaflow_xla.errors import PlanError, PlanTypeError, UnsupportedError, bad_argument, checks

_MOST_CORES = 4096
"""Of all lanes: XLA starts a thread for each, and for tens of thousands it never comes back."""

Parameter = tuple[str, int] | bytes | np.generic


def _integers(given: Any) -> tuple[int, ...] | None:
    """A tuple of integers, whichever library they are of; None if it is something else."""
    found = tuple(map(checks.integer, given)) if isinstance(given, tuple) else (None,)
    made = tuple(n for n in found if n is not None)
    return made if len(made) == len(found) else None


@dataclass(frozen=True)
class CudaKernel:
    """A CUDA kernel that does what a region does: ``s.execute(op, replace=dfx.CudaKernel(...))``.

    On lanes of a GPU (JAX, ``backend="ffi"``) the region is this kernel, launched on the lane's
    stream. Everywhere else (on a CPU, under ``vmap``) the region runs as it was written. A plan whose
    regions are all kernels is recorded into XLA's CUDA graph.

    Attributes:
        image: PTX text, or the bytes of a cubin or fatbin.
        name: The kernel's name in the image: unmangled only for ``extern "C"``.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        parameters: In the kernel's order: ``("in", i)`` and ``("out", i)`` for the address of the
            region's i-th input or output, a numpy scalar (``np.int32(n)``) or bytes for a constant.
            None: all inputs, then all outputs.
        shared_bytes: Dynamic shared memory.
    """

    image: str | bytes
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    parameters: Sequence[Parameter] | None = None
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        image: Any = self.image
        if not isinstance(image, str | bytes) or not image:
            raise bad_argument(
                image, (str, bytes), f"a kernel's image must be PTX text or bytes; got {image!r}"
            )
        for what in ("grid", "block"):
            size: Any = getattr(self, what)
            made = _integers(size)
            if made is None or not 1 <= len(made) <= 3 or min(made) < 1:
                raise PlanError(
                    f"the {what} of kernel {self.name!r} must be one to three positive integers; "
                    f"got {size!r}"
                )
            object.__setattr__(self, what, made)
        for parameter in self.parameters or ():
            given: Any = parameter
            if isinstance(given, bytes | np.generic):
                continue
            if not (
                isinstance(given, tuple)
                and len(given) == 2
                and given[0] in ("in", "out")
                and checks.integer(given[1]) is not None
            ):
                raise PlanError(
                    f"a parameter of kernel {self.name!r} must be ('in', i), ('out', i), a numpy scalar "
                    f"or bytes; got {given!r}"
                )

    def __call__(self, *_: Any) -> Any:
        """A kernel is launched by a lane; calling it raises UnsupportedError."""
        raise UnsupportedError(
            f"kernel {self.name!r} replaces regions of JAX functions on lanes of a GPU only; for PyTorch "
            "give replace= a function that launches the kernel on the current stream, which is the lane's"
        )

    @property
    def size(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block with three numbers each."""
        x, y, z = (*self.grid, 1, 1)[:3]
        a, b, c = (*self.block, 1, 1)[:3]
        return (x, y, z), (a, b, c)

    def image_bytes(self) -> bytes:
        """The image as the driver takes it: text ends with a zero."""
        return self.image.encode() + b"\0" if isinstance(self.image, str) else self.image

    def bound(self, inputs: int, outputs: int, region: str) -> list[tuple[str, int] | bytes]:
        """The parameters for a region with so many inputs and outputs.

        Raises:
            PlanError: a parameter names none of them, or nothing writes an output.
        """
        given = self.parameters
        if given is None:
            given = [("in", i) for i in range(inputs)] + [("out", i) for i in range(outputs)]
        made: list[tuple[str, int] | bytes] = []
        for parameter in given:
            if isinstance(parameter, tuple):
                limit = inputs if parameter[0] == "in" else outputs
                if not 0 <= parameter[1] < limit:
                    raise PlanError(
                        f"kernel {self.name!r} takes {parameter}; region {region!r} has {inputs} inputs "
                        f"and {outputs} outputs"
                    )
                made.append((parameter[0], operator.index(parameter[1])))
            else:
                made.append(parameter if isinstance(parameter, bytes) else parameter.tobytes())
        unwritten = set(range(outputs)) - {p[1] for p in made if p[0] == "out"}
        if unwritten:
            raise PlanError(
                f"kernel {self.name!r} must write every output of region {region!r}; no parameter is "
                f"('out', {min(unwritten)})"
            )
        return made

    @staticmethod
    def from_triton(
        compiled: Any, grid: tuple[int, ...], parameters: Sequence[Parameter] | None = None
    ) -> CudaKernel:
        """A kernel that ``triton.compile`` made.

        Args:
            compiled: What ``triton.compile`` returned, or a warmed-up ``@triton.jit`` function gave.
            grid: Programs in x, y, z.
            parameters: As for the class, for the arguments that are no ``constexpr``. Pointers to
                memory of Triton's own, which it puts behind them, are added as null: a kernel that
                needs such memory is refused.

        Raises:
            UnsupportedError: the kernel needs global memory of Triton's own.
        """
        name = str(compiled.metadata.name)
        for what in ("global_scratch_size", "profile_scratch_size"):
            if getattr(compiled.metadata, what, 0):
                raise UnsupportedError(
                    f"Triton kernel {name!r} needs memory of its own ({what}), which a lane does not give"
                )
        count = ptx_parameters(compiled.asm["ptx"], name)
        return _TritonKernel(
            bytes(compiled.asm["cubin"]), name, grid, (32 * int(compiled.metadata.num_warps),),
            parameters, int(compiled.metadata.shared), count,
        )  # fmt: skip


@dataclass(frozen=True)
class _TritonKernel(CudaKernel):
    total: int = 0

    def bound(self, inputs: int, outputs: int, region: str) -> list[tuple[str, int] | bytes]:
        """The parameters as ``CudaKernel.bound`` gives them, with Triton's null pointers behind."""
        made = super().bound(inputs, outputs, region)
        if len(made) > self.total:
            raise PlanError(
                f"Triton kernel {self.name!r} has {self.total} parameters; region {region!r} gives it "
                f"{len(made)}"
            )
        return made + [struct.pack("Q", 0)] * (self.total - len(made))


def ptx_parameters(text: str, name: str) -> int:
    """How many parameters a kernel of a PTX text has.

    Raises:
        PlanError: the text has no such kernel.
    """
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", text)
    if found is None:
        raise PlanError(f"the PTX text has no kernel {name!r}")
    return found.group(1).count(".param")


MAX_LANES = 256
"""Most lanes of a plan: the engine has no room for more (``kMaxLanes``)."""


def _checked_count(count: int) -> int:
    """The same number of lanes; PlanError if no plan has so many."""
    if count > MAX_LANES:
        raise PlanError(f"lanes must be at most {MAX_LANES}; got {count}")
    return count


@dataclass(frozen=True)
class Lanes:
    """Lanes with properties: ``lanes=dfx.Lanes(2, width=4)``; on a GPU ``dfx.Lanes(3, sms=(0, 32, 16))``.

    Attributes:
        count: Number of lanes with the caller's, lane 0.
        priorities: Of each lane's stream, lower runs first; lane 0 is the caller's stream, so its
            entry is 0. Lanes beyond the list have 0.
        sms: Multiprocessors that a lane has for itself (a green context); the driver rounds up. 0, and
            lanes beyond the list: all. Lane 0's entry is 0.
        width: Of lanes of a CPU: cores of each. None: lanes share the cores out evenly, on 16 cores two have
            eight each. More than there are is allowed: lanes then take turns, and ``explain`` says so.
        one_pass: Of lanes of a CPU, for JAX: cumulative operators on lanes run in one pass, in kernels of
            the engine; False: as XLA compiles them, in several, with its rounding.
    """

    count: int
    priorities: tuple[int, ...] = ()
    sms: tuple[int, ...] = ()
    width: int | None = None
    one_pass: bool = True

    def __post_init__(self) -> None:
        width = checks.integer(self.width)
        if self.width is not None and (width is None or width < 1):
            raise bad_argument(
                self.width,
                Integral,
                f"width must be an integer >= 1, cores of a lane; got {self.width!r}",
            )
        object.__setattr__(self, "width", width)
        one_pass: Any = self.one_pass
        if not isinstance(one_pass, bool):
            raise PlanTypeError(f"one_pass must be True or False; got {one_pass!r}")
        count = checks.integer(self.count)
        if count is None or count < 1:
            raise bad_argument(
                self.count, Integral, f"lanes must be an integer >= 1; got {self.count!r}"
            )
        object.__setattr__(self, "count", _checked_count(count))
        if width is not None and count * width > _MOST_CORES:
            raise PlanError(
                f"lanes must have at most {_MOST_CORES} cores together, each is a thread; got {count} of "
                f"width {width}. Leave width out and they share out the cores that there are"
            )
        for what in ("priorities", "sms"):
            given: Any = getattr(self, what)
            made = _integers(given)
            if made is None:
                raise PlanTypeError(
                    f"{what} must be a tuple of integers, one a lane; got {given!r}"
                )
            if made and made[0] != 0:
                raise PlanError(f"{what}[0] must be 0: lane 0 is the caller's stream; got {made}")
            if len(made) > count:
                raise PlanError(f"{what} has {len(made)} entries for {count} lanes")
            object.__setattr__(self, what, made)
        if any(n < 0 for n in self.sms):
            raise PlanError(f"sms must not be negative; got {self.sms}")

    @property
    def special(self) -> bool:
        """Whether the lanes differ from plain ones."""
        return any(self.priorities) or any(self.sms)

    def refuse_on_cpu(self, whose: str = "lanes of a CPU") -> None:
        """Raises where lanes turn out to be threads: what a stream has they have not.

        Raises:
            UnsupportedError: priorities or multiprocessors are asked for.
            PlanError: there are more lanes than cores.
        """
        if self.special:
            raise UnsupportedError(
                f"{self} asks for priorities or multiprocessors, which {whose} have not; give lanes= a "
                "number (on a GPU ask JAX for its lanes by backend='ffi')"
            )
        if self.width is None:
            thread_lanes(self.count)

    def refuse_on_device(self) -> None:
        """Raises UnsupportedError where lanes turn out to be streams: they have no cores."""
        if self.width is not None:
            raise UnsupportedError(
                f"{self} gives lanes cores of a CPU, which lanes of a device have not: leave width out, or "
                "say sms= for multiprocessors"
            )


def thread_lanes(count: int) -> int:
    """``count``, for lanes that are threads; PlanError if they are more than the cores."""
    cores = max(1, machine.cores())
    if _checked_count(count) > cores:
        why = machine.bound_by()
        raise PlanError(
            f"lanes must not exceed the cores this process may use, {cores}; got {count}. More lanes "
            "than cores would wait for each other on one core; leave lanes=None for the default, or take "
            f"lanes=dfx.Lanes({count}, width=1), which take turns on the cores. On a GPU, whose lanes are "
            f"streams, lanes=dfx.Lanes({count}) is right" + (why and f". {why}")
        )
    return count
