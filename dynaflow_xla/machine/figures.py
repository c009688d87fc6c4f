"""What planner, simulator and advice assume of this machine: assumed, until they are measured.

The numbers are the same in every process of a machine: a plan is known by its content, and numbers that
differed from process to process would make another plan of the same function in each. So they are measured
when the user asks for it (``dynaflow_xla.measure_machine``, ``dynaflow-xla doctor --measure``), kept in the
cache folder, and read once by each process. What an operator costs on one core of the machine that the
package was fitted to is said beside each frontend's capture; ``speeds`` tells how this one compares.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynaflow_xla.caches import private_files
from dynaflow_xla.watching import telling

Kind = Literal["products", "convolutions", "elements", "serial"]
"""Kinds of work that machines differ in: products of matrices, convolutions, loops over elements, and what
runs on one core however many there are."""

VERSION = 4

FARTHEST = 30.0
"""What was measured lies within this factor of what is assumed, or something else was measured."""

TURNS_NS = 20_000.0
"""What several lanes that are awake take longer than one: they start in turns, and the caller waits until all
have left. (8 chains of 1,024 floats, 66 us on the caller's thread, 67 to 83 on two lanes.)"""

STREAMS_NS = 1_500.0
"""What one stream of a GPU waits for another beside the work itself: an event, or an edge of a CUDA graph."""


_REUSED = 2 << 20
"""Bytes of results that are in memory which was touched before: malloc keeps some megabytes."""


@dataclass(frozen=True)
class Numbers:
    """One machine.

    Attributes:
        copy_bytes_per_ns: Speed of one core's copy from memory to memory that is in use. Assumed: a server's
            core of 2024.
        fresh_copy_bytes_per_ns: The same into memory that was just allocated: the system clears its pages
            first.
        hand_over_ns: From a signal on one lane to the end of the wait for it on another, gates of both
            included. (The event alone takes 0.1 us while the waiting lane is awake:
            ``benchmarks/engine/native.py``; a lane that sleeps is woken first, so a planner does well to
            assume more.)
        lane_start_ns: From the start of a stage until a lane's program runs; for lanes of Python steps: to
            take the interpreter lock and call XLA (``benchmarks/engine/pjrt_execute.py``). Not measured.
        lanes_ns: To leave the outer program for lanes and to come back: the custom call, and what XLA would
            have done beside it. (Lanes that are awake start within ``lane_start_ns``.) Like the next two, of
            a single call after a pause, in which threads fall asleep.
        lane_wake_ns: What every lane beside the caller's costs then: it sleeps and is woken, and so is the
            caller in the end. (Two lanes beside one, on two cores of a virtual machine: 15 to 60 us. In a
            row of calls lanes are awake.)
        program_ns: To hand a program to threads of XLA's and to wait for it: it does so with every program
            that has floating point operations of its own. One whose regions are all on lanes has none, and
            runs on the thread that calls it. (``lanes_ns`` and what plain ``jax.jit`` of one small operator
            takes longer than one lane: about 25 us, in a row and after pauses alike.)
        fork_ns: To hand an operator's work to a pool of threads and to wait for them: sleeping threads are
            woken each time. (Between 25 and 60 us on two cores of a virtual machine: small functions on
            XLA's pool beside the same on a pool of one thread.)
        step_ns: What a short step loses for each further thread that shares it, where all of them meet at its
            end: a time step of oneDNN's LSTM. (4 us on near cores of one core complex, 9 on those of a mesh;
            eight of these lose 50 to 75 us a step.)
        shared: By kind what of the work more cores share, by Amdahl's law: by default two cores are 1.92,
            1.87, 1.6 and 1.9 times as fast as one, sixteen 10, 7.8, 3.4 and 9.1 times. ``elements`` are
            XLA's loops, ``rows`` PyTorch's.
        speeds: By framework and kind, ``"jax products"``, how fast one core is compared with the one that
            the costs of operators were fitted to.
        measured: When and with what; empty if nothing was.
    """

    copy_bytes_per_ns: float = 8.0
    fresh_copy_bytes_per_ns: float = 4.0
    hand_over_ns: float = 5_000.0
    lane_start_ns: float = 3_000.0
    lanes_ns: float = 30_000.0
    lane_wake_ns: float = 40_000.0
    program_ns: float = 55_000.0
    fork_ns: float = 35_000.0
    step_ns: float = 4_000.0
    shared: Mapping[str, float] = field(
        default_factory=lambda: {
            "products": 0.96,
            "convolutions": 0.93,
            "elements": 0.75,
            "rows": 0.95,
        }
    )
    speeds: Mapping[str, float] = field(default_factory=dict)
    measured: str = ""

    def hand_over(self, size: int) -> float:
        """Nanoseconds for a value of ``size`` bytes from lane to lane: the signal, and a copy at each end."""
        return self.hand_over_ns + 2 * size / self.copy_bytes_per_ns

    def results_speed(self, size: int) -> float:
        """Bytes a nanosecond of a copy of so many bytes into memory of the program around the lanes.

        That of small results is what malloc got back from the call before.
        """
        return self.copy_bytes_per_ns if size <= _REUSED else self.fresh_copy_bytes_per_ns

    def speed_up(self, kind: str, cores: int) -> float:
        """How many times as fast as one core so many are at a kind of work, see ``ir.work.Spread``."""
        share = self.shared[kind]
        return 1.0 / (1.0 - share + share / max(1, cores))

    def saved(self, kind: str, cores: int) -> float:
        """The part of one core's time that so many save of such work."""
        return 1.0 - 1.0 / self.speed_up(kind, cores)

    def speed(self, framework: str, kind: Kind) -> float:
        """How fast one core is at a kind of work, 1 as assumed."""
        return self.speeds.get(f"{framework} {kind}", 1.0)

    @property
    def digest(self) -> str:
        """What tells these numbers from others, for keys of decisions; empty if nothing was measured."""
        if not self.measured:
            return ""
        content = dataclasses.asdict(self) | {"measured": ""}
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


ASSUMED = Numbers()
_SHARES = frozenset(ASSUMED.shared)


def checked(data: Mapping[str, Any]) -> Numbers:
    """Numbers from what a file holds.

    Raises:
        private_files.Broken: it is not that, or no machine is so.
    """
    try:
        numbers = {
            name: float(data[name])
            for name, kind in ASSUMED.__dict__.items()
            if isinstance(kind, float)
        }
        shared = {str(k): float(v) for k, v in data["shared"].items()}
        speeds = {str(k): float(v) for k, v in data["speeds"].items()}
        made = Numbers(**numbers, shared=shared, speeds=speeds, measured=str(data["measured"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise private_files.Broken(f"it holds no numbers of a machine: {error!r}") from error
    near = [(n, numbers[n] / getattr(ASSUMED, n)) for n in numbers] + list(speeds.items())
    for name, factor in near:
        if not (math.isfinite(factor) and 1 / FARTHEST <= factor <= FARTHEST):
            raise private_files.Broken(
                f"{name} is {factor:g} times what is assumed; no machine that this runs on is so"
            )
    if shared.keys() != _SHARES or not all(0.0 <= share < 1.0 for share in shared.values()):
        raise private_files.Broken(
            f"shares must lie between 0 and 1, for {sorted(_SHARES)}: {shared}"
        )
    return made


def path(identity: tuple[str, ...]) -> Path:
    """The file with the numbers of a machine."""
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return private_files.cache_folder() / f"machine-{name}.json"


def kept(identity: tuple[str, ...], assumed: Numbers = ASSUMED) -> Numbers:
    """The numbers that were measured on this machine; ``assumed`` if there are none.

    A file that cannot be used is reported.
    """
    try:
        file = path(identity)
        file.stat()
    except (OSError, RuntimeError):
        return assumed  # nothing was measured, or there is no home to keep it in
    try:
        return checked(private_files.opened(private_files.read(file), VERSION))
    except private_files.Untrusted as error:
        private_files.refused(file.parent, error)
    except (OSError, private_files.Broken) as error:
        telling.fallback(
            f"the measured numbers of this machine in {file} cannot be used ({error}); assumed ones are. "
            "Measure again: dynaflow-xla doctor --measure",
        )
    return assumed


def keep(made: Numbers, identity: tuple[str, ...]) -> Path:
    """Writes numbers for later processes; returns where.

    Raises:
        OSError: it cannot be written.
    """
    file = path(identity)
    content = dataclasses.asdict(made)
    checked(content)
    private_files.write(file, private_files.sealed(content, VERSION))
    return file
