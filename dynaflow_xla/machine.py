"""This machine, as far as times measured on it depend on it."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# x86 says "model name"; other kernels give the parts that together name a model, or the board's chip.
_NAMES = ("model name", "cpu model", "Hardware")
_PARTS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
_PARTS_ELSEWHERE = ("cpu", "machine", "uarch", "isa")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def cpu_model() -> str:
    """The processor's name; every model has another one, as far as the system tells them apart."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    return named(text) or platform.processor() or platform.machine()


def named(cpuinfo: str) -> str:
    """The processors' names in a text like ``/proc/cpuinfo``; "" if there are none.

    A machine can have cores of several models.
    """
    values: dict[str, dict[str, None]] = {}
    for line in cpuinfo.splitlines():
        key, found, value = line.partition(":")
        if found and value.strip():
            values.setdefault(key.strip(), {})[value.strip()] = None
    for name in _NAMES:
        if name in values:
            return ", ".join(values[name])
    for parts in (_PARTS, _PARTS_ELSEWHERE):
        if told := [f"{part} {'/'.join(values[part])}" for part in parts if part in values]:
            return ", ".join(told)
    return ""


def identity() -> tuple[str, ...]:
    """What tells this machine from others, for keys of what is kept on disk."""
    return platform.machine(), cpu_model(), str(cores())
