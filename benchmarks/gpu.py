"""Benchmarks on a GPU: every case, each opponent beside ours in the same run.

The variants of a group (PyTorch; JAX; JAX on lanes of its own) are measured in one process, in rotating
order, within a time limit; a group that hangs or dies costs its own rest. All samples are written, with
the machine, to ``benchmarks/results/gpu-<date>.json``; what cannot run is written with its reason.
Without a GPU nothing is measured, except with ``--dry``: then everything runs once at tiny sizes, on the CPU
or on a stand-in for the CUDA driver, and the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SHARE = {"torch": 0.45, "jax": 0.33, "ffi": 0.22}  # of the time


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
        return {"unknown": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, str | None]:
    """Of what a GPU's numbers depend on beside the packages of every stamp."""
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def run_group(group: str, options: Any) -> tuple[dict[str, Any], str]:
    """What a group measured, by case, and how it ended if not well."""
    seconds = options.seconds * SHARE[group] / sum(SHARE[g] for g in options.groups)
    with tempfile.TemporaryDirectory() as folder:
        target, ask = Path(folder) / "done.json", Path(folder) / "ask.json"
        ask.write_text(
            json.dumps(
                {
                    "group": group, "cases": options.cases, "rounds": options.rounds,
                    "inner": options.inner, "lanes": options.lanes, "dry": options.dry,
                    "seconds": seconds, "target": str(target),
                }
            )
        )  # fmt: skip
        begin, ended = time.monotonic(), ""
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / "gpu_worker.py"), str(ask)],
                stderr=subprocess.PIPE, text=True, errors="replace", timeout=seconds + 45,
            )  # fmt: skip
            if done.returncode != 0:
                ended = f"ended with status {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            ended = f"killed after {time.monotonic() - begin:.0f} s: it hung, or was too slow"
        return (json.loads(target.read_text()) if target.exists() else {}), ended


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
    parser.add_argument("--groups", nargs="*", default=list(SHARE), choices=list(SHARE))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner", type=int, default=20, help="calls a sample")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=400, help="then what is left is left out")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--dry", action="store_true", help="tiny, without a GPU: only to try the program"
    )
    options = parser.parse_args()
    options.dry = options.dry or bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
    if options.dry:
        options.rounds, options.inner, options.lanes = 3, 2, 2
    return options


def main() -> int:
    """Measures, prints and writes; returns the exit status: 1 if a group died or hung."""
    options = parse()

    import environment
    import gpu_cases

    from dynaflow_xla.ffi import _engine

    if not options.dry and (problem := _engine.cuda_problem()):
        print(f"bench-gpu: nothing to measure: {problem}")
        return 0
    stamp = {**environment.stamp(), "gpu": gpu_stamp(), "gpu_versions": versions()}
    record: dict[str, Any] = {
        "format": 2, "benchmark": "gpu", "dry": options.dry, "environment": stamp,
        "rounds": options.rounds, "calls_per_sample": options.inner, "lanes": options.lanes,
        "ended": {}, "cases": {},
    }  # fmt: skip
    for case in gpu_cases.CASES:
        if not options.cases or case.name in options.cases:
            shapes = (gpu_cases.small(case) if options.dry else case).shapes
            record["cases"][case.name] = {
                "note": case.note, "shapes": shapes, "samples_us": {}, "difference": {}, "failed": {},
            }  # fmt: skip
    if unknown := set(options.cases) - set(record["cases"]):
        known = ", ".join(case.name for case in gpu_cases.CASES)
        print(f"no case {sorted(unknown)}; there are {known}", file=sys.stderr)
        return 2
    date = stamp["date"].replace(":", "").replace("+0000", "Z")
    path = options.out or RESULTS / f"gpu-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for group in options.groups:
        done, ended = run_group(group, options)
        if ended:
            record["ended"][group] = ended
            print(f"{group}: {ended}", file=sys.stderr, flush=True)
        for name, case in record["cases"].items():
            made = done.get(name, {"failed": {group: ended or "no time left"}})
            for part in ("samples_us", "difference", "failed"):
                for variant, value in made.get(part, {}).items():
                    again = part == "samples_us" and variant in case[part]
                    case[part][f"{variant} ({group})" if again else variant] = value
            for variant, values in made.get("samples_us", {}).items():
                if values:
                    print(f"{name:16} {variant:28} median {np.median(values):9.1f} us", flush=True)
            for variant, why in made["failed"].items():
                print(f"{name:16} {variant:28} {(why.splitlines() or [''])[0][:100]}", flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")  # what is there survives a time limit
    print(f"wrote {path}")
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    return 1 if record["ended"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
