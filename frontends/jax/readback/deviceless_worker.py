"""The process that compiles for a GPU. Run as a module: ``deviceless_worker FOLDER``.

It exists because XLA reads its log settings once, aborts the process on some malformed input, and
because compiling for CUDA must not create clients in the caller's process. ``FOLDER/request.json``
names the programs (exported by ``jax.export``), their options and the target; for each program it
leaves XLA's dumps in ``FOLDER/NAME/``, the compiled text, and a line in ``FOLDER/result.json``. The
log goes to stderr, with a line ``dfx-program NAME`` in front of each program's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from dynaflow_xla.ffi import xla

LOG_MARK = "dfx-program"


def main(folder: Path) -> None:
    """Compiles every program of a request."""
    request = json.loads((folder / "request.json").read_text())
    xla.ensure_order_gate()
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=Path(request["target"]).read_text(),
        topology=f"1x{request['devices']}x1",
    )
    results = {}
    for program in request["programs"]:
        results[program["name"]] = _compile(
            folder / program["name"], program, topology, request["mesh"]
        )
    for _ in range(request["repeats"]):
        for program in request["programs"]:
            seconds = _seconds(folder / program["name"], program, topology, request["mesh"])
            result = results[program["name"]]
            result["compile_s"] = min(result["compile_s"], round(seconds, 3))
    (folder / "result.json").write_text(json.dumps(results))


def _lowered(
    folder: Path, program: dict[str, Any], topology: Any, axes: list[tuple[str, int, str]]
) -> Any:
    exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    names, sizes, kinds = zip(*(axes or [("d", exported.nr_devices, "Auto")]), strict=True)
    mesh = jax.sharding.Mesh(
        topologies.make_mesh(topology, sizes, names).devices,
        names,
        axis_types=tuple(jax.sharding.AxisType[kind] for kind in kinds),
    )
    shardings = exported.in_shardings_jax(mesh)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or everywhere)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
        return exported.call(*args, **kwargs)

    donated = tuple(program["donated"])
    # Without arguments it is the results that say where the program runs.
    where = {} if specs else {"out_shardings": everywhere}
    return jax.jit(flat, donate_argnums=donated, keep_unused=True, **where).lower(*specs)


def _seconds(
    folder: Path, program: dict[str, Any], topology: Any, axes: list[tuple[str, int, str]]
) -> float:
    """One more compilation, without dumps."""
    lowered = _lowered(folder, program, topology, axes)
    start = time.perf_counter()
    lowered.compile(program["options"])
    return time.perf_counter() - start


def _compile(
    folder: Path, program: dict[str, Any], topology: Any, axes: list[tuple[str, int, str]]
) -> dict[str, Any]:
    lowered = _lowered(folder, program, topology, axes)
    print(f"{LOG_MARK} {program['name']}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    compiled = lowered.compile({**program["options"], "xla_dump_to": str(folder)})
    seconds = time.perf_counter() - start
    print(f"{LOG_MARK} -", file=sys.stderr, flush=True)
    (folder / "compiled.txt").write_text(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    return {
        "compile_s": round(seconds, 3),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
