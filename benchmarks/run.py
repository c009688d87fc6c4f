"""``make bench``: all CPU cases, functions of models, and the pairs of models in JAX and PyTorch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cpu.runner import main

if __name__ == "__main__":
    raise SystemExit(main())
