"""Writes this machine's GPU as an XLA target text: ``python target.py FILE``; needs JAX on the GPU.

Such a text lets ``dfx.schedule(..., target=FILE)`` compile for this GPU elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    try:
        import jax
        from jaxlib import xla_client
    except ImportError as error:
        print(f"no target text: {error}")
        return 0
    if jax.default_backend() != "gpu":
        print(f"no target text: JAX runs on {jax.default_backend()!r}")
        return 0
    text = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
    Path(sys.argv[1]).write_text(text)
    print(f"{jax.devices()[0].device_kind}: {len(text)} characters in {sys.argv[1]}")
    return 0 if text.strip() else 1


if __name__ == "__main__":
    raise SystemExit(main())
