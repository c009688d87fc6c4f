"""What a CPU user would pick instead, on the same models and weights, in one run.

PyTorch (eager, ``torch.compile``, threads written by hand), ONNX Runtime and OpenVINO, each with every split
of the cores into threads inside of operators and operators side by side, and its own sequential mode beside
it: what better code does is not credited to scheduling. Ratios are to the fastest of each peer's ways. A peer
that is not installed, or fails on a model, is told, and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environment
import measure
import records
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dynaflow_xla as dfx

CORES = environment.stamp()["cores"]
SPLITS = [(n, CORES // n) for n in range(1, CORES + 1) if CORES % n == 0]
"""(side by side, threads in each operator)."""

Run = Callable[[], Any]
Way = tuple[Run, int]
"""A call, and PyTorch's threads while it is timed."""


@dataclass
class Model:
    """A model with parts that do not need each other.

    Attributes:
        name: Of the case.
        module: In PyTorch.
        args: Of a call, all tensors.
        parts: Its independent parts, and what puts their results together: for threads by hand.
    """

    name: str
    module: nn.Module
    args: tuple[torch.Tensor, ...]
    parts: list[Callable[..., Any]] = field(default_factory=list)
    join: Callable[[list[Any]], Any] | None = None


class Parts(nn.Module):
    """Some modules on the same input, and what becomes of their results."""

    def __init__(self, parts: list[nn.Module], join: nn.Module) -> None:
        super().__init__()
        self.parts, self.join = nn.ModuleList(parts), join

    def forward(self, x: Any) -> Any:
        outs = []
        for number, part in enumerate(self.parts):
            with dfx.mark(f"part{number}"):
                outs.append(part(x))
        return self.join(outs)


class Recurrent(nn.Module):
    """The last outputs of a GRU over [T, B, D]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gru = nn.GRU(d, d)

    def forward(self, x: Any) -> Any:
        return self.gru(x)[0][-1]


class Cat(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, xs: Any) -> Any:
        return torch.cat(list(xs), self.dim)


class Mean(nn.Module):
    def forward(self, xs: Any) -> Any:
        return torch.stack(list(xs)).mean(0)


class Largest(nn.Module):
    """Sorted rows: work of one core."""

    def forward(self, x: Any) -> Any:
        return torch.sort(x, dim=-1).values


def _mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _conv(c: int, *kernels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for k in kernels:
        layers += [nn.Conv2d(c, c, k, padding=k // 2), nn.ReLU()]
    return nn.Sequential(*layers)


def models() -> list[Model]:
    """Small ones whose parts are known; all weights random, from one seed."""
    torch.manual_seed(0)
    made = []
    for name, parts, join, x in (
        ("two GRU towers", [Recurrent(128), Recurrent(128)], Cat(1), torch.randn(32, 32, 128)),
        ("inception block", [_conv(32, 1), _conv(32, 1, 3), _conv(32, 1, 5), _conv(32, 3, 3)], Cat(1),
         torch.randn(1, 32, 28, 28)),
        ("ensemble of 4 MLPs", [_mlp(256, 512, 512, 16) for _ in range(4)], Mean(), torch.randn(64, 256)),
        ("8 dense experts", [_mlp(256, 512, 256) for _ in range(8)], Mean(), torch.randn(128, 256)),
        ("two sorted projections", [nn.Sequential(nn.Linear(512, 512), Largest()) for _ in range(2)],
         Cat(1), torch.randn(512, 512)),
    ):  # fmt: skip
        module = Parts(parts, join).eval()
        made.append(Model(name, module, (x,), list(module.parts), module.join))
    return made


# -- ways to run a model ----------------------------------------------------------------------------


def ours(model: Model) -> dict[str, Way]:
    made = {}
    for name, strategy in (("branches", dfx.Branches()), ("auto", dfx.Auto())):
        fast = dfx.schedule(model.module, strategy)
        made[f"dynaflow {name}"] = (lambda fast=fast: fast(*model.args), CORES)
    return made


def pytorch(model: Model) -> dict[str, Way]:
    compiled = torch.compile(model.module)
    made: dict[str, Way] = {}
    for threads in sorted({1, CORES}):
        made[f"eager, {threads} threads"] = (lambda: model.module(*model.args), threads)
        made[f"torch.compile, {threads} threads"] = (lambda: compiled(*model.args), threads)
    return made


def by_hand(model: Model) -> dict[str, Way]:
    join = model.join
    assert join is not None
    pool = ThreadPoolExecutor(CORES)

    def run(part: Callable[..., Any]) -> Any:
        with torch.inference_mode():  # each thread has a mode of its own
            return part(*model.args)

    return {"threads by hand": (lambda: join(list(pool.map(run, model.parts))), 1)}


def onnx_runtime(model: Model) -> dict[str, Way]:
    import onnxruntime as ort

    made: dict[str, Way] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model.module, model.args, path, dynamo=False, input_names=["x"])
        data = path.read_bytes()
    given = {"x": model.args[0].numpy()}
    for beside, inside in SPLITS:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = inside, beside
        parallel = beside > 1
        mode = ort.ExecutionMode
        options.execution_mode = mode.ORT_PARALLEL if parallel else mode.ORT_SEQUENTIAL
        session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
        name = f"ONNX Runtime, {'parallel' if parallel else 'sequential'} {beside} x {inside}"
        made[name] = (lambda session=session: torch.from_numpy(session.run(None, given)[0]), 1)
    return made


def openvino(model: Model) -> dict[str, Way]:
    import openvino as ov

    core, made = ov.Core(), {}
    given = [x.numpy() for x in model.args]
    converted = ov.convert_model(model.module, example_input=model.args)
    for threads in sorted({1, CORES}):
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
                  "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip
        compiled = core.compile_model(converted, "CPU", config)
        made[f"OpenVINO, {threads} threads"] = (
            lambda compiled=compiled: torch.from_numpy(compiled(given)[0]), 1,
        )  # fmt: skip
    return made


PEERS: dict[str, tuple[Callable[[Model], dict[str, Way]], str]] = {
    "PyTorch": (pytorch, "torch"),
    "threads by hand": (by_hand, "torch"),
    "ONNX Runtime": (onnx_runtime, "onnxruntime"),
    "OpenVINO": (openvino, "openvino"),
}
"""By name, the ways of each, and the package that they need."""


def study(model: Model, rounds: int, tolerance: float = 1e-3) -> dict[str, Any]:
    """All ways to run a model against each other, compared with eager PyTorch first."""
    want = model.module(*model.args)
    found: dict[str, dict[str, Way]] = {"dynaflow": ours(model)}
    failed: dict[str, str] = {}
    for peer, (ways, package) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            failed[peer] = f"{package} is not installed"
            continue
        try:
            found[peer] = ways(model)
        except Exception as error:
            failed[peer] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    differences: dict[str, float] = {}
    for peer, ways in found.items():
        for name, (run, threads) in list(ways.items()):
            with measure.torch_threads(threads):
                try:
                    differences[name] = float((run() - want).abs().max())
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                    del found[peer][name]
                    continue
            if differences[name] > tolerance:
                failed[name] = f"differs from eager PyTorch by {differences[name]:.1e}"
                del found[peer][name]
    runs = {name: way[0] for ways in found.values() for name, way in ways.items()}
    threads = {name: way[1] for ways in found.values() for name, way in ways.items()}
    contexts = {name: (lambda n=n: measure.torch_threads(n)) for name, n in threads.items()}
    made = measure.timed(runs, {}, rounds, contexts=contexts)
    ratios = {
        name: {
            peer: measure.ratio(made["samples_ms"], name, list(ways))
            for peer, ways in found.items()
            if peer != "dynaflow" and ways
        }
        for name in found["dynaflow"]
    }
    return {
        "name": model.name, **made, "ratios": ratios, "failed": failed, "max_abs_difference": differences,
        "peers": {peer: list(ways) for peer, ways in found.items()},
    }  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        yield


def table(record: dict[str, Any]) -> Table:
    """The fastest way of each peer, and what ours is of it."""
    made = Table("model", "ours", "ms", *[f"of {peer}" for peer in PEERS], box=None)
    for case in record["cases"]:
        for name, against in case["ratios"].items():
            cells = []
            for peer in PEERS:
                told = against.get(peer)
                cells.append(
                    f"{told['ratio']:.2f} ({told['low']:.2f}-{told['high']:.2f}) {told['baseline']}"
                    if told
                    else "-"
                )
            ms = case["statistics_ms"][name]["median"]
            made.add_row(case["name"], name, f"{ms:.3g}", *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", action="append", help="only these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true", help="write the result file")
    given = parser.parse_args()
    console = Console()
    start = time.perf_counter()
    record: dict[str, Any] = {
        "format": 1,
        "benchmark": "peers",
        "environment": environment.stamp(),
        "cases": [],
    }
    with _quiet():
        for model in models():
            if given.model and model.name not in given.model:
                continue
            record["cases"].append(study(model, given.rounds))
            for what, why in record["cases"][-1]["failed"].items():
                console.print(f"{model.name}: {what} left out: {why}", markup=False)
    record["rounds"], record["seconds"] = given.rounds, time.perf_counter() - start
    for package in ("onnxruntime", "openvino"):
        record["environment"]["versions"][package] = environment._version(package)
    console.print(table(record))
    if given.save or given.out:
        console.print(str(records.save(record, given.out).name))


if __name__ == "__main__":
    main()
