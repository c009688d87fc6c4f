"""Calling a planned JAX entry with torch tensors: the engine on the tensors' own memory.

Arguments are read where they lie, results are written into tensors that PyTorch allocated. Entries
that are no single stage of the engine run as a JAX program; tensors then cross by DLPack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax.xla import xla_options
from dynaflow_xla.frontends.torch._compat import modes


class EngineCall:
    """A planned entry, callable with contiguous tensors.

    Args:
        made: The JAX frontend's entry.
        closed: Values that tracing closed over; they come before the arguments.
        results: Shape and dtype of each result.
    """

    def __init__(
        self,
        made: Any,
        closed: Sequence[Any],
        results: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        self.made = made
        self.closed = list(closed)
        self._consts = [_aligned(const) for const in closed]
        self._results = list(results)
        self._jitted: Any = None
        self._held_by: dict[int, int] = {}

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous tensors to contiguous tensors, which share memory with nothing.

        Raises:
            EngineError: a region failed.
        """
        stages = self.made.stages
        if len(stages) == 1 and stages[0][0] is not None and stages[0][1] is None:
            return self.run_stage(stages[0][0], given)
        return self._run_jitted(given)

    def run_stage(
        self, stage: Any, given: Sequence[torch.Tensor], records: list[Any] | None = None
    ) -> list[torch.Tensor]:
        """Runs the plan's only stage; adds its trace records to ``records``.

        Raises:
            EngineError: a region failed.
            PlanError: nothing writes one of the results.
        """
        captured = self.made.captured
        held_by = self._held_by or self._holders(stage)
        memory = dict(zip(captured.graph.inputs, [*self._consts, *given], strict=True))
        fresh: dict[int, torch.Tensor] = {}
        outs = []
        for out, is_value, (shape, dtype) in zip(
            captured.outputs, captured.output_is_value, self._results, strict=True
        ):
            if not is_value:
                outs.append(torch.full(shape, np.asarray(out).item(), dtype=dtype))
            elif out in memory:  # an argument handed back: a result of its own
                outs.append(_typed(memory[out], shape, dtype).clone())
            elif out in held_by:
                outs.append(fresh.setdefault(held_by[out], torch.empty(shape, dtype=dtype)))
            else:  # its memory would be handed out as it is
                raise PlanError(
                    f"internal error: no lane of {captured.graph.name!r} writes result {len(outs)}"
                )
        made = stage.program.run(
            [memory[v].data_ptr() for v in stage.inputs],
            [fresh[v].data_ptr() for v in stage.outputs],
            profile=records is not None,
        )
        if records is not None:
            records.append([tuple(r) for r in made])
        return _apart(outs, ())

    def _holders(self, stage: Any) -> dict[int, int]:
        """By each value that the stage makes: the value by which its custom call's result is named.

        They differ where nano-batches put together the same parts for several results.
        """
        buffers = self.made.plan.buffers
        self._held_by = {
            buffers[number].value: value
            for value, numbers in zip(stage.outputs, stage.writes, strict=True)
            for number in numbers
        }
        return self._held_by

    def _run_jitted(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        on_gpu = [x.device for x in given if x.device.type == "cuda"]
        if on_gpu:  # a number in a tensor of one element may be on the CPU
            given = [x.to(on_gpu[0]) for x in given]
        if self._jitted is None:
            options = xla_options.for_entry(self.made) if on_gpu else None
            self._jitted = jax.jit(lambda *xs: self.made(*xs), compiler_options=options)
        with jax.enable_x64(True):
            arrays = [*self.closed, *(jax.dlpack.from_dlpack(x) for x in given)]
            try:
                made = jax.block_until_ready(self._jitted(*arrays))
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # XLA has both
                raise xla.engine_error(error) or error  # noqa: B904  (its cause is this error)
        return _apart([torch.from_dlpack(x) for x in made], given)


def _apart(outs: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results without shared memory: XLA hands arguments back, and one buffer for equal results."""
    known = {x.data_ptr() for x in given}
    for i, x in enumerate(outs):
        if x.numel() and x.data_ptr() in known:
            outs[i] = x.clone()
        known.add(x.data_ptr())
    return outs


def _aligned(const: Any) -> torch.Tensor:
    """The bytes of an array, where XLA takes them in place."""
    array = np.ascontiguousarray(const)
    with modes.apart():  # PyTorch captures while this runs, with tensors that have no memory
        memory = torch.empty(array.nbytes, dtype=torch.uint8)
        if array.nbytes:
            memory.numpy()[:] = array.reshape(-1).view(np.uint8)
    return memory


def _typed(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = memory.dtype == torch.uint8 and dtype != torch.uint8
    return (memory.view(dtype) if raw else memory).reshape(shape)
