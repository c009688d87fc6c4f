"""Where the stand-in is the driver: kernels have values, and JAX is told that there is a device.

(JAX asks for /dev/nvidia0 before it asks the driver.)
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

ASKED = "jax._src.hardware_utils"


class _Finder:
    """Finds the module that JAX asks, and changes its answer."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ASKED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module.has_visible_nvidia_gpu = lambda: True  # type: ignore[attr-defined]
            import values

            values.installed()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("DYNAFLOW_XLA_STANDIN"):
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
