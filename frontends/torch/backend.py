"""What differs between the ways to run a plan, from a functional graph of PyTorch to what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dynaflow_xla.frontends.torch.batch.nano import NanoBatches
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.settings import Settings


class Entry(Protocol):
    """A planned graph.

    Attributes:
        kind: "inference", "forward" or "backward".
        backward: Of a forward: the graph of its backward.
        later: Makes the plan of the backward when asked for.
        prepare: From the inputs of a call to those of the planned graph, if they are others.
        finish: From the results of the planned graph to those of a call, if they are others.
        notes: Lines for ``explain``.
        seconds: Time spent by step: "partition", "plan", "compile".
    """

    options: Settings
    kind: str
    seconds: dict[str, float]
    backward: Any
    later: Callable[[], Any] | None
    prepare: Callable[[Sequence[Any]], list[Any]] | None
    finish: Callable[[list[Any]], list[Any]] | None
    notes: tuple[str, ...]

    @property
    def captured(self) -> Any:
        """The graph that was planned."""

    @property
    def pg(self) -> PartitionedGraph:
        """Its regions."""

    @property
    def plan(self) -> Plan:
        """The validated plan."""

    @property
    def program_ns(self) -> float:
        """What the framework takes if any region is wide, see ``strategies.base.Context``."""

    @property
    def caller_ns(self) -> float:
        """What one lane may take to run on the thread that calls, see ``strategies.base.Context``."""

    @property
    def streams(self) -> bool:
        """Whether it computes on an accelerator, whose lanes have no cores."""

    @property
    def graphed(self) -> bool:
        """Whether calls are replays of one CUDA graph, which costs the host one launch."""

    def release(self) -> None:
        """Gives memory back that a later call takes again."""

    @property
    def without_python(self) -> int:
        """How many of PyTorch's operators run without Python between them."""

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Flat inputs to flat outputs; a list of inputs is emptied."""

    def describe(self) -> list[str]:
        """Lines of ``explain`` behind the table of regions."""

    def stamped(self) -> Any:
        """A form for ``profile``, whose ``run`` measures the regions."""


class BySizes(Protocol):
    """A graph with a plan for each of some sizes.

    Attributes:
        backward: Of a forward: the graph of its backward.
    """

    backward: Any

    def resolve(self, inputs: Sequence[Any]) -> Any:
        """The plan for the sizes of these inputs."""

    def release(self) -> None:
        """As an entry's, of all its plans."""


class Backend(Protocol):
    """One way to run plans, for one callable's settings.

    A new one is a folder with such a class, and a row in ``dynaflow_xla/backends.py``.

    Attributes:
        settings: What the user asked for.
        in_place: Whether operators run on PyTorch's own tensors: results may be views of arguments, and
            what the forward of nano-batches keeps may go to their backward in parts.
        whole_layers: Whether a transformer layer may stay one operator, which has no decomposition.
        whole_cells: Whether recurrent cells and interpolations may.
        compiles: Whether the first call of a plan compiles.
    """

    settings: Settings
    in_place: bool
    whole_layers: bool
    whole_cells: bool
    compiles: bool

    def capture_options(self) -> dict[str, Any]:
        """The user's options for the capture; UnsupportedError for those that nobody has."""

    def for_arrays(
        self, original: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """What calls with JAX arrays do; UnsupportedError where there is nothing."""

    def lower(self, gm: Any, kind: str) -> None:
        """Rewrites a functional graph for what runs it, before it is captured."""

    def whole(self, gm: Any, kind: str, name: str, batch: int | None = None) -> Entry:
        """The plan of a functional graph, whatever sizes it was captured with.

        Args:
            gm: The graph.
            kind: "inference", "forward" or "backward".
            name: Of the graph.
            batch: Rows of the batch, where it is too small to be split, or not in this graph.

        Raises:
            RuleError, PlanError, UnsupportedError: it cannot be captured, cut, planned or compiled.
        """

    def by_size(
        self, gm: Any, kind: str, name: str, batch: int | None, warn: Callable[[str], None]
    ) -> Entry | BySizes:
        """As ``whole``, with plans by sizes where they may change; ``warn`` tells the user something."""

    def fixed(self, captured: Captured, kind: str, batch: int) -> Entry:
        """The plan of a graph with fixed sizes, whose batch is known and stays whole."""

    def split(self, nano: NanoBatches) -> Entry:
        """The plan of a graph split over its batch.

        Raises:
            PlanError, SeparabilityError, UnsupportedError: it cannot be split in this way.
        """

    def place(self, entries: Sequence[Entry]) -> list[str]:
        """What a measured decision depends on of where graphs run, for keys on disk."""

    def told(self, entry: Entry) -> str:
        """The backend of a graph, as ``explain`` tells it."""
