"""What is assumed of processors that compute at another speed than the one that costs were fitted to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dynaflow_xla.machine.figures import ASSUMED, Numbers

_NARROW = {"jax products": 0.5, "jax convolutions": 0.5}
"""Half as many multiplications a cycle as two units of AVX-512: by arithmetic, not measured. What
has no AVX2 is slower still."""

_ZEN_3 = {
    "jax products": 0.4, "jax convolutions": 0.39, "jax elements": 1.6, "jax serial": 0.78,
    "torch convolutions": 1.7, "torch elements": 0.8, "torch serial": 0.87,
}  # fmt: skip
"""AMD EPYC, family 25, model 1, as ``dynaflow_xla.measure_machine`` has it, medians of three: AVX2 only."""

_ZEN_4 = {"jax products": 0.5, "jax convolutions": 0.47, "jax elements": 2.0}
"""AMD EPYC, family 25, model 17, as ``dynaflow_xla.measure_machine`` has it. 512 bits take two cycles."""

_MESH_STEP_NS = 9_000.0
"""Xeon, Sapphire Rapids: its cores are farther from each other than those of a core complex."""

_INTEL = "GenuineIntel"
_AMD, _ZEN_3_AND_4 = "AuthenticAMD", "25"


def fields(cpuinfo: str) -> dict[str, list[str]]:
    """What a text like ``/proc/cpuinfo`` says: different values of all processors by key, in their order."""
    found: dict[str, dict[str, None]] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            found.setdefault(key.strip(), {})[value.strip()] = None
    return {key: list(values) for key, values in found.items()}


def assumed_of(cpuinfo: str) -> Numbers:
    """The numbers of a machine that was not measured, by what such a text says of its first processor."""
    first = {key: values[0] for key, values in fields(cpuinfo).items()}
    made = dataclasses.replace(ASSUMED, speeds=_speeds(first))
    if first.get("vendor_id") == _INTEL and "avx512f" in first.get("flags", "").split():
        made = dataclasses.replace(made, step_ns=_MESH_STEP_NS)
    return made


def _speeds(told: Mapping[str, str]) -> dict[str, float]:
    flags = told.get("flags", "").split()
    if "sse2" not in flags:
        return {}  # another architecture, or nothing is known
    wide = "avx512f" in flags
    if told.get("vendor_id") == _AMD and told.get("cpu family") == _ZEN_3_AND_4:
        return _ZEN_4 if wide else _ZEN_3
    return {} if wide else _NARROW
