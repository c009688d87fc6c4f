"""Compiling a scheduled function for a GPU in another process, and reading back what became of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from dynaflow_xla.errors import DynaflowError, EngineError, UnsupportedError, optional
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import scheduled as scheduled_function
from dynaflow_xla.frontends.jax.adapters.lifted import looks_inside
from dynaflow_xla.frontends.jax.capture.tracing import Capturing, tracing_afresh
from dynaflow_xla.frontends.jax.readback import compiled_report, deviceless_worker, targets
from dynaflow_xla.frontends.jax.readback.report import CompiledReport
from dynaflow_xla.frontends.jax.xla import xla_options
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry, traced_entries

TIMEOUT_S = 900.0
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_PLATFORM = ("cuda",)


@looks_inside
def compile_report(
    fast: Any, args: Any, kwargs: Any, target: object = None, *, repeats: int = 0
) -> CompiledReport:
    """The report of ``dynaflow_xla.compile`` for a JAX function.

    With ``repeats``, the original is compiled under XLA's own defaults, too, and each program so many
    times again: its seconds are the shortest.
    """
    specs = jax.tree_util.tree_map(_spec, (args, kwargs))
    if isinstance(fast, scheduled_function.ScheduledFunction):
        made = fast.planned(args, kwargs)
        return report_of(
            made,
            {"scheduled": fast.planning(args, kwargs)._jit, "original": fast.original},
            specs,
            target,
            donated=fast.programs.donated_leaves(args, kwargs),
            repeats=repeats,
        )
    made, options, programs, notes = _outer_function(fast, specs)
    info = fast.trace(*specs[0], **specs[1]).args_info
    donated = [i for i, x in enumerate(jax.tree_util.tree_leaves(info)) if x.donated]
    path = _path(made, target)
    return _compiled(made, programs, specs, path, options, donated, notes, repeats)


def report_of(
    made: Any,
    programs: dict[str, Any],
    specs: Any,
    target: object,
    donated: Sequence[int] = (),
    repeats: int = 0,
) -> CompiledReport:
    """The report on a planned program.

    Args:
        made: Its entry.
        programs: "scheduled" and "original" -> a jitted function.
        specs: Positional and keyword arguments of both, as shapes.
        target: As for ``dynaflow_xla.compile``.
        donated: Which of the flat arguments are donated.
        repeats: See ``compile_report``.
    """
    _check_entry(made)
    path = _path(made, target)
    check_plugin()
    exported = {name: _export(jitted, *specs) for name, jitted in programs.items()}
    options = xla_options.for_entry(made)
    return _compiled(made, exported, specs, path, options, list(donated), [], repeats)


def _path(made: Any, target: object) -> str:
    path = targets.resolve(target) if target is not None else made.options.target
    return path or targets.of_this_machine()


def _compiled(
    made: Any,
    programs: dict[str, Any],
    specs: Any,
    path: str,
    options: dict[str, Any],
    donated: list[int],
    notes: list[str],
    repeats: int,
) -> CompiledReport:
    options = {k: str(v) for k, v in options.items()}
    given = dict.fromkeys(programs, options)
    if repeats:
        programs["plain"] = programs["original"]
        given["plain"] = {k: str(v) for k, v in (made.options.compiler_options or {}).items()}
    notes += filter(None, [xla_options.unproved()])
    with tempfile.TemporaryDirectory(prefix="dfx-compile-") as folder:
        results, log = _run(Path(folder), path, programs, donated, given, _mesh(specs), repeats)
        read = {
            which: compiled_report.read_program(
                Path(folder) / which, log.get(which, ""), results[which], given[which]
            )
            for which in results
        }
    return compiled_report.make(
        made,
        read,
        target=Path(path).stem,
        options=options,
        jaxlib=jaxlib.__version__,
        notes=notes,
    )


def _check_entry(made: Any) -> None:
    if not isinstance(made, XlaEntry):
        raise UnsupportedError(
            f"compile is for backend='xla'; {made.options.name!r} was scheduled with backend='ffi', "
            "which compiles a program for each lane of this machine. Use schedule(..., backend='xla')."
        )


def _outer_function(jitted: Any, specs: Any) -> tuple[XlaEntry, dict[str, Any], Any, list[str]]:
    """A jitted function with scheduled functions inside: the largest plan, options, both programs."""
    if not hasattr(jitted, "trace"):
        raise UnsupportedError(
            "compile takes what schedule returned, or a jax.jit function with that inside; got "
            f"{type(jitted).__name__}"
        )
    check_plugin()
    # Fresh functions: jit would return what it traced before.
    inner = jitted.__wrapped__
    with traced_entries() as entries, tracing_afresh():
        scheduled = _export(jax.jit(lambda *a, **k: inner(*a, **k)), *specs)
    if not entries:
        raise UnsupportedError(
            f"nothing in {jitted.__name__!r} is scheduled with backend='xla': compile reads a plan back"
        )
    with Capturing():
        original = _export(jax.jit(lambda *a, **k: inner(*a, **k)), *specs)
    options: dict[str, Any] = {}
    for made in entries:
        options.update(xla_options.for_entry(made))
    largest = max(entries, key=lambda made: len(made.pg.regions))
    notes = []
    if others := len({id(made) for made in entries}) - 1:
        notes.append(f"{others} other plans are in this program; this report is on the largest one")
    return largest, options, {"scheduled": scheduled, "original": original}, notes


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
        optional.require("flatbuffers", "handing a program to the compiling process", "cuda")
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
        spread = sharding is not None and sharding.num_devices > 1
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            weak_type=bool(getattr(leaf, "weak_type", False)),
            sharding=sharding if spread else None,
        )
    return leaf


def _mesh(specs: Any) -> list[tuple[str, int, str]]:
    """The mesh that the arguments are spread over, as (axis, devices, type of the axis).

    The program has to have the same; the mesh itself may be abstract.
    """
    for leaf in jax.tree_util.tree_leaves(specs):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None:
            return [
                (str(axis), size, kind.name)
                for (axis, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
            ]
    return []


def _export(jitted: Any, args: Any, kwargs: Any) -> Any:
    checks = [jax.export.DisabledSafetyCheck.custom_call(xla.ORDER_TARGET)]
    try:
        made = jax.export.export(jitted, platforms=_PLATFORM, disabled_checks=checks)(
            *args, **kwargs
        )
    except DynaflowError:
        raise  # a built-in error, too, but not one of those meant here
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            f"this program cannot be lowered for a GPU and handed to the compiling process: {error}"
        ) from error
    # Leaves alone: containers (an optimizer's state) need not be known to the other process.
    ins = jax.tree_util.tree_structure(((0,) * made.in_tree.num_leaves, {}))
    outs = jax.tree_util.tree_structure([0] * made.out_tree.num_leaves)
    return dataclasses.replace(made, in_tree=ins, out_tree=outs)


def _run(
    folder: Path,
    target: str,
    programs: dict[str, Any],
    donated: list[int],
    options: dict[str, dict[str, str]],
    mesh: list[tuple[str, int, str]],
    repeats: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    request: dict[str, Any] = {"target": target, "devices": 1, "mesh": mesh, "programs": []}
    request["repeats"] = repeats
    for name, exported in programs.items():
        (folder / name).mkdir()
        (folder / name / "program.bin").write_bytes(exported.serialize())
        request["devices"] = exported.nr_devices
        request["programs"].append({"name": name, "donated": donated, "options": options[name]})
    (folder / "request.json").write_text(json.dumps(request))
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_X64="1",  # the programs' types are settled; none is to be narrowed
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
            f"XLA refused the program, its options {options['scheduled']} or the target {target}: "
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
