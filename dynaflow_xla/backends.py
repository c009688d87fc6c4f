"""The ways to run plans, by the name that users give them: a new one is a folder, and a row here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.errors import UnsupportedError

Maker = str | Callable[[Any], Any]
"""Makes a backend from settings: a class, or ``"module:class"`` of one whose framework is imported late."""


@dataclass(frozen=True)
class BackendRow:
    """One way to run plans; for each framework that it runs, what makes its backend.

    Attributes:
        jax: Of the protocol in ``frontends/jax/backend.py``.
        torch: Of the protocol in ``frontends/torch/backend.py``.
        one_program: XLA runs a plan as one program: its lanes are neither threads nor streams.
    """

    jax: Maker | None = None
    torch: Maker | None = None
    one_program: bool = False


_FRONTENDS = "dynaflow_xla.frontends"

BACKENDS: dict[str, BackendRow] = {
    "ffi": BackendRow(
        jax=f"{_FRONTENDS}.jax.lanes.backend:LaneBackend",
        torch=f"{_FRONTENDS}.torch.on_xla.backend:LanesOnXla",
    ),
    "xla": BackendRow(
        jax=f"{_FRONTENDS}.jax.xla.backend:ProgramBackend",
        torch=f"{_FRONTENDS}.torch.on_xla.backend:ProgramOnXla",
        one_program=True,
    ),
    "torch": BackendRow(torch=f"{_FRONTENDS}.torch.native.backend:NativeBackend"),
}
"""By the name that users give it."""

DEFAULTS = {"jax": "ffi", "torch": "torch"}
"""What "auto" stands for, by framework. JAX's is "xla" where it computes on a GPU, which is known late
(``frontends/jax/signature/backends.py``)."""


def names() -> str:
    """What users may ask for, for messages."""
    *first, last = "auto", *BACKENDS
    return f"{', '.join(first)} or {last}"


def one_program(name: str) -> bool:
    """Whether XLA runs a plan as one program."""
    return name in BACKENDS and BACKENDS[name].one_program


def only_framework(name: str) -> str | None:
    """The framework of a backend that runs just one; None where arguments or functions tell it."""
    if name not in BACKENDS:
        return None
    found = [framework for framework in DEFAULTS if getattr(BACKENDS[name], framework) is not None]
    return found[0] if len(found) == 1 else None


def made(framework: str, settings: Any) -> Any:
    """The backend of a function's settings.

    Args:
        framework: "jax" or "torch".
        settings: Of the function.

    Raises:
        UnsupportedError: it does not run this framework, lacks a package, or does not do what is asked for.
    """
    name = DEFAULTS[framework] if settings.backend == "auto" else settings.backend
    maker: Any = getattr(BACKENDS[name], framework)
    if maker is None:
        others = [other for other, row in BACKENDS.items() if getattr(row, framework) is not None]
        raise UnsupportedError(
            f"backend={name!r} runs no function of {framework}; {', '.join(others)} do, and with "
            f"backend='auto' it is {DEFAULTS[framework]!r}"
        )
    if isinstance(maker, str):
        module, _, attribute = maker.partition(":")
        maker = getattr(importlib.import_module(module), attribute)
    return maker(settings)
