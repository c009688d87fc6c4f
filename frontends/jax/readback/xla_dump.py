"""Reading what XLA:GPU leaves behind: the thunk sequence, the CUDA graphs' edges, the compiled text.

None of these texts is a stable format, so each reader takes what it needs and says when it does not
find it (``DumpError``); nothing is guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dynaflow_xla.ffi.xla import ORDER_TARGET
from dynaflow_xla.frontends.jax.capture import marks
from dynaflow_xla.frontends.jax.readback import hlo_text
from dynaflow_xla.frontends.jax.readback.hlo_text import DumpError, Line
from dynaflow_xla.frontends.jax.xla.xla_backend import PLAN_SCOPE

LOG_MODULES = "command_executor=3"
"""TF_CPP_VMODULE under which XLA writes the edges of every CUDA graph it plans."""


# -- thunks ----------------------------------------------------------------------------------------


@dataclass
class Thunk:
    """One step of a compiled program; a command buffer, loop or branch holds others.

    Attributes:
        number: XLA's number of it.
        kind: "kCustomKernel", "kCommandBuffer", "kGemm", ...
        name: Name of the HLO instruction it comes from, "" if XLA does not say.
        text: What else the line says.
    """

    number: int
    kind: str
    name: str
    text: str
    children: list[Thunk] = field(default_factory=list)

    @property
    def async_id(self) -> str:
        """What an asynchronous start and its done have in common, "" for other steps."""
        found = re.search(r"async_id=(\d+)", self.text)
        return found[1] if found else ""

    @property
    def stream(self) -> str:
        """Where an asynchronous start runs its steps, "" for other steps."""
        found = re.search(r"stream=([\w\[\]]+)", self.text)
        return found[1] if found and self.kind == "kAsyncStart" else ""

    def leaves(self) -> Iterator[Thunk]:
        """The steps that do something, in order."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


_THUNK = re.compile(r"^( *)(\d+): (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")


def read_thunks(sequence: str, metadata: str) -> list[Thunk]:
    """The thunk sequence of a dump, with names from the dump's thunk metadata."""
    names: dict[int, str] = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        thunk_id = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if name and thunk_id:
            names[int(thunk_id[1])] = name[1]
    top: list[Thunk] = []
    stack: list[tuple[int, list[Thunk]]] = [(-1, top)]
    for line in sequence.splitlines():
        found = _THUNK.match(line)
        if not found:
            continue
        indent = len(found[1])
        number = int(found[2])
        thunk = Thunk(number, found[3], names.get(number, ""), found[4].strip())
        while stack[-1][0] >= indent:
            stack.pop()
        stack[-1][1].append(thunk)
        stack.append((indent, thunk.children))
    if not top:
        raise DumpError("XLA's thunk sequence is empty or has another form than known")
    return top


# -- edges -----------------------------------------------------------------------------------------

_NODE = re.compile(r"^node (\d+) \(priority=[^)]*\): in=\[([^\]]*)\] out=\[")


def read_graphs(log: str) -> list[list[set[int]]]:
    """The CUDA graphs in a log: for each node, the nodes it waits for."""
    graphs: list[list[set[int]]] = []
    open_graph = False
    for line in log.splitlines():
        if "Execution graph: " in line:
            graphs.append([])
            open_graph = True
        elif open_graph and (found := _NODE.match(line)):
            if int(found[1]) != len(graphs[-1]):
                raise DumpError(f"nodes of a CUDA graph are out of order in XLA's log: {line!r}")
            graphs[-1].append({int(n) for n in re.findall(r"id: (\d+)", found[2])})
        elif open_graph and graphs[-1]:
            open_graph = False
    return graphs


@dataclass
class GraphOrder:
    """The order of the leaves of a thunk sequence; they are named by ``id(leaf)``.

    Attributes:
        before: For each leaf those that are over before it starts.
        edges: For each leaf in a CUDA graph the last leaves of the nodes it waits for directly.
    """

    before: dict[int, set[int]] = field(default_factory=dict)
    edges: dict[int, set[int]] = field(default_factory=dict)


def order_of(top: list[Thunk], graphs: list[list[set[int]]], *, serial: bool) -> GraphOrder:
    """The order in which steps run.

    Steps run one after another on one stream; inside a command buffer the CUDA graph's edges rule
    (with ``serial`` XLA records no graph: it is a chain); what is between an asynchronous start and
    its done runs beside it.
    """
    made = GraphOrder()
    planned = {} if serial else _match(top, graphs)

    on_stream: dict[str, set[int]] = {}

    def visit(thunks: list[Thunk], base: set[int], in_graph: bool = False) -> set[int]:
        done = set(base)
        open_starts: dict[str, set[int]] = {}
        for thunk in thunks:
            mine = {id(leaf) for leaf in thunk.leaves()}
            if thunk.kind == "kCommandBuffer":
                commands = _commands(thunk)
                graph = (
                    [{i - 1} if i else set() for i in range(len(commands))]
                    if serial
                    else planned[id(thunk)]
                )
                seen: list[set[int]] = []
                leaves = [list(child.leaves()) for child in commands]
                for child, preds in zip(commands, graph, strict=True):
                    waits = set(done).union(*(seen[p] for p in preds))
                    visit([child], waits, in_graph=True)
                    seen.append(waits | {id(leaf) for leaf in child.leaves()})
                    first = next(child.leaves())
                    made.edges[id(first)] = {id(leaves[p][-1]) for p in preds}
            elif (stream := thunk.stream) and not in_graph:
                # Others on the same stream come first, though nobody has waited for them here.
                earlier = on_stream.setdefault(stream, set())
                visit(thunk.children, done | earlier)
                earlier |= mine | done
            elif thunk.children:
                visit(thunk.children, done)
            else:
                made.before[id(thunk)] = set(done)
            key = thunk.async_id
            if thunk.kind.endswith("Start") and key:
                open_starts[key] = mine
                continue
            if thunk.kind.endswith("Done") and key in open_starts:
                done |= open_starts.pop(key)
            done |= mine
        return done

    visit(top, set())
    return made


def _commands(buffer: Thunk) -> list[Thunk]:
    """The nodes of a command buffer's graph; the end of an asynchronous step is an edge."""
    return [child for child in buffer.children if child.kind != "kAsyncDone"]


def _match(top: list[Thunk], graphs: list[list[set[int]]]) -> dict[int, list[set[int]]]:
    """The graph of each command buffer, by ``id``.

    XLA closes a command buffer at the step that it cannot hold, and plans it when it has planned what
    is inside that step (a loop's body, say). A command that is a sequence itself has a graph in front
    of its command buffer's. The number of nodes tells which is which.
    """
    found = {}
    remaining = iter(graphs)
    for buffer in _buffers(top):
        count = len(_commands(buffer))
        graph = next((graph for graph in remaining if len(graph) == count), None)
        if graph is None:
            raise DumpError(
                f"the CUDA graph of command buffer {buffer.number} ({count} commands) is not in XLA's "
                f"log, which has graphs of {[len(graph) for graph in graphs]} nodes"
            )
        found[id(buffer)] = graph
    return found


def _buffers(thunks: list[Thunk]) -> Iterator[Thunk]:
    """Command buffers in the order in which XLA plans them."""
    open_buffer: list[Thunk] = []
    for thunk in thunks:
        if thunk.kind == "kCommandBuffer":
            open_buffer.append(thunk)
        else:
            yield from _buffers(thunk.children)
            yield from open_buffer
            open_buffer = []
    yield from open_buffer


# -- compiled text ---------------------------------------------------------------------------------


_LAYOUT = frozenset("bitcast convert copy parameter reshape slice transpose tuple".split())


@dataclass(frozen=True)
class Instruction:
    """An instruction of the compiled program.

    Attributes:
        region: The plan's region it comes from (outside of plans: "").
        held: Regions of what it computes inside itself, if it is a fusion.
        made: Regions of its results.
        ends: Regions whose values it puts together outside of all regions.
        operands: Names of what it reads.
        mark: The user's mark (``dfx.mark``) that it comes from, "" without.
        inside: It is part of a fusion or of what a reduction applies.
    """

    name: str
    opcode: str
    shape: str
    region: str
    held: frozenset[str]
    made: frozenset[str]
    body: frozenset[str]
    target: str
    operands: tuple[str, ...] = ()
    mark: str = ""
    inside: bool = False
    ends: frozenset[str] = frozenset()

    @property
    def is_gate(self) -> bool:
        """Whether it is one of the plan's order gates."""
        return self.target == ORDER_TARGET

    @property
    def is_copy(self) -> bool:
        """Whether it moves data and does nothing else."""
        return self.opcode in ("copy", "copy-start") or (
            self.opcode == "fusion" and self.body <= {"copy", "parameter", "bitcast", "tuple"}
        )

    @property
    def is_layout(self) -> bool:
        """Whether it is a kernel that puts a value into another form and computes nothing."""
        return self.opcode == "fusion" and self.body <= _LAYOUT

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return hlo_text.shape_bytes(self.shape)


_PLAN = re.compile(rf"{PLAN_SCOPE}(?:_(\d+))?")


def region_of(op_name: str) -> str:
    """The region in an operation's name, or "".

    The last component of a name is the operator: what a plan does outside of its regions has none.
    In the body of a loop that the operator n of region "layers" is: ``layers/n:region``.
    """
    for name in op_name.split(";"):
        found = [
            region if plan[1] is None else f"{plan[1]}:{region}"
            for scope, region in itertools.pairwise(marks.split_scope(name)[:-1])
            if (plan := _PLAN.fullmatch(scope))
        ]
        if found:
            return "/".join(found)
    return ""


def _is_between(op_name: str) -> bool:
    """Whether a plan does something outside of its regions: puts results together, say."""
    scopes = marks.split_scope(op_name.split(";")[0])
    return len(scopes) > 1 and _PLAN.fullmatch(scopes[-2]) is not None


_PARTS = ("calls", "to_apply", "called_computations", "select", "scatter")
"""Attributes that name computations which are parts of the instruction; others are steps of their own."""


def read_instructions(text: str) -> dict[str, Instruction]:
    """Every instruction of a compiled program, by name.

    Raises:
        DumpError: a line of a computation cannot be read; none is passed over.
    """
    bodies = hlo_text.read(text)
    parts = {
        name for lines in bodies.values() for line in lines for name in line.computations(*_PARTS)
    }
    made: dict[str, Instruction] = {}
    for computation, lines in bodies.items():
        for line in lines:
            called = next(line.computations("calls"), "") if line.opcode == "fusion" else ""
            body = bodies.get(called, [])
            region = region_of(line.op_name)
            between = _is_between(line.op_name)
            made[line.name] = Instruction(
                name=line.name,
                opcode=line.opcode,
                shape=line.shape,
                region=region if between else region or _root_region(body),
                held=frozenset(filter(None, (region_of(part.op_name) for part in body))),
                made=frozenset(filter(None, (region, *_roots(body)))),
                body=frozenset(part.opcode for part in body),
                target=line.attribute("custom_call_target"),
                inside=computation in parts,
                operands=line.operands,
                mark=next(filter(None, map(_mark_of, [line, *body[::-1]])), ""),
                ends=_ends(body) if between else frozenset(),
            )
    return made


def _mark_of(line: Line) -> str:
    scopes = marks.split_scope(line.op_name.split(";")[0])
    return next((marks.plain_name(s) for s in reversed(scopes) if marks.names_mark(s)), "")


def _roots(body: list[Line]) -> list[str]:
    """Regions of the results of a fusion."""
    root = next((line for line in body if line.root), None)
    if root is None:
        return []
    if root.opcode != "tuple":
        return [region_of(root.op_name)]
    return [region_of(line.op_name) for line in body if line.name in root.operands]


def _ends(body: list[Line]) -> frozenset[str]:
    """The regions that come last on the ways to a fusion's result."""
    lines = {line.name: line for line in body}
    found = set()
    seen = set()
    todo = [line.name for line in body if line.root]
    while todo:
        name = todo.pop()
        if name in seen or name not in lines:
            continue
        seen.add(name)
        op_name = lines[name].op_name
        if (region := region_of(op_name)) and not _is_between(op_name):
            found.add(region)
        else:
            todo += lines[name].operands
    return frozenset(found)


def _root_region(body: list[Line]) -> str:
    """Region of the last instruction of a fusion that has one."""
    for line in reversed(body):
        if region := region_of(line.op_name):
            return region
    return ""


def read_aliases(text: str) -> dict[int, int]:
    """Results that are written over an argument: number of the result -> number of the argument.

    Raises:
        DumpError: they are written in another way than known.
    """
    return hlo_text.aliases(text.split("\n", 1)[0])


def read_folder(folder: Path) -> tuple[list[Thunk], dict[str, Instruction]]:
    """The main program of a dump folder."""
    sequences = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt")) or sorted(
        folder.glob("*thunk_sequence.txt")
    )
    if not sequences:
        raise DumpError(
            "XLA left no thunk sequence; this jaxlib writes its dumps under another name"
        )
    largest = max(sequences, key=lambda path: path.stat().st_size)
    stem = largest.name.split(".thunk_sequence")[0]
    metadata = folder / f"{stem}.thunk_metadata.txt"
    thunks = read_thunks(largest.read_text(), metadata.read_text() if metadata.is_file() else "")
    instructions = read_instructions((folder / "compiled.txt").read_text())
    _name_by_start(thunks, instructions)
    return thunks, instructions


def _name_by_start(thunks: list[Thunk], instructions: dict[str, Instruction]) -> None:
    """Steps of a collective get the name of its start; jaxlib 0.12 names them after an earlier form."""
    for thunk in thunks:
        for child in thunk.children:
            if thunk.kind == "kAsyncStart" and child.name not in instructions:
                child.name = thunk.name
        _name_by_start(thunk.children, instructions)
