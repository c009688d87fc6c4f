"""Plans as PyTorch's own operators, on lanes of this machine's cores or streams of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches
from dynaflow_xla.frontends.torch.capture.capture import CAPTURE_OPTIONS, capture
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.native import by_size, nano_batches
from dynaflow_xla.frontends.torch.native.by_size import BySize
from dynaflow_xla.frontends.torch.native.entry import NativeEntry, whole_entry
from dynaflow_xla.frontends.torch.rewrite import spectra, strides
from dynaflow_xla.settings import Settings


class NativeBackend:
    """Regions as PyTorch runs them, operator by operator or compiled.

    Args:
        settings: Of the callable.
    """

    in_place = True
    whole_layers = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.compiles = settings.compiler != "eager"
        self.whole_cells = not self.compiles  # compilers fuse their steps

    def capture_options(self) -> dict[str, Any]:
        """Those of ``torch.compile``; with compiled regions the options are the compiler's."""
        if self.compiles:
            _check(self.settings.compiler_options or {})
            return {}  # sizes that change are captured open, and compiled one by one
        given = dict(self.settings.compiler_options or {})
        if unknown := set(given) - CAPTURE_OPTIONS:
            raise UnsupportedError(
                f"compiler_options of eager regions are {sorted(CAPTURE_OPTIONS)} (as in torch.compile); "
                f"got {sorted(unknown)}"
            )
        return given

    def for_arrays(
        self, original: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """There is nothing: no program of JAX's."""
        raise UnsupportedError(
            f"{self.settings.name!r} is scheduled for PyTorch and got a JAX array; convert it with "
            "torch.from_dlpack before the call, or use backend='ffi' to call it from JAX"
        )

    def lower(self, gm: Any, kind: str) -> None:
        """Spectra as PyTorch has them without gradients; what a trace writes in many operators as one."""
        strides.as_reshapes(gm)
        strides.factors_as_captured(gm)
        if kind == "inference":
            spectra.without_vectors(gm)

    def whole(self, gm: Any, kind: str, name: str, batch: int | None = None) -> NativeEntry:
        """One plan; its regions run at any size."""
        return whole_entry(capture(gm, name), self.settings, kind, batch)

    def by_size(
        self, gm: Any, kind: str, name: str, batch: int | None, warn: Callable[[str], None]
    ) -> NativeEntry | BySize:
        """Plans by class of sizes, or with regions compiled for them."""
        captured = capture(gm, name)
        made = by_size.of_graph(captured, self.settings, kind, batch, warn)
        return whole_entry(captured, self.settings, kind, batch) if made is None else made

    def fixed(self, captured: Captured, kind: str, batch: int) -> NativeEntry:
        """As any other graph."""
        return whole_entry(captured, self.settings, kind, batch)

    def split(self, nano: NanoBatches) -> NativeEntry:
        """Each nano-batch a part of one graph."""
        return nano_batches.split_entry(nano, self.settings)

    def place(self, entries: Sequence[Any]) -> list[str]:
        """The devices of the graphs."""
        return sorted({_device(e.captured.device) for e in entries})

    def told(self, entry: Any) -> str:
        """With the device, and what compiles regions."""
        return f"torch ({entry.captured.device.type}), regions {entry.options.compiler}"


def _device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return f"{device} {name}"


def _check(given: Mapping[Any, Any]) -> None:
    """Are these options of Inductor, as ``torch.compile(options=...)`` takes them?

    Raises:
        PlanError: naming the one that is not.
    """
    for name, value in given.items():
        if name in CAPTURE_OPTIONS:
            continue
        try:
            torch.compile(lambda: None, options={name: value})  # compiles nothing
        except (RuntimeError, AttributeError) as error:
            why = str(error).split(", known options")[0]
            raise PlanError(
                "compiler_options with a compiler are those of torch.compile(options=...), "
                f"{sorted(CAPTURE_OPTIONS)} besides; got {name!r}: {value!r} ({why})"
            ) from None
