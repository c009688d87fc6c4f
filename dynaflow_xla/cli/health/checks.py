"""What ``doctor`` finds out without a framework: the machine, the package, what is installed, the caches."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dynaflow_xla import machine
from dynaflow_xla._version import __version__
from dynaflow_xla.caches import private_files, trimming
from dynaflow_xla.cli import kept
from dynaflow_xla.errors import PlanError, optional
from dynaflow_xla.machine import memory

Status = Literal["ok", "note", "warn", "fail"]

_PYTHON = ((3, 11), (3, 15))
_PARTS = ("msgspec", "numpy", "threadpoolctl", "click", "rich")
_VARIABLES = (*machine.THREAD_VARIABLES, "NPROC", "XLA_FLAGS", "JAX_PLATFORMS")
_SLOW_FAULT_NS = 1_000.0
_TOOLS = {
    "matplotlib": ("Timeline.plot: pictures of timelines", "dynaflow-xla[trace]"),
    "perfetto": ("Timeline.to_perfetto('x.pftrace'); .json needs nothing", "dynaflow-xla[trace]"),
}


@dataclass(frozen=True)
class Check:
    """One line of what ``doctor`` says.

    Attributes:
        area: Heading.
        name: What was looked at.
        status: ``ok``; ``note``: nothing is wrong, and it is good to know; ``warn``: it works, in part or
            slowly; ``fail``: it does not work.
        found: What was found.
        mend: What to do about it, or "".
    """

    area: str
    name: str
    status: Status
    found: str
    mend: str = ""


def of_machine() -> Iterator[Check]:
    """Cores, their limits, what else runs."""
    area = "machine"
    system = platform.system()
    told = f"{system} {platform.release()}, {platform.machine()}"
    if system == "Linux":
        yield Check(area, "system", "ok", told)
    else:
        yield Check(
            area, "system", "fail", told, "the engine is for Linux; use a container or WSL 2"
        )
    yield Check(area, "processor", "ok", machine.cpu_model())
    usable, present = machine.cores(), os.cpu_count() or 1
    found = f"{usable} of {present} usable by this process" if usable < present else f"{usable}"
    if usable == 1:
        yield Check(
            area, "cores", "warn", f"{found}: nothing can run side by side on a CPU",
            "allow more of them (taskset -c, docker --cpuset-cpus, a job's --cpus-per-task)",
        )  # fmt: skip
    else:
        yield Check(area, "cores", "ok", found)
    known = machine.numbers()
    yield Check(
        area, "numbers", "ok" if known.measured else "note",
        f"measured {known.measured}" if known.measured else
        "plans assume those of a server with its vectors",
        "" if known.measured else "measure this machine's: dynaflow-xla doctor --measure",
    )  # fmt: skip
    fault = memory.fault_ns()
    yield Check(
        area, "fresh memory", "note" if fault >= _SLOW_FAULT_NS else "ok",
        f"a page of {mmap.PAGESIZE // 1024} KiB takes {fault / 1e3:.2g} us",
        "large results are slow: keep memory (dynaflow_xla.keep_memory(), before the first computation)"
        if fault >= _SLOW_FAULT_NS else "",
    )  # fmt: skip
    quota = machine.quota_cores()
    if quota is not None and quota < usable:
        yield Check(
            area, "time limit", "warn",
            f"the container may use {quota:.3g} cores' worth of time on {usable} cores: when it is used up, "
            "all lanes stand still until the next period",
            f"give lanes={max(1, int(quota))} to dfx.schedule, or pin cores instead (docker --cpuset-cpus)",
        )  # fmt: skip
    load = os.getloadavg()[0]
    if load > max(1.0, usable / 2):
        yield Check(
            area, "load", "warn", f"{load:.2g} programs run on average: timings are noisy now",
            "measure (dfx.tune, bench) when the machine is quiet",
        )  # fmt: skip
    else:
        yield Check(area, "load", "ok", f"{load:.2g}")
    for name in _VARIABLES:
        if os.environ.get(name):
            yield Check(area, name, "note", f"{os.environ[name]} (set in the environment)")
    try:
        trimming.limit_bytes()
    except PlanError as error:
        yield Check(
            area, trimming.VARIABLE, "warn", os.environ.get(trimming.VARIABLE, ""), str(error)
        )


def of_package() -> Iterator[Check]:
    """Python, this package, what it needs, its engine's file."""
    area = "package"
    version = platform.python_version()
    low, high = _PYTHON
    if low <= sys.version_info[:2] < high:
        yield Check(area, "Python", "ok", f"{version} ({sys.executable})")
    else:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
        yield Check(area, "Python", "fail", version, f"use Python {wanted}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield Check(
            area, "GIL", "note",
            "a free-threaded Python: the engine needs the GIL and turns it on when it is imported",
        )  # fmt: skip
    yield Check(area, "dynaflow-xla", "ok", __version__)
    missing = [name for name in _PARTS if _version(name) is None]
    if missing:
        yield Check(
            area, "dependencies", "fail", f"missing: {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )  # fmt: skip
    else:
        told = ", ".join(f"{name} {_version(name)}" for name in _PARTS)
        yield Check(area, "dependencies", "ok", told)


def of_tools() -> Iterator[Check]:
    """What some functions need."""
    area = "tools"
    for name, (use, extra) in _TOOLS.items():
        version = _version(name)
        if version is None:
            yield Check(area, name, "note", f"not installed; for {use}", f"pip install '{extra}'")
        else:
            yield Check(area, name, "ok", version)
    compiler = next(
        (c for c in (os.environ.get("CXX", ""), "g++", "clang++") if c and shutil.which(c)), ""
    )
    if compiler:
        yield Check(area, "C++ compiler", "ok", compiler)
    elif _version("torch"):
        yield Check(
            area, "C++ compiler", "note",
            "none found; for schedule(compiler='inductor' or 'aoti') and torch.compile",
            "install one (apt-get install g++), or set CXX",
        )  # fmt: skip


def of_cache() -> Iterator[Check]:
    """Where decisions and compiled regions are kept."""
    try:
        folder = private_files.cache_folder()
    except private_files.NoFolder:
        yield Check(
            "cache", "folder", "warn",
            "this user has no home folder to keep it in: each process measures and compiles anew",
            "name a folder in DYNAFLOW_XLA_CACHE_DIR",
        )  # fmt: skip
        return
    try:
        private_files.check_folder(folder)
        entries = kept.entries(folder)
    except (private_files.Untrusted, OSError) as error:
        yield Check(
            "cache", "folder", "warn", f"not used: {error}",
            f"chown and chmod go-w {folder}, or name another in DYNAFLOW_XLA_CACHE_DIR",
        )  # fmt: skip
        return
    above = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(above, os.W_OK):
        yield Check(
            "cache", "folder", "warn", f"{folder} cannot be written: each process measures and compiles anew",
            "name another in DYNAFLOW_XLA_CACHE_DIR",
        )  # fmt: skip
        return
    size = sum(entry.bytes for entry in entries)
    yield Check("cache", "folder", "ok", f"{folder}: {len(entries)} files, {kept.size(size)}")


def framework(name: str, extra: str) -> Check | None:
    """Why a framework need not be tried: it is not installed, or of a version that is not supported."""
    area, label = _LABELS[name]
    version = _version(name)
    if version is None:
        return Check(area, label, "note", "not installed", f"pip install 'dynaflow-xla[{extra}]'")
    oldest, too_new = optional.VERSIONS[name]
    number = tuple(int(n) if n.isdigit() else 0 for n in version.split(".")[:2])
    if number < oldest or (too_new is not None and number >= too_new):
        last = f" and older than {too_new[0]}.{too_new[1]}" if too_new else ""
        yield_ = f"{version}; supported: {oldest[0]}.{oldest[1]} or newer{last}"
        if name == "torch" and number == (2, 9) and _version("torch_xla"):
            return None
        return Check(area, label, "fail", yield_, f"pip install -U 'dynaflow-xla[{extra}]'")
    return None


_LABELS = {"jax": ("jax", "JAX"), "torch": ("torch", "PyTorch")}


def plugins() -> Iterator[Check]:
    """JAX's CUDA plugin: it has to be of jaxlib's version."""
    jaxlib = _version("jaxlib")
    if jaxlib is None:
        return
    found = {
        name: version
        for cuda in ("cuda12", "cuda13")
        for name in (f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt")
        if (version := _version(name)) is not None
    }
    for name, version in found.items():
        if version == jaxlib:
            yield Check("gpu", name, "ok", version)
        else:
            yield Check(
                "gpu", name, "fail", f"{version}, and jaxlib is {jaxlib}: they have to be the same",
                f"pip install {name}=={jaxlib}",
            )  # fmt: skip


def has_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return any(_version(f"jax-{cuda}-plugin") for cuda in ("cuda12", "cuda13"))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
