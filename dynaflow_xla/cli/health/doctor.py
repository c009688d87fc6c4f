"""``dynaflow-xla doctor``: what of this machine and environment works, what does not, how to mend it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dynaflow_xla import machine
from dynaflow_xla.cli.console import CommandOutput
from dynaflow_xla.cli.health import checks
from dynaflow_xla.cli.health.checks import Check

_STYLES = {"ok": "green", "note": "", "warn": "yellow", "fail": "bold red"}
_EXTRAS = {"jax": "jax", "torch": "torch"}
_TRIAL_S = 180.0


def examine(step: Callable[..., None], trial_s: float = _TRIAL_S) -> list[Check]:
    """Everything there is to say, the trials of the frameworks included.

    Args:
        step: Told what is looked at.
        trial_s: A trial that takes longer counts as hanging.
    """
    found = [*checks.of_machine(), *checks.of_package()]
    step("loading the engine")
    found.append(_engine(trial_s))
    gpus: list[str] = []
    step("asking for GPUs")
    found += _driver(gpus, trial_s)
    found += checks.plugins()
    usable = []
    for name, extra in _EXTRAS.items():
        step(f"trying {name}")
        told = list(_framework(name, extra, bool(gpus), trial_s))
        found += told
        if any(c.name == "lanes" and c.status in ("ok", "warn") for c in told):
            usable.append(name)
    if not usable:
        both = " or ".join(f"pip install 'dynaflow-xla[{extra}]'" for extra in _EXTRAS.values())
        found.append(
            Check(
                "package",
                "frameworks",
                "fail",
                "neither JAX nor PyTorch can be scheduled here",
                both,
            )
        )
    return [*found, *checks.of_tools(), *checks.of_cache()]


def _trial(what: str, seconds: float) -> tuple[dict[str, Any], str]:
    """What a probe says, or why it says nothing."""
    command = [sys.executable, "-P", "-m", "dynaflow_xla.cli.health.probe", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}, f"did not end within {seconds:.0f} s"
    if done.returncode < 0:
        return {}, f"the process was killed by signal {-done.returncode}"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        return {}, told[-1] if told else f"exit status {done.returncode}"
    try:
        return dict(json.loads(lines[-1])), ""
    except ValueError:
        return {}, f"said {lines[-1]!r}"


def _engine(seconds: float) -> Check:
    told, why = _trial("engine", seconds)
    if not why:
        return Check("package", "engine", "ok", f"loads (plan ABI {told['abi']})")
    way_out = (
        "install the package from its wheel, or build it (pip install .): a source folder alone has no engine"
        if "No module named 'dynaflow_xla.ffi" in why
        else "install the package again for this Python: pip install --force-reinstall dynaflow-xla"
    )
    return Check("package", "engine", "fail", f"cannot be loaded: {why}", way_out)


def _driver(gpus: list[str], seconds: float) -> Iterator[Check]:
    told, why = _trial("gpu", seconds)
    if not why and told.get("missing"):
        yield Check("gpu", "driver", "note", "no NVIDIA driver: lanes are cores of this machine")
    elif why or told.get("failed"):
        yield Check(
            "gpu", "driver", "warn", f"installed, but it does not answer: {why or told['failed']}",
            "see what nvidia-smi says; in a container start it with --gpus all",
        )  # fmt: skip
    elif not told["devices"]:
        yield Check(
            "gpu",
            "driver",
            "note",
            f"CUDA {told['cuda']}, no device is visible",
            "see CUDA_VISIBLE_DEVICES",
        )
    else:
        gpus.extend(told["devices"])
        yield Check("gpu", "driver", "ok", f"CUDA {told['cuda']}: {', '.join(gpus)}")


def _framework(name: str, extra: str, has_gpu: bool, seconds: float) -> Iterator[Check]:
    if (why_not := checks.framework(name, extra)) is not None:
        yield why_not
        return
    told, why = _trial(name, seconds)
    if why:
        yield Check(
            name, "lanes", "fail", f"scheduling does not work: {why}",
            f"see all of it with: {sys.executable} -P -m dynaflow_xla.cli.health.probe {name}",
        )  # fmt: skip
        return
    versions = [
        f"{told['version']}",
        *(f"{k} {told[k]}" for k in ("jaxlib", "cuda") if told.get(k)),
    ]
    yield Check(name, "JAX" if name == "jax" else "PyTorch", "ok", ", ".join(versions))
    yield Check(name, "devices", "ok", ", ".join(told["devices"]))
    if has_gpu and not told["gpu"]:
        mend = (
            "pip install 'dynaflow-xla[cuda]'" if name == "jax" and not checks.has_plugin()
            else "see JAX_PLATFORMS and CUDA_VISIBLE_DEVICES" if name == "jax"
            else "install a PyTorch that is built with CUDA (pytorch.org says which)"
        )  # fmt: skip
        yield Check(name, "GPU", "warn", "this machine has a GPU, and it is not used", mend)
    if told["lanes"] < 2:
        yield Check(name, "lanes", "warn", "two parts of a function went to one lane")
        return
    both = f"; both busy {told['overlap']:.0%} of the time" if "overlap" in told else ""
    slow = machine.cores() > 1 and told.get("overlap", 1.0) < 0.2
    yield Check(
        name, "lanes", "warn" if slow else "ok",
        f"a function ran on {told['lanes']} lanes with the original's values{both}",
        "the machine is busy, or its cores are shared: lanes gain little as it is" if slow else "",
    )  # fmt: skip


def show(found: list[Check], out: CommandOutput) -> int:
    """Prints what was found; returns the exit status: 1 if something does not work."""
    worst = "fail" if any(c.status == "fail" for c in found) else "ok"
    out.result({"ok": worst == "ok", "checks": [dataclasses.asdict(check) for check in found]})
    areas = list(dict.fromkeys(c.area for c in found))
    for area in areas:
        out.text(area, "bold")
        for check in (c for c in found if c.area == area):
            out.text(f"  {check.status:4}  {check.name}: {check.found}", _STYLES[check.status])
            if check.mend:
                out.text(f"        > {check.mend}", "cyan")
    counts = {status: sum(c.status == status for c in found) for status in ("fail", "warn")}
    out.text()
    if counts["fail"]:
        out.text(
            f"{counts['fail']} of {len(found)} checks failed; lines with > say what to do",
            "bold red",
        )
    elif counts["warn"]:
        out.text(f"all works, with {counts['warn']} warning{'s' * (counts['warn'] > 1)}", "yellow")
    else:
        out.text("all works", "green")
    return 1 if counts["fail"] else 0
