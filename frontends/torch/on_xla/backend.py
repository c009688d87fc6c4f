"""Plans of PyTorch graphs on XLA: as lane programs of the CPU, or as one XLA program.

What lowers operators is loaded with the first graph: exported programs that torch_xla lowers need none of it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches
from dynaflow_xla.frontends.torch.capture.capture import CAPTURE_OPTIONS
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.settings import Settings


class OnXla:
    """What both have in common; see ``LanesOnXla`` and ``ProgramOnXla``.

    Args:
        settings: Of the callable.

    Raises:
        UnsupportedError: a compiler of PyTorch's is asked for.
    """

    in_place = False
    whole_layers = False
    whole_cells = False
    compiles = True

    def __init__(self, settings: Settings) -> None:
        if settings.compiler != "eager":
            raise UnsupportedError(
                f"compiler={settings.compiler!r} is for backend='torch'; XLA compiles the regions of "
                f"backend={settings.backend!r}: leave compiler out"
            )
        self.settings = settings

    def refuse(self, captured: Captured) -> None:
        """Raises UnsupportedError for a graph that it cannot run."""

    def jax_settings(self) -> dict[str, Any]:
        """What the JAX frontend's settings say of the backend."""
        return {}

    def capture_options(self) -> dict[str, Any]:
        """Those of ``torch.compile``; the others are XLA's."""
        given = self.settings.compiler_options or {}
        return {k: v for k, v in given.items() if k in CAPTURE_OPTIONS}

    def for_arrays(
        self, original: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The graph as a part of the JAX program around the call."""
        from dynaflow_xla.frontends.torch.on_xla.jax_call import JaxSide

        return JaxSide(original, self)

    def lower(self, gm: Any, kind: str) -> None:
        """Nothing: operators are lowered one by one."""

    def whole(self, gm: Any, kind: str, name: str, batch: int | None = None) -> Any:
        """A program for each of some sizes, where they may change."""
        from dynaflow_xla.frontends.torch.on_xla import entry, split

        rows = None if batch is None else split.rows(batch)
        return entry.build_entry(gm, self, kind, name, rows)

    def by_size(
        self, gm: Any, kind: str, name: str, batch: int | None, warn: Callable[[str], None]
    ) -> Any:
        """The same; it tells once that sizes came too many."""
        made = self.whole(gm, kind, name, batch)
        made.warn = warn
        return made

    def fixed(self, captured: Captured, kind: str, batch: int) -> Any:
        """One program."""
        from dynaflow_xla.frontends.torch.on_xla import split

        return split.whole_entry(captured, self, kind, batch)

    def split(self, nano: NanoBatches) -> Any:
        """The JAX frontend's split, with PyTorch's proof."""
        from dynaflow_xla.frontends.torch.on_xla import split

        return split.split_entry(nano, self)

    def place(self, entries: Sequence[Any]) -> list[str]:
        """JAX's default device, and the versions of XLA."""
        versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
        return [*versions, jax.default_backend(), jax.devices()[0].device_kind]

    def told(self, entry: Any) -> str:
        """As the user names it."""
        return self.settings.backend


class LanesOnXla(OnXla):
    """Lane programs on this machine's cores, which read and write the tensors' own memory."""

    def refuse(self, captured: Captured) -> None:
        """Lanes of a GPU, and tensors on one."""
        if self.settings.gpu is not None:
            self.settings.gpu.refuse_on_cpu("lanes of XLA executables")
        if captured.device.type != "cpu":
            raise UnsupportedError(
                f"backend='ffi' runs PyTorch models on lanes of the CPU; in {captured.graph.name!r} the "
                f"tensors are on {captured.device}. Use backend='xla' or backend='torch'."
            )


class ProgramOnXla(OnXla):
    """One XLA program, for a device that need not be there."""

    def jax_settings(self) -> dict[str, Any]:
        """The target, too."""
        return {"backend": "xla", "target": self.settings.target}
