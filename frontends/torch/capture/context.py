"""What a captured graph is called, and what a strategy may look at of it."""

from __future__ import annotations

import torch

from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import Context

_PYTHON_NS = 120_000.0
"""What lanes take more, once a call, than they compute: guards, Python around each lane's steps, and waiting
for the interpreter lock. (Two lanes of 0.2 to 3 ms on two cores of a virtual machine: 60 us in a row of
calls, 110 to 180 where lanes slept, 240 to 300 where the caches are cold, too; that includes going to lanes
and waking one, which ``machine`` counts apart.)"""


def graph_name(options: Settings, kind: str, number: int) -> str:
    """Name of the ``number``-th graph of a scheduled callable."""
    name = options.name if number == 0 else f"{options.name}.{number}"
    return f"{name}.backward" if kind == "backward" else name


def cores(device: torch.device) -> int:
    """What a region has that runs on all cores: PyTorch's threads. 0 on a GPU, whose lanes are streams."""
    return torch.get_num_threads() if device.type == "cpu" else 0


def lane_cores(device: torch.device, options: Settings) -> int:
    """Cores of a lane of which a strategy says nothing else."""
    return options.lane_cores_of(cores(device)) if device.type == "cpu" else 1


def context_of(
    captured: Captured, options: Settings, batch: int | None, kind: str = "inference"
) -> Context:
    """What the strategy may look at."""
    graph, own = captured.graph, cores(captured.device)
    return Context(
        batch_size=batch,
        shapes=tuple(graph.values[v].shape for v in graph.inputs),
        platform=captured.device.type,
        lanes=options.lanes_on(captured.device.type == "cuda"),
        user=options.user,
        cores=own,
        lane_cores=lane_cores(captured.device, options),
        free_widths=options.free_widths and own > 0,
        derived=kind != "inference",
        copies=False,
        python_ns=_PYTHON_NS if captured.device.type == "cpu" else 0.0,
    )
