"""The stamp that every benchmark result carries: what it ran on, with which versions, when."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "dynaflow-xla", "jax", "jaxlib", "torch", "transformers", "numpy", "scipy", "optax",
    "scikit-learn", "matplotlib",
)  # fmt: skip
MODULES = {"scikit-learn": "sklearn"}
"""Modules of packages that are called otherwise."""
VARIABLES = (
    "XLA_FLAGS", "JAX_PLATFORMS", "NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS",
    "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip


def now() -> str:
    """Returns the date and time, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def stamp() -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat a measurement.

    ``load_average`` is that of the moment of the call: other work on the machine widens every
    spread, so a result with a load well above the run's own threads is not to be trusted.
    """
    return {
        "date": now(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_machine": os.cpu_count(),
        "threads_per_core": threads_per_core(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": git_revision(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "blas": blas_pools(),
    }


def cpu_model() -> str:
    """Returns the processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def threads_per_core() -> int | None:
    """Returns how many of the kernel's cores share a physical one; None where it is not said."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text()
    except OSError:
        return None
    # "0,2" or "0-1"
    ends = [[int(x) for x in part.split("-")] for part in text.strip().split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)


def git_revision() -> dict[str, Any]:
    """Returns the commit of this checkout and whether tracked files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "modified": None}


def blas_pools() -> list[dict[str, Any]]:
    """Returns the BLAS and OpenMP thread pools that are loaded now, with their thread counts."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    kept = ("user_api", "internal_api", "version", "num_threads", "threading_layer")
    return [{k: pool[k] for k in kept if k in pool} for pool in threadpool_info()]


def summary(made: dict[str, Any]) -> str:
    """Returns a stamp on one line, for the head of a table."""
    recorded = {name: version or "not installed" for name, version in made["versions"].items()}
    versions = defaultdict(lambda: "not recorded", recorded)
    commit = (made["git"]["commit"] or "no git")[:10] + ("+" if made["git"]["modified"] else "")
    return (
        f"{made['cpu']}, {made['cores']} cores | Python {made['python']}, jax {versions['jax']}, "
        f"jaxlib {versions['jaxlib']}, torch {versions['torch']}, numpy {versions['numpy']}, dynaflow-xla "
        f"{versions['dynaflow-xla']} ({commit}) | load {made['load_average'][0]} | {made['date']}"
    )


def _version(name: str) -> str | None:
    """What is installed of a package; "unknown" if it is there and does not say; None if it is not."""
    module = MODULES.get(name, name.replace("-", "_"))
    try:
        found: Any = importlib.metadata.version(name)
    except (
        importlib.metadata.PackageNotFoundError
    ):  # a checkout that is imported as it is, or nothing
        if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
            return None
        found = getattr(sys.modules.get(module), "__version__", None)
    except Exception:  # metadata that cannot be read
        found = None
    return str(found) if found else "unknown"


if __name__ == "__main__":
    import json

    print(json.dumps(stamp(), indent=1))
