"""Compiles a plan of kernels, between XLA's own, for an H200: ``kernel_graph.py FOLDER``.

The driver is the fake one (for loading images), the target a text: neither a GPU nor CUDA is needed.
XLA's dumps go to FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

import dynaflow_xla as dfx
from dynaflow_xla.ffi import device_lanes
from dynaflow_xla.frontends.jax.lanes import device_stage
from dynaflow_xla.frontends.jax.readback import targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import fake_driver  # noqa: E402


def main(folder: str) -> None:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=Path(targets.resolve("nvidia-h200")).read_text(),
        topology="1x1x1",
    )  # fmt: skip
    lanes = fake_driver.lanes()
    device_lanes._register_cuda()
    fast = dfx.schedule(
        fake_driver.function, strategy=fake_driver.strategy(), lanes=2, backend="ffi"
    )

    def around(x: Any, y: Any) -> Any:
        a, b = fast(x + 1, y - 1)
        return a * b

    mesh = topologies.make_mesh(topology, (1,), ("d",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in fake_driver.arrays()
    ]
    options = {
        "xla_dump_to": folder, "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    }  # fmt: skip
    with device_stage.use_lanes(lanes):
        jax.jit(around).lower(*specs).compile(options)


if __name__ == "__main__":
    main(sys.argv[1])
