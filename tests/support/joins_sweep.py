"""Random programs whose rows meet, split at random: values and gradients against the original.

``python -P tests/support/joins_sweep.py {jax,torch} --programs N [--seed S] [--seconds T]`` makes programs of
the steps in tests/frontends/test_joins.py and tests/frontends/torch/test_joins.py, and prints how many were
equal, refused (with the reasons) and wrong. It stops at T seconds and says how far it came.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import dynaflow_xla as dfx

FRONTENDS = Path(__file__).parent.parent / "frontends"
SIZES = [(3, 2), (2, 4), (2, 3, 2), (5, 4, 3), (4, 4), (6, 3, 2)]


def steps_of(framework: str) -> Any:
    """The module of tests with the steps."""
    path = FRONTENDS / ("torch/test_joins.py" if framework == "torch" else "test_joins.py")
    spec = importlib.util.spec_from_file_location(f"joins_{framework}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=("jax", "torch"))
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540)
    options = parser.parse_args()
    module = steps_of(options.framework)
    draw = random.Random(options.seed)
    names = sorted(module.STEPS)
    tally: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    wrong = 0
    for done in range(options.programs):
        if time.monotonic() > end:
            print(f"stopped after {done} programs")
            break
        program = draw.choices(names, k=draw.randint(1, 6))
        sizes, grad = draw.choice(SIZES), draw.random() < 0.4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module._equal(program, sizes, grad)
                tally["equal"] += 1
            except dfx.DynaflowError as error:
                tally[f"refused: {str(error).splitlines()[-1][:120]}"] += 1
            except Exception as error:
                wrong += 1
                print("WRONG", program, sizes, grad, repr(error)[:400], flush=True)
        if done % 50 == 49 and options.framework == "jax":
            import jax

            jax.clear_caches()
    print(options.framework, "seed", options.seed, dict(tally), "wrong", wrong)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
