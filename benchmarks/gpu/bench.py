"""Benchmarks on a GPU: every case, each opponent beside ours in the same run.

Each case of a group (PyTorch; JAX; JAX on lanes of its own) has a process. Many compile side by side; then
one at a time has the GPU for itself and measures its variants in rotating order (``pool.py``). One that
hangs or dies costs its own rest, and the whole ends within ``--seconds``. All samples are written, with the
machine, to ``benchmarks/results/gpu-<date>.json``, and tables beside it; what cannot run is written with its
reason. Without a GPU nothing is measured, except with ``--dry``: then everything runs once at tiny sizes, on
the CPU or on a stand-in for the CUDA driver, and the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))
from gpu import pool as gpu_pool  # noqa: E402

GROUPS = list(gpu_pool.ORDER)
RESULTS = BENCHMARKS / "results"
PREPARE = 0.55  # of the time
ASIDE_S = 8.0  # for what is written at the end
JOBS = 14


def gpu_stamp() -> dict[str, Any]:
    """Name, driver and clocks of the GPU, as far as the packages here tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "name": pynvml.nvmlDeviceGetName(device),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
        }
    except Exception as error:
        return _asked() or {"unknown": f"{type(error).__name__}: {error}"}


def _asked() -> dict[str, Any]:
    """The same from the driver's own program, where the package for it is missing."""
    fields = {
        "name": "name", "driver": "driver_version", "sm_clock_mhz": "clocks.sm",
        "sm_clock_max_mhz": "clocks.max.sm", "power_limit_w": "power.limit", "memory_used_mib": "memory.used",
        "compute_mode": "compute_mode",
    }  # fmt: skip
    ask = [
        "nvidia-smi",
        f"--query-gpu={','.join(fields.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=15, check=True)
        told = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
        return dict(zip(fields, told, strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def versions() -> dict[str, str | None]:
    """Of what a GPU's numbers depend on beside the packages of every stamp."""
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def draw(record: dict[str, Any], target: Path) -> None:
    """A bar for each variant and case: the median, in microseconds a call."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = record["cases"]
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(9, 3 * len(cases)), squeeze=False)
    for axis, (name, case) in zip(axes[:, 0], cases.items(), strict=True):
        medians = {k: float(np.median(v)) for k, v in case["samples_us"].items() if v}
        axis.barh(list(medians), list(medians.values()))
        axis.set_title(f"{name}: median microseconds a call", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=80)


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], help="default: all")
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=20, help="calls a sample; of long ones fewer")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=400, help="then what is left is left out")
    parser.add_argument(
        "--prepare-seconds", type=float, help=f"of these to compile; default: {PREPARE:.0%}%"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(len(os.sched_getaffinity(0)), JOBS),
        help="workers that compile at once; default: one a core, %(default)s here",
    )  # fmt: skip
    parser.add_argument(
        "--traces",
        nargs="*",
        default=[],
        metavar="CASE",
        help="profile calls of these, beside --out",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--dry", action="store_true", help="tiny, without a GPU: only to try the program"
    )
    options = parser.parse_args()
    options.dry = options.dry or bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
    if options.dry:
        options.rounds, options.inner, options.lanes = 3, 2, 2
    return options


class Run:
    """What a run measures, and its record.

    Args:
        options: Of the command line.
        begin: When it began, by ``time.monotonic``.
    """

    def __init__(self, options: Any, begin: float) -> None:
        from common import environment

        from gpu import cases as gpu_cases

        self.options, self.begin = options, begin
        stamp = {**environment.stamp(), "gpu": gpu_stamp(), "gpu_versions": versions()}
        self.record: dict[str, Any] = {
            "format": 3, "benchmark": "gpu", "dry": options.dry, "environment": stamp,
            "rounds": options.rounds, "calls_per_sample": options.inner, "lanes": options.lanes,
            "jobs": options.jobs, "seconds": options.seconds, "ended": {}, "cases": {},
        }  # fmt: skip
        for case in gpu_cases.CASES:
            if not options.cases or case.name in options.cases:
                shapes = (gpu_cases.small(case) if options.dry else case).shapes
                self.record["cases"][case.name] = {
                    "kind": case.kind, "note": case.note, "shapes": shapes, "samples_us": {},
                    "difference": {}, "failed": {}, "told": {}, "predicted_us": {}, "overlap": {},
                    "calls_per_sample": {}, "workers": {},
                }  # fmt: skip
        date = stamp["date"].replace(":", "").replace("+0000", "Z")
        self.path = options.out or RESULTS / f"gpu-{date}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._made: dict[tuple[str, str], Any] = {}

    def workers(self, folder: Path) -> list[gpu_pool.Worker]:
        """In order of importance: what time is short for comes last."""
        options, cases = self.options, self.record["cases"]
        ask = {
            "rounds": options.rounds, "inner": options.inner, "lanes": options.lanes,
            "dry": options.dry, "traces": options.traces,
            "trace_folder": str(self.path.with_suffix("").resolve()) + "-traces",
        }  # fmt: skip
        order = sorted(cases, key=lambda name: cases[name]["kind"] != "multi-branch")
        return [
            gpu_pool.Worker(group, name, cases[name]["kind"], folder, ask)
            for group in GROUPS
            if group in options.groups
            for name in order
        ]

    def take(self, worker: gpu_pool.Worker) -> None:
        """Writes what a worker measured: what is there survives a time limit."""
        self._made[worker.group, worker.case] = made = worker.made()
        if worker.ended:
            self.record["ended"][f"{worker.group} {worker.case}"] = worker.ended
        measured = sum(bool(v) for v in made["samples_us"].values())
        left = f", {len(made['failed'])} not" if made["failed"] else ""
        ended = f": {worker.ended.splitlines()[0][:100]}" if worker.ended else ""
        print(
            f"{time.monotonic() - self.begin:5.0f} s {worker.group:5} {worker.case:15} prepared in "
            f"{worker.took:.0f} s, {measured} variants measured{left}{ended}",
            flush=True,
        )
        self.write()

    def write(self) -> None:
        """The record, its cases' parts in the order of groups."""
        for (group, name), made in sorted(self._made.items(), key=lambda m: GROUPS.index(m[0][0])):
            case = self.record["cases"][name]
            case["workers"][group] = {k: made[k] for k in ("prepared_in_s", "notes")}
            case["calls_per_sample"][group] = made.get("calls_per_sample", 0)
            for part in ("samples_us", "difference", "failed", "told", "predicted_us", "overlap"):
                for variant, value in made.get(part, {}).items():
                    again = group == "ffi" and variant == "jax jit" and "jax" in self.options.groups
                    case[part][f"{variant} ({group})" if again else variant] = value
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.record, indent=1) + "\n")
        scratch.replace(self.path)


def main() -> int:
    """Measures, prints and writes; returns the exit status: 1 if a worker died or hung."""
    options, begin = parse(), time.monotonic()

    from dynaflow_xla.ffi import _engine
    from gpu import cases as gpu_cases, tables as gpu_tables

    known = [case.name for case in gpu_cases.CASES]
    if unknown := {*options.cases, *options.traces} - set(known):
        print(f"no case {sorted(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if not options.dry and (problem := _engine.cuda_problem()):
        print(f"bench-gpu: nothing to measure: {problem}")
        return 0
    run = Run(options, begin)
    prepare = options.prepare_seconds or PREPARE * options.seconds
    end = begin + options.seconds - min(ASIDE_S, 0.1 * options.seconds)
    with tempfile.TemporaryDirectory(prefix="dynaflow-gpu-", ignore_cleanup_errors=True) as folder:
        workers = run.workers(Path(folder))
        pool = gpu_pool.Pool(workers, options.jobs, min(begin + prepare, end), end, run.take)
        pool.run()
    run.write()
    run.path.with_suffix(".md").write_text(gpu_tables.page(run.record))
    # A plot is the least of it, and must not cost what is printed.
    plot = threading.Thread(
        target=drawn, args=(run.record, run.path.with_suffix(".png")), daemon=True
    )
    plot.start()
    plot.join(max(0.0, begin + options.seconds - 1.0 - time.monotonic()))
    print(f"wrote {run.path} and {run.path.with_suffix('.md')}")
    print(gpu_tables.text(run.record), flush=True)
    return 1 if run.record["ended"] else 0


def drawn(record: dict[str, Any], target: Path) -> None:
    try:
        draw(record, target)
    except Exception as error:
        print(f"no plot: {type(error).__name__}: {error}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # also while a plot is still being drawn
