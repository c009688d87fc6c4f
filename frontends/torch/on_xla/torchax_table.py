"""torchax's table of aten operators as JAX functions, without what importing torchax does.

``import torchax`` renames a PyTorch device, changes settings of JAX and PyTorch for the whole
process, and fails on PyTorch releases that dropped named tensors. Its lowerings need none of that:
they are loaded with a stand-in for the package around them, and no module called ``torchax`` is left
behind, so that a user's own import of it stays what it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import operators

_lock = threading.Lock()
_NAME = "torchax"


@functools.cache
def folder() -> str:
    """Where torchax is.

    Raises:
        UnsupportedError: it is not installed.
    """
    spec = importlib.util.find_spec(_NAME)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            "running a PyTorch model on XLA needs torchax, whose table of operators it uses. "
            "Install it with: pip install 'dynaflow-xla[torch,jax]'"
        )
    return list(spec.submodule_search_locations)[0]


@functools.cache
def table() -> Mapping[Any, Callable[..., Any]]:
    """Operator (overload, or packet for all overloads) -> function over JAX arrays.

    Raises:
        UnsupportedError: torchax is not installed, or is laid out in another way.
    """
    with _lock:
        where = folder()
        saved = {name: sys.modules.pop(name) for name in _loaded()}
        logger = logging.getLogger()
        level = logger.level
        try:
            _stand_in(_NAME, where)
            _stand_in(f"{_NAME}.ops", f"{where}/ops")
            # The lowerings name this class in annotations and isinstance checks only.
            _stand_in(f"{_NAME}.tensor").Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
            logger.setLevel(logging.ERROR)  # it notes each operator that it registers twice
            registry = importlib.import_module(f"{_NAME}.ops.ops_registry")
            with operators.removed_operators() as nothing:
                importlib.import_module(f"{_NAME}.ops.jaten")
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"the installed torchax does not fit this PyTorch ({error}); install torchax==0.0.13"
            ) from error
        finally:
            logger.setLevel(level)
            for name in _loaded():
                del sys.modules[name]
            sys.modules.update(saved)
        return {
            op: entry.func
            for op, entry in registry.all_aten_ops.items()
            if op not in nothing
            and entry.is_jax_function
            and not entry.needs_env
            and not entry.is_view_op
        }


def _loaded() -> list[str]:
    return [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]


def _stand_in(name: str, where: str | None = None) -> types.ModuleType:
    module = types.ModuleType(name)
    if where is not None:
        module.__path__ = [where]
    sys.modules[name] = module
    return module
