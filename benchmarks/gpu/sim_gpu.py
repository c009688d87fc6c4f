"""Simulated times of the GPU benchmark's cases: JAX's CUDA plugin on the stand-in driver, without a GPU.

``make sim-gpu`` compiles each case, takes the trace of one call and has it simulated
(``tests/gpu_standin/simulated.py`` says how). It compares plans by what they let overlap, under the
assumptions in the table's head; it measures nothing. Kernels are those of XLA without autotuning.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
from common import records  # noqa: E402
from common.environment import stamp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from gpu import cases as gpu_cases, variants as gpu_variants  # noqa: E402

LANES = 4
COLUMNS = {
    "LHS": "one graph, XLA's default order",
    "CONCURRENT": "XLA, CONCURRENT",
    "CONCURRENT_REGIONS": "XLA, CONCURRENT_REGIONS",
    "xla": "branches, as one XLA program",
    "ffi": "branches, on lanes",
}


def variants(fn: Any, args: list[Any]) -> dict[str, Callable[[], Any]]:
    """What makes each column's function."""

    def mode(name: str) -> Any:
        options = {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_gpu_command_buffer_scheduling_mode": name,
        }
        return jax.jit(fn).lower(*args).compile(compiler_options=options)

    def ours(backend: str) -> Any:
        return dfx.schedule(fn, strategy="branches", backend=backend, lanes=dfx.Lanes(LANES))

    made = {n: lambda n=n: mode(n) for n in ("LHS", "CONCURRENT", "CONCURRENT_REGIONS")}
    return {**made, "xla": lambda: ours("xla"), "ffi": lambda: ours("ffi")}


def simulated(case: Any, columns: list[str]) -> dict[str, Any]:
    """Microseconds and kernels by column; why, where there are none."""
    import simulated as model
    from standin_plugin import DRIVER, VALUES

    assert DRIVER is not None and VALUES is not None
    DRIVER.functions.fake_values(None)  # what kernels compute is not asked
    fn = case.make(gpu_variants.jax_functions(jax))
    args = [jnp.zeros(shape, jnp.bfloat16) for shape in case.shapes]
    found: dict[str, Any] = {}
    for name, make in variants(fn, args).items():
        if name not in columns:
            continue
        try:
            run = make()
            for _ in range(2):  # recorded, and replayed
                jax.block_until_ready(run(*args))
            with DRIVER.tracing(VALUES.kernel) as traces:
                jax.block_until_ready(run(*args))
            kernels = traces[0].kernels()
            found[name] = {
                "us": model.simulate(traces[0]), "kernels": len(kernels),
                "longest_chain": traces[0].longest_chain(),
                "unknown": sum(not k.accesses for k in kernels),
            }  # fmt: skip
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        print(f"{case.name:16} {name:20} {found[name]}", flush=True)
    return found


def page(record: dict[str, Any]) -> str:
    """The table."""
    assumed = record["assumed"]
    head = [
        "# Simulated times on a GPU",
        "",
        "After this page you know what the plans of the GPU benchmark's cases *could* gain, under the",
        "assumptions below.",
        "",
        "**Simulated. No GPU was used, and nothing here is a measurement**; made by `make sim-gpu`, do not",
        f"edit. JAX's CUDA plugin ({record['environment']['versions'].get('jax', '')}) runs on a stand-in",
        "for the driver, whose trace of one call is simulated. Which kernels there are, how many blocks",
        "each has, what it reads and writes, and which order the driver was given are XLA's and ours; how",
        "long a kernel takes is assumed:",
        "",
        *(f"- {name.replace('_', ' ')}: {value:g}" for name, value in assumed.items()),
        "- kernels without an order between them share multiprocessors and memory in proportion to what they",
        "  use alone",
        "- XLA's kernels without autotuning, in bfloat16; caches, clocks and interference are left out",
        "",
        "Microseconds of one call; in brackets how many times shorter than the first column. How many",
        "kernels each column has, and its longest chain, is in `benchmarks/results/sim-gpu.json`: plans that",
        "keep branches apart may have more kernels, and smaller ones, than XLA alone.",
        "",
    ]
    names = list(COLUMNS)
    rows = [
        "| case | kernels | " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * (len(names) + 2),
    ]
    for case, found in record["cases"].items():
        base = found.get("LHS", {}).get("us")
        cells = []
        for name in names:
            us = found.get(name, {}).get("us")
            cells.append(
                "-" if us is None else f"{us:.0f} ({base / us:.2f})" if base else f"{us:.0f}"
            )
        rows.append(
            f"| {case} | {found.get('LHS', {}).get('kernels', '-')} | " + " | ".join(cells) + " |"
        )
    why = {
        f"- {case}: {next(iter(found.values()))['failed'].rpartition(': ')[2]}"
        for case, found in record["cases"].items() if all("failed" in one for one in found.values())
    }  # fmt: skip
    why |= {
        f"- {case}, {COLUMNS[name]}: {one['failed']}"
        for case, found in record["cases"].items() for name, one in found.items()
        if "failed" in one and not all("failed" in other for other in found.values())
    }  # fmt: skip
    tail = [
        "",
        "Not simulated (convolutions are cuDNN's, which the stand-in lacks):",
        "",
        *sorted(why),
    ]
    tail = tail if why else []
    return "\n".join([*head, *rows, *tail]) + "\n"


def main() -> int:
    """Simulates, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], help="default: all")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--out", type=Path, default=records.RESULTS / "sim-gpu.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "sim_gpu.md")
    options = parser.parse_args()
    import simulated as model

    record: dict[str, Any] = {
        # Not where this machine keeps the stand-in.
        "format": 1, "benchmark": "sim-gpu", "simulated": True, "environment": {**stamp(), "variables": {}},
        "assumed": dataclasses.asdict(model.H200), "cases": {},
    }  # fmt: skip
    for case in gpu_cases.CASES:
        if not options.cases or case.name in options.cases:
            record["cases"][case.name] = simulated(case, options.columns)
    records.save(record, options.out)
    options.page.write_text(page(json.loads(options.out.read_text())))
    print(f"wrote {options.out} and {options.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
