"""Where torch_xla cannot work, importing the frontend says why."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.skipif(torch.__version__.startswith("2.9.0"), reason="this is the torch it needs")
def test_another_torch_is_named() -> None:
    with pytest.raises(ImportError) as error:
        importlib.import_module("dynaflow_xla.frontends.torch_xla")
    for part in ("needs torch 2.9.0", f"found torch {torch.__version__.split('+')[0]}",
                 "dynaflow-xla[torch-xla,jax]", "backend='ffi'"):  # fmt: skip
        assert part in str(error.value)
