"""Installs the package where the GPU is, without a package index: ``python install.py SITE WHEELS``.

What is carried in WHEELS is installed into SITE: the package always, another wheel only if this
Python lacks its module. A package that was built from other sources than these, or for another Python or
C library, is built here from the sources, with the build tools that this Python has.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import sources

ROOT = Path(__file__).resolve().parents[2]


def pip(*args: str) -> int:
    return subprocess.call([sys.executable, "-m", "pip", "-q", *args])


def problem(site: Path) -> str:
    """Why the package in SITE cannot be used, or ``""``."""
    check = "import dynaflow_xla.ffi._engine as e; e.cuda_problem()"
    env = {**os.environ, "PYTHONPATH": str(site)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", check],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return "its import hangs"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it died"])[-1]


def main() -> int:
    site, wheels = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    begin = time.time()
    shutil.rmtree(site, ignore_errors=True)
    into = ["install", "--no-index", "--no-deps", "--target", str(site)]
    ours = sorted(wheels.glob("dynaflow_xla-*.whl"))
    for wheel in sorted(wheels.glob("*.whl")):
        module = wheel.name.split("-")[0]
        if wheel in ours or importlib.util.find_spec(module) is not None:
            continue
        pip(*into, str(wheel))
    how = ours[-1].name if ours else f"no wheel in {wheels}"
    if not ours:
        why = "nothing to install"
    elif sources.beside(wheels) != sources.current():
        why = "the wheel was built from other sources than these"
    else:
        why = "pip refused it" if pip(*into, str(ours[-1])) != 0 else problem(site)
    if why:
        print(f"{how}: {why}; building from the sources")
        how = "built here"
        built = pip(*into, "--upgrade", "--no-build-isolation", str(ROOT)) == 0
        why = problem(site) if built else "pip could not build it"
    if why:
        print(
            f"dynaflow_xla cannot be used with {sys.executable}: {why}. Building needs scikit-build-core, "
            "nanobind, cmake, ninja and jaxlib; using it msgspec and threadpoolctl. `make gpu-wheel` on a "
            f"machine with an index makes wheels of all that; carry them to {wheels}"
        )
        return 1
    (site / sources.MADE_OF).write_text(sources.current())
    print(f"dynaflow_xla ({how}) in {site}, {time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
