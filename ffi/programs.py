"""Programs of this process by content hash: what does the same is made once, and shared while it lives."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from dynaflow_xla.ffi import _compat

_lock = threading.Lock()
_living: WeakValueDictionary[str, Loaded] = WeakValueDictionary()


@dataclass(eq=False)
class Loaded:
    """A registered program of the engine, with what it runs.

    It belongs to the stages that hold it; executables that hold the custom call keep the engine's program
    alive, but not this object.

    Attributes:
        program: The engine's program.
        lane_programs: Of lanes on the host.
        counters: Of device lanes: what their steps did.
        note: Of device lanes: a sentence for explain.
    """

    program: Any
    lane_programs: list[Any] = field(default_factory=list)
    counters: list[Any] = field(default_factory=list)
    note: str = ""


class Identity:
    """What a program is: two of equal ``text()`` do the same, in the same way."""

    def __init__(self, kind: str, compiler_options: Mapping[str, Any] | None):
        self._digest = hashlib.sha256()
        self.add(
            kind,
            sorted((compiler_options or {}).items()),
            _compat.compile_settings(),
            os.environ.get("XLA_FLAGS", ""),
        )

    def add(self, *parts: Any) -> None:
        """Adds what is told apart by its ``repr``."""
        for part in parts:
            self._add_bytes(repr(part).encode())

    def add_code(self, text: str, consts: Sequence[Any]) -> None:
        """Adds a lowered program, with the arrays that are given to it."""
        self._add_bytes(text.encode())
        for const in consts:
            array = np.asarray(const)
            self.add(str(array.dtype), array.shape)
            self._add_bytes(array.tobytes())

    def add_image(self, image: bytes) -> None:
        """Adds compiled code."""
        self._add_bytes(image)

    def text(self) -> str:
        """The content hash."""
        return self._digest.hexdigest()[:32]

    def _add_bytes(self, data: bytes) -> None:
        # Lengths keep "ab", "c" apart from "a", "bc".
        self._digest.update(len(data).to_bytes(8, "little"))
        self._digest.update(data)


def living(name: str) -> Loaded | None:
    """The program of a hash, if somebody owns one."""
    with _lock:
        return _living.get(name)


def shared(name: str, make: Callable[[], Loaded], engine: Any = None) -> Loaded:
    """The living program of a hash, or a new one, which is registered with the engine.

    Args:
        name: The hash.
        make: Compiles and finishes the program.
        engine: The CUDA engine that it runs on; None: host lanes.
    """
    found = living(name)
    if found is not None:
        return found
    made = make()
    with _lock:
        # Another thread may have made the same meanwhile; all then hold one object.
        found = _living.get(name)
        if found is None:
            made.program.register(name, engine)
            _living[name] = found = made
        return found
