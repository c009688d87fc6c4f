"""Compiling a scheduled function for a GPU in another process, and reading back what became of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jaxlib

from dynaflow_xla import _optional
from dynaflow_xla.errors import EngineError, UnsupportedError
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import compiled_report, deviceless_worker, targets, xla_options
from dynaflow_xla.frontends.jax.xla_backend import XlaEntry

TIMEOUT_S = 900.0
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_PLATFORM = ("cuda",)


def compile_report(fast: Any, args: Any, kwargs: Any) -> compiled_report.CompiledReport:
    """See ``dynaflow_xla.compile``."""
    made = fast.planned(args, kwargs)
    name = made.options.name
    if not isinstance(made, XlaEntry):
        raise UnsupportedError(
            f"compile is for backend='xla'; {name!r} was scheduled with backend='ffi', which compiles "
            "a program for each lane of this machine. Use schedule(..., backend='xla')."
        )
    target = made.options.target or targets.of_this_machine()
    check_plugin()
    specs = jax.tree_util.tree_map(_spec, (args, kwargs))
    scheduled = _export(fast._jit, *specs)
    original = _export(fast.original, *specs)
    options = {k: str(v) for k, v in fast.compiler_options(args, kwargs).items()}
    with tempfile.TemporaryDirectory(prefix="dfx-compile-") as folder:
        results, log = _run(
            Path(folder),
            target,
            {"scheduled": scheduled, "original": original},
            fast.donated_leaves(args, kwargs),
            options,
        )
        programs = {
            which: compiled_report.read_program(
                Path(folder) / which, log.get(which, ""), results[which], options
            )
            for which in results
        }
    return compiled_report.make(
        made,
        programs,
        target=Path(target).stem,
        options=options,
        jaxlib=jaxlib.__version__,
        note=xla_options.unproved(),
    )


def check_plugin() -> str:
    """The version of the installed CUDA plugin.

    Raises:
        UnsupportedError: it is not installed, or of another version than jaxlib.
    """
    for plugin in _PLUGINS:
        try:
            found = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found != jaxlib.__version__:
            raise UnsupportedError(
                f"{plugin} must have jaxlib's version {jaxlib.__version__}; found {found}. "
                f"pip install '{plugin}=={jaxlib.__version__}'"
            )
        _optional.require("flatbuffers", "handing a program to the compiling process", "cuda")
        return found
    raise UnsupportedError(
        "compiling for a GPU needs JAX's CUDA plugin (but no GPU and no driver), which is not installed. "
        "Install it with: pip install 'dynaflow-xla[cuda]'. Enough for compiling alone, where ptxas is "
        f"at hand: pip install flatbuffers; pip install --no-deps jax-cuda13-plugin=={jaxlib.__version__} "
        f"jax-cuda13-pjrt=={jaxlib.__version__}"
    )


def _spec(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        sharding = getattr(leaf, "sharding", None)
        spread = sharding is not None and len(sharding.device_set) > 1
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            weak_type=bool(getattr(leaf, "weak_type", False)),
            sharding=sharding if spread else None,
        )
    return leaf


def _export(jitted: Any, args: Any, kwargs: Any) -> Any:
    checks = [jax.export.DisabledSafetyCheck.custom_call(xla.ORDER_TARGET)]
    try:
        return jax.export.export(jitted, platforms=_PLATFORM, disabled_checks=checks)(
            *args, **kwargs
        )
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            f"this program cannot be handed to another process: {error}"
        ) from error


def _run(
    folder: Path, target: str, programs: dict[str, Any], donated: list[int], options: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    request: dict[str, Any] = {"target": target, "devices": 1, "programs": []}
    for name, exported in programs.items():
        (folder / name).mkdir()
        (folder / name / "program.bin").write_bytes(exported.serialize())
        request["devices"] = exported.nr_devices
        request["programs"].append({"name": name, "donated": donated, "options": options})
    (folder / "request.json").write_text(json.dumps(request))
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TF_CPP_MIN_LOG_LEVEL="0",
        TF_CPP_VMODULE=compiled_report.LOG_MODULES,
    )
    environment.pop("XLA_FLAGS", None)  # they may hold flags of another backend
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", deviceless_worker.__name__, str(folder)],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"compiling for a GPU took more than {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise EngineError(
            f"XLA refused the program, its options {options} or the target {target}: "
            f"{_reason(done.stderr)} (exit status {done.returncode})"
        )
    log: dict[str, str] = {}
    current = "-"
    for line in done.stderr.splitlines():
        if line.startswith(deviceless_worker.LOG_MARK + " "):
            current = line.split(" ", 1)[1]
        else:
            log[current] = log.get(current, "") + line + "\n"
    return json.loads((folder / "result.json").read_text()), log


def _reason(stderr: str) -> str:
    """The error in a log: a Python exception's last line, else the last fatal or plain lines."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") and ".cc:" in line]
    if fatal:
        return fatal[0].split("] ", 1)[-1]
    raised = [line for line in lines if "Error: " in line.split("(")[0] and line[0] not in " IWE"]
    return raised[-1] if raised else "\n".join(lines[-5:]) or "no message"
